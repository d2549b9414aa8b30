"""Models of these tests; vLLM is imported once."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path

import pytest

FOLDER = "ASYNCHICACHE_ENGINE_FOLDER"

if FOLDER not in os.environ:
    raise pytest.UsageError("these tests need a whole engine: make engines-e2e ARGS='vllm'")

from models import checkpoint  # noqa: E402 - of packages that only this environment has


@pytest.fixture(scope="session")
def model() -> Callable[[str], Path]:
    """Return the folder of a model's checkpoint by its name in `models.CONFIGS`."""
    folder = Path(os.environ[FOLDER]) / "models"
    folder.mkdir(exist_ok=True)
    return lambda name: checkpoint(folder, name)


@pytest.fixture(autouse=True)
def no_states_inside_a_prefill(monkeypatch: pytest.MonkeyPatch) -> None:
    """Mamba2's CPU kernel returns final states only; vLLM 0.32 reads others too, past the end."""
    from vllm.model_executor.layers.mamba.abstract import MambaBase
    from vllm.model_executor.layers.mamba.mamba_mixer2 import MambaMixer2

    monkeypatch.setattr(MambaMixer2, "get_kv_cache_spec", MambaBase.get_kv_cache_spec)
