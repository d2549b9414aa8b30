"""The executor: carries out copies and storage calls, counts what is in flight, and wakes who waits.

It decides nothing. A copy ends in a callback on the loop, and the planner says what follows from it. A
storage call is a task. There is no polling and no thread. Every wait of the cache (for room, `drain`,
`durable`) waits for `progress`, which is set whenever something ends or is given back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Coroutine, Iterable, Iterator
from contextlib import contextmanager
from functools import partial

from asynchicache.controller.tasks import OwnedTasks
from asynchicache.errors import ClosedError
from asynchicache.planner.actions import Copy, begin_span
from asynchicache.planner.planner import Planner
from asynchicache.streams.base import Device, Event, Stream
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.tracing import Tracer
from asynchicache.transfer.engine import TransferEngine
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.transfer.record import OnWait
from asynchicache.transfer.ticket import Ticket
from asynchicache.tree.node import Node


class Executor:
    """Carries out what a planner decides; confined to one event loop.

    Attributes:
        progress: set when something has ended or was given back. A waiter clears it, looks, and waits.
        calls: tasks that read from storage or write to it.
        tracer: told of copies, if there is one.
        copies_failed: how many copies failed.
        on_backed_up: called with the end of a path whose pages have reached the host, and the period of the
            work that this follows from (`Activity`).
        closing: requests are refused; what is in flight goes on.
        stopped: nothing follows any more from what still is in flight.
    """

    def __init__(
        self,
        planner: Planner,
        device: Device,
        reactor: CompletionReactor,
        engine: TransferEngine,
        tasks: OwnedTasks,
    ) -> None:
        self.progress = asyncio.Event()
        self.calls: set[asyncio.Task[None]] = set()
        self.tracer: Tracer | None = None
        self.copies_failed = 0
        self.on_backed_up: Callable[[Node, int | None], None] = lambda node, period: None
        self.closing = False
        self.stopped = False
        self._planner = planner
        self._device = device
        self._reactor = reactor
        self._engine = engine
        self._tasks = tasks
        self._activity = planner.activity
        self._computing: dict[Stream, Event] = {}
        self._failure: BaseException | None = None

    @property
    def failure(self) -> BaseException | None:
        """Why every request is a miss from now on: the error of the device or of a copy.

        What is published after it might have been computed from bytes that never came.
        """
        return self._failure or self._device.error

    # Copies

    def run(self, copies: Iterable[Copy], on_wait: OnWait | None = None) -> Ticket | None:
        """Enqueue copies; the ticket of the last one, None if there are none.

        A copy that reads device memory runs behind the forwards of `order_after`.

        Args:
            on_wait: called with each stream that a fence of the ticket makes wait. Default: the ticket is not
                handed out.
        """
        ticket = None
        for copy in copies:
            if self.tracer is not None:
                copy.span = begin_span(self.tracer, copy)
            copy.period = self._activity.begin(copy.period)
            done = partial(self._copy_done, copy)
            operation = CacheOperation(copy.direction, tuple(copy.transfers))
            events = () if copy.direction is Direction.LOAD else tuple(self._computing.values())
            ticket = self._engine.submit(
                operation, after=events, reads=copy.reads, done=done, on_wait=on_wait
            )
        return ticket

    def _copy_done(self, copy: Copy, error: BaseException | None) -> None:
        if copy.span is not None:
            copy.span.finish(error)
        if error is not None:
            self.copies_failed += 1
            self._failure = self._failure or error
        try:
            node = self._planner.copy_finished(copy, error)
            if node is not None and not self.stopped:
                self._schedule_next_tier(copy, node)
        finally:
            self._ended(copy.period)

    def _schedule_next_tier(self, copy: Copy, node: Node) -> None:
        """What is on the path to `node` now is due for the tier below."""
        if copy.direction is Direction.BACKUP:
            self.on_backed_up(node, copy.period)
        else:
            self.run(self._planner.backups.backup(node, period=copy.period))

    # Streams

    def order_after(self, stream: Stream) -> None:
        """Order later copies that read device memory after the work already enqueued on `stream`.

        Pages that are published now may be copied to the host, and states to other slots, by any request.
        """
        event = self._device.event()
        stream.record(event)
        self._computing[stream] = event
        self._reactor.track(self._device, stream, lambda _: self._computed(stream, event), event=event)

    def _computed(self, stream: Stream, event: Event) -> None:
        if self._computing.get(stream) is event:
            del self._computing[stream]

    def when_reached(self, stream: Stream, done: Callable[[BaseException | None], object]) -> None:
        """Call `done`, with the device's error if there is one, once `stream` has done its work of now."""
        self._reactor.track(self._device, stream, partial(self._reached, done, self._activity.begin()))

    def _reached(
        self, done: Callable[[BaseException | None], object], period: int, error: BaseException | None
    ) -> None:
        try:
            done(error)
        finally:
            self._ended(period)

    # Storage calls

    def call(self, work: Coroutine[object, object, None], period: int | None = None) -> None:
        """Run a storage call as a task.

        Args:
            work: the call, and what it does with the answer.
            period: of the work that it follows from. Default: the current one.
        """
        period = self._activity.begin(period)
        task = self._tasks.spawn(work)
        self.calls.add(task)
        task.add_done_callback(partial(self._call_done, period))

    def _call_done(self, period: int, task: asyncio.Task[None]) -> None:
        self.calls.discard(task)
        self._ended(period)

    def call_late(self, work: Coroutine[object, object, None]) -> None:
        """Run what waits for a call that outlived its deadline. It may never end: no wait counts it."""
        self._tasks.spawn(work).add_done_callback(lambda _: self.notify())

    # What is in flight, and who waits for it

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
        """Something may have been given back: wake who waits, and begin the backups that lacked room."""
        self.progress.set()
        backups = self._planner.backups
        if (backups.postponed or backups.urgent) and self.failure is None and not self.stopped:
            self.run(backups.retry())

    async def next_progress(self) -> None:
        """Until something ends, or is given back."""
        self.progress.clear()
        await self.progress.wait()

    @property
    def copies(self) -> Collection[CacheOperation]:
        """Copies in flight."""
        return self._engine.in_flight()

    @property
    def left_tasks(self) -> Collection[asyncio.Task[None]]:
        """Tasks that still run though the executor is stopped."""
        return self._tasks.running if self.stopped else ()

    def in_flight(self) -> int:
        """Copies, storage calls and stream callbacks that have not ended."""
        return self._activity.running()

    async def idle(self) -> None:
        """Until nothing is in flight.

        Raises:
            ClosedError: the executor was stopped, and something that is in flight may never end.
        """
        await self._all_ended(None)

    async def settled(self) -> None:
        """Until all has ended that is in flight now, and what follows from it.

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
            ClosedError: the cache is closing, or closed.
        """
        if self.closing:
            raise ClosedError("the cache is closed")

    async def checkpoint(self) -> None:
        """Give other tasks a turn: a cancellation point, also where there is nothing to wait for.

        Raises:
            ClosedError: the cache is closing, or was closed meanwhile.
        """
        await asyncio.sleep(0)
        self.check_open()

    def close(self) -> None:
        """Refuse requests, those that wait for room too; what is in flight goes on."""
        self.closing = True
        self.progress.set()

    def stop(self) -> None:
        """Let nothing follow from what still is in flight; who waits for it gets `ClosedError`."""
        self.stopped = True
        self.progress.set()
