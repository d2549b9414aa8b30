"""Page copies in Triton: one launch for many small pages, straight from and to pinned host memory.

A copy engine needs runs of some 28 KiB to reach the bus's speed; below that a kernel is faster
(https://github.com/vllm-project/vllm/pull/42212). A table of addresses makes one launch serve every
layer of every tensor. Few programs run, each in a loop, because a model computes on the same GPU.

Two kernels, to the device and from it, copy whatever a pool holds: the table says how wide a row's words
are, and how many a page has. They are compiled when a pool is opened, and launched by the driver itself:
Triton's own launcher is a C extension, which a machine without a compiler cannot build.
"""

from __future__ import annotations

import logging
import re
import struct
from collections.abc import Callable
from ctypes import addressof, c_size_t, c_void_p, create_string_buffer
from functools import cache
from math import gcd
from subprocess import SubprocessError
from typing import NamedTuple, TypeAlias

import torch
import triton
import triton.language as tl
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.jit import JITFunction

from asynchicache.cuda_driver import CudaDriver
from asynchicache.errors import DeviceError
from asynchicache.kernels.items import LayerRow, PoolItems
from asynchicache.kernels.pointers import HostPointers, shared_address

logger = logging.getLogger(__name__)

LANES = 1024
"""Words of a block. With 4 of them a thread, the loads of all are under way before the first is stored."""

BYTES_IN_FLIGHT = 512 << 10
"""Of all programs: what a PCIe 5 bus of 55 GB/s holds at a latency of several microseconds. In words of 16
bytes, these are 32 programs, on a quarter of a large GPU's processors."""

MAX_PROGRAMS = 128
MAX_WORDS = 2**31 - LANES
"""Of a row's pages in one launch: the kernel counts them in 32 bits, and the last block may reach beyond."""

WIDEST = 16
"""Bytes that a thread of a GPU loads at once."""

_WARPS = 8


@triton.jit  # type: ignore[untyped-decorator]
def _copy_block(
    entry: tl.tensor,
    host_slots: tl.tensor,
    device_slots: tl.tensor,
    start: int,
    pages: int,
    width: tl.constexpr,
    word: tl.constexpr,
    parts: tl.constexpr,
    to_device: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    # One load of a thread is `width` bytes: `parts` neighbouring values, which Triton joins because their
    # addresses are multiples of it.
    host = tl.multiple_of(tl.load(entry).to(tl.pointer_type(word)), width)
    device = tl.multiple_of(tl.load(entry + 1).to(tl.pointer_type(word)), width)
    # Slots and strides are int64: pools are larger than 2**31 words.
    host_slot_stride, device_slot_stride = tl.load(entry + 2), tl.load(entry + 3)
    host_unit_stride, device_unit_stride = tl.load(entry + 4), tl.load(entry + 5)
    # A GPU divides 64 bits several times as slowly as 32, and a row's words are fewer than 2**31.
    of_page, of_unit = tl.load(entry + 6).to(tl.int32), tl.load(entry + 7).to(tl.int32)

    index = start + tl.arange(0, lanes)
    page, in_page = index // of_page, index % of_page
    unit, in_unit = in_page // of_unit, in_page % of_unit
    there = page < pages
    host_slot = tl.load(host_slots + page, mask=there, other=0)
    device_slot = tl.load(device_slots + page, mask=there, other=0)

    # [lanes, parts]
    part = tl.arange(0, parts)[None, :]
    mask = there[:, None] & (part < parts)
    host_at = (host_slot * host_slot_stride + unit * host_unit_stride + in_unit)[:, None] * parts + part
    device_at = (device_slot * device_slot_stride + unit * device_unit_stride + in_unit)[
        :, None
    ] * parts + part
    if to_device:
        tl.store(device + device_at, tl.load(host + host_at, mask=mask, other=0), mask=mask)
    else:
        tl.store(host + host_at, tl.load(device + device_at, mask=mask, other=0), mask=mask)


@triton.jit  # type: ignore[untyped-decorator]
def _copy_rows(
    table: tl.tensor,  # int64, an address as the next two
    host_slots: tl.tensor,
    device_slots: tl.tensor,
    first_row: int,
    pages: int,
    work: int,
    row_blocks: int,
    columns: tl.constexpr,
    to_device: tl.constexpr,
    lanes: tl.constexpr,
) -> None:
    rows = table.to(tl.pointer_type(tl.int64))
    ours = host_slots.to(tl.pointer_type(tl.int64))
    theirs = device_slots.to(tl.pointer_type(tl.int64))
    # Work items [rows, blocks], assigned to the programs round-robin.
    for item in range(tl.program_id(0), work, tl.num_programs(0)):
        entry = rows + (first_row + item // row_blocks) * columns
        start = item % row_blocks * lanes
        width = tl.load(entry + 8)
        if width == 16:
            _copy_block(entry, ours, theirs, start, pages, 16, tl.int64, 2, to_device, lanes)
        elif width == 8:
            _copy_block(entry, ours, theirs, start, pages, 8, tl.int64, 1, to_device, lanes)
        elif width == 4:
            _copy_block(entry, ours, theirs, start, pages, 4, tl.int32, 1, to_device, lanes)
        elif width == 2:
            _copy_block(entry, ours, theirs, start, pages, 2, tl.int16, 1, to_device, lanes)
        else:
            _copy_block(entry, ours, theirs, start, pages, 1, tl.int8, 1, to_device, lanes)


Arguments: TypeAlias = tuple[int, int, int, int, int, int, int]
"""Of the kernel: addresses of table, host and device slots; first row, pages, work items, blocks of a row."""

RunKernel: TypeAlias = Callable[[bool, int, Arguments, int], None]
"""Runs the kernel to the device, or from it: direction, programs, arguments, handle of a stream."""


def interpreted(to_device: bool, programs: int, arguments: Arguments, stream: int) -> None:
    """Run the kernel in Triton's interpreter, on a CPU."""
    _copy_rows[(programs,)](*arguments, columns=len(KernelRow._fields), to_device=to_device, lanes=LANES)


class Compiled(NamedTuple):
    """A kernel in a GPU's machine code.

    Attributes:
        binary: the module of the function, as the driver loads it.
        hidden: pointers that Triton adds to the arguments; this kernel makes no use of them.
    """

    name: str
    binary: bytes
    hidden: int


@cache
def compiled(capability: int, to_device: bool) -> Compiled:
    """The kernel for GPUs of a compute capability, say 90, which need not be here; Triton keeps it on disk.

    Raises:
        DeviceError: Triton cannot compile it.
    """
    if not isinstance(_copy_rows, JITFunction):
        raise DeviceError("TRITON_INTERPRET is set, so Triton compiles nothing for a GPU")
    numbers = dict.fromkeys(("first_row", "pages", "work", "row_blocks"), "i32")
    constants = {"columns": len(KernelRow._fields), "to_device": to_device, "lanes": LANES}
    signature = dict.fromkeys(("table", "host_slots", "device_slots"), "i64") | numbers
    signature |= dict.fromkeys(constants, "constexpr")
    target = GPUTarget("cuda", capability, 32)
    try:
        source = ASTSource(_copy_rows, signature, constants)
        found = triton.compile(source, target=target, options={"num_warps": _WARPS})
    # A Triton that does not know the GPU; no folder that it may write to; no assembler.
    except (triton.TritonError, RuntimeError, OSError, SubprocessError) as error:
        cause = error.__cause__ or error
        raise DeviceError(
            f"Triton {triton.__version__} cannot compile for compute capability {capability / 10}: "
            f"{type(cause).__name__}: {str(cause).strip().rpartition(chr(10))[2]}; a newer Triton, or "
            "TRITON_CACHE_DIR with the name of a folder that can be written, may help"
        ) from error
    entry = re.search(r"\.entry .*?\)", found.asm["ptx"], re.DOTALL)
    parameters = entry[0].count(".param") if entry else 0
    return Compiled(found.metadata.name, found.asm["cubin"], parameters - len(signature) + len(constants))


class CudaLaunch:
    """Launches the kernel on one GPU; a `RunKernel`, for one thread at a time."""

    def __init__(self, driver: CudaDriver, capability: int) -> None:
        """Compiles and loads, on torch's current device.

        Raises:
            DeviceError: Triton cannot compile the kernel, or the driver refused it.
        """
        both = [compiled(capability, to_device) for to_device in (False, True)]
        self._driver = driver
        self._functions = [driver.load_function(one.binary, one.name) for one in both]
        self._format = struct.Struct(f"=3q4i{8 * both[0].hidden}x")  # without gaps, as CUDA aligns them
        self._packed = create_string_buffer(self._format.size)
        self._size = c_size_t(self._format.size)
        # Of cuLaunchKernel: here are the packed arguments, so many bytes, that is all.
        self._extra = (c_void_p * 5)(1, addressof(self._packed), 2, addressof(self._size), 0)

    def __call__(self, to_device: bool, programs: int, arguments: Arguments, stream: int) -> None:
        """
        Raises:
            DeviceError: the driver refused it.
        """
        self._format.pack_into(self._packed, 0, *arguments)
        extra = addressof(self._extra)
        self._driver.launch(self._functions[to_device], programs, _WARPS * 32, extra, stream)


class KernelRow(NamedTuple):
    """What the kernel knows of one layer of one tensor; its table has these columns. A word is `width` bytes,
    the widest load that suits all of the row's addresses.

    Attributes:
        host, device: addresses.
        host_slot, device_slot, host_unit, device_unit: words from one slot, or unit, to the next.
        page, unit: words of a page, and of a unit.
    """

    host: int
    device: int
    host_slot: int
    device_slot: int
    host_unit: int
    device_unit: int
    page: int
    unit: int
    width: int

    @classmethod
    def of(cls, items: PoolItems, row: LayerRow, pointers: HostPointers) -> KernelRow:
        """
        Raises:
            DeviceError: the GPU cannot reach the host's items, or calls them by another address.
        """
        host, device = items.host[row.tensor][row.local], items.device[row.tensor][row.local]
        _, units, words = host.shape
        size = host.element_size()
        ours = shared_address(host.data_ptr(), pointers) if host.numel() else 0
        pairs = [(view.stride(i) * size, view.shape[i]) for i in (0, 1) for view in (host, device)]
        moving = [step for step, count in pairs if count > 1]
        width = gcd(WIDEST, words * size, ours, device.data_ptr(), *moving)
        steps = [step // width for step, _ in pairs]
        unit = words * size // width
        return cls(ours, device.data_ptr(), *steps, units * unit, unit, width)  # type: ignore[call-arg]


class TritonKernels:
    """Copies between the tiers of one pool in one launch each."""

    def __init__(self, items: PoolItems, pointers: HostPointers, launch: RunKernel) -> None:
        """
        Args:
            items: where they lie; the host's must be memory that the GPU can reach.
            pointers: what the GPU calls an address of the host.
            launch: runs the kernel on the items' device.

        Raises:
            DeviceError: the GPU cannot reach the host items, or calls them by other addresses; or an item is
                too large to be counted in 32 bits.
        """
        self._items = items
        self._device = items.device[0].device
        self._launch = launch
        self.rows = [KernelRow.of(items, row, pointers) for row in items.rows]
        most = max(row.page for row in self.rows)
        if most > MAX_WORDS:
            raise DeviceError(f"an item of {most} words; the kernel counts {MAX_WORDS} at most")
        self._warn_of_narrow_rows()
        self._table = torch.tensor(self.rows, dtype=torch.int64).to(self._device)
        self._address = self._table.data_ptr()
        self._shapes: dict[range, tuple[int, int]] = {}

    def _warn_of_narrow_rows(self) -> None:
        for row in self.rows:
            wanted = gcd(WIDEST, row.unit * row.width)
            if row.width < wanted:
                logger.warning(
                    "copies by kernel move %d bytes a thread, not %d: the items at %#x on the host and %#x "
                    "on the device, or the distances of slots, are not at multiples of %d bytes",
                    *(row.width, wanted, row.host, row.device, wanted),
                )
                return

    def copy(
        self, rows: range, host_slots: int, device_slots: int, pages: int, *, to_device: bool, stream: int
    ) -> None:
        """One launch, unless pages are 2 GiB of one row and more; see
        `asynchicache.kernels.select.PageKernels`.
        """
        if not rows:
            return
        if rows not in self._shapes:
            some = self.rows[rows.start : rows.stop]
            width = max(some, key=lambda row: row.page * row.width).width  # of most of the bytes
            self._shapes[rows] = max(row.page for row in some), width
        most, width = self._shapes[rows]
        programs = min(MAX_PROGRAMS, BYTES_IN_FLIGHT // (LANES * width))
        # Blocks are counted in 32 bits, too; of more than a thousand rows they are fewer than words.
        step = max(1, min(MAX_WORDS, MAX_WORDS // len(rows) * LANES) // most)
        for start in range(0, pages, step):
            count = min(step, pages - start)
            row_blocks = -(-count * most // LANES)
            work = len(rows) * row_blocks
            slots = host_slots + 8 * start, device_slots + 8 * start
            numbers = rows.start, count, work, row_blocks
            self._launch(to_device, min(work, programs), (self._address, *slots, *numbers), stream)
