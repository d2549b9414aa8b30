"""Leases on slots, with their expiry. They are not stored on disk: see `SlotLeases`."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from itertools import count
from typing import NamedTuple
from uuid import uuid4


class Slot(NamedTuple):
    """A slot of a namespace."""

    namespace: int
    number: int


class _Read(NamedTuple):
    slots: tuple[Slot, ...]
    end: float


class SlotLeases:
    """Leases of writers and readers. They expire, so that a dead client holds no slots.

    After a restart, every reservation on disk gets a full lease. Readers from before the restart have none;
    the slots' generations and the pages' seals tell them whether a slot was rewritten.

    Args:
        seconds: duration of a lease.
        now: monotonic clock, in seconds.
    """

    def __init__(self, seconds: float, now: Callable[[], float]) -> None:
        self.seconds = seconds
        self._now = now
        self._writes: dict[Slot, float] = {}
        self._reads: dict[int, _Read] = {}
        # Random start, so that lease numbers sent from before a restart do not end new leases.
        self._numbers = count(uuid4().int >> 80)

    def write(self, slots: Iterable[Slot]) -> None:
        """Start write leases."""
        self._writes.update(dict.fromkeys(slots, self._now() + self.seconds))

    def end_writes(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            self._writes.pop(slot, None)

    def expired_writes(self, namespace: int) -> list[int]:
        """Slots whose write leases have expired; they stay listed until `end_writes`."""
        now = self._now()
        return [
            slot.number for slot, end in self._writes.items() if slot.namespace == namespace and end <= now
        ]

    def read(self, slots: Iterable[Slot]) -> int:
        """Start a read lease; return its number."""
        number = next(self._numbers)
        self._reads[number] = _Read(tuple(slots), self._now() + self.seconds)
        return number

    def end_reads(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._reads.pop(number, None)

    def being_read(self, namespace: int) -> set[int]:
        """Slots under a read lease, which must not be reused yet."""
        now = self._now()
        self.end_reads([number for number, read in self._reads.items() if read.end <= now])
        return {
            slot.number for read in self._reads.values() for slot in read.slots if slot.namespace == namespace
        }
