"""Move frames through 3FS's USRBIO rings, bypassing the kernel: 3FS reads and writes shared memory itself.

Written to the documented interface of `hf3fs_fuse.io`
(https://github.com/deepseek-ai/3FS/blob/main/src/lib/api/UsrbIo.md). These of its rules matter here: results
arrive in order of completion; an I/O may run before it is submitted; after a time-out `wait` returns fewer
results, and the missing I/Os still complete later, in the same memory.
"""

from __future__ import annotations

import errno
import importlib
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from multiprocessing.shared_memory import SharedMemory
from typing import Any, Protocol, runtime_checkable

from asynchicache.backends.hf3fs.datafile import DataFile, Frame
from asynchicache.backends.hf3fs.options import Hf3fsOptions
from asynchicache.backends.hf3fs.rings import RingIo, RingWorker
from asynchicache.errors import StorageError
from asynchicache.failure_log import FailureLog
from asynchicache.storage.protocol import PoolBinding
from asynchicache.types import Outcome

logger = logging.getLogger(__name__)

_QUARANTINED_A_WORKER = 2


def load_usrbio() -> Any:
    """Import the module `hf3fs_fuse.io`.

    Raises:
        StorageError: the module is not installed.
    """
    try:
        return importlib.import_module("hf3fs_fuse.io")
    except ImportError as error:
        raise StorageError(
            f"storage 'hf3fs' with io='usrbio' needs hf3fs_fuse, which is built with 3FS ({error}); "
            "io='posix' works on the FUSE mount without it"
        ) from error


@runtime_checkable
class SharedSlots(Protocol):
    """A binding whose slots lie in one shared memory, so that 3FS can move them zero-copy."""

    @property
    def shared_memory(self) -> SharedMemory: ...

    def header_offset(self, slot: int) -> int:
        """Byte offset of the slot's header in the memory."""
        ...

    def page_offset(self, slot: int) -> int:
        """Byte offset of the slot's page in the memory."""
        ...


class UsrbioPath:
    """A `DataPath` on rings: one ring in each direction per concurrent batch.

    By default each worker copies frames through its own shared memory. A worker whose I/Os miss their
    deadline is quarantined with its memory and rings until they end. With `zero_copy`, 3FS moves the slots
    themselves; late I/Os then still use the slots, so the call continues until they end or the path is
    stopped.

    Args:
        usrbio: the module `hf3fs_fuse.io`.
        file: closed together with the path.
        now: monotonic clock, in seconds.

    Raises:
        StorageError: the file is not on 3FS, or 3FS refuses the memory.
    """

    def __init__(
        self,
        usrbio: Any,
        file: DataFile,
        binding: PoolBinding,
        options: Hf3fsOptions,
        now: Callable[[], float],
    ) -> None:
        self._usrbio = usrbio
        self._file = file
        self._binding = binding
        self._options = options
        self._now = now
        self._shared = _shared_slots(binding) if options.zero_copy else None
        self._mount = _mount_of(usrbio, file)
        self._failures = FailureLog(logger)
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self._turns = threading.BoundedSemaphore(options.workers)
        self._idle: list[RingWorker] = []
        self._quarantined: list[RingWorker] = []
        self._registered = self._register()
        self._idle.append(self._worker_or_refusal())

    @property
    def quarantined(self) -> int:
        """Workers whose I/Os have not ended yet."""
        return len(self._quarantined)

    def read(self, frames: Sequence[Frame]) -> list[Outcome]:
        outcomes = self._move(True, frames)
        return [Outcome.FAILED if outcome is Outcome.TIMEOUT else outcome for outcome in outcomes]

    def write(self, frames: Sequence[Frame]) -> list[Outcome]:
        return self._move(False, frames)

    def in_place(self) -> bool:
        return self._file.in_place()

    def stop(self) -> None:
        self._stopped.set()

    def close(self) -> None:
        self.stop()
        if not self._registered:
            return
        self._registered = False
        self._reap()
        while self._idle:
            self._idle.pop().close()
        if self._quarantined:
            _LEAKED.extend(self._quarantined)
            logger.error("%s: closed with I/O in flight; memory and descriptor are leaked", self._file.path)
        else:
            self._usrbio.deregister_fd(self._file.fileno)  # must precede closing the file
            self._file.close()

    def _register(self) -> bool:
        try:
            self._usrbio.register_fd(self._file.fileno)
        except OSError as error:
            raise StorageError(f"{self._file.path} is not on 3FS: {error}; io='posix' works there") from error
        return True

    def _worker_or_refusal(self) -> RingWorker:
        """Create the first worker, so that opening the pool reports problems with memory or rings."""
        try:
            return self._new_worker()
        except OSError as error:
            self._usrbio.deregister_fd(self._file.fileno)
            raise StorageError(f"no USRBIO rings at {self._mount}: {error}") from error

    def _new_worker(self) -> RingWorker:
        options = self._options
        memory, size = None, self._batch_frames * self._file.frame_bytes
        if self._shared is not None:
            memory = self._shared.shared_memory
        return RingWorker(self._usrbio, self._mount, options.entries, memory=memory, size=size)

    @property
    def _batch_frames(self) -> int:
        """Number of frames that one ring and its memory hold."""
        if self._shared is not None:
            return max(1, self._options.entries // 2)
        return max(1, min(self._options.entries, self._options.buffer_bytes // self._file.frame_bytes))

    def _move(self, reading: bool, frames: Sequence[Frame]) -> list[Outcome]:
        with self._turns:
            outcomes: list[Outcome] = []
            for batch in _batches(frames, self._batch_frames):
                outcomes += self._batch(reading, batch)
            return outcomes

    def _batch(self, reading: bool, frames: Sequence[Frame]) -> list[Outcome]:
        worker = self._take()
        if worker is None:
            return [Outcome.FAILED] * len(frames)
        try:
            if self._shared is None:
                return self._copied(worker, reading, frames)
            return self._in_place(worker, self._shared, reading, frames)
        finally:
            self._give_back(worker)

    def _copied(self, worker: RingWorker, reading: bool, frames: Sequence[Frame]) -> list[Outcome]:
        size = self._file.frame_bytes
        pieces = [RingIo(at * size, size, self._file.offset(frame.slot)) for at, frame in enumerate(frames)]
        if not reading:  # before `run`: an I/O may run as soon as it is prepared
            for piece, frame in zip(pieces, frames, strict=True):
                self._copy_in(worker, piece.start, frame)
        results = self._run(worker, reading, pieces)
        outcomes = [self._outcome(reading, size, results.get(piece.start)) for piece in pieces]
        for piece, frame, outcome in zip(pieces, frames, outcomes, strict=True):
            if outcome is Outcome.HIT:
                self._copy_out(worker, piece.start, frame)
        return outcomes

    def _in_place(
        self, worker: RingWorker, shared: SharedSlots, reading: bool, frames: Sequence[Frame]
    ) -> list[Outcome]:
        header_bytes, page_bytes = self._binding.header_bytes, self._binding.slot_bytes
        pairs = []
        for frame in frames:
            offset = self._file.offset(frame.slot)
            header = RingIo(shared.header_offset(frame.memory), header_bytes, offset)
            page = RingIo(shared.page_offset(frame.memory), page_bytes, offset + header_bytes)
            pairs.append((header, page))
        results = self._run(worker, reading, [piece for pair in pairs for piece in pair])
        return [
            _worse(*(self._outcome(reading, piece.size, results.get(piece.start)) for piece in pair))
            for pair in pairs
        ]

    def _run(self, worker: RingWorker, reading: bool, pieces: Sequence[RingIo]) -> dict[int, int]:
        """Results by the pieces' starts. Missing ones are still in flight."""
        results = worker.run(reading, self._file.fileno, pieces, self._now, self._options.io_seconds)
        while self._shared is not None and worker.in_flight and not self._stopped.is_set():
            message, count = "%s: %d I/Os take long", worker.in_flight
            self._failures.warning("long", message, self._file.path, count, pages=count)
            results |= worker.await_late(self._options.io_seconds, self._now, self._stopped.wait)
        return results

    def _outcome(self, reading: bool, size: int, result: int | None) -> Outcome:
        if result is None:
            return Outcome.TIMEOUT
        if result == size:
            return Outcome.HIT if reading else Outcome.STORED
        if result == -errno.ENOSPC:
            return Outcome.REJECTED
        if result >= 0 and reading:
            return Outcome.MISS  # the file ends there, or has a hole
        message = "%s: an I/O of %d bytes gave %d"
        self._failures.warning("result", message, self._file.path, size, result)
        return Outcome.FAILED

    def _copy_in(self, worker: RingWorker, start: int, frame: Frame) -> None:
        middle = start + self._binding.header_bytes
        worker.memory[start:middle] = self._binding.header(frame.memory)
        worker.memory[middle : start + self._file.frame_bytes] = self._binding.page(frame.memory)

    def _copy_out(self, worker: RingWorker, start: int, frame: Frame) -> None:
        middle = start + self._binding.header_bytes
        self._binding.header(frame.memory)[:] = worker.memory[start:middle]
        self._binding.page(frame.memory)[:] = worker.memory[middle : start + self._file.frame_bytes]

    def _take(self) -> RingWorker | None:
        """Take a worker without I/Os in flight; None while too many are quarantined."""
        self._reap()
        with self._lock:
            if self._idle:
                return self._idle.pop()
            if len(self._quarantined) >= _QUARANTINED_A_WORKER * self._options.workers:
                return None
        try:
            return self._new_worker()
        except OSError as error:
            self._failures.warning("ring", "%s: no USRBIO ring: %s", self._file.path, error)
            return None

    def _give_back(self, worker: RingWorker) -> None:
        with self._lock:
            (self._quarantined if worker.in_flight else self._idle).append(worker)

    def _reap(self) -> None:
        """Release quarantined workers whose I/Os have ended."""
        with self._lock:
            quarantined, self._quarantined = self._quarantined, []
            for worker in quarantined:
                worker.reap()
                (self._quarantined if worker.in_flight else self._idle).append(worker)


_LEAKED: list[RingWorker] = []
"""What 3FS may still write to after the path was closed; the file's number stays taken as well, so that no
late write meets another file."""


def _batches(frames: Sequence[Frame], size: int) -> Iterator[Sequence[Frame]]:
    for start in range(0, len(frames), size):
        yield frames[start : start + size]


_BAD = (Outcome.TIMEOUT, Outcome.FAILED, Outcome.REJECTED, Outcome.MISS)


def _worse(one: Outcome, other: Outcome) -> Outcome:
    """Outcome of a frame from those of its header and page."""
    return next((bad for bad in _BAD if bad in (one, other)), one)


def _shared_slots(binding: PoolBinding) -> SharedSlots:
    if isinstance(binding, SharedSlots):
        return binding
    raise StorageError(
        f"pool {binding.pool!r}: zero_copy needs host slots in shared memory; these are not, set it to false"
    )


def _mount_of(usrbio: Any, file: DataFile) -> str:
    mount = usrbio.extract_mount_point(str(file.path))
    if not mount:
        raise StorageError(f"{file.path} is not on a mount of 3FS; io='posix' works there")
    return str(mount)
