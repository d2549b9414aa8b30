"""Pages on their way between memory and neighbouring slots of a store."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple


class Move(NamedTuple):
    """A page on its way: the store's slot, and the page's place in its batch."""

    slot: int
    place: int


class Run(NamedTuple):
    """Pages that lie behind each other in the store; one at least.

    Attributes:
        moves: the pages.
        views: where they are in memory.
    """

    moves: Sequence[Move]
    views: list[memoryview]

    @property
    def slot(self) -> int:
        """Of the first page."""
        return self.moves[0].slot

    def cut(self, start: int, end: int) -> Run:
        """The pages from number `start` to before number `end`."""
        return Run(self.moves[start:end], self.views[start:end])


def neighbours(moves: Iterable[Move], most: int) -> Iterator[list[Move]]:
    """Moves in ascending order of store slots, cut where a slot does not follow, and after `most`."""
    run: list[Move] = []
    for move in moves:
        if run and (move.slot != run[-1].slot + 1 or len(run) == most):
            yield run
            run = []
        run.append(move)
    if run:
        yield run


def joined(runs: Iterable[Run], most: int) -> Iterator[list[Run]]:
    """Runs in ascending order, those together that lie behind each other, up to `most` pages of them."""
    group: list[Run] = []
    for run in sorted(runs, key=_slot):
        pages = sum(len(one.moves) for one in group) + len(run.moves)
        if group and (run.slot != group[-1].moves[-1].slot + 1 or pages > most):
            yield group
            group = []
        group.append(run)
    if group:
        yield group


def _slot(run: Run) -> int:
    return run.slot
