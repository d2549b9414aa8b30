"""Writes to storage: bounded in bytes, shed beyond that, counted by why; and storage that comes and goes."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from dataclasses import dataclass, field, replace
from typing import Self

from asynchicache.controller.actions import Store
from asynchicache.controller.planner import Planner
from asynchicache.controller.stored import Attachment, StoredPools, linger
from asynchicache.controller.tracing import Tracer
from asynchicache.errors import UsageError
from asynchicache.storage.limits import Batch
from asynchicache.tree.node import Node
from asynchicache.types import Outcome, ShedReason

_SHED = {
    Outcome.REJECTED: ShedReason.REJECTED,
    Outcome.FAILED: ShedReason.FAILED,
    Outcome.TIMEOUT: ShedReason.TIMEOUT,
}


@dataclass(slots=True, eq=True)
class Traffic:
    """What was carried out since the start, in pages and states unless said otherwise.

    Attributes:
        stored: in storage now, or there already.
        shed: what did not get there, by why.
        copies_failed: copies between device and host that failed.
    """

    stored: int = 0
    shed: Counter[ShedReason] = field(default_factory=Counter)
    copies_failed: int = 0

    def copy(self) -> Self:
        return replace(self, shed=Counter(self.shed))


class Storer:
    """Writes what is on the host to storage.

    Attributes:
        traffic: what became of it.
        under_way: tasks that read from storage or write to it.
        storing_bytes: bytes of writes that are under way.
        clearing: clears that are under way: what is stored now may be gone when they end.
        tracer: told of writes, if there is one.
    """

    def __init__(
        self,
        planner: Planner,
        stored: StoredPools,
        *,
        limit_bytes: int,
        spawn: Callable[[Coroutine[object, object, None]], None],
        spawn_late: Callable[[Coroutine[object, object, None]], None],
        moved: Callable[[], None],
    ) -> None:
        """
        Args:
            planner: decides what is written.
            stored: where it goes.
            limit_bytes: under way at once; what would go beyond is shed, unless nothing else is under way.
            spawn: runs a write.
            spawn_late: waits for calls that have outlived their deadline.
            moved: to be called when others may go on.
        """
        self.traffic = Traffic()
        self.under_way: set[asyncio.Task[None]] = set()
        self.tracer: Tracer | None = None
        self._writer = planner.writer
        self._stored = stored
        self._limit = limit_bytes
        self.storing_bytes = 0
        self.clearing = 0
        self._spawn = spawn
        self._spawn_late = spawn_late
        self._moved = moved
        self._detaching = False

    def store(self, node: Node) -> None:
        """Write what the path to `node` has on the host and not in storage, or shed it."""
        work = self._writer.store(node) if self._stored else None
        if work is None:
            return
        sizes = self._stored.page_sizes(work)
        size = sum(len(slots) * each for (_, slots), each in zip(work.pages.values(), sizes, strict=True))
        if self.storing_bytes and self.storing_bytes + size > self._limit:
            self.traffic.shed[ShedReason.BUDGET] += sum(len(slots) for _, slots in work.pages.values())
            self._writer.wrote(work, stored=False)
            return
        self.storing_bytes += size
        self._spawn(self._write(work, size, sizes))

    async def _write(self, work: Store, size: int, page_sizes: Sequence[int]) -> None:
        stored, late, left = False, False, 0
        span = self.tracer.storing(work) if self.tracer is not None else None
        try:
            batches = await self._stored.put(work)
            stored = self._count(batches)
            late = any(batch.lingering is not None for batch in batches)
            left = _late_bytes(batches, page_sizes)
        finally:
            self._writer.wrote(work, stored=stored, late=late)
            self.storing_bytes -= size - left
            if span is not None:
                span.finish(bytes=size, stored=stored)
        if late:
            self._spawn_late(self._finish_late(work, left, batches))

    async def _finish_late(self, work: Store, size: int, batches: Sequence[Batch]) -> None:
        safe = False
        try:
            safe = await linger(batches)
        finally:
            self.storing_bytes -= size
            if safe:  # else its pages stay where they are: what came in their place would be stored as theirs
                self._writer.finish(work)

    def _count(self, batches: Sequence[Batch]) -> bool:
        """Add up what became of a write; whether all of it is there."""
        outcomes = Counter(outcome for batch in batches for outcome in batch.outcomes)
        self.traffic.stored += outcomes[Outcome.STORED] + outcomes[Outcome.EXISTS]
        shed = {reason: outcomes[outcome] for outcome, reason in _SHED.items() if outcomes[outcome]}
        self.traffic.shed.update(shed)
        return not shed

    def check_none(self) -> None:
        """
        Raises:
            UsageError: there is storage already, or it is being detached.
        """
        if self._detaching:
            raise UsageError("storage is being detached; wait for that")
        if self._stored:
            raise UsageError("the cache has storage already; detach_storage() comes first")

    def attach(self, attachment: Attachment) -> None:
        """Have storage from now on.

        Raises:
            UsageError: there is some already, or it is being detached.
        """
        self.check_none()
        self._stored.attach(attachment)

    async def detach(self) -> bool:
        """Have none from now on; requests go on, with misses for what was in it. False if there was none."""
        attachment = self._stored.detach()
        if attachment is None:
            return False
        self._detaching = True
        try:
            await attachment.aclose()
            running = [task for task in self.under_way if not task.done()]
            if running:
                await asyncio.wait(running)
        finally:
            self._writer.forget_stored()
            self._detaching = False
            self._moved()
        return True

    async def clear(self) -> int:
        """Forget what storage has of this model, of these weights; how many pages that was.

        Raises:
            StorageError: an engine failed.
        """
        self.clearing += 1
        try:
            return await self._stored.clear()
        finally:
            self.clearing -= 1
            self._writer.forget_stored()  # also after a failure: nobody knows how far it got
            self._moved()


def _late_bytes(batches: Sequence[Batch], page_sizes: Sequence[int]) -> int:
    """Bytes of the pages that engines may still read; those that hang do not count for the others."""
    return sum(
        batch.outcomes.count(Outcome.TIMEOUT) * each
        for batch, each in zip(batches, page_sizes, strict=True)
        if batch.lingering is not None
    )
