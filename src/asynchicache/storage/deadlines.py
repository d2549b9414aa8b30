"""Call backend code with a deadline, turn its failures into `StorageError`, and limit its concurrency."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from typing import TypeVar

from asynchicache.errors import CacheError, StorageError
from asynchicache.openings import AsyncClosable

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RAISED_AS_IS = (Exception, KeyboardInterrupt, SystemExit)
"""Exceptions to re-raise unchanged: errors, and those that end the program, because a signal handler may
raise one while backend code runs."""

GRACE_SECONDS = 1.0
"""How long to wait for a cancelled call to end before abandoning it."""


async def with_deadline(
    call: Coroutine[object, object, T],
    seconds: float,
    what: str,
    *,
    on_unwanted: Callable[[T], Awaitable[None]] | None = None,
) -> T:
    """Await `call` for at most `seconds`, and return its result or raise its error.

    `asyncio.timeout` would wait forever for a call that ignores its cancellation.

    Args:
        seconds: the deadline; the call is then cancelled, and abandoned after `GRACE_SECONDS`.
        what: describes the call in messages.
        on_unwanted: called with the result of an abandoned call, e.g. to close it.

    Raises:
        StorageError: the call missed its deadline, cancelled itself, or raised something that is not an
            `Exception`.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise StorageError(f"{what} took longer than {seconds:g} s")
    except BaseException:  # also if this task is cancelled, even when the call has just ended
        task.cancel()
        end = asyncio.ensure_future(_drop_result(task, on_unwanted))
        await asyncio.wait([end], timeout=GRACE_SECONDS)
        raise
    if task.cancelled():
        raise StorageError(f"{what} cancelled itself")
    error = task.exception()
    if error is None or isinstance(error, _RAISED_AS_IS):
        return task.result()
    raise StorageError(f"{what} failed: {error!r}") from error


def failure(task: asyncio.Task[T]) -> BaseException | None:
    """The exception of a finished call, or None; a cancellation counts as a failure.

    It may be any `BaseException`: PyO3, for example, raises a Rust panic as one.
    """
    return asyncio.CancelledError("it cancelled itself") if task.cancelled() else task.exception()


@contextmanager
def as_storage_error(what: str) -> Iterator[None]:
    """Turn exceptions of backend code in the body into `StorageError`; a `CacheError` passes unchanged.

    Raises:
        StorageError: the body raised any other `Exception`.
    """
    try:
        yield
    except CacheError:
        raise
    except Exception as error:
        raise StorageError(f"{what} failed: {error!r}") from error


async def close(closable: AsyncClosable, seconds: float, what: str) -> None:
    """Close `closable` within `seconds`. A failure is logged, not raised, so that closing continues."""
    try:
        await with_deadline(closable.aclose(), seconds, f"closing {what}")
    except Exception as error:  # noqa: BLE001 - the boundary to backend code
        logger.warning("%s could not be closed: %r", what, error)


def run_immediate(call: Awaitable[T]) -> T:
    """Run `call` to its end without yielding to the event loop, and return its result or raise its error.

    Raises:
        StorageError: the call suspended although its engine is `immediate` (the call is then closed), or it
            raised something that is not an `Exception`. A `CancelledError` is one of these: this function
            never suspends, so only the call itself can have raised it.
    """
    steps = call.__await__()
    try:
        next(steps)
    except StopIteration as end:
        value: T = end.value
        return value
    except BaseException as error:
        if not isinstance(error, _RAISED_AS_IS):
            raise StorageError(f"the engine raised {error!r}") from error
        raise
    if isinstance(call, Coroutine):
        call.close()
    raise StorageError("the engine is `immediate`, and a call of it suspended")


def joined(late: Sequence[asyncio.Future[None]]) -> asyncio.Future[None] | None:
    """One future for calls past their deadline: done when all have ended, and cancelled if one was, so that
    its end will never be known. None if there are none."""
    return asyncio.ensure_future(_all_ended(late)) if late else None


async def _all_ended(calls: Sequence[asyncio.Future[None]]) -> None:
    await asyncio.wait(calls)
    if any(call.cancelled() for call in calls):
        raise asyncio.CancelledError


async def _drop_result(task: asyncio.Task[T], on_unwanted: Callable[[T], Awaitable[None]] | None) -> None:
    """Wait for an abandoned call, ignore its error, and pass its result to `on_unwanted`."""
    await asyncio.wait([task])
    if not task.cancelled() and task.exception() is None and on_unwanted is not None:
        await on_unwanted(task.result())


# Concurrency limit: first come, first served.


class SlidingDeadline:
    """The time that the batches of one call may wait for a permit, counted from the last answered batch.

    It slides so that a call of many batches does not time out on an engine that serves them one by one.

    Args:
        seconds: how long to wait; None for no limit.
    """

    __slots__ = ("_loop", "_seconds", "_timeouts", "_until")

    def __init__(self, seconds: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._timeouts: dict[asyncio.Timeout, None] = {}  # in the order they began
        self.renew()

    def renew(self) -> None:
        """Restart the deadline: a batch was answered."""
        self._until = None if self._seconds is None else self._loop.time() + self._seconds
        for wait in self._timeouts:
            if not wait.expired():
                wait.reschedule(self._until)

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """Run the body until the deadline, which may slide meanwhile.

        Raises:
            TimeoutError: the deadline passed first.
        """
        async with asyncio.timeout_at(self._until) as wait:
            self._timeouts[wait] = None
            try:
                yield
            finally:
                del self._timeouts[wait]


class ConcurrencyLimit:
    """Limits concurrent calls to one engine.

    Args:
        concurrency: most calls at once.
    """

    def __init__(self, concurrency: int) -> None:
        self._all = asyncio.Semaphore(concurrency)
        # No request waits for puts, and a GiB of them may queue: they leave one permit to reads, and only the
        # next of them stands in the line for the others.
        self._puts = asyncio.Semaphore(max(1, concurrency - 1))
        self._next_put = asyncio.Semaphore(1)

    async def acquire(self, deadline: SlidingDeadline, *, put: bool) -> ExitStack:
        """Wait for a permit; closing the returned stack releases it, and closing twice is harmless.

        Args:
            deadline: how long to wait.
            put: whether the call is a put, which must leave one permit to other calls.

        Raises:
            TimeoutError: the deadline passed first.
        """
        with ExitStack() as acquired, ExitStack() as waiting:
            if put:
                await self._take(self._puts, deadline, acquired)
                await self._take(self._next_put, deadline, waiting)
            await self._take(self._all, deadline, acquired)
            return acquired.pop_all()

    @staticmethod
    async def _take(permits: asyncio.Semaphore, deadline: SlidingDeadline, acquired: ExitStack) -> None:
        async with deadline.waiting() if permits.locked() else nullcontext():
            await permits.acquire()
        acquired.callback(permits.release)
