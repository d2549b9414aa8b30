"""Move frames with `preadv` and `pwritev`, through 3FS's FUSE mount or on any other file system."""

from __future__ import annotations

import errno
import logging
import os
import threading
from collections.abc import Callable, Iterator, Sequence

from asynchicache.backends.direct_file import divide
from asynchicache.backends.hf3fs.datafile import DataFile, Frame
from asynchicache.failure_log import FailureLog
from asynchicache.storage.protocol import PoolBinding
from asynchicache.types import Outcome

logger = logging.getLogger(__name__)

_MAX_FRAMES = 500  # each has two views, and IOV_MAX is 1,024 on Linux
_MAX_BYTES = 64 << 20
_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})

_FrameIo = Callable[[Sequence[memoryview], int], int]


class PosixPath:
    """A `DataPath` on system calls. One call moves slots that are adjacent in the file.

    Args:
        file: closed together with the path.
    """

    def __init__(self, file: DataFile, binding: PoolBinding) -> None:
        self._file = file
        self._binding = binding
        self._most = max(1, min(_MAX_FRAMES, _MAX_BYTES // file.frame_bytes))
        self._broken = False
        self._failures = FailureLog(logger)
        self._syncing = threading.Lock()
        self._syncs_begun = self._synced_up_to = 0

    def read(self, frames: Sequence[Frame]) -> list[Outcome]:
        return self._move(self._file.read, frames, whole=Outcome.HIT, short=Outcome.MISS)

    def write(self, frames: Sequence[Frame]) -> list[Outcome]:
        if self._broken:
            return [Outcome.FAILED] * len(frames)
        outcomes = self._move(self._file.write, frames, whole=Outcome.STORED, short=Outcome.REJECTED)
        if Outcome.STORED not in outcomes or self._synced():
            return outcomes
        return [Outcome.FAILED if outcome is Outcome.STORED else outcome for outcome in outcomes]

    def in_place(self) -> bool:
        return self._file.in_place()

    def stop(self) -> None:
        """Do nothing: system calls end by themselves."""

    def close(self) -> None:
        self._file.close()

    def _move(
        self, io: _FrameIo, frames: Sequence[Frame], *, whole: Outcome, short: Outcome
    ) -> list[Outcome]:
        outcomes, errors = [short] * len(frames), list[OSError]()
        for run in adjacent(frames, self._most):
            while run:
                done, problem = self._try(io, [frames[place] for place in run], short, errors)
                if not done and len(run) > 1:  # retry one by one to find the failing frame
                    done, problem = self._try(io, [frames[run[0]]], short, errors)
                for place in run[:done]:
                    outcomes[place] = whole
                if not done:
                    outcomes[run[0]] = problem
                run = run[max(done, 1) :]
        if errors:
            kind, count = (whole, errors[0].errno), len(outcomes) - outcomes.count(whole)
            message, path = "%s: %d of %d pages cannot be moved: %s", self._file.path
            self._failures.warning(kind, message, path, count, len(frames), errors[0], pages=count)
        return outcomes

    def _try(
        self, io: _FrameIo, run: Sequence[Frame], short: Outcome, errors: list[OSError]
    ) -> tuple[int, Outcome]:
        """Return the number of frames that were moved completely, and the outcome of the next one."""
        memory = self._binding
        views = [view for frame in run for view in (memory.header(frame.memory), memory.page(frame.memory))]
        try:
            return io(views, self._file.offset(run[0].slot)) // self._file.frame_bytes, short
        except OSError as error:
            errors.append(error.with_traceback(None))  # its frames hold views of slots
            return 0, Outcome.REJECTED if error.errno in _FULL else Outcome.FAILED

    def _synced(self) -> bool:
        """Return whether all writes so far are durable.

        One fdatasync runs at a time, because the kernel reports a lost write to only one of several
        concurrent calls. Threads that waited share the next one.
        """
        begun = self._syncs_begun
        with self._syncing:
            if not self._broken and self._synced_up_to <= begun:
                self._sync()
            return not self._broken

    def _sync(self) -> None:
        self._syncs_begun += 1
        try:
            os.fdatasync(self._file.fileno)
        except OSError:
            # The kernel reports lost writes once; the next fdatasync may succeed without them.
            logger.exception("%s: nothing is written any more until it is reopened", self._file.path)
            self._broken = True
        self._synced_up_to = self._syncs_begun


def adjacent(frames: Sequence[Frame], most: int) -> Iterator[list[int]]:
    """Indices of `frames` sorted by slot, split into runs of at most `most` adjacent slots."""

    def joins(run: list[int], place: int) -> bool:
        return frames[place].slot == frames[run[-1]].slot + 1 and len(run) < most

    return divide(sorted(range(len(frames)), key=lambda place: frames[place].slot), joins)
