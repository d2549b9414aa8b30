"""HybridCacheController: carries out what the planner decides, in a task group that it owns.

No polling and no thread of its own. Copies end in a callback on the loop, which plans what follows;
storage calls are tasks. Writes to storage are bounded in bytes and shed beyond that. Whatever fails
costs a hit, never a request. A little above 400 lines: one count of what is under way ties them together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from asynchicache.controller.actions import Copy
from asynchicache.controller.fetching import Fetcher, PrefetchOptions
from asynchicache.controller.namespaces import Namespaces
from asynchicache.controller.planner import Planner
from asynchicache.controller.sequence import Retired
from asynchicache.controller.sequence import Sequence as RequestSequence
from asynchicache.controller.served import Served
from asynchicache.controller.stored import StoredPools
from asynchicache.controller.storing import Storer
from asynchicache.controller.subscriptions import EventHub
from asynchicache.controller.tasks import OwnedTasks
from asynchicache.controller.tracing import Tracer
from asynchicache.controller.verify import UnderWay, problems
from asynchicache.errors import CapacityError, ClosedError, RequestStateError
from asynchicache.histograms import Histogram
from asynchicache.streams.base import Device, Event, Stream
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.transfer.engine import TransferEngine
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.transfer.ticket import Ticket
from asynchicache.tree.node import Node

T = TypeVar("T")


class HybridCacheController:
    """Runs one cache.

    Attributes:
        planner: what decides.
        namespaces: what the seeds of digests stand for.
        events: who is told what becomes of pages.
        served: what requests were given.
        tracer: told of copies, if there is one.
        room_waits: how long `admit` and `reserve` took: waits for others to give back slots.
        closing: requests are refused; what is under way goes on.
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
        count_namespaces: int = 0,
    ) -> None:
        """`store_bytes`: of writes to storage under way, beyond which they are shed; `count_namespaces`: how
        many are counted apart."""
        self.planner = planner
        self.namespaces = Namespaces(planner.books.tree.roots)
        self.events = EventHub(planner, self.namespaces)
        self.served = Served()
        self.tracer: Tracer | None = None
        self.room_waits = Histogram()
        self._failure: BaseException | None = None
        self.closing = False
        self.fetcher = Fetcher(
            planner,
            stored,
            prefetch,
            carry_out=self.carry_out,
            spawn=self._spawn,
            spawn_late=self._spawn_late,
        )
        self.storer = Storer(
            planner,
            stored,
            limit_bytes=store_bytes,
            spawn=self._spawn,
            spawn_late=self._spawn_late,
            moved=self._moved,
        )
        self._device = device
        self._reactor = reactor
        self._engine = engine
        self._stored = stored
        self._tasks = tasks
        self._computing: dict[Stream, Event] = {}
        self._reserving: set[RequestSequence] = set()
        self._count_namespaces = count_namespaces
        self._stopped = False
        self._active = 0
        self._progress = asyncio.Event()

    @property
    def failure(self) -> BaseException | None:
        """Why everything is a miss from now on: the device's error, known as soon as the device knows,
        or that of a copy. What is published after it might have been computed from what never came."""
        return self._failure or self._device.error

    def trace(self, tracer: Tracer | None) -> None:
        """Tell `tracer` of what takes time from now on; None for nobody."""
        self.tracer = self.planner.books.tracer = self.storer.tracer = tracer

    # Requests

    def open(self, sequence: RequestSequence) -> None:
        """A request has begun: what it makes due for the host goes there."""
        self.carry_out(self.planner.meet(sequence))

    async def prefetch(self, sequence: RequestSequence) -> None:
        if self._stored and self.failure is None:
            await self.fetcher.prefetch(sequence)

    def load(self, sequence: RequestSequence, *, counted: bool) -> Ticket:
        """Enqueue what brings a request's prefix to the device."""
        if self.failure is None:
            copies = self.planner.loader.load(sequence)
        else:
            copies = self.planner.loader.start_cold(sequence)
        if counted:
            self._count_served(sequence)
        ticket = self.carry_out(copies)
        assert ticket is not None, "a load has a copy, if an empty one"
        return ticket

    def _count_served(self, sequence: RequestSequence) -> None:
        prompt, hit = len(sequence.tokens), sequence.hit_pages * self.planner.books.page_size
        reason = self.planner.reason(sequence)
        self.served.count(prompt, hit, sequence.tier, reason, self.planner.limiting_pool(sequence))
        self.served.hit_slots.update(sequence.sources)
        if self._count_namespaces:
            name = self.namespaces.named(sequence.seed).name or ""
            self.served.count_namespace(name, prompt, hit, self._count_namespaces)

    def rest(self, sequence: RequestSequence) -> None:
        """Let a request keep nothing while it waits for something else."""
        self.planner.rest(sequence)
        self._moved()

    def extend(self, sequence: RequestSequence, tokens: int) -> dict[str, list[int]]:
        before = len(sequence.pages)
        slots = self.planner.extend(sequence, tokens)
        if len(sequence.pages) > before:  # not at each token of a decode
            self.carry_out(self.planner.writer.clean())
        return slots

    async def admit(self, sequence: RequestSequence) -> None:
        """Have what `load` takes of the device as soon as others have given back enough."""
        await self._timed(self._when_possible(sequence, partial(self.planner.admit, sequence)))

    async def reserve(self, sequence: RequestSequence, tokens: int) -> dict[str, list[int]]:
        """Extend a request as soon as others have given back enough."""
        return await self._timed(self._when_possible(sequence, partial(self.extend, sequence, tokens)))

    async def _timed(self, waiting: Coroutine[object, object, T]) -> T:
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            return await waiting
        finally:
            self.room_waits.observe(clock() - started)

    async def _when_possible(self, sequence: RequestSequence, attempt: Callable[[], T]) -> T:
        """Try again whenever something was given back.

        The last of the requests that all wait for one another is refused, so that it can give way.
        """
        while True:
            self._progress.clear()
            self._check_waiting(sequence)
            try:
                return attempt()
            except CapacityError:
                if self.failure is not None or not (self._active or self._others(sequence)):
                    raise
            self._reserving.add(sequence)
            try:
                await self._progress.wait()
            finally:
                self._reserving.discard(sequence)

    def _others(self, sequence: RequestSequence) -> bool:
        """Whether somebody else may give back something without being given anything first."""
        others = self.planner.books.sequences - self._reserving - {sequence}
        return any(not other.resting for other in others)

    def _check_waiting(self, sequence: RequestSequence) -> None:
        if sequence.closed:
            raise RequestStateError("the request was closed while it waited for room")
        self.check_open()

    def release(self, sequence: RequestSequence, after: Stream | None) -> None:
        """Give back a request's slots, once `after` is done with what is enqueued on it now."""
        sequence.closed = True
        if after is None or self._stopped:
            self._released(sequence, None)
            return
        self._active += 1
        self._reactor.track(self._device, after, partial(self._released_after, sequence))

    def _released_after(self, sequence: RequestSequence, error: BaseException | None) -> None:
        try:
            self._released(sequence, error)
        finally:
            self._step()

    def _released(self, sequence: RequestSequence, error: BaseException | None) -> None:
        sequence.poisoned |= error is not None
        self.planner.release(sequence)
        self._moved()

    def snapshot(self, sequence: RequestSequence, length: int, after: Stream | None) -> Ticket:
        """Copy a request's working states behind `after`."""
        self._behind(after)
        return self._copy_states(self.planner.snapshot(sequence, length))

    def publish(self, sequence: RequestSequence, length: int, after: Stream | None, *, final: bool) -> Ticket:
        """Publish a request's pages and states, which are written when `after` is."""
        self._behind(after)
        if self.failure is None:
            copies = self.planner.publish(sequence, length, final=final)
        else:
            copies, sequence.unpublished = [], True
        ticket = self._copy_states(copies)
        self._retire(sequence, length, after)
        return ticket

    def advance(self, sequence: RequestSequence, length: int, after: Stream | None) -> None:
        """Let a request go of what lies before its windows, once `after` has got there."""
        self._retire(sequence, length, after)

    def _retire(self, sequence: RequestSequence, length: int, after: Stream | None) -> None:
        retired = self.planner.windows.retire(sequence, length)
        if retired is None:
            return
        if after is None or self._stopped:
            self.planner.windows.finish(retired)
            self._moved()
            return
        self._active += 1
        self._reactor.track(self._device, after, partial(self._retired, retired))

    def _retired(self, retired: Retired, error: BaseException | None) -> None:
        try:
            self.planner.windows.finish(retired, poisoned=error is not None)
        finally:
            self._step()

    def _behind(self, stream: Stream | None) -> None:
        """Let every copy that reads device memory wait for what is enqueued on `stream` now: whoever
        meets what is published now may copy its pages to the host, or its state to a slot of their own."""
        if stream is None:
            return
        event = self._device.event()
        stream.record(event)
        self._computing[stream] = event
        self._reactor.track(self._device, stream, lambda _: self._computed(stream, event), event=event)

    def _computed(self, stream: Stream, event: Event) -> None:
        if self._computing.get(stream) is event:
            del self._computing[stream]

    def _copy_states(self, copies: list[Copy]) -> Ticket:
        """Carry out a publication; the ticket of its states' copy, done if it has none."""
        ticket = self.carry_out(copies)
        if ticket is None or copies[-1].direction is not Direction.FORK:
            return Ticket.of_nothing(self.planner.books.spec.layers)
        return ticket

    # Copies

    def carry_out(self, copies: Iterable[Copy]) -> Ticket | None:
        """Enqueue copies, those from the device behind the forwards that still run; the last one's ticket."""
        ticket = None
        for copy in copies:
            if self.tracer is not None:
                copy.span = self.tracer.copying(copy)
            self._active += 1
            done = partial(self._copied, copy)
            operation = CacheOperation(copy.direction, tuple(copy.transfers))
            events = () if copy.direction is Direction.LOAD else tuple(self._computing.values())
            ticket = self._engine.submit(operation, after=events, reads=copy.reads, done=done)
        return ticket

    def _copied(self, copy: Copy, error: BaseException | None) -> None:
        if copy.span is not None:
            copy.span.finish(error)
        if error is not None:
            self.storer.traffic.copies_failed += 1
            self._failure = self._failure or error
        try:
            node = self.planner.copied(copy, error)
            if node is not None and not self._stopped:
                self._pass_on(copy, node)
        finally:
            self._step()

    def _pass_on(self, copy: Copy, node: Node) -> None:
        """What is on the path to `node` now is due for the next tier."""
        if copy.direction is Direction.BACKUP:
            self.storer.store(node)
        else:
            self.carry_out(self.planner.writer.backup(node))

    def _step(self) -> None:
        """Something ended that others wait for."""
        self._active -= 1
        self._moved()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """For as long as it is entered, something is under way."""
        self._active += 1
        try:
            yield
        finally:
            self._step()

    def _moved(self) -> None:
        """Something may have been given back that somebody waits for."""
        self._reserving.clear()  # they look again, and wait again if it was not enough
        self._progress.set()
        if self.planner.writer.owed and self.failure is None and not self._stopped:
            self.carry_out(self.planner.writer.retry())

    def _spawn(self, work: Coroutine[object, object, None]) -> None:
        self._active += 1
        task = self._tasks.spawn(work)
        self.storer.under_way.add(task)
        task.add_done_callback(self._storage_ended)

    def _storage_ended(self, task: asyncio.Task[None]) -> None:
        self.storer.under_way.discard(task)
        self._step()

    def _spawn_late(self, work: Coroutine[object, object, None]) -> None:
        """Run what waits for an engine that may hang for ever: nobody may wait for it in turn."""
        self._tasks.spawn(work).add_done_callback(lambda _: self._moved())

    def verify(self, *, idle: bool) -> list[str]:
        """Broken invariants in words; `idle`: and whatever is held, under way or lost."""
        left = self._tasks.running if self._stopped else ()
        under_way = UnderWay(self._engine.live(), self.storer.under_way, left, self._active)
        return problems(self.planner, under_way, idle=idle)

    # Waiting

    def check_open(self) -> None:
        """
        Raises:
            ClosedError: the cache is closing, or closed.
        """
        if self.closing:
            raise ClosedError("the cache is closed")

    async def turn(self) -> None:
        """Give others a turn: a cancellation point, also where there is nothing to wait for.

        Raises:
            ClosedError: the cache is closing, or was closed meanwhile.
        """
        await asyncio.sleep(0)
        self.check_open()

    def close(self) -> None:
        """Refuse requests, those that wait for room too; what is under way goes on."""
        self.closing = True
        self._progress.set()

    def stop(self) -> None:
        """Let nothing follow on what is still under way; who waits for it is told."""
        self._stopped = True
        self._progress.set()
        self.events.close()

    async def idle(self) -> None:
        """Until no copy, write or read is under way.

        Raises:
            ClosedError: the cache was closed, and something that is under way may never end.
        """
        while self._active:
            if self._stopped:
                raise ClosedError("the cache is closed, and not all that was under way has ended")
            self._progress.clear()
            await self._progress.wait()

    async def durable(self, sequence: RequestSequence) -> bool:
        """Until everything that a request published is in storage; False if it cannot get there, or if a
        checkpoint of it could not even be published."""
        node, tried = sequence.lease.node, False
        while self._stored and not sequence.unpublished:
            if not self.storer.clearing and self.planner.writer.is_stored(node):
                return True
            if not (self._active or self.storer.clearing):
                if tried or self.failure is not None or self.closing:
                    return False
                tried = True
                self.carry_out(self.planner.writer.backup(node))
                self.storer.store(node)
                continue
            if self._stopped:
                return False
            self._progress.clear()
            await self._progress.wait()
        return False
