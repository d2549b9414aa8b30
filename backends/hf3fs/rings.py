"""One worker of the USRBIO path: shared memory, a ring in each direction, and the I/Os in flight."""

from __future__ import annotations

import errno
import logging
import os
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from typing import Any, NamedTuple

from asynchicache.failure_log import FailureLog

logger = logging.getLogger(__name__)


class RingIo(NamedTuple):
    """One I/O of `size` bytes, between offset `start` of the shared memory and `offset` of the file."""

    start: int
    size: int
    offset: int


class RingWorker:
    """Runs I/Os. Only one thread at a time may use it.

    Results arrive in any order. An I/O is identified by its memory offset (`base_off`), because `userdata`
    is unsafe: its reference is counted without the interpreter's lock.

    Args:
        usrbio: the module `hf3fs_fuse.io`.
        mount: the 3FS mount point.
        entries: I/Os that a ring holds.
        memory: the caller's memory, which must outlive the worker; None to allocate some.
        size: bytes to allocate if `memory` is not given.

    Raises:
        OSError: /dev/shm is full, or 3FS refuses the memory or a ring.
    """

    def __init__(
        self, usrbio: Any, mount: str, entries: int, *, memory: SharedMemory | None, size: int
    ) -> None:
        self._entries = entries
        self._owned = memory is None
        self._shared = SharedMemory(create=True, size=size) if memory is None else memory
        self._waiting: set[int] = set()
        self._failures = FailureLog(logger)
        try:
            if self._owned:
                _reserve(self._shared)
            self._iovec = usrbio.make_iovec(self._shared, mount)
            self._rings = {reading: usrbio.make_ioring(mount, entries, reading) for reading in (True, False)}
        except BaseException:
            self.close()
            raise
        finally:
            if self._owned:
                self._shared.unlink()  # 3FS has opened it, so the name is no longer needed
        self._ring = self._rings[True]

    @property
    def memory(self) -> memoryview:
        buffer = self._shared.buf
        if buffer is None:
            raise OSError(errno.EBADF, "the ring's memory is closed")
        return buffer

    @property
    def in_flight(self) -> int:
        """I/Os that may still touch the memory."""
        return len(self._waiting)

    def run(
        self,
        reading: bool,
        descriptor: int,
        pieces: Sequence[RingIo],
        now: Callable[[], float],
        seconds: float,
    ) -> dict[int, int]:
        """Run I/Os until they end or time out.

        Args:
            reading: whether to read from the file or write to it.
            descriptor: registered with USRBIO.
            pieces: the I/Os, with distinct `start`.
            now: monotonic clock, in seconds.
            seconds: time limit.

        Returns:
            By `start`: bytes moved or a negative errno. I/Os that are still in flight are missing.
        """
        self._ring = self._rings[reading]
        results: dict[int, int] = {}
        queue = deque(pieces)
        end = now() + seconds
        while queue:
            self._prepare(reading, descriptor, queue, results)
            self._submit()
            self._collect(results, now, end)
            if self._waiting:
                break
        results.update((piece.start, -errno.ECANCELED) for piece in queue)  # never prepared
        return results

    def await_late(
        self, seconds: float, now: Callable[[], float], pause: Callable[[float], object]
    ) -> dict[int, int]:
        """Wait once more for the I/Os in flight."""
        results: dict[int, int] = {}
        end = now() + seconds
        self._collect(results, now, end)
        if not results and now() < end:  # the ring no longer waits
            pause(end - now())
        return results

    def reap(self) -> None:
        """Collect available results without waiting."""
        self._take(max_results=self._entries, min_results=0, timeout=timedelta(0))

    def close(self) -> None:
        """Close the rings, then the memory unless the caller owns it. No I/O may be in flight."""
        self._rings = {}
        self._ring = self._iovec = None
        if self._owned:
            self._shared.close()

    def _prepare(self, reading: bool, descriptor: int, queue: deque[RingIo], results: dict[int, int]) -> None:
        """Queue I/Os until the ring is full. Refused I/Os get their result immediately."""
        while queue and len(self._waiting) < self._entries:
            piece = queue[0]
            view = self._iovec[piece.start : piece.start + piece.size]
            try:
                self._ring.prepare(view, reading, descriptor, piece.offset)
            except OSError as error:
                if error.errno == errno.EAGAIN and self._waiting:
                    return  # the ring is full; the caller queues the rest later
                results[piece.start] = -(error.errno or errno.EIO)
            else:
                self._waiting.add(piece.start)
            queue.popleft()

    def _submit(self) -> None:
        try:
            self._ring.submit()
        except OSError as error:  # the I/Os may run anyway
            self._failures.warning("submit", "USRBIO submit: %s", error)

    def _collect(self, results: dict[int, int], now: Callable[[], float], end: float) -> None:
        """Collect results until all have arrived or time is up (a wait without results means time is up)."""
        while self._waiting:
            left = max(end - now(), 0.0)  # a late thread still takes available results
            found = self._take(min_results=len(self._waiting), timeout=timedelta(seconds=left))
            if not found:
                return
            results |= found

    def _take(self, **how: Any) -> dict[int, int]:
        try:
            done = self._ring.wait(**how)
        except OSError as error:
            self._failures.warning("wait", "USRBIO wait: %s", error)
            return {}
        found = {view.base_off: view.result for view in done if view.base_off in self._waiting}
        self._waiting -= found.keys()
        return found


def _reserve(memory: SharedMemory) -> None:
    """Allocate the space now. If /dev/shm were full, the first access to a page would kill the process."""
    with Path("/dev/shm", memory.name).open("r+b") as file:  # noqa: S108 - where 3FS looks for it
        os.posix_fallocate(file.fileno(), 0, memory.size)
