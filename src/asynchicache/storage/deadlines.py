"""How the core awaits what it has not written: for so long, whatever it does, and with one kind of error;
and whose turn it is to call an engine.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, contextmanager, nullcontext
from typing import Protocol, TypeVar

from asynchicache.errors import CacheError, StorageError

logger = logging.getLogger(__name__)

T = TypeVar("T")

_RAISED_AS_IS = (Exception, KeyboardInterrupt, SystemExit)
"""What is raised on as it is: errors, and what ends the program, because a signal's handler may have raised
it while a stranger's code ran."""

GRACE_SECONDS = 1.0
"""How long a call that was cancelled may take to end, before nobody waits for it any more."""


class Closable(Protocol):
    """A backend, or an engine of one."""

    async def aclose(self) -> None: ...


async def with_deadline(
    call: Coroutine[object, object, T],
    seconds: float,
    what: str,
    *,
    on_unwanted: Callable[[T], Awaitable[None]] | None = None,
) -> T:
    """What `call` returns, or raises.

    `asyncio.timeout` would wait for ever for a call that does not end when it is cancelled.

    Args:
        call: code of others.
        seconds: how long it may take; then it is cancelled, and left alone after a grace.
        what: it does, for messages.
        on_unwanted: gets what `call` returned when nobody waited for it any more, e.g. to close it.

    Raises:
        StorageError: it took longer, cancelled itself, or raised what is no `Exception`.
    """
    task = asyncio.ensure_future(call)
    try:
        await asyncio.wait([task], timeout=seconds)
        if not task.done():
            raise StorageError(f"{what} took longer than {seconds:g} s")
    except BaseException:  # also if we are cancelled, even when the call has just ended
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
    """What a call that has ended raised, or None; that it was cancelled is a failure too.

    Not only an `Exception`: a panic in Rust, for one, is a `BaseException` in Python (PyO3).
    """
    return asyncio.CancelledError("it cancelled itself") if task.cancelled() else task.exception()


@contextmanager
def as_storage_error(what: str) -> Iterator[None]:
    """Let whatever code of others raises in the body say what failed; errors of ours stay what they are.

    Raises:
        StorageError: it raised something else.
    """
    try:
        yield
    except CacheError:
        raise
    except Exception as error:
        raise StorageError(f"{what} failed: {error!r}") from error


async def close(closable: Closable, seconds: float, what: str) -> None:
    """Close something within `seconds`; if that fails it is logged, and does not keep us open."""
    try:
        await with_deadline(closable.aclose(), seconds, f"closing {what}")
    except Exception as error:  # noqa: BLE001 - the boundary to code of others
        logger.warning("%s could not be closed: %r", what, error)


def run_immediate(call: Awaitable[T]) -> T:
    """What `call` returns, or raises, without a turn of the loop.

    Raises:
        StorageError: it suspended, though its engine says that calls are `immediate`; it was closed. Or it
            raised what is no `Exception`; a cancellation is its own, because nothing was waited for.
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


async def _drop_result(task: asyncio.Task[T], on_unwanted: Callable[[T], Awaitable[None]] | None) -> None:
    """What became of a call that was given up is no news; what it returns is to be let go of."""
    await asyncio.wait([task])
    if not task.cancelled() and task.exception() is None and on_unwanted is not None:
        await on_unwanted(task.result())


# Whose turn it is: so many calls at once, first come, first served.


class SlidingDeadline:
    """How long the parts of one call wait for their turns: since it began, or since one was answered.

    So a call of many parts is not cut short by an engine that does one after the other.

    Args:
        seconds: how long; None for as long as it takes.
    """

    __slots__ = ("_loop", "_seconds", "_timeouts", "_until")

    def __init__(self, seconds: float | None) -> None:
        self._loop = asyncio.get_running_loop()
        self._seconds = seconds
        self._timeouts: set[asyncio.Timeout] = set()
        self.renew()

    def renew(self) -> None:
        """A part was answered."""
        self._until = None if self._seconds is None else self._loop.time() + self._seconds
        for wait in self._timeouts:
            if not wait.expired():
                wait.reschedule(self._until)

    @asynccontextmanager
    async def waiting(self) -> AsyncIterator[None]:
        """
        Raises:
            TimeoutError: what is waited for in the body takes longer.
        """
        async with asyncio.timeout_at(self._until) as wait:
            self._timeouts.add(wait)
            try:
                yield
            finally:
                self._timeouts.discard(wait)


class ConcurrencyLimit:
    """Most calls at once of one engine.

    Args:
        concurrency: how many.
    """

    def __init__(self, concurrency: int) -> None:
        self._all = asyncio.Semaphore(concurrency)
        # Nobody waits for puts, and there may be a GiB of them: they leave a turn to what is waited for.
        self._puts = asyncio.Semaphore(max(1, concurrency - 1))

    async def acquire(self, deadline: SlidingDeadline, *, put: bool) -> ExitStack:
        """Wait for a turn; it ends when what is returned is closed, which may happen twice.

        Args:
            deadline: how long.
            put: nobody waits for the call, a put or a touch.

        Raises:
            TimeoutError: patience has come to its end first.
        """
        with ExitStack() as acquired:
            for permits in (self._puts, self._all) if put else (self._all,):
                async with deadline.waiting() if permits.locked() else nullcontext():
                    await permits.acquire()
                acquired.callback(permits.release)
            return acquired.pop_all()
