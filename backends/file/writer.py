"""Group commit: one thread per pool writes the pages of several calls and makes them durable together.

A disk is fast when it has many writes queued, and each barrier stalls it. So the thread takes the batches
queued since its last round, at most half of the bytes in flight, writes them, and ends with one barrier.
Meanwhile other threads compute the checksums, which only the entries need, and prepare the other half.
Source: DeWitt et al., "Implementation Techniques for Main Memory Database Systems", 1984.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import NamedTuple

from asynchicache.backends.direct_file import divide
from asynchicache.backends.file.commits import Commits, CommitStamp
from asynchicache.backends.file.entries import EntryBlock
from asynchicache.backends.file.index import StoredPage
from asynchicache.backends.file.segments import Segments
from asynchicache.ports import ThreadWorker


class PageMove(NamedTuple):
    """A page to read or write: its slot in the store, and its position in the batch."""

    slot: int
    place: int


class SlotRun(NamedTuple):
    """One or more pages in consecutive slots of the store."""

    moves: Sequence[PageMove]
    views: list[memoryview]

    @property
    def slot(self) -> int:
        """Slot of the first page."""
        return self.moves[0].slot

    def cut(self, start: int, end: int) -> SlotRun:
        """The pages from index `start` up to, but not including, index `end`."""
        return SlotRun(self.moves[start:end], self.views[start:end])


def contiguous_moves(moves: Iterable[PageMove], most: int) -> Iterator[list[PageMove]]:
    """Split moves, which ascend by slot, into runs of consecutive slots of at most `most` pages."""

    def joins(run: list[PageMove], move: PageMove) -> bool:
        return move.slot == run[-1].slot + 1 and len(run) < most

    return divide(moves, joins)


def merge_runs(runs: Iterable[SlotRun], most: int) -> Iterator[list[SlotRun]]:
    """Sort runs by slot, and group those that are consecutive, up to `most` pages per group."""

    def joins(group: list[SlotRun], run: SlotRun) -> bool:
        pages = sum(len(one.moves) for one in group) + len(run.moves)
        return run.slot == group[-1].moves[-1].slot + 1 and pages <= most

    return divide(sorted(runs, key=lambda run: run.slot), joins)


_NO_STAMP = CommitStamp(0, 0, ())

Seal = Callable[[], Mapping[int, StoredPage]]
"""Computes the checksums of a call's pages; returns the pages by slot."""


@dataclass(slots=True, eq=False)
class WriteBatch:
    """The pages that one call writes, and the state of the write.

    Attributes:
        move: writes a run, page by page if it must, and returns the pages that were written whole.
        seal: see `Seal`.
        runs: runs still to be written.
        written: pages that were written whole.
        pages: the result of `seal`.
        entries: packed entries of the pages, by slot.
        blocks: the blocks of `entries`, to be written if all pages were.
        may_be_named: an entry on disk may name the written pages, even if the commit failed.
        error: why the pages are not durable.
        sealed: set when `seal` has ended.
        ended: set when the pages are durable or have failed.
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
        """Pages that were written whole, in the order of writing."""
        return [self.pages[move.slot] for move in self.written]

    def write(self, run: SlotRun) -> None:
        """Write as many pages of a run as possible."""
        self.written.extend(self.move(run))


class GroupWriter:
    """The writer thread of a pool; the first call starts it."""

    def __init__(self, segments: Segments, commits: Commits) -> None:
        self._segments = segments
        self._commits = commits
        self._worker = ThreadWorker("asynchicache-file")
        self._lock = threading.Lock()
        self._queue: list[WriteBatch] = []

    def write(self, batch: WriteBatch) -> None:
        """Write a batch; returns when its written pages and their entries are durable.

        The calling thread writes short runs, so that those of several calls are in flight at once. It also
        seals the pages while the writer thread writes long runs.

        Raises:
            OSError: the pages may not be durable. Errors of `seal` and of starting the thread are raised too.
        """
        runs, batch.runs = batch.runs, []
        for run in runs:
            if self._segments.is_long(len(run.moves)):
                batch.runs.append(run)
            else:
                batch.write(run)
        with self._lock:  # the thread needs it to read the queue; if `submit` fails, the batch is not queued
            self._worker.submit(self._write_queued)
            self._queue.append(batch)
        try:
            batch.pages = batch.seal()
            by_use = list(batch.pages.values())[::-1]  # the first page of a path is the most recently used
            batch.entries = self._commits.entries(batch.stamp, by_use)
            batch.blocks = self._commits.blocks(batch.stamp, batch.entries)
        except BaseException as error:  # noqa: BLE001 - raised below, after the pages in flight are written
            batch.error = error
        finally:
            batch.sealed.set()
            batch.ended.wait()
        if batch.error is not None:
            raise batch.error

    def close(self) -> None:
        """Stop the thread: no more writes are allowed. Closing twice is harmless."""
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
        """Take the first batch of the queue, and the following ones that fit."""
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
        """Write runs of several calls in one system call; if False, each run must be written separately."""
        views = [view for run in group for view in run.views]
        try:
            return self._segments.write(group[0].slot, views) == len(views)
        except Exception:  # noqa: BLE001 - the boundary of the thread: writing each run again finds the error
            return False


def _write(batch: WriteBatch, run: SlotRun, *, whole: bool) -> None:
    try:
        if whole:
            batch.written.extend(run.moves)
        else:
            batch.write(run)
    except Exception as error:  # noqa: BLE001 - the boundary of the thread: its caller raises it
        batch.error = error
