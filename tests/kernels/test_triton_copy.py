"""Compiles the kernel for GPUs, and runs `triton_checks.py`: interpreted anywhere, compiled on a GPU."""

from __future__ import annotations

import os
import re
import struct
import subprocess
from collections import Counter
from collections.abc import Iterator
from contextlib import closing, contextmanager
from ctypes import c_int64, c_size_t, c_void_p, string_at
from itertools import product
from math import gcd
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import numpy as np
import pytest
import torch

import forking

triton = pytest.importorskip("triton")

from triton.runtime.jit import JITFunction  # noqa: E402

from asynchicache.cuda_driver import CudaDriver, Libraries  # noqa: E402
from asynchicache.errors import DeviceError  # noqa: E402
from asynchicache.kernels import triton_copy  # noqa: E402
from asynchicache.kernels.items import PoolItems  # noqa: E402
from asynchicache.kernels.pointers import SamePointers  # noqa: E402
from asynchicache.kernels.select import compile_kernels  # noqa: E402
from asynchicache.kernels.triton_copy import (  # noqa: E402
    LANES,
    MAX_WORDS,
    WIDEST,
    Arguments,
    CudaLaunch,
    KernelRow,
    TritonKernels,
    compiled,
)
from asynchicache.layouts import HostLayout  # noqa: E402
from asynchicache.pools.device import DevicePool  # noqa: E402
from asynchicache.pools.host import HostPool  # noqa: E402
from asynchicache.specs import PoolSpec  # noqa: E402
from asynchicache.transfer.copies import PoolMemory  # noqa: E402
from asynchicache_lab.bench.transfer import POOLS  # noqa: E402
from integrations.zoo import ALL, PAGE, tiny_spec  # noqa: E402
from soaking import first  # noqa: E402

STREAM = 7
CHECKS = Path(__file__).with_name("triton_checks.py")
CONSTRAINTS = Path(__file__).parents[2] / "constraints.txt"


def _run_checks(environment: dict[str, str]) -> None:
    """In a process of its own, see there."""
    run = forking.run(["-m", "pytest", "-q", "-p", "no:cacheprovider", CHECKS], env=environment)
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


CAPABILITIES = first(1, [90, 80, 100])


@pytest.fixture(autouse=True)
def _compiles() -> None:
    if not isinstance(triton_copy._copy_rows, JITFunction):
        pytest.skip("Triton's interpreter is on in this process")


@pytest.mark.parametrize("capability", CAPABILITIES)
def test_machine_code_moves_the_widest_words_there_are(capability: int) -> None:
    """Each width of a row has code of its own, which loads words of that width; nothing is spilled."""
    threads, sizes = triton_copy._WARPS * 32, {"128", "64", "32", "U16", "U8"}
    for to_device in (True, False):
        found = compiled(capability, to_device)
        usage, code = _disassembled(found.binary)

        stored = Counter(_size(instruction) for instruction in re.findall(r"\bSTG\S*", code))
        loaded = Counter(_size(instruction) for instruction in re.findall(r"\bLDG\S*", code))
        assert stored == dict.fromkeys(sizes, LANES // threads)
        assert loaded["128"] == stored["128"]  # all others read the table and the slots, too
        assert not re.findall(r"\b(?:LDL|STL)\b", code)
        assert int(usage["REG"]) <= 64
        assert (usage["STACK"], usage["LOCAL"], usage["SHARED"]) == ("0", "0", "0")
        assert 0 <= found.hidden <= 2


def _disassembled(binary: bytes) -> tuple[dict[str, str], str]:
    """What a function uses, and its instructions."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary)
        file.flush()
        usage, code = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True).stdout
            for option in ("-res-usage", "-sass")
        )
    return dict(re.findall(r"(REG|STACK|SHARED|LOCAL):(\d+)", usage)), code


def _size(instruction: str) -> str:
    """`LDG.E.128` is one of 128 bits."""
    named = {"128", "64", "U16", "U8"} & set(instruction.split("."))
    return named.pop() if named else "32"


def _zoo() -> dict[str, tuple[PoolSpec, int]]:
    """Pools and their page sizes."""
    sizes = {
        f"{name} in pages of {size}": (pool, size) for name, (pool, pages) in POOLS.items() for size in pages
    }
    specs = {f"{name} {dtype}": tiny_spec(name, dtype) for name in ALL for dtype in ("float32", "bfloat16")}
    return sizes | {
        f"{name} {pool.name}": (pool, PAGE) for name, spec in specs.items() for pool in spec.pools
    }


@contextmanager
def _memory(pool: PoolSpec, page_size: int, layout: HostLayout) -> Iterator[PoolMemory]:
    host = HostPool(pool, page_size, 3, pin=False, layout=layout)
    with closing(host):
        yield PoolMemory(DevicePool(pool, page_size, 3), host)


@pytest.mark.parametrize("layout", list(HostLayout))
def test_each_row_of_every_pool_is_read_by_the_widest_words_of_its_units(layout: HostLayout) -> None:
    """So all those are read 16 bytes a thread whose rows are multiples of them."""
    for name, (pool, page_size) in _zoo().items():
        with _memory(pool, page_size, layout) as memory:
            items = memory.items()
            rows = [KernelRow.of(items, row, SamePointers()) for row in items.rows]
        assert [(name, row.width) for row in rows] == [
            (name, gcd(WIDEST, row.unit * row.width)) for row in rows
        ]


def test_addresses_and_strides_limit_the_words_of_their_own_row(caplog: pytest.LogCaptureFixture) -> None:
    slab = torch.zeros(4096, dtype=torch.uint8)
    wide, odd = (
        slab.as_strided((2, 2, 1, 32), (64, 128, 32, 1), 0),
        slab.as_strided((1, 2, 1, 32), (40, 40, 32, 1), 4),
    )
    items = PoolItems.of([wide, odd], [wide.clone(), odd.clone()], [(0, 1), (0,)])

    rows = [KernelRow.of(items, row, SamePointers()) for row in items.rows]

    assert {(row.tensor, made.width) for row, made in zip(items.rows, rows, strict=True)} == {(0, 16), (1, 4)}
    programs: list[int] = []
    kernels = TritonKernels(items, SamePointers(), lambda *one: programs.append(one[1]))
    assert kernels.rows == rows
    for some in (range(3), range(1, 2)):  # two wide rows and the odd one; that one alone
        kernels.copy(some, 0, 0, 100_000, to_device=True, stream=0)
    assert programs == [32, 128], "as many bytes in flight, and no more processors than most of them need"
    assert caplog.text.count("copies by kernel move 4 bytes a thread, not 16: the items at 0x") == 1


class _Library:
    """What a driver is asked for; it runs nothing."""

    def __init__(self) -> None:
        self.loaded: dict[int, str] = {}
        self.launched: list[tuple[str, int, int, tuple[int, ...]]] = []

    def cuCtxGetCurrent(self, context: Any) -> int:  # noqa: N802 - the driver's name
        context._obj.value = 1
        return 0

    def cuModuleLoadData(self, module: Any, binary: bytes) -> int:  # noqa: N802
        module._obj.value = len(binary)
        return 0

    def cuModuleGetFunction(self, function: Any, module: c_void_p, name: bytes) -> int:  # noqa: N802
        function._obj.value = len(self.loaded) + 1
        self.loaded[function._obj.value] = name.decode()
        return 0

    def cuLaunchKernel(self, function: int, *launch: Any) -> int:  # noqa: N802
        blocks, _, _, threads, _, _, _, stream, arguments, extra = launch
        assert stream == STREAM
        pointer, at, size, size_at, end = (c_void_p * 5).from_address(extra)
        assert (arguments, pointer, size, end) == (None, 1, 2, None)
        packed = string_at(at, c_size_t.from_address(size_at).value)
        self.launched.append((function, blocks, threads, struct.unpack_from("=3q4i", packed)))
        return 0


@pytest.fixture
def library() -> _Library:
    return _Library()


def test_nothing_is_compiled_but_two_kernels_when_a_pool_opens(
    library: _Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For any pool, any layers of it and any number of pages: a request would wait for a compilation."""
    compile_, counted = triton.compile, []
    monkeypatch.setattr(triton, "compile", lambda *a, **b: counted.append(a) or compile_(*a, **b))
    compiled.cache_clear()
    opened = CudaLaunch(CudaDriver(0, Libraries(library, library)), 90)
    assert (len(counted), list(library.loaded.values())) == (2, [compiled(90, True).name] * 2)

    launches = 0
    for pool, page_size in _zoo().values():
        with _memory(pool, page_size, HostLayout.PAGE_FIRST) as memory:
            items = memory.items()
            kernels = TritonKernels(items, SamePointers(), opened)
            for pages, layer in product((1, 3, 1000), range(max(row.layer for row in items.rows) + 1)):
                rows = items.span(layer, layer + 1)
                for to_device in (False, True):
                    kernels.copy(rows, 64, 64, pages, to_device=to_device, stream=STREAM)
                    launches += bool(rows)

    assert len(counted) == 2
    assert len(library.launched) == launches


def test_opening_compiles_both_before_the_loop_loads_them(
    library: _Library, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: (9, index))
    compiled.cache_clear()

    compile_kernels(0)

    assert compiled.cache_info().currsize == 2
    CudaLaunch(CudaDriver(0, Libraries(library, library)), 90)
    assert compiled.cache_info().misses == 2


def test_a_launch_is_packed_as_the_machine_code_takes_it(library: _Library) -> None:
    """Every block of every row is one program's work, and what is added to the arguments is zero."""
    pool, page_size = POOLS["mha"][0], 64
    with _memory(pool, page_size, HostLayout.PAGE_FIRST_DIRECT) as memory:
        items = memory.items()
        kernels = TritonKernels(
            items, SamePointers(), CudaLaunch(CudaDriver(0, Libraries(library, library)), 90)
        )
        host, device = torch.tensor([2, 0]), torch.tensor([1, 2])
        slots = host.data_ptr(), device.data_ptr()
        kernels.copy(items.span(1, 3), *slots, 2, to_device=True, stream=STREAM)

    ((function, blocks, threads, (table, *found, first, pages, work, row_blocks)),) = library.launched
    rows = (c_int64 * (len(kernels.rows) * len(KernelRow._fields))).from_address(table)[:]
    assert rows == [value for row in kernels.rows for value in row]
    assert found == list(slots)
    page_bytes = pool.slot_bytes(page_size) // len(kernels.rows)
    assert row_blocks == 2 * page_bytes // (WIDEST * LANES)
    assert (function, blocks, threads, first, pages, work) == (2, 32, 256, 2, 2, 4 * row_blocks)


def test_more_pages_than_32_bits_count_are_several_launches() -> None:
    """Memory that is never touched takes no room."""
    words = MAX_WORDS // 2 - 5
    host = torch.empty(words, dtype=torch.uint8).as_strided((1, 5, 1, words), (0, 0, 0, 1))
    launched: list[Arguments] = []
    kernels = TritonKernels(
        PoolItems.of([host], [host]), SamePointers(), lambda *one: launched.append(one[2])
    )

    kernels.copy(range(1), 4096, 8192, 5, to_device=True, stream=STREAM)

    assert [one[1:5] for one in launched] == [
        (4096, 8192, 0, 2),
        (4096 + 16, 8192 + 16, 0, 2),
        (4096 + 32, 8192 + 32, 0, 1),
    ]


def test_of_thousands_of_layers_no_launch_has_more_blocks_than_32_bits_count() -> None:
    layers, pages, words = 3000, 5000, (1 << 20) + 1
    host = torch.empty(words, dtype=torch.uint8).as_strided((layers, pages, 1, words), (0, 0, 0, 1))
    launched: list[Arguments] = []
    kernels = TritonKernels(
        PoolItems.of([host], [host]), SamePointers(), lambda *one: launched.append(one[2])
    )

    kernels.copy(range(layers), 4096, 8192, pages, to_device=True, stream=STREAM)

    assert sum(one[4] for one in launched) == pages
    assert max(work for *_, work, _ in launched) < 2**31
    assert all(work == layers * blocks for *_, work, blocks in launched)


def test_a_machine_without_a_c_compiler_has_kernels(tmp_path: Path) -> None:
    """Triton's own launcher is built by one."""
    code = "from asynchicache.kernels.triton_copy import compiled; print(len(compiled(90, True).binary))"
    kept = {name: value for name, value in os.environ.items() if name not in ("CC", "TRITON_INTERPRET")}
    environment = kept | {"PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}

    run = forking.run(["-c", code], env=environment)

    assert int(run.stdout or 0) > 10_000, run.stderr


def test_what_triton_refuses_is_said_with_what_may_help(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*given: object, **more: object) -> None:
        raise PermissionError("[Errno 13] Permission denied: '/root/.triton'")

    monkeypatch.setattr(triton, "compile", refuse)
    compiled.cache_clear()

    with pytest.raises(
        DeviceError, match=r"capability 9\.0: Permission.*a newer Triton, or TRITON_CACHE_DIR"
    ):
        compiled(90, True)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_kernels_equal_the_reference() -> None:
    _run_checks({name: value for name, value in os.environ.items() if name != "TRITON_INTERPRET"})
