"""Runs `triton_checks.py` in a process of its own: interpreted anywhere, compiled on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

CHECKS = Path(__file__).with_name("triton_checks.py")

pytest.importorskip("triton")


def _run_checks(environment: dict[str, str]) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_interpreted_kernels_equal_the_reference() -> None:
    _run_checks({**os.environ, "TRITON_INTERPRET": "1"})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_kernels_equal_the_reference() -> None:
    _run_checks({name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"})
