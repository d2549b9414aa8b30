"""One thread of a pool that writes to its files what calls have ready, and makes it durable together.

A disk is fast while it has much to do at once, and each barrier is a pause for it. So the thread takes
everything that has queued up since it looked last, writes it, and ends with one barrier; meanwhile other
threads compute checksums of what comes next. This is group commit (DeWitt et al., "Implementation Techniques
for Main Memory Database Systems", 1984).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from asynchicache.backends.file.commits import Commits, Naming
from asynchicache.backends.file.runs import Move, Run, joined
from asynchicache.backends.file.segments import Segments
from asynchicache.ports import ThreadWorker


@dataclass(slots=True, eq=False)
class Load:
    """What one call writes.

    Attributes:
        naming: the entries of its pages; `wrote` takes those out that nothing may name.
        move: writes a run page by page if it must, and returns the pages that were written whole.
        runs: what is still to be written.
        written: pages that were written whole.
        error: why they are not durable.
        ended: set once they are, or cannot be.
    """

    naming: Naming
    move: Callable[[Run], list[Move]]
    runs: list[Run] = field(default_factory=list)
    written: list[Move] = field(default_factory=list)
    error: Exception | None = None
    ended: threading.Event = field(default_factory=threading.Event)

    def write(self, run: Run) -> None:
        """Write a run, as much of it as goes."""
        self.wrote(run, self.move(run))

    def wrote(self, run: Run, moved: Sequence[Move]) -> None:
        """Of a run these pages were written."""
        self.written.extend(moved)
        if len(moved) < len(run.moves):
            for move in set(run.moves).difference(moved):
                del self.naming.entries[move.slot]


class GroupWriter:
    """The thread, which is started with the first call.

    Args:
        segments: the pool's files.
        commits: of the same files.
    """

    def __init__(self, segments: Segments, commits: Commits) -> None:
        self._segments = segments
        self._commits = commits
        self._worker = ThreadWorker("asynchicache-file")
        self._lock = threading.Lock()
        self._queue: list[Load] = []

    def write(self, load: Load) -> None:
        """Write the runs of `load`; returns when all that is written of it is durable, and named.

        Raises:
            OSError: it may not be.
        """
        with self._lock:  # which the thread waits for; a call that it could not be told of is not written
            self._worker.submit(self._serve)
            self._queue.append(load)
        load.ended.wait()
        if load.error is not None:
            raise load.error

    def close(self) -> None:
        """Nobody may write any more; twice is harmless."""
        self._worker.close()

    def _serve(self) -> None:
        with self._lock:
            loads, self._queue = self._queue, []
        try:
            self._carry_out(loads)
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: their callers raise it
            for load in loads:
                load.error = load.error or error
        for load in loads:
            load.ended.set()

    def _carry_out(self, loads: Sequence[Load]) -> None:
        owners = {id(run): load for load in loads for run in load.runs}
        for group in joined((run for load in loads for run in load.runs), self._segments.most_frames):
            whole = len(group) > 1 and self._at_once(group)
            for run in group:
                _write(owners[id(run)], run, whole=whole)
        self._commits.commit([load.naming for load in loads if load.error is None])

    def _at_once(self, group: Sequence[Run]) -> bool:
        """Whether runs of several calls were written in one; if not, each of them goes by itself."""
        views = [view for run in group for view in run.views]
        try:
            return self._segments.write(group[0].slot, views) == len(views) // 2
        except Exception:  # noqa: BLE001 - the boundary of the thread: it is told of the run that fails
            return False


def _write(load: Load, run: Run, *, whole: bool) -> None:
    try:
        if whole:
            load.wrote(run, run.moves)
        else:
            load.write(run)
    except Exception as error:  # noqa: BLE001 - the boundary of the thread: its caller raises it
        load.error = error
