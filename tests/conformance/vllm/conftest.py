"""Makes vLLM importable from its wheel, without its compiled parts, and opens its managers."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from standins import enter_wheel

os.environ["VLLM_TARGET_DEVICE"] = "cpu"
enter_wheel({"llguidance", "torchaudio", "torchvision", "xgrammar"})

from rig import Open, Rig  # noqa: E402 - vLLM can be imported from here on


@pytest.fixture
def open_rig(tmp_path: Path) -> Iterator[Open]:
    """Opens managers over one folder; those that a test leaves open are shut down."""
    opened: list[Rig] = []

    def make(tier: dict[str, Any] | None = None, **options: Any) -> Rig:
        file = {"storage": "file", "storage_options": {"path": str(tmp_path / "pages")}}
        opened.append(Rig({**file, **(tier or {})}, **options))
        return opened[-1]

    yield make
    for rig in opened:
        if not rig.tier._bridge.closed:
            rig.shutdown()
