"""Operations that ranks have not answered yet. Pure.

An operation has ended when every rank has answered (rule R3), and the worst answer counts (rule R4). Nothing
waits without a deadline (rule R7): an operation past it names the rank that is missing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Generic, NamedTuple, TypeVar

from asynchicache.errors import RankProtocolError
from asynchicache.histograms import Histogram

A = TypeVar("A")


class Overdue(NamedTuple):
    """A rank that has not answered an operation in time."""

    rank: int
    operation: int
    seconds: float


@dataclass(slots=True, eq=False)
class _OpenOperation(Generic[A]):
    begun: float
    deadline: float
    waiting: set[int]
    answered: Callable[[dict[int, A]], object]
    answers: dict[int, A] = field(default_factory=dict)


class PendingOperations(Generic[A]):
    """Operations in flight over several ranks, by number.

    Args:
        ranks: the ranks that answer each operation.
    """

    def __init__(self, ranks: Iterable[int]) -> None:
        self._ranks = frozenset(ranks)
        self._open: dict[int, _OpenOperation[A]] = {}
        self._next = 0
        self.slowest: dict[int, float] = dict.fromkeys(self._ranks, 0.0)
        """By rank, the longest time from an operation to its answer, in seconds, since it was last read."""
        self.lags: dict[int, Histogram] = {rank: Histogram() for rank in self._ranks}
        """By rank, the times from an operation to its answer."""

    def __len__(self) -> int:
        return len(self._open)

    @property
    def numbers(self) -> list[int]:
        """The operations that some rank has not answered."""
        return list(self._open)

    def begin(self, now: float, seconds: float, answered: Callable[[dict[int, A]], object]) -> int:
        """Begin an operation; returns its number.

        Args:
            seconds: how long each rank may take.
            answered: called once with the answers by rank, when all have answered.
        """
        self._next += 1
        self._open[self._next] = _OpenOperation(now, now + seconds, set(self._ranks), answered)
        return self._next

    def answer(self, rank: int, operation: int, answer: A, now: float) -> None:
        """Take a rank's answer.

        Raises:
            RankProtocolError: the operation is not open, or the rank has answered it before.
        """
        one = self._open.get(operation)
        if one is None or rank not in one.waiting:
            raise RankProtocolError(f"rank {rank} answered operation {operation}, which it does not owe")
        one.waiting.discard(rank)
        one.answers[rank] = answer
        self.slowest[rank] = max(self.slowest[rank], now - one.begun)
        self.lags[rank].observe(now - one.begun)
        if not one.waiting:
            del self._open[operation]
            one.answered(one.answers)

    def overdue(self, now: float) -> Overdue | None:
        """The operation longest past its deadline, and the lowest rank that owes it."""
        late = [(one.deadline, number) for number, one in self._open.items() if one.deadline <= now]
        if not late:
            return None
        _, number = min(late)
        one = self._open[number]
        return Overdue(min(one.waiting), number, now - one.begun)

    def abandon(self) -> list[Callable[[dict[int, A]], object]]:
        """Drop all open operations; returns what was to be called with their answers."""
        left = [one.answered for one in self._open.values()]
        self._open.clear()
        return left
