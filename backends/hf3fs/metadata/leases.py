"""Who uses which slots, and until when. Nothing here is on disk: see `SlotLeases`."""

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
    """Leases of writers and readers, which end by themselves, so that a dead client holds nothing.

    After a restart every reservation that is on disk gets a full lease. Readers of before have none;
    they find out by the slots' generations, and by the pages' seals, if a slot was written again.

    Args:
        seconds: how long a lease holds.
        now: seconds on a clock that never goes back.
    """

    def __init__(self, seconds: float, now: Callable[[], float]) -> None:
        self.seconds = seconds
        self._now = now
        self._writes: dict[Slot, float] = {}
        self._reads: dict[int, _Read] = {}
        # Numbers of before a restart may still be sent, and must not end leases of after it.
        self._numbers = count(uuid4().int >> 80)

    def write(self, slots: Iterable[Slot]) -> None:
        """These are being written from now on."""
        self._writes.update(dict.fromkeys(slots, self._now() + self.seconds))

    def end_writes(self, slots: Iterable[Slot]) -> None:
        for slot in slots:
            self._writes.pop(slot, None)

    def expired_writes(self, namespace: int) -> list[int]:
        """Slots whose writers have not been heard of for too long; they stay until `end_writes`."""
        now = self._now()
        return [
            slot.number for slot, end in self._writes.items() if slot.namespace == namespace and end <= now
        ]

    def read(self, slots: Iterable[Slot]) -> int:
        """These are being read from now on; the lease's number."""
        number = next(self._numbers)
        self._reads[number] = _Read(tuple(slots), self._now() + self.seconds)
        return number

    def end_reads(self, numbers: Iterable[int]) -> None:
        for number in numbers:
            self._reads.pop(number, None)

    def being_read(self, namespace: int) -> set[int]:
        """Slots that must not get another page yet."""
        now = self._now()
        self.end_reads([number for number, read in self._reads.items() if read.end <= now])
        return {
            slot.number for read in self._reads.values() for slot in read.slots if slot.namespace == namespace
        }
