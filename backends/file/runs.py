"""Pages on their way between memory and neighbouring slots of a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class PageMove(NamedTuple):
    """A page on its way: the store's slot, and the page's place in its batch."""

    slot: int
    place: int


class SlotRun(NamedTuple):
    """Pages that lie behind each other in the store; one at least.

    Attributes:
        moves: the pages.
        views: where they are in memory.
    """

    moves: Sequence[PageMove]
    views: list[memoryview]

    @property
    def slot(self) -> int:
        """Of the first page."""
        return self.moves[0].slot

    def cut(self, start: int, end: int) -> SlotRun:
        """The pages from number `start` to before number `end`."""
        return SlotRun(self.moves[start:end], self.views[start:end])


def contiguous_moves(moves: Iterable[PageMove], most: int) -> Iterator[list[PageMove]]:
    """Moves in ascending order of store slots, cut where a slot does not follow, and after `most`."""
    run: list[PageMove] = []
    for move in moves:
        if run and (move.slot != run[-1].slot + 1 or len(run) == most):
            yield run
            run = []
        run.append(move)
    if run:
        yield run


def merge_runs(runs: Iterable[SlotRun], most: int) -> Iterator[list[SlotRun]]:
    """Runs in ascending order, those together that lie behind each other, up to `most` pages of them."""
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
