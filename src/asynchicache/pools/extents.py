"""One memory that several pools share: its extents go from pool to pool, as their slots come and go.

Each pool numbers its slots over the whole memory: slot `i` begins at byte `i * slot_bytes`. So a slot of one
pool overlaps slots of others, and which of them are in use decides who owns the bytes. That is settled by
extents, equal runs of bytes: an extent belongs to one pool while any slot in it is in use, and to none
otherwise. A slot that crosses a border between extents is never used.

Slot numbers stay what they are for a pool with memory of its own, so copies and storage do not know of this.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from operator import itemgetter

from asynchicache.errors import CapacityError, InternalError
from asynchicache.pools.allocator import FREE, QUARANTINED, SlotAllocator

_MAX_SLOTS = 16
"""An extent has at most this many slots of the pool with the largest ones."""


@dataclass(frozen=True, slots=True)
class ExtentPlan:
    """How a memory is divided.

    Attributes:
        slot_bytes: by pool, the bytes from slot to slot.
        extent_bytes: of an extent, a multiple of the largest slot.
        beside: bytes that each extent costs elsewhere: headers, and pools that share slots.
    """

    slot_bytes: Mapping[str, int]
    extent_bytes: int
    extents: int
    beside: int = 0

    @property
    def nbytes(self) -> int:
        return self.extent_bytes * self.extents

    @property
    def paid_bytes(self) -> int:
        """What all of it costs."""
        return (self.extent_bytes + self.beside) * self.extents

    def slots(self, pool: str) -> int:
        """The slots of a pool that has all of the memory."""
        return self.nbytes // self.slot_bytes[pool]

    def extents_for(self, pool: str, slots: int) -> int:
        """Extents that hold `slots` slots of a pool, wherever they lie."""
        return -(-slots // whole_slots(self.extent_bytes, self.slot_bytes[pool]))


def whole_slots(extent_bytes: int, slot_bytes: int) -> int:
    """Slots that every extent holds at least, given that they may begin anywhere in the first one."""
    count, rest = divmod(extent_bytes, slot_bytes)
    return count - 1 if rest else count


def choose_extent_bytes(slot_bytes: Iterable[int], nbytes: int) -> int:
    """Of the multiples of the largest slot that hold a slot of each pool, the one that wastes least.

    Small extents waste the slots that cross their borders; of large ones, each pool has one that is not full.

    Args:
        slot_bytes: of each pool.
        nbytes: of the memory.
    """
    sizes = list(slot_bytes)
    largest = max(sizes)

    def waste(extent_bytes: int) -> float:
        crossing = max(1 - whole_slots(extent_bytes, size) * size / extent_bytes for size in sizes)
        return crossing + len(sizes) * extent_bytes / nbytes

    lengths = [largest * count for count in range(1, _MAX_SLOTS + 1)]
    return min((one for one in lengths if all(whole_slots(one, size) for size in sizes)), key=waste)


class ExtentMemory:
    """The extents of one memory, and which pool owns each.

    Attributes:
        extent_bytes, extents: as of the plan.
        owners: by extent, the allocator that owns it, or None.
    """

    def __init__(self, plan: ExtentPlan) -> None:
        self.extent_bytes = plan.extent_bytes
        self.extents = plan.extents
        self.owners: list[ExtentAllocator | None] = [None] * plan.extents
        self._free = list(range(plan.extents))  # a heap: low extents first, so that high ones become empty
        self._opened = plan.extents

    @property
    def nbytes(self) -> int:
        return self.extent_bytes * self.extents

    @property
    def free(self) -> int:
        """Extents that no pool owns."""
        return len(self._free)

    @property
    def opened(self) -> int:
        """Extents that may be used, see `open_only`."""
        return self._opened

    def open_only(self, extents: int) -> None:
        """Use only the first `extents` extents, until this is called with a larger number: the memory of the
        others is not ready.

        Raises:
            InternalError: a later extent is in use, or there are fewer.
        """
        if not 0 <= extents <= self.extents or any(self.owners[extents:]):
            raise InternalError(f"{extents} of {self.extents} extents cannot be all that are open")
        self._free = [extent for extent in range(extents) if self.owners[extent] is None]
        self._opened = extents

    def take(self, owner: ExtentAllocator) -> int:
        """Give a free extent to a pool; there is one."""
        extent = heappop(self._free)
        self.owners[extent] = owner
        return extent

    def give_back(self, extent: int) -> None:
        """Take an extent back whose slots are all free."""
        self.owners[extent] = None
        heappush(self._free, extent)

    def fits(self, wanted: Iterable[tuple[SlotAllocator, int]]) -> bool:
        """Whether each pool can have that many slots, beside the others."""
        return self._extents_for(wanted) <= len(self._free)

    def short(self, wanted: Sequence[tuple[SlotAllocator, int]], pool: SlotAllocator) -> int:
        """Slots of `pool` to free next, if `wanted` does not fit: its own, or an extent for the others."""
        assert isinstance(pool, ExtentAllocator)
        count = sum(count for of_pool, count in wanted if of_pool is pool)
        if count > pool.spare:
            return max(count - pool.available, 1)
        return max((self._extents_for(wanted) - self.free) * pool.whole - pool.spare, 1)

    def _extents_for(self, wanted: Iterable[tuple[SlotAllocator, int]]) -> int:
        extents = 0
        for pool, count in wanted:
            assert isinstance(pool, ExtentAllocator)
            extents += -(-max(count - pool.spare, 0) // pool.whole)
        return extents

    def problems(self) -> list[str]:
        """Describe broken invariants; empty if there are none. Linear in the extents."""
        unowned = [extent for extent in range(self._opened) if self.owners[extent] is None]
        if sorted(self._free) != unowned:
            return [f"shared memory: free extents {sorted(self._free)}, without an owner {unowned}"]
        return []

    def __repr__(self) -> str:
        return f"<ExtentMemory {len(self._free)} of {self.extents} extents free>"


class ExtentAllocator(SlotAllocator):
    """The slots of one pool in a shared memory.

    Attributes:
        spare: free slots in the extents that the pool owns.
        whole: slots that every extent has at least.
    """

    __slots__ = ("_by_extent", "_live", "_order", "_queued", "extents", "spare", "whole")

    def __init__(self, extents: ExtentMemory, slot_bytes: int, *, name: str = "pool") -> None:
        super().__init__(0, name=name, slot_bytes=slot_bytes)
        self._state = bytearray(extents.nbytes // slot_bytes)
        self.extents = extents
        self.whole = whole_slots(extents.extent_bytes, slot_bytes)
        self.spare = 0
        self._live: dict[int, int] = {}  # by owned extent, slots in use, quarantined ones too
        self._by_extent: dict[int, list[int]] = {}  # of owned extents with any: their free slots
        self._order: list[int] = []  # a heap of these extents, and of some that have none any more
        self._queued: set[int] = set()  # what is in it

    @property
    def available(self) -> int:
        return self.spare + self.extents.free * self.whole

    @property
    def held(self) -> int:
        return sum(self._live.values()) - self.quarantined

    @property
    def closed(self) -> int:
        return (self.extents.extents - self.extents.opened) * self.whole

    @property
    def owned_bytes(self) -> int:
        """Bytes of the pool's extents."""
        return len(self._live) * self.extents.extent_bytes

    def open_only(self, count: int) -> None:
        raise InternalError(f"{self.name}: a shared memory opens by extents, not {count} slots")

    def _take(self, count: int) -> list[int]:
        taken: list[int] = []
        while len(taken) < count:
            extent = self._first_extent()
            free = self._by_extent[extent]
            some = free[len(taken) - count :]
            del free[len(taken) - count :]
            taken += reversed(some)
            self._live[extent] += len(some)
            if not free:
                del self._by_extent[extent]
        self.spare -= count
        return taken

    def _first_extent(self) -> int:
        """The lowest of the pool's extents that has a free slot, or a new one."""
        while self._order:
            if self._order[0] in self._by_extent:
                return self._order[0]
            self._queued.discard(heappop(self._order))
        extent = self.extents.take(self)
        free = list(reversed(self.slots_in(extent)))
        self._live[extent] = 0
        self._by_extent[extent] = free
        self.spare += len(free)
        self._queue(extent)
        return extent

    def _queue(self, extent: int) -> None:
        if extent not in self._queued:
            self._queued.add(extent)
            heappush(self._order, extent)

    def _freed(self, slots: Sequence[int]) -> None:
        self.spare += len(slots)
        for slot in reversed(slots):
            extent = slot * self.slot_bytes // self.extents.extent_bytes
            self._by_extent.setdefault(extent, []).append(slot)
            self._live[extent] -= 1
            if self._live[extent]:
                self._queue(extent)
            else:
                self.spare -= len(self._by_extent.pop(extent))
                del self._live[extent]
                self.extents.give_back(extent)

    # Moving slots, so that an extent becomes empty

    def slots_in(self, extent: int) -> range:
        """The slots that lie whole in an extent."""
        size, start = self.slot_bytes, extent * self.extents.extent_bytes
        return range(-(-start // size), (start + self.extents.extent_bytes) // size)

    def emptiest(self) -> list[int]:
        """The pool's extents, those with the fewest slots in use first."""
        return [extent for extent, _ in sorted(self._live.items(), key=itemgetter(1))]

    def used_in(self, extent: int) -> list[int]:
        """The slots in use in an extent, quarantined ones too."""
        return [slot for slot in self.slots_in(extent) if self._state[slot] != FREE]

    def allocate_outside(self, extent: int, count: int) -> list[int]:
        """Allocate slots in other extents of the pool.

        Raises:
            CapacityError: there are fewer.
        """
        kept = self._by_extent.pop(extent, [])
        self.spare -= len(kept)
        try:
            if count > self.spare:
                raise CapacityError(
                    f"{self.name}: {count} slots wanted outside of an extent, {self.spare} free"
                )
            return self.allocate(count)
        finally:
            if kept:
                self._by_extent[extent] = kept
                self.spare += len(kept)
                self._queue(extent)

    def problems(self) -> list[str]:
        found = self.extents.problems()
        used = [slot for slot, state in enumerate(self._state) if state != FREE]
        size, extent_bytes, owners = self.slot_bytes, self.extents.extent_bytes, self.extents.owners
        for slot in used:
            first, last = slot * size // extent_bytes, ((slot + 1) * size - 1) // extent_bytes
            if any(owners[extent] is not self for extent in {first, last}):
                found.append(f"{self.name}: slot {slot} is in use in an extent of another pool, or of none")
        if len(used) != sum(self._live.values()):
            found.append(f"{self.name}: {len(used)} slots in use, {sum(self._live.values())} counted")
        if self._state.count(QUARANTINED) != self.quarantined:
            found.append(f"{self.name}: {self.quarantined} slots counted as quarantined, not so marked")
        spare = [slot for slots in self._by_extent.values() for slot in slots]
        if sorted(spare) != sorted(set(spare)) or len(spare) != self.spare:
            found.append(f"{self.name}: {len(spare)} free slots in its extents, {self.spare} counted")
        return found
