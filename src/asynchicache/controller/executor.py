"""The executor: carries out copies and storage calls, counts work in flight, and wakes waiters.

It decides nothing. A copy ends in a callback on the loop; the planner then decides what follows. A storage
call is a task. There is no polling and no thread. Every wait of the cache (for room, `drain`, `durable`)
waits for `progress`, which is set whenever work ends or slots are freed.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from asynchicache.controller.tasks import OneLoop, OwnedTasks
from asynchicache.errors import ClosedError, CopyEndedError
from asynchicache.planner.actions import Copy, begin_span
from asynchicache.planner.planner import Planner
from asynchicache.streams.base import Device, Event, Stream, check_stream
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.tracing import Tracer
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.transfer.record import OnWait
from asynchicache.transfer.ticket import Ticket
from asynchicache.transfer.transfers import Transfers
from asynchicache.tree.node import Node


class Executor:
    """Carries out the decisions of a planner. Confined to one event loop.

    Attributes:
        progress: set when work has ended or slots were freed. A waiter clears it, checks, and waits.
        calls: tasks that read from storage or write to it.
        tracer: receives copies, if set.
        on_progress: called whenever work ends or slots are freed.
        on_backed_up: called with the end of a path whose pages have reached the host, and the `Activity`
            period of the backup.
        closing: requests are refused; work in flight continues.
        loop: where the cache was opened.
        stopped: no new work follows from work still in flight.
    """

    def __init__(
        self,
        planner: Planner,
        device: Device,
        reactor: CompletionReactor,
        transfers: Transfers,
        tasks: OwnedTasks,
    ) -> None:
        self.progress = asyncio.Event()
        self.calls: set[asyncio.Task[None]] = set()
        self.tracer: Tracer | None = None
        self.copies_failed = 0
        self.on_progress: Callable[[], None] = lambda: None
        self.on_backed_up: Callable[[Node, int | None], None] = lambda node, period: None
        self.closing = False
        self.stopped = False
        self.loop = OneLoop("the cache")
        self._planner = planner
        self._device = device
        self._reactor = reactor
        self._transfers = transfers
        self._tasks = tasks
        self._activity = planner.activity
        self._computing: dict[Stream, Event] = {}
        self._failure: BaseException | None = None

    @property
    def copies_here(self) -> bool:
        """Whether copies run in this process, in the order of its streams."""
        return self._transfers.in_process

    @property
    def failure(self) -> BaseException | None:
        """The device or copy error since which every request is a miss; None if there is none.

        Pages published after it might have been computed from bytes that never arrived.
        """
        return self._failure or self._device.error

    def fail(self, error: BaseException) -> None:
        """Make every request a miss from now on, as after a failed device."""
        self._failure = self._failure or error
        self.notify()

    # Copies

    def run(
        self, copies: Iterable[Copy], on_wait: OnWait | None = None, *, after: Stream | None = None
    ) -> Ticket | None:
        """Enqueue copies; returns the ticket of the last one, None if there are none.

        A copy that reads device memory runs after the forwards given to `order_after`.

        Args:
            on_wait: called with each stream that a fence of the ticket makes wait. Default: none, for callers
                that do not hand out the ticket.
            after: loads too run after the work enqueued on this stream. Default: at once.
        """
        ticket, ready = None, None if after is None else self._recorded(after)
        for copy in copies:
            if self.tracer is not None:
                copy.span = begin_span(self.tracer, copy)
            copy.period = self._activity.begin(copy.period)
            done = partial(self._copy_done, copy)
            operation = CacheOperation(copy.direction, tuple(copy.transfers))
            # A backup reads what a forward wrote, so it stands behind every forward that may still write.
            events = () if copy.direction is Direction.LOAD else tuple(self._computing.values())
            events += () if ready is None else (ready,)
            ticket = self._transfers.submit(
                operation, after=events, reads=copy.reads, done=done, on_wait=on_wait
            )
        return ticket

    def _copy_done(self, copy: Copy, error: BaseException | None) -> None:
        if copy.span is not None:
            copy.span.finish(error)
        if error is not None:
            self.copies_failed += 1
            # One that failed and has ended wrote nothing wrong later: it fails alone, the cache goes on.
            if not isinstance(error, CopyEndedError):
                self._failure = self._failure or error
        try:
            node = self._planner.copy_finished(copy, error)
            if node is not None and not self.stopped:
                self._schedule_next_tier(copy, node)
        finally:  # also if the planner raised: a copy that never ends would hold every `drain`
            self._ended(copy.period)

    def _schedule_next_tier(self, copy: Copy, node: Node) -> None:
        """Start copying the path to `node` to the next tier."""
        if copy.direction is Direction.BACKUP:
            self.on_backed_up(node, copy.period)
        else:
            self.run(self._planner.backups.backup(node, period=copy.period))

    # Streams

    def check_stream(self, stream: Stream | None) -> None:
        """
        Raises:
            UsageError: the stream is not one of the cache's device.
        """
        if stream is not None:
            check_stream(self._device, stream)

    def order_after(self, stream: Stream) -> None:
        """Order later copies that read device memory after the work already enqueued on `stream`.

        From publication on, any request may cause copies of the pages to the host and of states.
        """
        self._computing[stream] = event = self._recorded(stream)
        self._reactor.track(self._device, stream, lambda _: self._computed(stream, event), event=event)

    def _recorded(self, stream: Stream) -> Event:
        event = self._device.event()
        stream.record(event)
        return event

    def _computed(self, stream: Stream, event: Event) -> None:
        if self._computing.get(stream) is event:  # else a later forward has taken its place
            del self._computing[stream]

    def when_reached(self, stream: Stream, done: Callable[[BaseException | None], object]) -> None:
        """Call `done`, with the device's error if any, once `stream` has done the work enqueued now."""
        self._reactor.track(self._device, stream, partial(self._reached, done, self._activity.begin()))

    def _reached(
        self, done: Callable[[BaseException | None], object], period: int, error: BaseException | None
    ) -> None:
        try:
            done(error)
        finally:
            self._ended(period)

    # Storage calls

    def call(self, work: Coroutine[object, object, None], period: int | None = None) -> asyncio.Task[None]:
        """Run a storage call as a task.

        Args:
            work: the call, including the handling of its result.
            period: the `Activity` period of the work that it follows from. Default: the current period.
        """
        period = self._activity.begin(period)
        task = self._tasks.spawn(work)
        self.calls.add(task)
        task.add_done_callback(partial(self._call_done, period))
        return task

    def _call_done(self, period: int, task: asyncio.Task[None]) -> None:
        self.calls.discard(task)
        self._ended(period)

    def call_late(self, work: Coroutine[object, object, None]) -> None:
        """Run a task that waits for a call past its deadline. It may never end, so no wait counts it."""
        self._tasks.spawn(work).add_done_callback(lambda _: self.notify())

    # Work in flight, and its waiters

    @contextmanager
    def busy(self) -> Iterator[None]:
        """Count the body as work in flight."""
        period = self._activity.begin()
        try:
            yield
        finally:
            self._ended(period)

    def _ended(self, period: int | None) -> None:
        assert period is not None, "it was counted when it began"
        self._activity.end(period)
        self.notify()

    def notify(self) -> None:
        """Wake waiters and retry postponed backups, after slots may have been freed."""
        self.progress.set()
        backups = self._planner.backups
        if (backups.postponed or backups.urgent) and self.failure is None and not self.stopped:
            self.run(backups.retry())
        self.on_progress()

    async def next_progress(self) -> None:
        """Wait until work ends or slots are freed."""
        # The caller has looked since the last await, so nothing that it waits for is cleared away here.
        self.progress.clear()
        await self.progress.wait()

    @property
    def copies(self) -> Collection[CacheOperation]:
        """Copies in flight."""
        return self._transfers.in_flight()

    @property
    def left_tasks(self) -> Collection[asyncio.Task[None]]:
        """Tasks that still run after `stop`."""
        return self._tasks.running if self.stopped else ()

    def in_flight(self, until: int | None = None) -> int:
        """Copies, storage calls and stream callbacks that have not ended; if given, of periods up to one."""
        return self._activity.running(until)

    def close_period(self) -> int:
        """Close the current `Activity` period; returns it."""
        return self._activity.close_period()

    async def idle(self) -> None:
        """Wait until nothing is in flight.

        Raises:
            ClosedError: the executor was stopped, and some work in flight may never end.
        """
        await self._all_ended(None)

    async def settled(self) -> None:
        """Wait until all work now in flight, and the work that follows from it, has ended.

        Raises:
            ClosedError: as `idle`.
        """
        await self._all_ended(self._activity.close_period())

    async def _all_ended(self, until: int | None) -> None:
        while self._activity.running(until):
            if self.stopped:
                raise ClosedError("the cache is closed, and not all that was in flight has ended")
            await self.next_progress()

    # Life

    def check_open(self) -> None:
        """
        Raises:
            ClosedError: the cache is closing or closed.
            UsageError: another event loop runs than that of the cache.
        """
        self.loop.check()
        if self.closing:
            raise ClosedError("the cache is closed")

    async def checkpoint(self) -> None:
        """Yield to other tasks: a cancellation point even if there is nothing to wait for.

        Raises:
            ClosedError: the cache is closing, or was closed meanwhile.
        """
        self.loop.check()
        await asyncio.sleep(0)
        self.check_open()

    def close(self) -> None:
        """Refuse requests, including those that wait for room; work in flight continues."""
        self.closing = True
        self.progress.set()

    def stop(self) -> None:
        """Start nothing more after work in flight; its waiters get `ClosedError`."""
        self.stopped = True
        self.progress.set()
        self.on_progress()
