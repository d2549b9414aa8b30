"""Requests that wait for device slots, and the order in which they are served. Pure.

Requests that have begun to compute are served before those that have not; within each kind, the order is
first come, first served. A request that has begun holds pages that others wait for, so it must be able to
finish. No other request begins while some wait, so those that have begun finish in bounded time. A request
that has not begun takes no room that an earlier one waits for.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from asynchicache.planner.request_state import RequestState


@dataclass(slots=True, eq=False)
class Waiter:
    """A request in the queue.

    Attributes:
        refused: it must give way, because all requests that hold slots wait for each other.
        rested: the queue released its match; it matches again when it is served or leaves.
    """

    request: RequestState
    refused: bool = False
    rested: bool = False

    @property
    def begun(self) -> bool:
        """Whether the request has slots beyond its hit, for tokens to compute."""
        restored = self.request.hit_pages + (self.request.tail_tokens > 0)
        return len(self.request.pages) > restored


class RoomQueue:
    """The waiters, in order of arrival."""

    def __init__(self) -> None:
        self._waiters: list[Waiter] = []

    def __len__(self) -> int:
        return len(self._waiters)

    def enter(self, request: RequestState) -> Waiter:
        """Add a request at the end."""
        waiter = Waiter(request)
        self._waiters.append(waiter)
        return waiter

    def leave(self, waiter: Waiter) -> None:
        """Remove a waiter that was served or stopped waiting."""
        self._waiters.remove(waiter)

    def is_next(self, waiter: Waiter) -> bool:
        """Whether `waiter` is served next."""
        begun = next((one for one in self._waiters if one.begun), None)
        return waiter is (begun or self._waiters[0])

    def blocks(self, request: RequestState) -> bool:
        """Whether a request outside the queue must wait behind those in it."""
        return bool(self._waiters) and not Waiter(request).begun

    def all_wait(self, requests: Collection[RequestState]) -> bool:
        """Whether all of `requests` that hold slots wait, and none was refused."""
        if any(one.refused for one in self._waiters):
            return False
        waiting = {one.request for one in self._waiters}
        return all(request.resting or request in waiting for request in requests)

    def holding(self) -> list[Waiter]:
        """Waiters that lock a match but have not loaded it: they can release it and match again later."""
        return [one for one in self._waiters if not (one.request.loaded or one.request.resting)]

    def last(self) -> Waiter:
        """The waiter that gives way when all wait for each other: the last that holds slots."""
        return next((one for one in reversed(self._waiters) if not one.request.resting), self._waiters[-1])
