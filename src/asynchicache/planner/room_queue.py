"""Requests that wait for device slots, and the order in which they are served. Pure.

Requests that have begun to compute are served before those that have not, and each kind in the order in
which they came. Who has begun holds pages that others wait for, so it must be able to finish; nobody new
joins that kind while others wait, so it is used up in bounded time. A request that has not begun takes no
room that an earlier one waits for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from asynchicache.planner.request_state import RequestState


@dataclass(slots=True, eq=False)
class Waiter:
    """A request in the queue.

    Attributes:
        sequence: the request.
        refused: it is told to give way, because all who hold slots wait for one another.
        rested: it was made to let go of what it matched; it matches again when it is served, or leaves.
    """

    sequence: RequestState
    refused: bool = False
    rested: bool = False

    @property
    def begun(self) -> bool:
        """Whether the request has slots for tokens of its own to compute."""
        return len(self.sequence.pages) > self.sequence.hit_pages


class RoomQueue:
    """The waiters, in the order in which they came."""

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []

    def enter(self, sequence: RequestState) -> Waiter:
        """Wait behind those who are there."""
        waiter = Waiter(sequence)
        self._waiters.append(waiter)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """It was served, or waits no longer."""
        self._waiters.remove(waiter)

    def is_next(self, waiter: Waiter) -> bool:
        """Whether nobody is served before `waiter`."""
        begun = next((one for one in self._waiters if one.begun), None)
        return waiter is (begun or self._waiters[0])

    def blocks(self, sequence: RequestState) -> bool:
        """Whether a request that is not in the queue must wait behind those who are."""
        return bool(self._waiters) and not Waiter(sequence).begun

    def all_wait(self, sequences: Collection[RequestState]) -> bool:
        """Whether every one of `sequences` that holds anything waits, and none was told to give way."""
        if any(one.refused for one in self._waiters):
            return False
        waiting = {one.sequence for one in self._waiters}
        return all(sequence.resting or sequence in waiting for sequence in sequences)

    def holding(self) -> list[Waiter]:
        """Waiting requests that keep what matched, but have not loaded it: they can match again later."""
        return [one for one in self._waiters if not (one.sequence.loaded or one.sequence.resting)]

    def last(self) -> Waiter:
        """Who gives way where all wait for one another: the last one that keeps others from their slots."""
        return next((one for one in reversed(self._waiters) if not one.sequence.resting), self._waiters[-1])
