"""The pools of one cache in storage: keys, calls, and outcomes per slot."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Mapping, Sequence
from typing import NamedTuple

from asynchicache.controller.actions import Store
from asynchicache.controller.books import Books
from asynchicache.controller.reading import Outcomes, Read
from asynchicache.hashing import ObjectKey
from asynchicache.storage import hits
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.pool import Batch, GuardedPool
from asynchicache.types import MissReason, Outcome

_WORST = (Outcome.TIMEOUT, Outcome.CORRUPT, Outcome.FAILED, Outcome.REJECTED, Outcome.MISS)
"""Of outcomes of pools that share a slot, the first of these counts. A pool that timed out may still
write to its part of the slot, whatever became of the others."""


_REASONS = {
    Outcome.TIMEOUT: MissReason.DEADLINE,
    Outcome.FAILED: MissReason.STORAGE_FAILED,
    Outcome.REJECTED: MissReason.STORAGE_FAILED,
}


class Presence(NamedTuple):
    """Bit p of `pages` is set if page p is there; `reason` tells why that may be too few."""

    pages: int
    reason: MissReason


class StoredPool(NamedTuple):
    """One pool in storage: its guarded engine, and the binding that names its keys."""

    guard: GuardedPool
    binding: SlotBinding


class StoredPools:
    """The pools of a cache in storage; empty, and false, without storage."""

    def __init__(self, books: Books, pools: Mapping[str, StoredPool]) -> None:
        self._books = books
        self._pools = pools

    def __bool__(self) -> bool:
        return bool(self._pools)

    def size(self, work: Store) -> int:
        """Bytes that a write moves."""
        return sum(
            len(slots) * self._pools[name].binding.slot_bytes for name, (_, slots) in work.pages.items()
        )

    async def exists(self, number: int, digests: Sequence[bytes], first: int) -> Presence:
        """Which pages are there, in every pool that shares the component's slots.

        Args:
            number: the component.
            digests: of the pages from number `first` on.
            first: see above.
        """
        mask, reason = -1 if digests else 0, MissReason.NONE
        for name in self._books.sharing(number) if digests else ():
            answer = await self._pools[name].guard.exists(self._keys(name, digests))
            mask &= hits.bitmap(answer.present)
            reason = next((_REASONS[outcome] for outcome in answer.outcomes if outcome in _REASONS), reason)
        return Presence(mask << first, reason)

    async def put(self, work: Store) -> list[Batch]:
        return await _gather(
            self._pools[name].guard.put(self._keys(name, digests), slots)
            for name, (digests, slots) in work.pages.items()
        )

    async def get(self, read: Read) -> tuple[Outcomes, list[Batch]]:
        """Outcomes of each slot, and the batches that may still write to theirs."""
        calls = [(number, name) for number in read.slots for name in self._books.sharing(number)]
        batches = await _gather(
            self._pools[name].guard.get(self._keys(name, read.digests(number)), read.slots[number])
            for number, name in calls
        )
        results = [(number, batch.outcomes) for (number, _), batch in zip(calls, batches, strict=True)]
        outcomes = {
            number: list(zip(slots, _worst([r for n, r in results if n == number]), strict=True))
            for number, slots in read.slots.items()
        }
        return outcomes, [batch for batch in batches if batch.lingering is not None]

    def _keys(self, name: str, digests: Sequence[bytes]) -> list[ObjectKey]:
        return list(map(self._pools[name].binding.key, digests))


def _worst(results: Sequence[Sequence[Outcome]]) -> list[Outcome]:
    """Pools that share slots are there together or not at all."""
    if len(results) == 1:
        return list(results[0])
    return [
        next((bad for bad in _WORST if bad in outcomes), Outcome.HIT)
        for outcomes in zip(*results, strict=True)
    ]


async def _gather(calls: Iterable[Coroutine[object, object, Batch]]) -> list[Batch]:
    calls = list(calls)
    if len(calls) == 1:  # no task for the usual case
        return [await calls[0]]
    return list(await asyncio.gather(*calls))


async def linger(batches: Iterable[Batch]) -> None:
    """Wait for calls that outlived their deadline: until they end they use their slots."""
    late = [batch.lingering for batch in batches if batch.lingering is not None]
    if late:
        await asyncio.wait(late)
