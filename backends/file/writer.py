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

from asynchicache.backends.file.commits import Commits, CommitStamp
from asynchicache.backends.file.entries import EntryBlock
from asynchicache.backends.file.index import StoredPage
from asynchicache.backends.file.runs import PageMove, SlotRun, merge_runs
from asynchicache.backends.file.segments import Segments
from asynchicache.ports import ThreadWorker

_NO_STAMP = CommitStamp(0, 0, ())

Seal = Callable[[], Mapping[int, StoredPage]]
"""Computes the checksums of a call's pages; by the slots where they will lie."""


@dataclass(slots=True, eq=False)
class WriteBatch:
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

    move: Callable[[SlotRun], list[PageMove]]
    seal: Seal
    runs: list[SlotRun] = field(default_factory=list)
    written: list[PageMove] = field(default_factory=list)
    pages: Mapping[int, StoredPage] = field(default_factory=dict)
    entries: Mapping[int, bytes] = field(default_factory=dict)
    blocks: Sequence[EntryBlock] = ()
    stamp: CommitStamp = _NO_STAMP
    may_be_named: bool = False
    error: BaseException | None = None
    sealed: threading.Event = field(default_factory=threading.Event)
    ended: threading.Event = field(default_factory=threading.Event)

    @property
    def stored(self) -> list[StoredPage]:
        """Pages that were written whole, in that order."""
        return [self.pages[move.slot] for move in self.written]

    def write(self, run: SlotRun) -> None:
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
        self._queue: list[WriteBatch] = []

    def write(self, batch: WriteBatch) -> None:
        """Write the runs of `load`; returns when all that is written of it is durable, and named.

        Short ones are written on this thread, so that those of several calls are under way at once; pages
        are sealed on it, too, while the other thread writes the long ones.

        Raises:
            OSError: it may not be. Whatever `seal` raises, and starting the thread, is raised, too.
        """
        runs, batch.runs = batch.runs, []
        for run in runs:
            if self._segments.is_long(len(run.moves)):
                batch.runs.append(run)
            else:
                batch.write(run)
        with self._lock:  # which the thread waits for; a call that it could not be told of is not written
            self._worker.submit(self._write_queued)
            self._queue.append(batch)
        try:
            batch.pages = batch.seal()
            by_use = list(batch.pages.values())[::-1]  # the first of a path counts as the last used
            batch.entries = self._commits.entries(batch.stamp, by_use)
            batch.blocks = self._commits.blocks(batch.stamp, batch.entries)
        except BaseException as error:  # noqa: BLE001 - raised below: its pages are being written
            batch.error = error
        finally:
            batch.sealed.set()
            batch.ended.wait()
        if batch.error is not None:
            raise batch.error

    def close(self) -> None:
        """Nobody may write any more; twice is harmless."""
        self._worker.close()

    def _write_queued(self) -> None:
        batches = self._next_batches()
        try:
            self._write_and_commit(batches)
        except Exception as error:  # noqa: BLE001 - the boundary of the thread: their callers raise it
            for batch in batches:
                batch.error = batch.error or error
        for batch in batches:
            batch.ended.set()

    def _next_batches(self) -> list[WriteBatch]:
        """What is written next: the first in the queue, and as many more as fit."""
        with self._lock:
            pages = accumulate(sum(len(run.moves) for run in batch.runs) for batch in self._queue)
            count = max(1, sum(total <= self._segments.most_slots for total in pages))
            batches, self._queue = self._queue[:count], self._queue[count:]
            return batches

    def _write_and_commit(self, batches: Sequence[WriteBatch]) -> None:
        owners = {id(run): batch for batch in batches for run in batch.runs}
        for group in merge_runs((run for batch in batches for run in batch.runs), self._segments.most_slots):
            whole = len(group) > 1 and self._write_together(group)
            for run in group:
                _write(owners[id(run)], run, whole=whole)
        for batch in batches:
            batch.sealed.wait()
        sealed = [batch for batch in batches if batch.error is None]
        blocks = [block for batch in sealed for block in self._blocks(batch)]
        for batch in sealed:
            batch.may_be_named = True
        self._commits.commit([batch.stamp for batch in sealed], blocks)

    def _blocks(self, batch: WriteBatch) -> Sequence[EntryBlock]:
        if len(batch.written) == len(batch.entries):
            return batch.blocks
        return self._commits.blocks(
            batch.stamp, {move.slot: batch.entries[move.slot] for move in batch.written}
        )

    def _write_together(self, group: Sequence[SlotRun]) -> bool:
        """Whether runs of several calls were written in one; if not, each of them goes by itself."""
        views = [view for run in group for view in run.views]
        try:
            return self._segments.write(group[0].slot, views) == len(views)
        except Exception:  # noqa: BLE001 - the boundary of the thread: it is told of the run that fails
            return False


def _write(batch: WriteBatch, run: SlotRun, *, whole: bool) -> None:
    try:
        if whole:
            batch.written.extend(run.moves)
        else:
            batch.write(run)
    except Exception as error:  # noqa: BLE001 - the boundary of the thread: its caller raises it
        batch.error = error
