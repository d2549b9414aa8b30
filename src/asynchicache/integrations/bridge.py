"""An event loop in its own thread, for engines without one: submit a coroutine, poll for its result.

The adapters of synchronous engines use it. No engine code runs on the loop: finished jobs go to a queue that
the engine polls.

anyio's blocking portal is unsuitable, because storage calls of a job use the engine's memory:
- A portal's future is cancelled at once, while its coroutine still runs. A job ends with its coroutine.
- A cancel scope cancels again in every loop iteration. A coroutine that waits for its storage call to end
  would keep the CPU busy until then. A job's task is cancelled once.
- Leaving a portal waits for its tasks and its thread without a time limit. `close` has one.
"""

from __future__ import annotations

import asyncio
import atexit
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Coroutine
from concurrent.futures import CancelledError
from contextlib import suppress
from dataclasses import dataclass
from enum import Enum
from functools import partial
from typing import Any, Generic, TypeVar, cast

from asynchicache.errors import CapacityError, ClosedError, ConfigError, UsageError

T = TypeVar("T")

logger = logging.getLogger(__name__)

_OBEY_SECONDS = 1.0  # for cancelled coroutines to end, and again for the thread to end
_TIDY_SECONDS = 0.2  # part of the thread's second, for tasks that still run after the loop stopped
_EXIT_SECONDS = 1.0  # for the thread to end, at the exit of a process that did not close its bridge


class JobState(Enum):
    """The state of a job. All but the first are final."""

    PENDING = "pending"  # waiting for bytes, or running
    DONE = "done"  # has a result
    FAILED = "failed"  # raised
    CANCELLED = "cancelled"  # `cancel` was called
    TIMED_OUT = "timed_out"  # its deadline passed
    SHED = "shed"  # never ran: too many bytes were in flight


class Job(Generic[T]):
    """One coroutine on a `LoopBridge`. Every method may be called from any thread.

    Attributes:
        tag: set by the submitter to recognise the job.
        nbytes: bytes that count towards the bridge's limit.
    """

    __slots__ = ("_cancel", "_ended", "_error", "_guard", "_seen", "_value", "nbytes", "state", "tag")

    def __init__(
        self,
        cancel: Callable[[Job[T]], None],
        guard: Callable[[], None],
        *,
        nbytes: int = 0,
        tag: object = None,
    ) -> None:
        """
        Args:
            cancel: asks the bridge to cancel the job.
            guard: raises if waiting would never end.
            nbytes, tag: as the attributes.
        """
        self.tag = tag
        self.nbytes = nbytes
        self.state = JobState.PENDING
        self._cancel = cancel
        self._guard = guard
        self._ended = threading.Event()
        self._value: T | None = None
        self._error: BaseException | None = None
        self._seen = False

    def done(self) -> bool:
        """Return whether the job has ended and no longer uses the engine's memory."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait up to `timeout` seconds (None: no limit); return whether the job has ended.

        Raises:
            UsageError: called on the bridge's own loop, which would deadlock.
            ClosedError: the process was forked, and the job belongs to its parent.
        """
        if not self._ended.is_set():
            self._guard()
        return self._ended.wait(timeout)

    def result(self, timeout: float | None = None) -> T:
        """Return the coroutine's result, or raise its error.

        Raises:
            TimeoutError: the deadline passed (`done` is true), or the job did not end within `timeout` s.
            CancelledError: the job was cancelled (`concurrent.futures`).
            CapacityError: the job was shed.
            ClosedError: the bridge ended before the job did; or as `wait`.
            UsageError: as `wait`.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return cast("T", self._value)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Return the error that `result` would raise; None if it would return.

        Raises:
            TimeoutError: the job did not end within `timeout` seconds.
            UsageError, ClosedError: as `wait`.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"{self!r} has not ended in {timeout} s")
        self._seen = True
        return self._error

    def cancel(self) -> bool:
        """Request cancellation; False if the job has ended. A result returned meanwhile is kept."""
        if self._ended.is_set():
            return False
        self._cancel(self)
        return True

    def finish(self, state: JobState, value: T | None = None, error: BaseException | None = None) -> None:
        """Set the result and wake waiters; called once, by the bridge."""
        self._value, self._error = value, error
        self.state = state
        self._ended.set()

    def __del__(self) -> None:
        if self.state is JobState.FAILED and not self._seen:
            logger.error("%r failed, and its error was never read", self, exc_info=self._error)

    def __repr__(self) -> str:
        tag = "" if self.tag is None else f" {self.tag!r}"
        return f"<Job{tag}: {self.state.value}>"


class ByteGate:
    """Limits the bytes in flight; waiters are admitted in FIFO order.

    An operation larger than the limit runs alone; one of 0 bytes never waits. Confined to its loop.

    Args:
        limit: most bytes in flight; None for no limit.
    """

    def __init__(self, limit: int | None) -> None:
        self._limit = limit
        self._inside = 0
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()

    async def enter(self, nbytes: int) -> None:
        """Wait until `nbytes` fit."""
        if not nbytes or (not self._waiting and self._fits(nbytes)):
            self._inside += nbytes
            return
        turn = asyncio.get_running_loop().create_future()
        self._waiting.append((nbytes, turn))
        try:
            await turn
        except asyncio.CancelledError:
            if not turn.cancelled():  # admitted, but cancelled before it could run
                self.leave(nbytes)
            else:
                self._admit()  # smaller operations may have queued behind this one
            raise

    def leave(self, nbytes: int) -> None:
        self._inside -= nbytes
        self._admit()

    def _admit(self) -> None:
        while self._waiting:
            nbytes, turn = self._waiting[0]
            if not turn.cancelled():
                if not self._fits(nbytes):
                    return
                self._inside += nbytes
                turn.set_result(None)
            self._waiting.popleft()

    def _fits(self, nbytes: int) -> bool:
        return self._limit is None or not self._inside or self._inside + nbytes <= self._limit


@dataclass(slots=True, eq=False)
class _RunningJob:
    """A job and its state on the loop.

    Attributes:
        ending: the job's final state if its coroutine is cancelled; set before the cancellation.
    """

    job: Job[Any]
    coro: Coroutine[Any, Any, Any]
    expires: float | None
    queued: bool
    ending: JobState | None = None
    task: asyncio.Task[Any] | None = None
    timer: asyncio.TimerHandle | None = None


class LoopBridge:
    """One event loop in a daemon thread. Every method may be called from any thread but the loop's own.

    A job ends when its coroutine has ended, even after a deadline or `cancel`; until then the engine must not
    reuse its memory. If a coroutine ignores cancellation, its job does not end until `close` abandons it.

    After a fork the child's bridge is closed, because it has no loop; the parent's continues.
    """

    def __init__(
        self,
        *,
        name: str = "asynchicache-loop",
        max_bytes: int | None = None,
        loop_factory: Callable[[], asyncio.AbstractEventLoop] = asyncio.new_event_loop,
    ) -> None:
        """
        Args:
            name: name of the thread.
            max_bytes: most bytes of running jobs; further jobs wait in FIFO order or are shed. A larger job
                runs alone. None: no limit.
            loop_factory: creates the loop, e.g. `uvloop.new_event_loop`.

        Raises:
            ConfigError: `max_bytes` is not above 0.
        """
        if max_bytes is not None and max_bytes < 1:
            raise ConfigError(f"max_bytes {max_bytes} must be above 0, or None for no limit")
        self._max_bytes = max_bytes
        self._gate = ByteGate(max_bytes)
        self._changed = threading.Condition()
        """Guards the attributes below; notified when a job has ended."""
        self._runs: dict[Job[Any], _RunningJob] = {}
        self._bytes = 0
        self._finished: deque[Job[Any]] = deque()
        self._refusal: str | None = None
        """Why submissions are refused; None while the bridge is open."""
        self._process = os.getpid()
        self._loop = loop_factory()
        self._thread = threading.Thread(target=self._serve, name=name, daemon=True)
        self._thread.start()
        atexit.register(self._exit)

    @property
    def pending(self) -> int:
        """Number of jobs that have not ended."""
        return len(self._runs)

    @property
    def closed(self) -> bool:
        return self._why_closed() is not None

    # Jobs.

    def submit(
        self,
        coro: Coroutine[Any, Any, T],
        *,
        nbytes: int = 0,
        deadline_s: float | None = None,
        tag: object = None,
        wait: bool = True,
        queued: bool = True,
    ) -> Job[T]:
        """Start `coro` on the loop and return at once. If it is refused, `coro` is closed without running.

        Args:
            nbytes: counted towards `max_bytes`; a job of 0 never waits and is never shed.
            deadline_s: seconds from now, including the wait for `max_bytes`, after which the coroutine is
                cancelled and the job ends as timed out; None for no deadline.
            tag: lets the submitter recognise the job.
            wait: above `max_bytes`, wait inside the loop; False: shed the job at once.
            queued: report the job in `finished` when it has ended; False if the caller waits for it.

        Raises:
            ClosedError: the bridge is closed, its loop has died, or the process was forked.
            UsageError: `coro` is not a coroutine, or `nbytes` is below 0.
        """
        if not asyncio.iscoroutine(coro):
            raise UsageError(f"submit takes a coroutine, such as store.get(...), not {coro!r}")
        job: Job[T] = Job(self._request_cancel, self._check_waitable, nbytes=nbytes, tag=tag)
        expires = None if deadline_s is None else time.monotonic() + deadline_s
        run = _RunningJob(job, coro, expires, queued)
        try:
            if nbytes < 0:
                raise UsageError(f"a job of {nbytes} bytes; 0 is the least")
            started = self._enlist(run, wait=wait)
        except (ClosedError, UsageError):
            coro.close()
            raise
        if not started:
            coro.close()
        return job

    def call(self, coro: Coroutine[Any, Any, T], *, nbytes: int = 0, deadline_s: float | None = None) -> T:
        """Run `coro` on the loop and wait for it; if the wait is interrupted, it is cancelled.

        Raises:
            TimeoutError: the deadline passed.
            ClosedError, UsageError: as `submit`, and as `Job.result`.
        """
        job = self.submit(coro, nbytes=nbytes, deadline_s=deadline_s, queued=False)
        try:
            return job.result()
        finally:
            job.cancel()

    def finished(self) -> list[Job[Any]]:
        """Return the jobs that have ended since the last call, in the order of completion; never waits."""
        if self._forked:  # a thread of the parent may have held the lock, which is never released here
            return []
        with self._changed:
            jobs = list(self._finished)
            self._finished.clear()
        return jobs

    def wait_finished(self, timeout_s: float) -> bool:
        """Wait until `finished` has a job to return, or no job is pending; False after `timeout_s` seconds.

        Raises:
            UsageError: called on the bridge's own loop.
        """
        self._check_waitable()
        with self._changed:
            return self._changed.wait_for(lambda: bool(self._finished) or not self._runs, timeout_s)

    # Closing.

    def drain(self, timeout_s: float | None = None) -> bool:
        """Wait until no job is pending; False after `timeout_s` seconds.

        Raises:
            UsageError: called on the bridge's own loop.
        """
        self._check_waitable()
        with self._changed:
            return self._changed.wait_for(lambda: not self._runs, timeout_s)

    def close(self, timeout_s: float = 10.0) -> bool:
        """Refuse new jobs, wait for the pending ones, cancel the rest, and end the thread.

        `finished` still returns jobs that ended. Idempotent.

        Args:
            timeout_s: seconds for jobs to end by themselves; cancelled jobs get 1 s more.

        Returns:
            False if a job or the thread did not end. Such a job fails with `ClosedError`, and its coroutine
            may still use the engine's memory.

        Raises:
            UsageError: called on the bridge's own loop.
        """
        if self._forked:
            return True
        if threading.current_thread() is self._thread:
            raise UsageError("a bridge cannot be closed from its own loop: it would wait for itself")
        with self._changed:
            self._refusal = self._refusal or "the bridge is closed"
        if not self.drain(timeout_s):
            self._cancel_all()
            self.drain(_OBEY_SECONDS)
        return self._stop(_OBEY_SECONDS)

    def _cancel_all(self) -> None:
        with self._changed:
            jobs = list(self._runs)
        for job in jobs:
            job.cancel()

    def _stop(self, timeout_s: float) -> bool:
        """Stop the loop and the thread; return whether every job and the thread ended."""
        clean = not self._runs
        with suppress(RuntimeError):  # closed already
            self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(timeout_s)
        if self._thread.is_alive():  # blocked by a coroutine
            self._abandon("the bridge was closed while its loop was blocked")
        atexit.unregister(self._exit)
        return clean and not self._thread.is_alive()

    def _exit(self) -> None:
        """At interpreter exit: no daemon thread may run while the interpreter is torn down."""
        if not self._forked:
            self._refusal = self._refusal or "the interpreter is shutting down"
            self._stop(_EXIT_SECONDS)

    # Any thread.

    @property
    def _forked(self) -> bool:
        return os.getpid() != self._process

    def _why_closed(self) -> str | None:
        if self._forked:
            return "the bridge belongs to the parent of this process; make one after the fork"
        return self._refusal

    def _check_open(self) -> None:
        refusal = self._why_closed()
        if refusal is not None:
            raise ClosedError(f"{refusal}; nothing can be submitted")

    def _check_waitable(self) -> None:
        if self._forked:
            raise ClosedError("the job is one of the parent of this process; it never ends here")
        if threading.current_thread() is self._thread:
            raise UsageError("waiting on the bridge's own loop would wait for itself; await instead")

    def _enlist(self, run: _RunningJob, *, wait: bool) -> bool:
        """Register a job and schedule its start; False if it was shed."""
        self._check_open()  # before the lock, which a fork may have left locked
        with self._changed:
            self._check_open()
            over = self._max_bytes is not None and self._bytes + run.job.nbytes > self._max_bytes
            if over and run.job.nbytes and self._bytes and not wait:
                text = f"{run.job.nbytes} bytes more than {self._bytes} of {self._max_bytes} in flight"
                self._tell(run, JobState.SHED, error=CapacityError(text))
                return False
            self._runs[run.job] = run
            self._bytes += run.job.nbytes
            self._loop.call_soon_threadsafe(self._start, run)
        return True

    def _request_cancel(self, job: Job[Any]) -> None:
        if self._forked:
            return
        with suppress(RuntimeError):  # the loop is closed, so the job has ended
            self._loop.call_soon_threadsafe(self._end_early, job, JobState.CANCELLED)

    def _tell(
        self, run: _RunningJob, state: JobState, value: object = None, error: BaseException | None = None
    ) -> None:
        """Report a job's end to its submitter. The caller holds the lock."""
        if run.queued:  # before `finish`, so that a job that is done is already in the queue
            self._finished.append(run.job)
        run.job.finish(state, value, error)

    def _end(
        self, run: _RunningJob, state: JobState, value: object = None, error: BaseException | None = None
    ) -> None:
        """Record that a job has ended; a no-op if it ended before."""
        with self._changed:
            if self._runs.pop(run.job, None) is not None:
                self._bytes -= run.job.nbytes
                self._tell(run, state, value, error)
                self._changed.notify_all()

    def _abandon(self, why: str) -> None:
        """Fail every pending job: the loop will not end them."""
        with self._changed:
            self._refusal = self._refusal or why
            left = list(self._runs.values())
        for run in left:
            self._end(run, JobState.FAILED, error=ClosedError(f"{why}; {run.job!r} did not end"))

    # The loop's thread.

    def _serve(self) -> None:
        """Run the loop. When it ends, for any reason, pending jobs fail, so no submitter waits forever."""
        why = "the loop of the bridge was stopped"
        try:
            asyncio.set_event_loop(self._loop)
            self._loop.run_forever()
        except BaseException as error:
            logger.exception("the loop of the bridge died")
            why = f"the loop of the bridge died: {error!r}"
        finally:
            with self._changed:
                self._refusal = self._refusal or why
            self._tidy()
            self._abandon(self._refusal)

    def _tidy(self) -> None:
        """Cancel remaining tasks, wait for them briefly, and close the loop."""
        try:
            self._loop.run_until_complete(asyncio.sleep(0))  # lets the latest submissions start
            left = asyncio.all_tasks(self._loop)
            for task in left:
                task.cancel()
            if left:
                self._loop.run_until_complete(asyncio.wait(left, timeout=_TIDY_SECONDS))
            self._loop.run_until_complete(self._loop.shutdown_asyncgens())
        except RuntimeError as error:  # the loop was stopped again meanwhile
            logger.warning("the loop of the bridge did not end tidily: %s", error)
        finally:
            self._loop.close()

    def _start(self, run: _RunningJob) -> None:
        run.task = self._loop.create_task(self._admitted(run))
        run.task.add_done_callback(partial(self._ended, run))
        if run.expires is not None:
            delay = max(0.0, run.expires - time.monotonic())
            run.timer = self._loop.call_later(delay, self._end_early, run.job, JobState.TIMED_OUT)

    def _end_early(self, job: Job[Any], ending: JobState) -> None:
        run = self._runs.get(job)
        if run is not None and run.task is not None and run.ending is None:
            run.ending = ending
            run.task.cancel()

    async def _admitted(self, run: _RunningJob) -> object:
        await self._gate.enter(run.job.nbytes)
        try:
            return await run.coro
        except (KeyboardInterrupt, SystemExit) as error:
            raise UsageError(f"{run.job!r} raised {error!r}, which would end the loop") from error
        finally:
            self._gate.leave(run.job.nbytes)

    def _ended(self, run: _RunningJob, task: asyncio.Task[object]) -> None:
        """Report the result of a coroutine, which may never have started."""
        run.coro.close()
        if run.timer is not None:
            run.timer.cancel()
        if task.cancelled():
            self._end(run, *_cancelled(run))
        elif (error := task.exception()) is not None:
            self._end(run, JobState.FAILED, error=error)
        else:
            self._end(run, JobState.DONE, task.result())

    def __repr__(self) -> str:
        state = self._why_closed() or "open"
        return f"<LoopBridge {self._thread.name}: {self.pending} jobs, {self._bytes} bytes, {state}>"


def _cancelled(run: _RunningJob) -> tuple[JobState, None, BaseException]:
    if run.ending is JobState.TIMED_OUT:
        return JobState.TIMED_OUT, None, TimeoutError(f"{run.job!r} did not end by its deadline")
    return JobState.CANCELLED, None, CancelledError(f"{run.job!r} was cancelled")
