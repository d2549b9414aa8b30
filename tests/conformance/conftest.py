"""Says how these tests are run to those who run them otherwise."""

from __future__ import annotations

import os

import pytest

if "ASYNCHICACHE_ENGINE_WHEEL" not in os.environ:
    raise pytest.UsageError("tests/conformance needs an engine's wheel: make conformance ARGS='vllm'")
