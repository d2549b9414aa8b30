"""Compiles the kernel for GPUs, and runs `triton_checks.py`: interpreted anywhere, compiled on a GPU."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

triton = pytest.importorskip("triton")

from triton import language  # noqa: E402
from triton.backends.compiler import GPUTarget  # noqa: E402
from triton.compiler import ASTSource  # noqa: E402
from triton.runtime.jit import JITFunction  # noqa: E402

from asynchicache.kernels import triton_copy  # noqa: E402
from soaking import first  # noqa: E402

CHECKS = Path(__file__).with_name("triton_checks.py")
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def _run_checks(environment: dict[str, str]) -> None:
    """In a process of its own, see there."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(CHECKS)]
    run = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode == 0, run.stdout + run.stderr


def _interpreter_fails(triton_version: str, numpy_version: str) -> bool:
    """Triton 3.6 takes scalars out of arrays of one element, and numpy gives none from 2.4 on."""
    of_triton, of_numpy = (tuple(map(int, found.split(".")[:2])) for found in (triton_version, numpy_version))
    return of_triton == (3, 6) and of_numpy >= (2, 4)


@pytest.mark.skipif(
    _interpreter_fails(triton.__version__, np.__version__),
    reason="Triton 3.6's interpreter fails with numpy 2.4 and newer: "
    "TypeError: only 0-dimensional arrays can be converted to Python scalars",
)
def test_interpreted_kernels_equal_the_reference() -> None:
    _run_checks({**os.environ, "TRITON_INTERPRET": "1"})


@pytest.mark.skipif(not CONSTRAINTS.exists(), reason="a source distribution pins no versions")
def test_what_is_pinned_runs_interpreted_kernels() -> None:
    """So that no test run with these versions leaves them out."""
    pins = dict(re.findall(r"^(triton|numpy)==(\S+)$", CONSTRAINTS.read_text(), re.MULTILINE))

    assert not _interpreter_fails(pins["triton"], pins["numpy"])
    assert _interpreter_fails("3.6.0", pins["numpy"])
    assert not _interpreter_fails("3.6.0", "2.3.5")


WORDS = ["int64", "int32", "int16", "uint8"]
BUILDS = first(
    len(WORDS) + 4,
    [
        *((90, word, 1) for word in WORDS),
        *((capability, "int64", 1) for capability in (80, 100)),
        *((90, "uint8", pages) for pages in (8, 1024)),  # of small items a block holds many
        *((capability, word, 1) for capability in (80, 100) for word in WORDS[1:]),
        *((90, word, pages) for word in WORDS[:-1] for pages in (8, 1024)),
    ],
)


def _kernel() -> JITFunction:
    kernel = triton_copy._copy_rows_kernel
    if not isinstance(kernel, JITFunction):
        pytest.skip("Triton's interpreter is on in this process")
    return kernel


def _constants(word: str, pages: int, to_device: bool) -> dict[str, object]:
    """Those of a launch."""
    words = triton_copy.BLOCK_BYTES // getattr(torch, word).itemsize // pages
    shape = {"block_pages": pages, "block_words": words}
    return {"columns": 8, "word": getattr(language, word), "to_device": to_device, **shape}


@pytest.mark.parametrize(("capability", "word", "pages"), BUILDS)
def test_the_kernel_compiles_for_gpus_that_are_not_here(
    capability: int, word: str, pages: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The interpreter takes what the compiler refuses; from here it is only the launch that needs a GPU."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = _kernel()
    signature = {
        one.name: "constexpr" if one.is_constexpr else one.annotation_type or "*i64" for one in kernel.params
    }
    for to_device in (True, False):
        source = ASTSource(kernel, signature, _constants(word, pages, to_device))

        compiled = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"num_warps": 8})

        assert f".target sm_{capability}" in compiled.asm["ptx"]
        assert compiled.asm["cubin"].startswith(b"\x7fELF")


class _PlayedDriver:
    """Says that there is a GPU; a launch would need one."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", 90, 32)

    def get_current_device(self) -> int:
        return 99  # no other test's

    def get_current_stream(self, device: int) -> int:
        return 0


class _Slots:
    """A tensor, as far as a launch looks at it."""

    dtype = torch.int64

    def __init__(self, address: int) -> None:
        self._address = address

    def data_ptr(self) -> int:
        return self._address


def test_neither_numbers_nor_where_slots_begin_are_compiled_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request would wait for each such compilation."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel, table, constants = _kernel(), _Slots(512), _constants("int64", 8, True)
    monkeypatch.setattr(triton.runtime.driver, "_active", _PlayedDriver())
    found = [
        kernel.warmup(table, _Slots(start), _Slots(end), *numbers, grid=(1,), num_warps=8, **constants)
        for start, end, numbers in (
            (1024, 2048, (0, 1, 1, 1, 1)),
            (1032, 2048, (16, 5, 7, 3, 2)),
            (1024, 2056, (3, 1 << 20, 1 << 30, 1 << 17, 16)),
        )
    ]

    assert len(set(map(id, found))) == 1


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_kernels_equal_the_reference() -> None:
    _run_checks({name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"})
