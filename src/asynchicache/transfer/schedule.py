"""Makes transfers of what one tick of the loop submitted: the independent merge, the urgent go first.

Used by one thread at a time. The arithmetic is numpy's, for a whole tick at once.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

import numpy as np

from asynchicache.errors import CacheError
from asynchicache.transfer.plan import (
    CacheOperation,
    Columns,
    Direction,
    PoolExtent,
    Slots,
    columns_of,
    merge,
    slot_numbers,
)
from asynchicache.transfer.record import GroupState, Submission, TransferRecord, TransferView
from asynchicache.types import Tier

_TIERS = (Tier.DEVICE, Tier.HOST)
_READERS = {
    Tier.DEVICE: (Direction.BACKUP, Direction.FORK),
    Tier.HOST: (Direction.LOAD,),
    Tier.STORAGE: (),
}


class HazardTable:
    """The last users of every slot, by transfer number; numbers are positive and ascend.

    Which copies must wait for which: whoever reads what another writes, or writes what another uses.
    Every slot remembers the number of the last transfer that wrote it, and of the last that read it in
    each direction. The last is enough: transfers of one direction run in the order of their numbers on one
    stream, and each waits for the writer before it. Numbers of transfers that are complete mean nothing any
    more and are skipped, so there is nothing to take back when a transfer ends.
    """

    def __init__(self, extents: Mapping[str, PoolExtent]) -> None:
        self._writers = {
            (pool, tier): np.zeros(extent.capacity(tier), np.int64)
            for pool, extent in extents.items()
            for tier in _TIERS
        }
        self._readers = {
            (pool, tier, direction): np.zeros(extent.capacity(tier), np.int64)
            for pool, extent in extents.items()
            for tier in _TIERS
            for direction in _READERS[tier]
        }

    def writers(self, pool: str, tier: Tier, slots: Slots | Sequence[int], since: int) -> set[int]:
        """Transfers numbered `since` or later that write one of `slots`."""
        return _recent([self._writers[pool, tier]], slot_numbers(slots), since)

    def writers_of_sources(self, direction: Direction, columns: Columns, since: int) -> set[int]:
        """Transfers numbered `since` or later that write what is read here."""
        found: set[int] = set()
        for pool, (sources, _) in columns.items():
            found |= self.writers(pool, direction.source, sources, since)
        return found

    def users_of_destinations(self, direction: Direction, columns: Columns, since: int) -> set[int]:
        """Transfers numbered `since` or later that read or write what is written here."""
        tier = direction.destination
        found: set[int] = set()
        for pool, (_, destinations) in columns.items():
            found |= _recent(self._users(pool, tier), destinations, since)
        return found

    def mark(self, direction: Direction, columns: Columns, number: int) -> None:
        """Transfer `number` moves `columns`."""
        for pool, (sources, destinations) in columns.items():
            self._readers[pool, direction.source, direction][sources] = number
            self._writers[pool, direction.destination][destinations] = number

    def _users(self, pool: str, tier: Tier) -> list[Slots]:
        """Who wrote each slot last, then who read it last, by direction."""
        return [self._writers[pool, tier], *(self._readers[pool, tier, one] for one in _READERS[tier])]


class Independence:
    """Tells whether operations may run in any order: no slot is written twice, or read and written.

    Every slot that is written is stamped; stamps only ascend, so none has to be taken back.
    """

    def __init__(self, extents: Mapping[str, PoolExtent]) -> None:
        self._stamps = {
            (pool, tier): np.zeros(extent.capacity(tier), np.int64)
            for pool, extent in extents.items()
            for tier in _TIERS
        }
        self._next = 1

    def holds(self, operations: Sequence[CacheOperation]) -> bool:
        first = self._next
        moved = [
            (direction, columns_of([one for one in operations if one.direction is direction]))
            for direction in Direction
        ]
        for direction, columns in moved:
            for pool, (_, written) in columns.items():
                if not self._stamp(self._stamps[pool, direction.destination], written, first):
                    return False
        return not any(
            (self._stamps[pool, direction.source][read] >= first).any()
            for direction, columns in moved
            for pool, (read, _) in columns.items()
        )

    def _stamp(self, table: Slots, slots: Slots, first: int) -> bool:
        """Whether none of `slots` had a stamp of this call, or comes twice."""
        if (table[slots] >= first).any():
            return False
        stamps = np.arange(self._next, self._next + len(slots))
        self._next += len(slots)
        table[slots] = stamps
        return not (table[slots] != stamps).any()


def _recent(tables: Iterable[Slots], slots: Slots, since: int) -> set[int]:
    found: set[int] = set()
    for table in tables:
        numbers = table[slots]
        found.update(numbers[numbers >= since].tolist())
    return found


_MOST_URGENT_FIRST = (Direction.FORK, Direction.LOAD, Direction.BACKUP)
"""Forks are small, and forwards wait for them and for loads."""


class Batcher:
    """Numbers transfers in the order in which they must be enqueued, and knows what each waits for."""

    def __init__(
        self,
        extents: Mapping[str, PoolExtent],
        layers: int,
        group_bytes: int,
        group: Callable[[], GroupState],
    ) -> None:
        """
        Args:
            extents: by pool.
            layers: layers of the model, those without a cache included.
            group_bytes: what makes a group of a load's layers worth a launch.
            group: makes the state of a layer group.
        """
        self._extents = extents
        self._layers = layers
        self._group_bytes = group_bytes
        self._group = group
        self._hazards = HazardTable(extents)
        self._independence = Independence(extents)
        self._live: dict[int, TransferRecord] = {}
        self._made: list[TransferRecord] = []
        self._number = 0

    def batch(self, submissions: Sequence[Submission]) -> list[TransferRecord]:
        """The transfers of one tick, in the order to enqueue them; every ticket is told what it sees.

        Independent operations of one direction are one transfer. Among independent transfers forks and loads
        go before backups.
        """
        self._forget_finished()
        self._made = []
        moving = [submission for submission in submissions if not submission.operation.empty]
        records = [record for some in self._rounds(moving) for record in self._round(some)]
        for record in records:
            for position, submission in enumerate(record.submissions):
                others = [view for view in self._writers(submission) if view.record is not record]
                submission.resolve((TransferView(record, position), *others))
        for submission in submissions:
            if submission.operation.empty:
                submission.resolve(tuple(self._writers(submission)))
        return records

    def withdraw(self, error: Exception) -> list[TransferRecord]:
        """What a batch that failed had made: live, so that others wait for it, but nobody will enqueue it."""
        for record in self._made:
            record.error = error
            record.forget()
        return self._made

    def _forget_finished(self) -> None:
        self._live = {number: record for number, record in self._live.items() if not record.finished}

    def _rounds(self, submissions: Sequence[Submission]) -> Iterator[Sequence[Submission]]:
        """Split where an operation depends on one before it: copies of one round have no order."""
        while submissions:
            size = self._independent_prefix(submissions)
            yield submissions[:size]
            submissions = submissions[size:]

    def _independent_prefix(self, submissions: Sequence[Submission]) -> int:
        operations = [submission.operation for submission in submissions]
        if len(operations) == 1 or self._independence.holds(operations):
            return len(operations)
        sizes = range(2, len(operations))  # what is independent stays so with fewer; one alone always is
        return 1 + bisect_left(sizes, True, key=lambda size: not self._independence.holds(operations[:size]))

    def _round(self, submissions: Iterable[Submission]) -> list[TransferRecord]:
        merged: dict[Direction, list[Submission]] = {direction: [] for direction in _MOST_URGENT_FIRST}
        for submission in submissions:
            merged[submission.operation.direction].append(submission)
        return [self._record(together) for together in merged.values() if together]

    def _record(self, submissions: Sequence[Submission]) -> TransferRecord:
        operations = [submission.operation for submission in submissions]
        direction, columns = operations[0].direction, columns_of(operations)
        since = self._oldest
        self._number += 1
        record = TransferRecord(self._number, direction, submissions)
        self._made.append(record)
        if self._live:
            record.needs = self._records(self._hazards.writers_of_sources(direction, columns, since))
            record.follows = self._records(self._hazards.users_of_destinations(direction, columns, since))
        self._hazards.mark(direction, columns, record.number)
        self._live[record.number] = record
        group_bytes = self._group_bytes if direction is Direction.LOAD else None
        try:
            plan = merge(operations, self._extents, self._layers, group_bytes)
            record.start(plan, [self._group() for _ in plan.groups])
        except CacheError as error:
            record.error = error
        return record

    def _writers(self, submission: Submission) -> Iterator[TransferView]:
        """The transfers in flight that bring what a submitter will read."""
        numbers: set[int] = set()
        for pool, slots in submission.reads:
            numbers |= self._hazards.writers(pool, Tier.DEVICE, slots, self._oldest)
        return (TransferView(record, None) for record in self._records(numbers))

    @property
    def _oldest(self) -> int:
        """The number of the oldest transfer in flight; above all numbers if there is none."""
        return next(iter(self._live), self._number + 1)

    def _records(self, numbers: Iterable[int]) -> set[TransferRecord]:
        return {self._live[number] for number in numbers if number in self._live}
