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


class SharedHostMemory:
    """Host memory that several pools have their slots in, pinned in steps of whole extents.

    Attributes:
        slab: the memory.
        ready: bytes that may be used, the first ones.
        step_bytes: bytes per registration, see `HostPool`.
    """

    def __init__(self, slab: Slab, extent_bytes: int, *, pinner: Pinner | None = None) -> None:
        """
        Args:
            slab: the memory, which this closes.
            extent_bytes: what is never divided between two registrations.
            pinner: pins it. Default: it is not pinned.
        """
        self.slab = slab
        self.ready = self.step_bytes = slab.nbytes
        self._lock = threading.Lock()
        self._pinner = pinner
        self._steps: Iterator[tuple[int, int]] = iter(())
        if pinner is None:
            return
        try:
            # Two registrations must not share a page of the system, which may be larger than ours.
            self._steps = pinner.steps(slab.nbytes, lcm(extent_bytes, mmap.PAGESIZE))
            self.ready = self.step_bytes = self._pin_next(pinner)
        except RuntimeError as error:  # a DeviceError, one of torch, or no thread available
            slab.unpin()
            self._pinner = None
            warn_unpinned("host memory that pools share", error)
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
        """Pin the next step, as `HostPool.grow`; returns the bytes that are ready now."""
        with self._lock:  # `close` waits for a running step
            if not self.growing or self._pinner is None:
                return self.ready
            try:
                self.ready += self._pin_next(self._pinner)
            except (RuntimeError, CapacityError) as error:
                self._pinner = None
                text = f"pools share {self.ready} of {self.slab.nbytes} bytes of host memory: {error}"
                warnings.warn(text, PinningWarning, stacklevel=2)
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

    Pinning takes seconds for tens of GiB. The first step is pinned at once, and `grow` pins the next. Only
    the first `ready` slots may be used meanwhile.

    Attributes:
        spec: the pool.
        page_size: tokens per slot; not used if a slot holds a state.
        slots: the number of slots.
        layout: the position of each tensor in a slot.
        ready: the number of usable slots, the first ones.
        step_bytes: bytes per registration: one begins at each multiple of it. All of the memory if slots are
            in pieces or not pinned. CUDA cannot copy a run that spans two registrations.
    """

    def __init__(
        self,
        spec: PoolSpec,
        page_size: int,
        slots: int,
        *,
        pin: bool | Pinner,
        layout: HostLayout = HostLayout.PAGE_FIRST_DIRECT,
        memory: Slab | SharedHostMemory | None = None,
    ) -> None:
        """
        Args:
            spec: the pool.
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
        self._shared = memory if isinstance(memory, SharedHostMemory) else None
        self._pages = self._slab(memory, self.layout.nbytes(max(slots, 1)))
        self._headers = Slab(max(slots, 1) * HEADER_BYTES)
        self._lock = threading.Lock()
        self._pinner = (Pinner.of() if pin else None) if isinstance(pin, bool) else pin
        if self._shared is not None:
            self._pinner = None
        self._steps: Iterator[tuple[int, int]] = iter(())
        self.ready = slots
        self._step_bytes = self._pages.nbytes
        self._whole_slots = slots if self.layout.kind.whole_slots else 0
        self._slot_bytes = self.layout.slot_bytes
        if self._pinner is not None and slots:
            try:
                self._begin(self._pinner)
            except BaseException:  # else nothing could unpin what was pinned so far
                self.close()
                raise

    def _slab(self, memory: Slab | SharedHostMemory | None, nbytes: int) -> Slab:
        if isinstance(memory, SharedHostMemory):
            if memory.slab.nbytes < nbytes or not self.layout.kind.whole_slots:
                raise ConfigError(
                    f"pool {self.spec.name!r}: {self.slots} slots in layout {self.layout.kind.value!r} do "
                    f"not fit into shared memory of {memory.slab.nbytes} bytes"
                )
            return memory.slab
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
        return self._step_bytes if self._shared is None else self._shared.step_bytes

    @property
    def growing(self) -> bool:
        """Whether `grow` has steps left."""
        return self.ready < self.slots and self._pinner is not None

    def _begin(self, pinner: Pinner) -> None:
        """Pin the first step; or everything, if the layout has slots in pieces."""
        self.ready = 0
        try:
            if self.layout.kind.whole_slots:
                # Two registrations must not share a page of the system, which may be larger than ours.
                unit = lcm(self.layout.slot_bytes, mmap.PAGESIZE)
                self._steps = pinner.steps(self._pages.nbytes, unit)
                self.ready = self._pin_next(pinner)
                self._step_bytes = self.ready * self.layout.slot_bytes
                return
            for offset, nbytes in self.layout.layer_arrays(self.slots):
                self._pages.pin(pinner, offset, nbytes)
        except RuntimeError as error:  # a DeviceError, one of torch, or no thread available
            self._pages.unpin()
            self._pinner = None
            warn_unpinned(f"host memory of pool {self.spec.name!r}", error)
        self.ready = self.slots

    def _pin_next(self, pinner: Pinner) -> int:
        """Pin the next step; returns its number of slots."""
        offset, nbytes = next(self._steps)
        self._pages.pin(pinner, offset, nbytes)
        return nbytes // self.layout.slot_bytes

    def grow(self) -> int:
        """Pin the next step. Blocks, so do not call it on the loop.

        If the system refuses, the pool keeps its size, with a warning.

        Returns:
            The number of slots that are ready now.
        """
        with self._lock:  # `close` waits for a running step
            if not self.growing or self._pinner is None:
                return self.ready
            try:
                self.ready += self._pin_next(self._pinner)
            except (RuntimeError, CapacityError) as error:
                self._pinner = None
                text = f"pool {self.spec.name!r} has {self.ready} of {self.slots} host slots: {error}"
                warnings.warn(text, PinningWarning, stacklevel=2)
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
        with self._lock:
            self._pinner = None
            if self._shared is None:
                self._pages.close()
            self._headers.close()

    def _no_slots(self, first: int, count: int) -> UsageError:
        return UsageError(
            f"pool {self.spec.name!r}: there are no host slots {first} to {first + count - 1}; "
            f"it has {self.slots}"
        )

    def __repr__(self) -> str:
        return f"<HostPool {self.spec.name}: {self.slots} slots, {self.nbytes} bytes, pinned={self.pinned}>"


async def grow_pool(port: Port, pool: HostPool | SharedHostMemory, opened: Callable[[int], object]) -> None:
    """Pin the rest of a memory off the loop; calls `opened` with what `grow` returns after each step."""
    while pool.growing:
        opened(await port.run_blocking(pool.grow))
