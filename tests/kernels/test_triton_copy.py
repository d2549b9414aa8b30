"""Compiles the kernel for GPUs, and runs `triton_checks.py`: interpreted anywhere, compiled on a GPU."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

triton = pytest.importorskip("triton")

from triton import language  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from asynchicache.kernels import triton_copy  # noqa: E402

CHECKS = Path(__file__).with_name("triton_checks.py")


def _run_checks(environment: dict[str, str]) -> None:
    """In a process of its own, see there."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def test_interpreted_kernels_equal_the_reference() -> None:
    _run_checks({**os.environ, "TRITON_INTERPRET": "1"})


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("word", ["int64", "int16"])
def test_the_kernel_compiles_for_gpus_that_are_not_here(
    capability: int, word: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter takes what the compiler refuses; from here it is only the launch that needs a GPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = triton_copy._copy_rows_kernel
    if not isinstance(kernel, JITFunction):
        pytest.skip("Triton's interpreter is on in this process")
    signature = {
        one.name: "constexpr" if one.is_constexpr else one.annotation_type or "*i64" for one in kernel.params
    }
    words = triton_copy.BLOCK_BYTES // getattr(torch, word).itemsize
    for to_device in (True, False):
        values = {"columns": 8, "word": getattr(language, word), "block_pages": 1, "block_words": words}
        source = ASTSource(kernel, signature, {**values, "to_device": to_device})

        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})

        assert f".target sm_{capability}" in compiled.asm["ptx"]
        assert compiled.asm["cubin"].startswith(b"\x7fELF")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_kernels_equal_the_reference() -> None:
    _run_checks({name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"})
