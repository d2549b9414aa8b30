"""Makes SGLang importable from its wheel, without a GPU."""

from __future__ import annotations

import os

from standins import enter_wheel

os.environ["SGLANG_RUST_BUILD_MODE"] = "never"
enter_wheel({"sgl_kernel", "torchvision"})
