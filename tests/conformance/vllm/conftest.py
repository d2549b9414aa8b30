"""Makes vLLM importable from its wheel, without its compiled parts."""

from __future__ import annotations

import os

from standins import enter_wheel

os.environ["VLLM_TARGET_DEVICE"] = "cpu"
enter_wheel({"llguidance", "torchaudio", "torchvision", "xgrammar"})
