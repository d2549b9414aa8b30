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
