"""One thread of a pool that writes to its files what calls have ready, and makes it durable together.

A disk is fast while it has much to do at once, and each barrier is a pause for it. So the thread takes
what has queued up since it looked last, up to half of what calls have under way at most, writes it, and
ends with one barrier; meanwhile other threads compute the checksums, which entries need and pages do not,
and make the other half ready. This is group commit (DeWitt et al., "Implementation Techniques for Main
Memory Database Systems", 1984).
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate

from asynchicache.backends.file.commits import Commits, Naming
from asynchicache.backends.file.entries import Block
from asynchicache.backends.file.index import Stored
from asynchicache.backends.file.runs import Move, Run, joined
from asynchicache.backends.file.segments import Segments
from asynchicache.ports import ThreadWorker

_UNNAMED = Naming(0, 0, ())

Seal = Callable[[], Mapping[int, Stored]]
"""Computes the checksums of a call's pages; by the slots where they will lie."""


@dataclass(slots=True, eq=False)
class Load:
    """What one call writes.

    Attributes:
        move: writes a run page by page if it must, and returns the pages that were written whole.
        seal: see `Seal`.
        runs: what is still to be written.
        written: pages that were written whole.
        pages: what `seal` returned.
        entries: that name them, by slot.
        blocks: what is written for them if all pages are.
        naming: of the pages.
        named: an entry may name what was written, whatever has failed.
        error: why the pages are not durable.
        sealed: set once `seal` has ended.
        ended: set once they are, or cannot be.
    """

    move: Callable[[Run], list[Move]]
    seal: Seal
    runs: list[Run] = field(default_factory=list)
    written: list[Move] = field(default_factory=list)
    pages: Mapping[int, Stored] = field(default_factory=dict)
    entries: Mapping[int, bytes] = field(default_factory=dict)
    blocks: Sequence[Block] = ()
    naming: Naming = _UNNAMED
    named: bool = False
    error: BaseException | None = None
    sealed: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def stored(self) -> list[Stored]:
        """Pages that were written whole, in that order."""
        return [self.pages[move.slot] for move in self.written]

    def write(self, run: Run) -> None:
        """Write a run, as much of it as goes."""
        self.written.extend(self.move(run))


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

        Short ones are written on this thread, so that those of several calls are under way at once; pages
        are sealed on it, too, while the other thread writes the long ones.

        Raises:
            OSError: it may not be. Whatever `seal` raises, and starting the thread, is raised, too.
        """
        runs, load.runs = load.runs, []
        for run in runs:
            if self._segments.is_long(len(run.moves)):
                load.runs.append(run)
            else:
                load.write(run)
        with self._lock:  # which the thread waits for; a call that it could not be told of is not written
            self._worker.submit(self._serve)
            self._queue.append(load)
        try:
            load.pages = load.seal()
            by_use = list(load.pages.values())[::-1]  # the first of a path counts as the last used
            load.entries = self._commits.entries(load.naming, by_use)
            load.blocks = self._commits.blocks(load.naming, load.entries)
        except BaseException as error:  # noqa: BLE001 - raised below: its pages are being written
            load.error = error
        finally:
            load.sealed.set()
            load.ended.wait()
        if load.error is not None:
            raise load.error

    def close(self) -> None:
        """Nobody may write any more; twice is harmless."""
        self._worker.close()

    def _serve(self) -> None:
        loads = self._taken()
        try:
            self._carry_out(loads)
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: their callers raise it
            for load in loads:
                load.error = load.error or error
        for load in loads:
            load.ended.set()

    def _taken(self) -> list[Load]:
        """What is written next: the first in the queue, and as many more as fit."""
        with self._lock:
            pages = accumulate(sum(len(run.moves) for run in load.runs) for load in self._queue)
            count = max(1, sum(total <= self._segments.most_slots for total in pages))
            loads, self._queue = self._queue[:count], self._queue[count:]
            return loads

    def _carry_out(self, loads: Sequence[Load]) -> None:
        owners = {id(run): load for load in loads for run in load.runs}
        for group in joined((run for load in loads for run in load.runs), self._segments.most_slots):
            whole = len(group) > 1 and self._at_once(group)
            for run in group:
                _write(owners[id(run)], run, whole=whole)
        for load in loads:
            load.sealed.wait()
        sealed = [load for load in loads if load.error is None]
        blocks = [block for load in sealed for block in self._blocks(load)]
        for load in sealed:
            load.named = True
        self._commits.commit([load.naming for load in sealed], blocks)

    def _blocks(self, load: Load) -> Sequence[Block]:
        if len(load.written) == len(load.entries):
            return load.blocks
        return self._commits.blocks(
            load.naming, {move.slot: load.entries[move.slot] for move in load.written}
        )

    def _at_once(self, group: Sequence[Run]) -> bool:
        """Whether runs of several calls were written in one; if not, each of them goes by itself."""
        views = [view for run in group for view in run.views]
        try:
            return self._segments.write(group[0].slot, views) == len(views)
        except Exception:  # noqa: BLE001 - the boundary of the thread: it is told of the run that fails
            return False


def _write(load: Load, run: Run, *, whole: bool) -> None:
    try:
        if whole:
            load.written.extend(run.moves)
        else:
            load.write(run)
    except Exception as error:  # noqa: BLE001 - the boundary of the thread: its caller raises it
        load.error = error
