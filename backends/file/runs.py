"""Group page moves between memory and a store into runs of neighbouring slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class PageMove(NamedTuple):
    """A page to read or write: its slot in the store, and its position in the batch."""

    slot: int
    place: int


class SlotRun(NamedTuple):
    """One or more pages in consecutive slots of the store.

    Attributes:
        moves: the pages.
        views: the pages' memory.
    """

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
    run: list[PageMove] = []
    for move in moves:
        if run and (move.slot != run[-1].slot + 1 or len(run) == most):
            yield run
            run = []
        run.append(move)
    if run:
        yield run


def merge_runs(runs: Iterable[SlotRun], most: int) -> Iterator[list[SlotRun]]:
    """Sort runs by slot, and group those that are consecutive, up to `most` pages per group."""
    group: list[SlotRun] = []
    for run in sorted(runs, key=_slot):
        pages = sum(len(one.moves) for one in group) + len(run.moves)
        if group and (run.slot != group[-1].moves[-1].slot + 1 or pages > most):
            yield group
            group = []
        group.append(run)
    if group:
        yield group


def _slot(run: SlotRun) -> int:
    return run.slot
