"""One worker of the USRBIO path: shared memory, a ring in each direction, and what is under way in them."""

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

logger = logging.getLogger(__name__)


class RingIo(NamedTuple):
    """One I/O: `size` bytes between `start` of the shared memory and `offset` of the file."""

    start: int
    size: int
    offset: int


class RingWorker:
    """Used by one thread at a time.

    An I/O is known by where its bytes lie in memory (`base_off`): results come in any order, and
    `userdata` is not safe to use (its reference is counted without the interpreter's lock).

    Args:
        usrbio: the module `hf3fs_fuse.io`.
        mount: of 3FS.
        entries: I/Os that a ring holds.
        memory: the caller's, if given; it must outlive the worker.
        size: bytes of the worker's own memory, without the caller's.

    Raises:
        OSError: there is no room in /dev/shm, or 3FS refuses the memory or a ring.
    """

    def __init__(
        self, usrbio: Any, mount: str, entries: int, *, memory: SharedMemory | None, size: int
    ) -> None:
        self._entries = entries
        self._owned = memory is None
        self._shared = SharedMemory(create=True, size=size) if memory is None else memory
        self._waiting: set[int] = set()
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
                self._shared.unlink()  # 3FS has it open by now; nobody else needs its name
        self._ring = self._rings[True]

    @property
    def memory(self) -> memoryview:
        buffer = self._shared.buf
        if buffer is None:
            raise OSError(errno.EBADF, "the ring's memory is closed")
        return buffer

    @property
    def under_way(self) -> int:
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
        """Do I/Os.

        Args:
            reading: from the file, or to it.
            descriptor: registered with USRBIO.
            pieces: each at a `start` of its own.
            now: seconds on a clock that never goes back.
            seconds: how long they may take.

        Returns:
            Bytes moved, or a negative errno, by `start`; those of I/Os that are under way are missing.
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
        """Wait once more for what is under way."""
        results: dict[int, int] = {}
        end = now() + seconds
        self._collect(results, now, end)
        if not results and now() < end:  # the ring does not wait any more
            pause(end - now())
        return results

    def reap(self) -> None:
        """Take the results that have come meanwhile."""
        self._take(max_results=self._entries, min_results=0, timeout=timedelta(0))

    def close(self) -> None:
        """Let go of rings, then of memory, unless it is the caller's. Nothing may be under way."""
        self._rings = {}
        self._ring = self._iovec = None
        if self._owned:
            self._shared.close()

    def _prepare(self, reading: bool, descriptor: int, queue: deque[RingIo], results: dict[int, int]) -> None:
        """Queue as many as the ring takes. What is refused gets its result at once."""
        while queue and len(self._waiting) < self._entries:
            piece = queue[0]
            view = self._iovec[piece.start : piece.start + piece.size]
            try:
                self._ring.prepare(view, reading, descriptor, piece.offset)
            except OSError as error:
                if error.errno == errno.EAGAIN and self._waiting:
                    return  # the ring is full: the rest comes after these
                results[piece.start] = -(error.errno or errno.EIO)
            else:
                self._waiting.add(piece.start)
            queue.popleft()

    def _submit(self) -> None:
        try:
            self._ring.submit()
        except OSError as error:  # they may run all the same
            logger.warning("USRBIO submit: %s", error)

    def _collect(self, results: dict[int, int], now: Callable[[], float], end: float) -> None:
        """Results until all are there, or time is up, which a call that brings none says as well."""
        while self._waiting:
            left = max(end - now(), 0.0)  # a thread that comes late still takes what is there
            found = self._take(min_results=len(self._waiting), timeout=timedelta(seconds=left))
            if not found:
                return
            results |= found

    def _take(self, **how: Any) -> dict[int, int]:
        try:
            done = self._ring.wait(**how)
        except OSError as error:
            logger.warning("USRBIO wait: %s", error)
            return {}
        found = {view.base_off: view.result for view in done if view.base_off in self._waiting}
        self._waiting -= found.keys()
        return found


def _reserve(memory: SharedMemory) -> None:
    """Take the room now: where /dev/shm is full, the first touch of a page would kill the process."""
    with Path("/dev/shm", memory.name).open("r+b") as file:  # noqa: S108 - where 3FS looks for it
        os.posix_fallocate(file.fileno(), 0, memory.size)
