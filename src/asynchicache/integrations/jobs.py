"""What a synchronous host holds of a coroutine that runs on another thread's loop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from enum import Enum
from typing import Generic, TypeVar, cast

T = TypeVar("T")

logger = logging.getLogger(__name__)


class JobState(Enum):
    """How far a job is. All but the first are final."""

    PENDING = "pending"  # waits for its turn, or runs
    DONE = "done"  # has a result
    FAILED = "failed"  # raised
    CANCELLED = "cancelled"  # somebody wanted it to end
    TIMED_OUT = "timed_out"  # its deadline came first
    SHED = "shed"  # never ran: too many bytes were under way


class Job(Generic[T]):
    """One coroutine on a `LoopBridge`. Every method may be called from any thread.

    Attributes:
        tag: what the submitter gave to know it again.
        nbytes: what it counts for in the bridge's byte cap.
        state: how far it is.
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
            cancel: asks whoever runs the job to end it.
            guard: raises where waiting would never end.
            nbytes, tag: see above.
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
        """Whether it has ended, and lets go of everything that it was lent."""
        return self._ended.is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait for `timeout` seconds at most, None for as long as it takes; whether it has ended.

        Raises:
            UsageError: called on the bridge's own loop, which would wait for itself.
            ClosedError: the process was forked, and the job is its parent's.
        """
        if not self._ended.is_set():
            self._guard()
        return self._ended.wait(timeout)

    def result(self, timeout: float | None = None) -> T:
        """What the coroutine returned, or raised.

        Raises:
            TimeoutError: its deadline passed (`done` is true), or it has not ended in `timeout` seconds.
            CancelledError: it was cancelled (`concurrent.futures`).
            CapacityError: it was shed.
            ClosedError: the bridge ended before the job did; or as `wait`.
            UsageError: as `wait`.
        """
        error = self.exception(timeout)
        if error is not None:
            raise error
        return cast("T", self._value)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What `result` would raise; None if it would return.

        Raises:
            TimeoutError: it has not ended in `timeout` seconds.
            UsageError, ClosedError: as `wait`.
        """
        if not self.wait(timeout):
            raise TimeoutError(f"{self!r} has not ended in {timeout} s")
        self._seen = True
        return self._error

    def cancel(self) -> bool:
        """Ask it to end; False if it has ended. It may still end otherwise, if that comes first."""
        if self._ended.is_set():
            return False
        self._cancel(self)
        return True

    def finish(self, state: JobState, value: T | None = None, error: BaseException | None = None) -> None:
        """For the bridge that runs it, once."""
        self._value, self._error = value, error
        self.state = state
        self._ended.set()

    def __del__(self) -> None:
        if self.state is JobState.FAILED and not self._seen:
            logger.error("%r failed, and nobody asked how", self, exc_info=self._error)

    def __repr__(self) -> str:
        tag = "" if self.tag is None else f" {self.tag!r}"
        return f"<Job{tag}: {self.state.value}>"
