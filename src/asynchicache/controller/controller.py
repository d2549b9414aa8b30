"""HybridCacheController: carries out what the planner decides, in a task group that it owns.

No polling and no thread of its own. Copies end in a callback on the loop, which plans what follows;
storage calls are tasks. Writes to storage are bounded in bytes and shed beyond that. Whatever fails
costs a hit, never a request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial

from asynchicache.controller.actions import Copy, Store
from asynchicache.controller.fetching import Fetcher, PrefetchOptions
from asynchicache.controller.planner import Planner
from asynchicache.controller.sequence import Sequence as RequestSequence
from asynchicache.controller.stored import StoredPools, linger
from asynchicache.controller.tasks import OwnedTasks
from asynchicache.errors import CapacityError
from asynchicache.storage.pool import Batch
from asynchicache.streams.base import Device, Event, Stream
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.transfer.engine import TransferEngine
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.transfer.ticket import Ticket
from asynchicache.tree.node import Node, place
from asynchicache.types import MissReason, Outcome, Tier


@dataclass(slots=True)
class Traffic:
    """What was carried out since the start, in pages and states unless said otherwise.

    Attributes:
        stored, shed, store_failed: written to storage, not tried for want of budget, refused or failed.
        copies_failed: copies between device and host that failed.
    """

    stored: int = 0
    shed: int = 0
    store_failed: int = 0
    copies_failed: int = 0


@dataclass(slots=True)
class Served:
    """What requests were given: `hit_tokens` of `prompt_tokens`, by the farthest tier they came from.

    Attributes:
        reasons: requests by why they were not given more.
    """

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    reasons: dict[MissReason, int] = field(default_factory=lambda: dict.fromkeys(MissReason, 0))


class HybridCacheController:
    """Runs one cache.

    Attributes:
        planner: what decides.
        failure: the device's error once it failed; everything is a miss from then on.
    """

    def __init__(
        self,
        planner: Planner,
        device: Device,
        reactor: CompletionReactor,
        engine: TransferEngine,
        stored: StoredPools,
        tasks: OwnedTasks,
        *,
        prefetch: PrefetchOptions,
        store_bytes: int,
    ) -> None:
        """`store_bytes`: writes to storage under way; what would go beyond is shed."""
        self.planner = planner
        self.traffic = Traffic()
        self.served = Served()
        self.failure: BaseException | None = None
        self.fetcher = Fetcher(planner, stored, prefetch, carry_out=self.carry_out, spawn=self._spawn)
        self._device = device
        self._reactor = reactor
        self._engine = engine
        self._stored = stored
        self._tasks = tasks
        self._store_limit = store_bytes
        self._store_bytes = 0
        self._storing: set[Node] = set()
        self._active = 0
        self._progress = asyncio.Event()

    # Requests

    def open(self, sequence: RequestSequence) -> None:
        """A request has begun: what it makes due for the host goes there."""
        self.carry_out(self.planner.meet(sequence))

    async def prefetch(self, sequence: RequestSequence) -> None:
        if self._stored and self.failure is None:
            await self.fetcher.prefetch(sequence)

    def load(self, sequence: RequestSequence) -> Ticket:
        """Enqueue what brings a request's prefix to the device."""
        if self.failure is None:
            copies = self.planner.load(sequence)
        else:
            copies = self.planner.start_cold(sequence)
        self._count_served(sequence)
        ticket = self.carry_out(copies)
        assert ticket is not None, "a load has a copy, if an empty one"
        return ticket

    def _count_served(self, sequence: RequestSequence) -> None:
        served = self.served
        served.requests += 1
        served.prompt_tokens += len(sequence.tokens)
        served.hit_tokens[sequence.tier] += sequence.hit_pages * self.planner.books.page_size
        served.reasons[self.planner.reason(sequence)] += 1

    def extend(self, sequence: RequestSequence, tokens: int) -> dict[str, list[int]]:
        slots = self.planner.extend(sequence, tokens)
        self.carry_out(self.planner.writer.clean())
        return slots

    async def reserve(self, sequence: RequestSequence, tokens: int) -> dict[str, list[int]]:
        """Extend a request as soon as others have given back enough."""
        while True:
            self._progress.clear()
            try:
                return self.extend(sequence, tokens)
            except CapacityError:
                alone = len(self.planner.books.sequences) == 1
                if (alone and not self._active) or self.failure is not None:
                    raise
            await self._progress.wait()

    def release(self, sequence: RequestSequence, after: Stream | None) -> None:
        """Give back a request's slots, once `after` is done with what is enqueued on it now."""
        if after is None:
            self._released(sequence, None)
            return
        self._active += 1
        self._reactor.track(self._device, after, partial(self._released_after, sequence))

    def _released_after(self, sequence: RequestSequence, error: BaseException | None) -> None:
        self._released(sequence, error)
        self._step()

    def _released(self, sequence: RequestSequence, error: BaseException | None) -> None:
        sequence.poisoned |= error is not None
        self.planner.release(sequence)
        self._progress.set()

    def copy_states(self, copies: list[Copy], after: Stream | None) -> Ticket:
        """Carry out a publication behind `after`; the ticket of its states' copy, done if it has none."""
        events = []
        if after is not None and copies:
            events.append(self._device.event())
            after.record(events[0])
        ticket = self.carry_out(copies, events)
        if ticket is None or copies[-1].direction is not Direction.FORK:
            return Ticket(self.planner.books.spec.layers, ())
        return ticket

    # Copies

    def carry_out(self, copies: Iterable[Copy], after: Sequence[Event] = ()) -> Ticket | None:
        """Enqueue copies behind `after`; the ticket of the last one."""
        ticket = None
        for copy in copies:
            self._active += 1
            done = partial(self._copied, copy)
            operation = CacheOperation(copy.direction, tuple(copy.transfers))
            ticket = self._engine.submit(operation, after=after, reads=copy.reads, done=done)
        return ticket

    def _copied(self, copy: Copy, error: BaseException | None) -> None:
        if error is not None:
            self.traffic.copies_failed += 1
            self.failure = self.failure or error
        node = self.planner.copied(copy, error)
        if node is not None and copy.direction is Direction.BACKUP:
            self._store(node)
        elif node is not None:
            self.carry_out(self.planner.writer.backup(node))
        self._step()

    def _step(self) -> None:
        """Something ended, and may have given back what somebody waits for."""
        self._active -= 1
        self._progress.set()
        if self.planner.writer.owed:
            self.carry_out(self.planner.writer.retry())

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        self._active += 1
        self._tasks.spawn(work).add_done_callback(lambda _: self._step())

    # Writes to storage

    def _store(self, node: Node) -> None:
        work = self.planner.writer.store(node) if self._stored else None
        if work is None:
            return
        size = self._stored.size(work)
        if self._store_bytes and self._store_bytes + size > self._store_limit:
            self.traffic.shed += sum(len(slots) for _, slots in work.pages.values())
            self.planner.writer.wrote(work, stored=False)
            return
        self._store_bytes += size
        self._storing.update(node for node, _ in work.marks)
        self._spawn(self._write(work, size))

    async def _write(self, work: Store, size: int) -> None:
        stored = False
        try:
            batches = await self._stored.put(work)
            stored = self._count(batches)
            await linger(batches)
        finally:
            self._store_bytes -= size
            self._storing.difference_update(node for node, _ in work.marks)
            self.planner.writer.wrote(work, stored=stored)

    def _count(self, batches: Sequence[Batch]) -> bool:
        outcomes = [outcome for batch in batches for outcome in batch.outcomes]
        good = sum(outcome in (Outcome.STORED, Outcome.EXISTS) for outcome in outcomes)
        self.traffic.stored += good
        self.traffic.store_failed += len(outcomes) - good
        return good == len(outcomes)

    # Waiting

    async def idle(self) -> None:
        """Until no copy, write or read is under way."""
        while self._active:
            self._progress.clear()
            await self._progress.wait()

    async def durable(self, sequence: RequestSequence) -> bool:
        """Until everything that a request published is in storage; False if it cannot get there."""
        node, tried = sequence.lease.node, False
        while not self._is_stored(node):
            if not self._active:
                if tried or not self._stored or self.failure is not None:
                    return False
                tried = True
                self.carry_out(self.planner.writer.backup(node))
                self._store(node)
                continue
            self._progress.clear()
            await self._progress.wait()
        return True

    def _is_stored(self, node: Node) -> bool:
        """Whether everything that the path to `node` has in memory is in storage as well."""
        numbers = range(len(self.planner.books.names))
        while node.parent is not None:
            places = {n: (place(n, Tier.DEVICE), place(n, Tier.HOST)) for n in numbers}
            held = sum(1 << n for n, ats in places.items() if any(node.slots[at] for at in ats))
            if held & ~node.stored or node in self._storing:
                return False
            node = node.parent
        return True
