"""Host memory of one pool, in one of three layouts, pinned in steps for a GPU."""

from __future__ import annotations

import mmap
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from math import lcm

import torch

from asynchicache.errors import CapacityError, ConfigError, UsageError
from asynchicache.layouts import HEADER_BYTES, HostLayout, SlotLayout
from asynchicache.pools.device import check_size
from asynchicache.pools.slabs import Pinner, PinningWarning, Slab, warn_unpinned
from asynchicache.ports import Port
from asynchicache.specs import PoolSpec


class SteppedMemory:
    """Memory that is pinned in steps: tens of GiB take seconds, and the first part serves meanwhile.

    Attributes:
        ready: bytes that may be used, the first ones.
        step_bytes: bytes per registration: one begins at each multiple of it. All of the memory if it is not
            pinned. CUDA cannot copy a run that spans two registrations.
    """

    def __init__(
        self,
        slab: Slab,
        unit_bytes: int,
        *,
        pinner: Pinner | None = None,
        title: str = "host memory that pools share",
        short: Callable[[int], str] | None = None,
    ) -> None:
        """
        Args:
            slab: the memory, which this closes.
            unit_bytes: what is never divided between two registrations.
            pinner: pins it. Default: it is not pinned.
            title: what the memory is, for warnings.
            short: says how much a number of ready bytes is, for warnings.
        """
        self.slab = slab
        self.ready = self.step_bytes = slab.nbytes
        self._short = short or (lambda ready: f"{title}: {ready} of {slab.nbytes} bytes are usable")
        self._lock = threading.Lock()
        self._pinner = pinner
        self._steps: Iterator[tuple[int, int]] = iter(())
        if pinner is None:
            return
        try:
            # Two registrations must not share a page of the system, which may be larger than ours.
            self._steps = pinner.steps(slab.nbytes, lcm(unit_bytes, mmap.PAGESIZE))
            self.ready = self.step_bytes = self._pin_next(pinner)
            while self.growing and self.ready < pinner.first_bytes:
                self.ready += self._pin_next(pinner)
        except RuntimeError as error:  # a DeviceError, one of torch, or no thread available
            slab.unpin()
            self._pinner = None
            warn_unpinned(title, error)
        except BaseException:  # else nothing could unpin what was pinned so far
            self.close()
            raise

    @property
    def growing(self) -> bool:
        """Whether `grow` has steps left."""
        return self.ready < self.slab.nbytes and self._pinner is not None

    def _pin_next(self, pinner: Pinner) -> int:
        offset, nbytes = next(self._steps)
        self.slab.pin(pinner, offset, nbytes)
        return nbytes

    def grow(self) -> int:
        """Pin the next step; returns the bytes that are ready now. Blocks, so do not call it on the loop.

        If the system refuses, the memory keeps its size, with a warning.
        """
        with self._lock:  # `close` waits for a running step
            if not self.growing or self._pinner is None:
                return self.ready
            try:
                self.ready += self._pin_next(self._pinner)
            except (RuntimeError, CapacityError) as error:
                self._pinner = None
                warnings.warn(f"{self._short(self.ready)}: {error}", PinningWarning, stacklevel=2)
            return self.ready

    def close(self) -> None:
        """Unpin and release the memory; idempotent. No copy may be in flight."""
        with self._lock:
            self._pinner = None
            self.slab.close()


class HostPool:
    """The slots of one pool in host memory, and a header for each slot in a separate slab.

    Headers are separate so that pages of neighbouring slots are contiguous, and so that storage can write a
    header and a page as two runs of one vectored call.

    Its memory is pinned in steps, see `SteppedMemory`. Only the first `ready` slots may be used meanwhile.

    Attributes:
        page_size: tokens per slot; not used if a slot holds a state.
        layout: the position of each tensor in a slot.
        ready: the number of usable slots, the first ones.
        step_bytes: bytes per registration of the memory; all of it if slots are in pieces.
    """

    def __init__(
        self,
        spec: PoolSpec,
        page_size: int,
        slots: int,
        *,
        pin: bool | Pinner,
        layout: HostLayout = HostLayout.PAGE_FIRST_DIRECT,
        memory: Slab | SteppedMemory | None = None,
    ) -> None:
        """
        Args:
            page_size: tokens per slot.
            slots: the number of slots; 0 for a pool that stays on the device.
            pin: whether to pin for a GPU, or the pinner to use. A memory that pools share pins itself.
            layout: the order of layers, pages and tokens.
            memory: the slab of the slots, which the pool closes; or one that it shares. Default: a new one.

        Raises:
            ConfigError: fewer than 0 slots, a page size below 1, or a slab of another size.
            CapacityError: the system has no room.
        """
        check_size(spec, page_size, slots, least=0)
        self.spec = spec
        self.page_size = page_size
        self.slots = slots
        self.layout = SlotLayout.of(spec, page_size, layout)
        self._shares = isinstance(memory, SteppedMemory)
        self._slot_bytes = self.layout.slot_bytes
        self._whole_slots = slots if self.layout.kind.whole_slots else 0
        self._headers = Slab(max(slots, 1) * HEADER_BYTES)
        try:
            if isinstance(memory, SteppedMemory):
                self._memory = self._checked(memory)
            else:
                self._memory = self._own(memory, pin)
        except BaseException:
            self._headers.close()
            raise
        self._pages = self._memory.slab
        self.ready = self._ready_slots()

    def _checked(self, memory: SteppedMemory) -> SteppedMemory:
        nbytes = self.layout.nbytes(max(self.slots, 1))
        if memory.slab.nbytes < nbytes or not self.layout.kind.whole_slots:
            raise ConfigError(
                f"pool {self.spec.name!r}: {self.slots} slots in layout {self.layout.kind.value!r} do "
                f"not fit into shared memory of {memory.slab.nbytes} bytes"
            )
        return memory

    def _own(self, memory: Slab | None, pin: bool | Pinner) -> SteppedMemory:
        """The memory of this pool alone, with its first step pinned; or all, if slots are in pieces."""
        slab, title = self._slab(memory), f"host memory of pool {self.spec.name!r}"
        pinner = (Pinner.of() if pin else None) if isinstance(pin, bool) else pin
        if not self.slots:
            pinner = None
        if pinner is None or self.layout.kind.whole_slots:
            return SteppedMemory(slab, self._slot_bytes, pinner=pinner, title=title, short=self._short)
        own = SteppedMemory(slab, self._slot_bytes)
        try:
            for offset, nbytes in self.layout.layer_arrays(self.slots):
                slab.pin(pinner, offset, nbytes)
        except RuntimeError as error:  # as in `SteppedMemory`
            slab.unpin()
            warn_unpinned(title, error)
        except BaseException:
            own.close()
            raise
        return own

    def _ready_slots(self) -> int:
        if self._shares or not self._whole_slots:
            return self.slots
        return min(self._memory.ready // self._slot_bytes, self.slots)

    def _short(self, ready: int) -> str:
        return f"pool {self.spec.name!r} has {ready // self._slot_bytes} of {self.slots} host slots"

    def _slab(self, memory: Slab | None) -> Slab:
        nbytes = self.layout.nbytes(max(self.slots, 1))
        if memory is not None and memory.nbytes != nbytes:
            raise ConfigError(
                f"host memory of pool {self.spec.name!r} has {memory.nbytes} bytes; {self.slots} slots take "
                f"{nbytes}"
            )
        return Slab(nbytes) if memory is None else memory

    @property
    def memory(self) -> Slab:
        """The slab of the slots."""
        return self._pages

    @property
    def nbytes(self) -> int:
        """Bytes of both slabs, padding included."""
        return self._pages.nbytes + self._headers.nbytes

    @property
    def pinned(self) -> bool:
        return self._pages.pinned

    @property
    def step_bytes(self) -> int:
        return self._memory.step_bytes

    @property
    def growing(self) -> bool:
        """Whether `grow` has steps left. A memory that pools share grows by itself."""
        return not self._shares and self._memory.growing

    def grow(self) -> int:
        """Pin the next step, as `SteppedMemory.grow`; returns the number of slots that are ready now."""
        if not self._shares:
            self._memory.grow()
            self.ready = self._ready_slots()
        return self.ready

    def page(self, slot: int) -> memoryview:
        """The `slot_bytes` of a slot, writable; those of the next slot follow directly.

        Raises:
            UsageError: there is no such slot, or slots are not whole in this layout.
            ClosedError: the pool is closed.
        """
        if not 0 <= slot < self._whole_slots:
            return self.pages(slot, 1)  # raises the error
        size = self._slot_bytes
        return self._pages.memory[slot * size : (slot + 1) * size]

    def pages(self, first: int, count: int) -> memoryview:
        """The `count * slot_bytes` of neighbouring slots, writable.

        Raises:
            UsageError: there are no such slots, or slots are not whole in this layout.
            ClosedError: the pool is closed.
        """
        if not self.layout.kind.whole_slots:
            raise UsageError(
                f"pool {self.spec.name!r}: a host slot is in pieces in layout {self.layout.kind.value!r}"
            )
        if first < 0 or count < 1 or first + count > self.slots:
            raise self._no_slots(first, count)
        return self._pages.memory[first * self._slot_bytes : (first + count) * self._slot_bytes]

    def move(self, sources: Sequence[int], destinations: Sequence[int]) -> None:
        """Copy slots to others of this pool; headers are written anew when storage writes a slot."""
        for source, destination in zip(sources, destinations, strict=True):
            self.page(destination)[:] = self.page(source)

    def header(self, slot: int) -> memoryview:
        """The `HEADER_BYTES` of a slot's header, writable; those of the next slot follow directly.

        Raises:
            UsageError: there is no such slot.
            ClosedError: the pool is closed.
        """
        if not 0 <= slot < self.slots:
            raise self._no_slots(slot, 1)
        return self._headers.memory[slot * HEADER_BYTES : (slot + 1) * HEADER_BYTES]

    def regions(self) -> tuple[memoryview, memoryview]:
        """All headers and all pages, each as one run of memory that begins with slot 0.

        Raises:
            ClosedError: the pool is closed.
        """
        return self._headers.memory, self._pages.memory

    def items(self, name: str) -> torch.Tensor:
        """One tensor of every slot as bytes, uint8 `[layers, slots, units, unit_bytes]`, strided.

        An item, one layer of one slot, is one unit; with `page_first`, one unit per token.

        Raises:
            ClosedError: the pool is closed.
        """
        strides = self.layout.strides(name, self.slots)
        return self._pages.tensor.as_strided(strides.shape, strides.stride, strides.offset)

    def close(self) -> None:
        """Unpin and release the memory; idempotent. No copy may be in flight."""
        if not self._shares:
            self._memory.close()
        self._headers.close()

    def _no_slots(self, first: int, count: int) -> UsageError:
        return UsageError(
            f"pool {self.spec.name!r}: there are no host slots {first} to {first + count - 1}; "
            f"it has {self.slots}"
        )

    def __repr__(self) -> str:
        return f"<HostPool {self.spec.name}: {self.slots} slots, {self.nbytes} bytes, pinned={self.pinned}>"


async def grow_pool(port: Port, pool: HostPool | SteppedMemory, opened: Callable[[int], object]) -> None:
    """Pin the rest of a memory off the loop; calls `opened` with what `grow` returns after each step."""
    while pool.growing:
        opened(await port.run_blocking(pool.grow))
