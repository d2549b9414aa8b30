"""Allocates the slots of one pool in one tier: each is free, held by one owner, or quarantined."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence

from asynchicache.errors import CapacityError, InternalError
from asynchicache.pools.budget import ByteBudget

FREE, HELD, QUARANTINED = 0, 1, 2
"""What a slot is."""

_AT_ONCE = 256
"""Slots that enter the list of free ones at once."""
_ONLY_HELD = bytes(state == HELD for state in range(256))


class SlotAllocator:
    """Allocates slot numbers `0 .. capacity - 1`, in ascending runs if possible, so that copies coalesce.

    Pure and loop-confined. Releasing a slot that is not held is an error: a slot with two owners would let
    one request read another's bytes.

    Attributes:
        name: used in messages.
        on_release: called with slots that were freed or quarantined.
        quarantined: the number of slots that are not allocated again, unless they are readmitted.
    """

    __slots__ = (
        "_condemned",
        "_free",
        "_fresh",
        "_left",
        "_opened",
        "_readmitted",
        "_state",
        "memory",
        "name",
        "on_release",
        "quarantined",
        "slot_bytes",
    )

    def __init__(
        self, capacity: int, *, name: str = "pool", memory: ByteBudget | None = None, slot_bytes: int = 1
    ) -> None:
        """
        Args:
            capacity: the number of slots.
            name: used in messages.
            memory: what the slots are paid from; None: they have memory of their own.
            slot_bytes: the bytes of a slot in `memory`.
        """
        self.name = name
        self.memory = memory
        self.slot_bytes = slot_bytes
        self.on_release: Callable[[Sequence[int]], object] | None = None
        self.quarantined = 0
        self._free: list[int] = []  # the next one last
        self._fresh = 0  # it and all behind it are free too: in a list, each would take 40 bytes
        self._left = capacity  # free slots in the list and behind
        self._state = bytearray(capacity)
        self._opened = capacity
        self._condemned: set[int] = set()  # held slots to quarantine on release
        self._readmitted: set[int] = set()  # held slots that need no quarantine when they are given back

    @property
    def capacity(self) -> int:
        return len(self._state)

    @property
    def available(self) -> int:
        if self.memory is None:
            return self._left
        return min(self._left, self.memory.left // self.slot_bytes)

    @property
    def held(self) -> int:
        return self._opened - self._left - self.quarantined

    @property
    def closed(self) -> int:
        """Slots that are not usable yet; see `open_only`."""
        return len(self._state) - self._opened

    def open_only(self, count: int) -> None:
        """Allocate only the first `count` slots, until this is called with a larger number: the memory of the
        others is not ready.

        Raises:
            InternalError: a later slot is in use, or `count` exceeds the capacity.
        """
        if not 0 <= count <= len(self._state) or any(self._state[count:]):
            raise InternalError(f"{self.name}: {count} slots cannot be all that is open")
        self._free = [slot for slot in self._free if slot < count]
        self._fresh = min(self._fresh, count)
        self._left += count - self._opened
        self._opened = count

    def allocate(self, count: int) -> list[int]:
        """Allocate `count` slots, all or nothing.

        Raises:
            CapacityError: fewer are free.
        """
        if count > self.available:
            raise CapacityError(
                f"{self.name}: {count} slots wanted, {self.available} of {self.capacity} free"
            )
        if count == 0:
            return []
        if self.memory is not None:
            self.memory.used += count * self.slot_bytes
        slots = self._take(count)
        state = self._state
        for slot in slots:
            state[slot] = HELD
        return slots

    def _take(self, count: int) -> list[int]:
        """Remove `count` slots, which are there, from the free ones."""
        free = self._free
        if count > len(free):
            first = self._fresh
            self._fresh = min(first + count - len(free) + _AT_ONCE, self._opened)
            free[:0] = range(self._fresh - 1, first - 1, -1)  # ascending, after those that were given back
        slots = free[-count:]
        del free[-count:]
        slots.reverse()
        self._left -= count
        return slots

    def _freed(self, slots: Sequence[int]) -> None:
        """Add slots to the free ones."""
        self._free.extend(reversed(slots))
        self._left += len(slots)

    def release(self, slots: Sequence[int]) -> None:
        """Free slots; condemned ones are quarantined.

        Raises:
            InternalError: a slot is not held; nothing is changed then.
        """
        lost = self._condemned.intersection(slots) if self._condemned else None
        if lost:
            slots = [slot for slot in slots if slot not in lost]
        self._leave(slots, FREE)
        if self.memory is not None:
            self.memory.used -= len(slots) * self.slot_bytes
        self._freed(slots)
        if lost:
            self._condemned -= lost
            self._readmitted -= lost
            self.quarantine(sorted(lost))

    def condemn(self, slots: Sequence[int]) -> None:
        """Quarantine these slots as soon as they are released; some may be quarantined already.

        Raises:
            InternalError: a slot is free; nothing is changed then.
        """
        state, end = self._state, len(self._state)
        for slot in slots:
            if not 0 <= slot < end or state[slot] == FREE:
                raise self._not_held(slot, "condemned")
        self._condemned.update(slot for slot in slots if state[slot] == HELD)

    def quarantine(self, slots: Sequence[int]) -> None:
        """Do not allocate these slots: a failed device, or a call of detached storage, may write to them.

        Raises:
            InternalError: a slot is not held; nothing is changed then.
        """
        readmitted = self._readmitted.intersection(slots)
        self._leave(slots, QUARANTINED)
        self.quarantined += len(slots)
        self._condemned.difference_update(slots)
        self.readmit(readmitted)

    def readmit(self, slots: Collection[int]) -> None:
        """Free these slots, which are in quarantine or on the way there: nothing writes to them any more."""
        back = sorted(slot for slot in slots if self._state[slot] == QUARANTINED)
        self._readmitted.update(slot for slot in slots if self._state[slot] == HELD)
        for slot in back:
            self._state[slot] = FREE
        self.quarantined -= len(back)
        if self.memory is not None:
            self.memory.used -= len(back) * self.slot_bytes
        self._freed(back)

    def _leave(self, slots: Sequence[int], to: int) -> None:
        state = self._state
        end = len(state)
        for done, slot in enumerate(slots):
            if not 0 <= slot < end or state[slot] != HELD:
                for undone in slots[:done]:
                    state[undone] = HELD
                raise self._not_held(slot, "given back")
            state[slot] = to
        if self._readmitted:
            self._readmitted.difference_update(slots)
        if self.on_release is not None:
            self.on_release(slots)

    def _not_held(self, slot: int, verb: str) -> InternalError:
        return InternalError(f"{self.name}: slot {slot} {verb} while it is not held")

    def is_free(self, slot: int) -> bool:
        """Whether the slot is free; slots whose memory is not ready count as free."""
        return self._state[slot] == FREE

    def audit(self, owned: Iterable[int]) -> list[str]:
        """Compare held slots with those that somebody owns; describe what differs. Linear in the capacity."""
        owners = bytearray(self.capacity)
        found = []
        for slot in owned:
            if slot >= len(owners):
                found.append(f"{self.name}: slot {slot} is owned, there are {len(owners)}")
            elif owners[slot]:
                found.append(f"{self.name}: slot {slot} has two owners")
            else:
                owners[slot] = HELD
        if owners != self._state.translate(_ONLY_HELD):
            wrong = [slot for slot, state in enumerate(self._state) if (state == HELD) != owners[slot]]
            found.append(f"{self.name}: {wrong} leaked or stolen")
        return found

    def problems(self) -> list[str]:
        """Describe broken invariants; empty if there are none."""
        found = []
        if len(set(self._free)) != len(self._free):
            found.append(f"{self.name}: a slot is free twice")
        if self._left != len(self._free) + self._opened - self._fresh:
            found.append(f"{self.name}: {self._left} slots counted as free")
        free = self._left + self.closed  # not `available`: it may be less in a shared memory
        for state, count in ((FREE, free), (QUARANTINED, self.quarantined)):
            if self._state.count(state) != count:
                found.append(f"{self.name}: {count} slots counted in state {state}, not so marked")
        return found

    def __repr__(self) -> str:
        counts = f"{self.held} held, {self.available} free, {self.quarantined} quarantined"
        return f"<SlotAllocator {self.name}: {counts}>"
