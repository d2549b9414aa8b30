"""Requests that wait for device slots: which is next, and which gives way in a deadlock."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TypeVar

from asynchicache.controller.executor import Executor
from asynchicache.errors import CapacityError, RequestStateError
from asynchicache.histograms import Histogram
from asynchicache.planner.planner import Planner
from asynchicache.planner.request_state import RequestState
from asynchicache.planner.room_queue import RoomQueue, Waiter

T = TypeVar("T")

_FEWER = "admit fewer requests, or raise the device slots"


class Admission:
    """Gives requests device slots, in the order of `RoomQueue`.

    Attributes:
        waits: durations of `admit` and `reserve`, in seconds.
    """

    def __init__(self, planner: Planner, executor: Executor) -> None:
        self.waits = Histogram()
        self._planner = planner
        self._executor = executor
        self._queue = RoomQueue()

    def is_waited_for(self) -> bool:
        """Whether requests wait for room."""
        return bool(self._queue)

    def extend(self, request: RequestState, tokens: int) -> dict[str, list[int]]:
        """Allocate room for `tokens` more tokens, without waiting.

        Raises:
            CapacityError: there is no room, or the request has not begun to compute and others wait.
        """
        if self._queue.blocks(request) and self._planner.new_pages(request, tokens):
            raise CapacityError("others wait for room: wait behind them (reserve)")
        try:
            return self._extend(request, tokens)
        except CapacityError as error:
            raise CapacityError(f"{error}: wait for them (reserve), {_FEWER}") from None

    def _extend(self, request: RequestState, tokens: int) -> dict[str, list[int]]:
        before = len(request.pages)
        slots = self._planner.extend(request, tokens)
        if len(request.pages) > before:  # not at each token of a decode
            self._executor.run(self._planner.backups.clean())
        return slots

    async def admit(self, request: RequestState) -> None:
        """Wait until there is room on the device for `load`."""
        await self._timed(self._when_possible(request, partial(self._admit, request)))

    def _admit(self, request: RequestState) -> None:
        # After a failure of the device, `load` serves nothing, and the match may not be in the tree any more.
        if self._executor.failure is None:
            self._planner.admit(request)

    async def reserve(self, request: RequestState, tokens: int) -> dict[str, list[int]]:
        """Extend a request; wait until there is room."""
        return await self._timed(self._when_possible(request, partial(self._extend, request, tokens)))

    async def _timed(self, waiting: Coroutine[object, object, T]) -> T:
        clock = asyncio.get_running_loop().time
        started = clock()
        try:
            return await waiting
        finally:
            self.waits.observe(clock() - started)

    async def _when_possible(self, request: RequestState, attempt: Callable[[], T]) -> T:
        """Try when the request is next, and again whenever something was freed."""
        waiter = self._queue.enter(request)
        progress = self._executor.progress
        progress.set()  # this may complete a deadlock: the next in the queue checks
        try:
            while True:
                progress.clear()  # before the attempt, so that slots freed during it are seen
                self._check_waiting(request)
                served = self._attempt(waiter, attempt)
                if served is not None:
                    return served[0]
                await progress.wait()
        finally:
            self._queue.leave(waiter)
            self._match_again(waiter)
            progress.set()  # the next in the queue: nobody else wakes it if this one was cancelled

    def _check_waiting(self, request: RequestState) -> None:
        if request.closed:
            raise RequestStateError("the request was closed while it waited for room")
        self._executor.check_open()

    def _match_again(self, waiter: Waiter) -> None:
        """Match again for a request whose match was released while it waited."""
        if waiter.rested and waiter.request.resting and not waiter.request.closed:
            self._planner.rematch(waiter.request, prefetched=False)

    def _attempt(self, waiter: Waiter, attempt: Callable[[], T]) -> tuple[T] | None:
        """The result of `attempt` in a tuple, or None to keep waiting.

        Raises:
            CapacityError: nothing in flight or held by other requests will free room, or the request must
                give way.
        """
        if not (self._queue.is_next(waiter) or waiter.refused):
            return None
        if waiter.refused and not waiter.begun:
            raise CapacityError(
                "all requests that hold slots wait for room, and this one came last; one that waits in "
                "admit(), before load(), holds none"
            )
        try:
            self._match_again(waiter)
            return (attempt(),)
        except CapacityError as error:
            if waiter.refused or self._executor.failure is not None or self._nothing_follows(waiter):
                raise CapacityError(f"{error}; {self._cure(waiter.request)}") from None
            return None

    def _cure(self, request: RequestState) -> str:
        """What the caller of a wait that leads nowhere can do."""
        others = [one for one in self._planner.inventory.requests if one is not request and not one.resting]
        if not others:
            return "raise the device slots, or make the prompt shorter"
        return (
            f"all requests that hold slots wait for room: suspend this one, and load it again later, {_FEWER}"
        )

    def _nothing_follows(self, waiter: Waiter) -> bool:
        """Whether waiting is useless for `waiter`, which is next and found no room.

        If all requests that hold slots wait for each other, those that have not loaded yet release their
        match. If there are none of these, the last waiter gives way.
        """
        # Who keeps a path, as `durable` does, waits for storage, not for room: it ends, and says so.
        kept = self._executor.in_flight() or self._planner.inventory.keepers
        if kept or not self._queue.all_wait(self._planner.inventory.requests):
            return False
        # First those who lose least: a match can be made again, computed pages cannot.
        others = [one for one in self._queue.holding() if one is not waiter]
        for other in others:
            self._planner.rest(other.request)
            other.rested = True
        last = self._queue.last()
        if not others and last is waiter:
            return True
        if not others:
            last.refused = True
        self._executor.progress.set()
        return False
