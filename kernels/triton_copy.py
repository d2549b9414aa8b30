"""Page copies in Triton: one launch for many small pages, straight from and to pinned host memory.

A copy engine needs runs of some 28 KiB to reach the bus's speed; below that a kernel is faster
(https://github.com/vllm-project/vllm/pull/42212). A table of addresses makes one launch serve every
layer of every tensor. Few programs run, each in a loop, because a model computes on the same GPU.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from asynchicache.errors import DeviceError, UsageError
from asynchicache.kernels.items import LayerRow, PoolItems
from asynchicache.kernels.pointers import HostPointers, shared_address

PROGRAMS = 32
"""Programs of a launch. With `BLOCK_BYTES` of each in flight, some 0.5 MiB: what a PCIe 5 bus of 55 GB/s
holds at a latency of several microseconds, on a quarter of a large GPU's processors."""

BLOCK_BYTES = 16 << 10
MAX_WORDS = 2**31 - BLOCK_BYTES
"""Of an item: the kernel counts them in 32 bits, and its last block may reach beyond."""

_COLUMNS = 8  # of the table: host and device address, slot strides, unit strides, units, words
_WORDS = {torch.int64: tl.int64, torch.int32: tl.int32, torch.int16: tl.int16, torch.uint8: tl.uint8}


# The alignment of slots is not specialized either: later chunks of a plan may be aligned differently, and a
# request would wait for another compilation.
@triton.jit(  # type: ignore[untyped-decorator]
    do_not_specialize=[
        "host_slots",
        "device_slots",
        "first_row",
        "pages",
        "work",
        "page_blocks",
        "word_blocks",
    ]
)
def _copy_rows_kernel(
    table: tl.tensor,
    host_slots: tl.tensor,
    device_slots: tl.tensor,
    first_row: int,
    pages: int,
    work: int,
    page_blocks: int,
    word_blocks: int,
    columns: tl.constexpr,
    word: tl.constexpr,
    to_device: tl.constexpr,
    block_pages: tl.constexpr,
    block_words: tl.constexpr,
) -> None:
    # Work items [rows, page blocks, word blocks], assigned to the programs round-robin.
    for item in range(tl.program_id(0), work, tl.num_programs(0)):
        row = first_row + item // (page_blocks * word_blocks)
        entry = table + row * columns
        host = tl.load(entry).to(tl.pointer_type(word))
        device = tl.load(entry + 1).to(tl.pointer_type(word))
        host_slot_stride, device_slot_stride = tl.load(entry + 2), tl.load(entry + 3)
        host_unit_stride, device_unit_stride = tl.load(entry + 4), tl.load(entry + 5)
        # A GPU divides 64 bits several times as slowly as 32, and an item's words are fewer than 2**31.
        units, words = tl.load(entry + 6).to(tl.int32), tl.load(entry + 7).to(tl.int32)

        page = (item // word_blocks) % page_blocks * block_pages + tl.arange(0, block_pages)
        index = item % word_blocks * block_words + tl.arange(0, block_words)
        unit, within = index // words, index % words
        # Slots and strides are int64: pools are larger than 2**31 words.
        host_slot = tl.load(host_slots + page, mask=page < pages, other=0)
        device_slot = tl.load(device_slots + page, mask=page < pages, other=0)

        # [block_pages, block_words]
        mask = (page < pages)[:, None] & (unit < units)[None, :]
        host_at = (host_slot * host_slot_stride)[:, None] + (unit * host_unit_stride + within)[None, :]
        device_at = (device_slot * device_slot_stride)[:, None] + (unit * device_unit_stride + within)[
            None, :
        ]
        if to_device:
            tl.store(device + device_at, tl.load(host + host_at, mask=mask, other=0), mask=mask)
        else:
            tl.store(host + host_at, tl.load(device + device_at, mask=mask, other=0), mask=mask)


class TritonKernels:
    """Copies between the tiers of one pool in one launch each, on the current stream."""

    def __init__(self, items: PoolItems, pointers: HostPointers) -> None:
        """
        Args:
            items: where they lie; the host's must be memory that the GPU can reach.
            pointers: what the GPU calls an address of the host.

        Raises:
            DeviceError: the GPU cannot reach the host items, or calls them by other addresses; or an item is
                too large to be counted in 32 bits.
        """
        self._items = items
        self._device = items.device[0].device
        self._words = [tensor.shape[2] * tensor.shape[3] for tensor in items.host]
        if max(self._words) > MAX_WORDS:
            raise DeviceError(f"an item of {max(self._words)} words; the kernel counts {MAX_WORDS} at most")
        table = [_entry(items, row, pointers) for row in items.rows]
        self._table = torch.tensor(table, dtype=torch.int64).to(self._device)

    def upload(self, slots: torch.Tensor) -> torch.Tensor:
        """Slots where `gather` and `scatter` want them, in the order of the current stream."""
        if self._device.type == "cpu":
            return slots
        # Through pinned memory, which torch keeps for the next time: from other memory the driver may
        # wait for the stream.
        return slots.pin_memory().to(self._device, non_blocking=True)

    def gather(
        self, rows: range, device_slots: torch.Tensor, host_slots: torch.Tensor, *, checked: bool = False
    ) -> None:
        """`ReferenceKernels.gather` in one launch; both slots as `upload` returns them. Waits for the
        current stream unless they are `checked`."""
        self._check(rows, host_slots, device_slots, "" if checked else "host")
        self._copy(rows, host_slots, device_slots, to_device=False)

    def scatter(
        self, rows: range, host_slots: torch.Tensor, device_slots: torch.Tensor, *, checked: bool = False
    ) -> None:
        """`ReferenceKernels.scatter` in one launch; both slots as `upload` returns them. Waits for the
        current stream unless they are `checked`."""
        self._check(rows, host_slots, device_slots, "" if checked else "device")
        self._copy(rows, host_slots, device_slots, to_device=True)

    def _check(self, rows: range, host_slots: torch.Tensor, device_slots: torch.Tensor, written: str) -> None:
        self._items.check_slots(rows, host_slots, device_slots)
        if host_slots.device != self._device or device_slots.device != self._device:
            raise UsageError(
                f"slots lie on {host_slots.device} and {device_slots.device}, not on {self._device}"
            )
        if written:
            self._items.check_values(host_slots, device_slots, written)

    def _copy(
        self, rows: range, host_slots: torch.Tensor, device_slots: torch.Tensor, *, to_device: bool
    ) -> None:
        pages = len(host_slots)
        if not pages or not rows:
            return
        most = max(self._words[row.tensor] for row in self._items.rows[rows.start : rows.stop])
        block = BLOCK_BYTES // self._items.word.itemsize
        block_words = min(triton.next_power_of_2(most), block)
        block_pages = block // block_words
        page_blocks, word_blocks = triton.cdiv(pages, block_pages), triton.cdiv(most, block_words)
        work = len(rows) * page_blocks * word_blocks
        _copy_rows_kernel[(min(work, PROGRAMS),)](
            self._table,
            host_slots,
            device_slots,
            rows.start,
            pages,
            work,
            page_blocks,
            word_blocks,
            columns=_COLUMNS,
            word=_WORDS[self._items.word],
            to_device=to_device,
            block_pages=block_pages,
            block_words=block_words,
            num_warps=8,
        )


def _entry(items: PoolItems, row: LayerRow, pointers: HostPointers) -> list[int]:
    host, device = items.host[row.tensor][row.local], items.device[row.tensor][row.local]
    return [
        shared_address(host.data_ptr(), pointers) if host.numel() else 0,
        device.data_ptr(),
        host.stride(0),
        device.stride(0),
        host.stride(1),
        device.stride(1),
        *host.shape[1:],
    ]
