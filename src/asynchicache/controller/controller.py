"""HybridCacheController: carries out what the planner decides, in a task group that it owns.

No polling and no thread of its own. Copies end in a callback on the loop, which plans what follows;
storage calls are tasks. Writes to storage are bounded in bytes and shed beyond that. Whatever fails
costs a hit, never a request. Some 500 lines: one count of what is in flight ties them together.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TypeVar

from asynchicache.controller.event_hub import EventHub
from asynchicache.controller.hit_counters import Served
from asynchicache.controller.namespaces import Namespaces
from asynchicache.controller.prefetch import Fetcher, PrefetchOptions
from asynchicache.controller.presence_queries import PresenceQuestions
from asynchicache.controller.storage_pools import StoredPools
from asynchicache.controller.storage_writer import Storer
from asynchicache.controller.tasks import OwnedTasks
from asynchicache.controller.verify import UnderWay, problems
from asynchicache.errors import CapacityError, ClosedError, RequestStateError
from asynchicache.histograms import Histogram
from asynchicache.planner.actions import Copy, begin_span
from asynchicache.planner.planner import Planner
from asynchicache.planner.request_state import Retired
from asynchicache.planner.request_state import Sequence as RequestSequence
from asynchicache.planner.room_queue import RoomQueue, Waiter
from asynchicache.streams.base import Device, Event, Stream
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.tracing import Tracer
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
        questions = PresenceQuestions(stored)
        self.fetcher = Fetcher(
            planner,
            stored,
            questions,
            prefetch,
            carry_out=self.carry_out,
            mend=self._mend,
            spawn=self._spawn,
            spawn_late=self._spawn_late,
        )
        self.storer = Storer(
            planner,
            stored,
            questions,
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
        self._queue = RoomQueue()
        self._count_namespaces = count_namespaces
        self._stopped = False
        self._activity = planner.activity
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
        self.storer.use(sequence.lease.node)
        if counted:
            self._count_served(sequence)
        ticket = self.carry_out(copies)
        assert ticket is not None, "a load has a copy, if an empty one"
        ticket.ordered = sequence.runs_on
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
        """Give a request room at once.

        Raises:
            CapacityError: there is none, or the request has not begun to compute and others wait for room.
        """
        if self._queue.blocks(sequence) and self.planner.new_pages(sequence, tokens):
            raise CapacityError("others wait for room: wait behind them (reserve)")
        return self._extend(sequence, tokens)

    def _extend(self, sequence: RequestSequence, tokens: int) -> dict[str, list[int]]:
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
        return await self._timed(self._when_possible(sequence, partial(self._extend, sequence, tokens)))

    async def _timed(self, waiting: Coroutine[object, object, T]) -> T:
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            return await waiting
        finally:
            self.room_waits.observe(clock() - started)

    async def _when_possible(self, sequence: RequestSequence, attempt: Callable[[], T]) -> T:
        """Try when it is the request's turn (`room_queue`), and again whenever something was given back."""
        waiter = self._queue.enter(sequence)
        self._progress.set()  # whoever is next looks whether all wait for one another now
        try:
            while True:
                self._progress.clear()
                self._check_waiting(sequence)
                served = self._attempt(waiter, attempt)
                if served is not None:
                    return served[0]
                await self._progress.wait()
        finally:
            self._queue.leave(waiter)
            self._match_again(waiter)
            self._progress.set()

    def _match_again(self, waiter: Waiter) -> None:
        """A request that was made to let go of its match, to wait, has one again."""
        if waiter.rested and waiter.sequence.resting and not waiter.sequence.closed:
            self.planner.rematch(waiter.sequence, fetched=False)

    def _attempt(self, waiter: Waiter, attempt: Callable[[], T]) -> tuple[T] | None:
        """What `attempt` returned, as a tuple, or None to wait on.

        Raises:
            CapacityError: nothing that is in flight or held by others will give room, or the request must
                give way.
        """
        turn = self._queue.is_next(waiter)
        if not (turn or waiter.refused):
            return None
        if waiter.refused and not waiter.begun:
            raise CapacityError(
                "all requests that hold slots wait for room, and this one came last; one that waits in "
                "admit(), before load(), holds none"
            )
        try:
            self._match_again(waiter)
            return (attempt(),)
        except CapacityError:
            if waiter.refused or self.failure is not None or self._nothing_follows(waiter):
                raise
            return None

    def _nothing_follows(self, waiter: Waiter) -> bool:
        """Whether waiting is in vain for `waiter`, who is next and found no room.

        Where all who hold slots wait for one another, those who have not loaded yet let go of what they
        matched; if that is not enough, the last one gives way.
        """
        if self._activity.running() or not self._queue.all_wait(self.planner.books.sequences):
            return False
        others = [one for one in self._queue.holding() if one is not waiter]
        for other in others:
            self.planner.rest(other.sequence)
            other.rested = True
        last = self._queue.last()
        if not others and last is waiter:
            return True
        if not others:
            last.refused = True
        self._progress.set()
        return False

    def _check_waiting(self, sequence: RequestSequence) -> None:
        if sequence.closed:
            raise RequestStateError("the request was closed while it waited for room")
        self.check_open()

    def release(self, sequence: RequestSequence) -> None:
        """Give back a request's slots, once every stream that its forwards may run on is done with what is
        enqueued there now."""
        sequence.closed = True
        for stream in list(sequence.streams) if not self._stopped else ():
            sequence.users += 1
            done = partial(self._stream_done, sequence, self._activity.begin())
            self._reactor.track(self._device, stream, done)
        self.planner.release(sequence)
        self._moved()

    def _stream_done(self, sequence: RequestSequence, period: int, error: BaseException | None) -> None:
        try:
            sequence.poisoned |= error is not None
            self.planner.release(sequence)
        finally:
            self._ended(period)

    def snapshot(self, sequence: RequestSequence, length: int, after: Stream | None) -> Ticket:
        """Copy a request's working states behind `after`."""
        self._behind(sequence, after)
        return self._copy_states(sequence, self.planner.snapshot(sequence, length))

    def publish(self, sequence: RequestSequence, length: int, after: Stream | None, *, final: bool) -> Ticket:
        """Publish a request's pages and states, which are written when `after` is."""
        self._behind(sequence, after)
        if self.failure is None:
            copies = self.planner.publish(sequence, length, final=final)
        else:
            copies, sequence.unpublished = [], True
        ticket = self._copy_states(sequence, copies)
        self._retire(sequence, length, after)
        return ticket

    def advance(self, sequence: RequestSequence, length: int, after: Stream | None) -> None:
        """Let a request go of what lies before its windows, once `after` has got there."""
        if after is not None:
            sequence.runs_on(after)
        self._retire(sequence, length, after)

    def _retire(self, sequence: RequestSequence, length: int, after: Stream | None) -> None:
        retired = self.planner.windows.retire(sequence, length)
        if retired is None:
            return
        if after is None or self._stopped:
            self.planner.windows.finish(retired)
            self._moved()
            return
        period = self._activity.begin()
        self._reactor.track(self._device, after, partial(self._retired, retired, period))

    def _retired(self, retired: Retired, period: int, error: BaseException | None) -> None:
        try:
            self.planner.windows.finish(retired, poisoned=error is not None)
        finally:
            self._ended(period)

    def _behind(self, sequence: RequestSequence, stream: Stream | None) -> None:
        """Let every copy that reads device memory wait for what is enqueued on `stream` now: whoever
        meets what is published now may copy its pages to the host, or its state to a slot of their own."""
        if stream is None:
            return
        sequence.runs_on(stream)
        event = self._device.event()
        stream.record(event)
        self._computing[stream] = event
        self._reactor.track(self._device, stream, lambda _: self._computed(stream, event), event=event)

    def _computed(self, stream: Stream, event: Event) -> None:
        if self._computing.get(stream) is event:
            del self._computing[stream]

    def _copy_states(self, sequence: RequestSequence, copies: list[Copy]) -> Ticket:
        """Carry out a publication; the ticket of its states' copy, done if it has none."""
        ticket = self.carry_out(copies)
        if ticket is None or copies[-1].direction is not Direction.FORK:
            ticket = Ticket.of_nothing(self.planner.books.spec.layers)
        ticket.ordered = sequence.runs_on
        return ticket

    # Copies

    def carry_out(self, copies: Iterable[Copy]) -> Ticket | None:
        """Enqueue copies, those from the device behind the forwards that still run; the last one's ticket."""
        ticket = None
        for copy in copies:
            if self.tracer is not None:
                copy.span = begin_span(self.tracer, copy)
            copy.period = self._activity.begin(copy.period)
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
            self._ended(copy.period)

    def _pass_on(self, copy: Copy, node: Node) -> None:
        """What is on the path to `node` now is due for the next tier."""
        if copy.direction is Direction.BACKUP:
            self.storer.store(node, period=copy.period)
        else:
            self.carry_out(self.planner.writer.backup(node, period=copy.period))

    def _mend(self, node: Node) -> None:
        """Have what storage lost of the path to `node` written anew."""
        self._spawn(self._write_anew(node))

    async def _write_anew(self, node: Node) -> None:
        if await self.storer.confirm(node) is False and not self._stopped:
            self.carry_out(self.planner.writer.backup(node))
            self.storer.store(node)

    def _ended(self, period: int | None) -> None:
        """Work of a period ended that others wait for."""
        assert period is not None, "it was counted when it began"
        self._activity.end(period)
        self._moved()

    @contextmanager
    def busy(self) -> Iterator[None]:
        """For as long as it is entered, something is under way."""
        period = self._activity.begin()
        try:
            yield
        finally:
            self._ended(period)

    def _moved(self) -> None:
        """Something may have been given back that somebody waits for."""
        self._progress.set()
        writer = self.planner.writer
        if (writer.owed or writer.urgent) and self.failure is None and not self._stopped:
            self.carry_out(writer.retry())

    def _spawn(self, work: Coroutine[object, object, None], period: int | None = None) -> None:
        period = self._activity.begin(period)
        task = self._tasks.spawn(work)
        self.storer.under_way.add(task)
        task.add_done_callback(partial(self._storage_ended, period))

    def _storage_ended(self, period: int, task: asyncio.Task[None]) -> None:
        self.storer.under_way.discard(task)
        self._ended(period)

    def _spawn_late(self, work: Coroutine[object, object, None]) -> None:
        """Run what waits for an engine that may hang for ever: nobody may wait for it in turn."""
        self._tasks.spawn(work).add_done_callback(lambda _: self._moved())

    def verify(self, *, idle: bool) -> list[str]:
        """Broken invariants in words; `idle`: and whatever is held, under way or lost."""
        left = self._tasks.running if self._stopped else ()
        under_way = UnderWay(self._engine.live(), self.storer.under_way, left, self._activity.running())
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
        self.storer.stop()
        self._progress.set()
        self.events.close()

    async def idle(self) -> None:
        """Until no copy, write or read is in flight.

        Raises:
            ClosedError: the cache was closed, and something that is in flight may never end.
        """
        await self._all_ended(None)

    async def settled(self) -> None:
        """Until every copy, write and read has ended that is in flight now, and what follows from them.

        Raises:
            ClosedError: as `idle`.
        """
        await self._all_ended(self._activity.close_period())

    async def _all_ended(self, until: int | None) -> None:
        while self._activity.running(until):
            if self._stopped:
                raise ClosedError("the cache is closed, and not all that was in flight has ended")
            await self._next_change()

    async def _next_change(self) -> None:
        """Until something ends, or is given back."""
        self._progress.clear()
        await self._progress.wait()

    async def durable(self, sequence: RequestSequence) -> bool:
        """Until everything that a request published is in storage; False if it cannot get there, or if a
        checkpoint of it could not even be published.

        It waits for what is in flight for the request's own path. Storage is asked before the answer is
        True; what it has lost, or what was not written for want of room, is written once more.
        """
        node, writer, tried, lost = sequence.lease.node, self.planner.writer, False, False
        while self._stored and not (sequence.unpublished or self._stopped):
            if self.storer.clearing or writer.in_flight(node):
                await self._next_change()
            elif writer.is_stored(node):
                there = await self.storer.confirm(node)
                if there or there is None or lost:
                    return bool(there)
                tried, lost = False, True
            elif self.failure is not None or self.closing:
                return False
            elif writer.lacks_room(node) and self._activity.running():
                await self._back_up_first(node)
            elif tried:
                return False
            else:
                tried = True
                self.carry_out(writer.backup(node))
                self.storer.store(node, wait=True)
        return False

    async def _back_up_first(self, node: Node) -> None:
        """Give a path the next host slots that are given back, until something of it is in flight."""
        writer = self.planner.writer
        writer.urgent.append(node)
        try:
            self.carry_out(writer.backup(node))
            if not writer.in_flight(node):
                await self._next_change()
        finally:
            writer.urgent.remove(node)
