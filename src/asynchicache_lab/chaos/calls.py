"""A record of a cache's storage calls: those in flight and those that ended recently."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import Protocol

from asynchicache.types import Outcome

_REMEMBERED = 256
"""Calls that have ended."""


@dataclass(slots=True, eq=False)
class Call:
    """One call of one pool's engine.

    Attributes:
        verb: `exists`, `get` or `put`.
        pool, digests: the pages it concerns.
        began, ended: times of its start and end.
    """

    verb: str
    pool: str
    digests: Sequence[bytes]
    began: float
    ended: float = inf


class CallListener(Protocol):
    """Called when calls begin and end."""

    def began(self, call: Call, running: Iterable[Call]) -> None:
        """A call begins while the calls in `running` are in flight."""
        ...

    def ended(self, call: Call, answer: Sequence[bool] | Sequence[Outcome]) -> None:
        """A call returned `answer`."""
        ...


class Calls:
    """The calls of one cache.

    Attributes:
        given_up: number of reads and writes whose caller was cancelled before they ended.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._listeners: list[CallListener] = []
        self.given_up = 0
        self._clock = clock
        self._running: list[Call] = []
        self._ended: deque[Call] = deque(maxlen=_REMEMBERED)

    @contextmanager
    def told(self, listeners: Sequence[CallListener]) -> Iterator[None]:
        """During the body, notify `listeners` of each call."""
        self._listeners += listeners
        try:
            yield
        finally:
            self._listeners[:] = [one for one in self._listeners if one not in listeners]

    @contextmanager
    def running(self, verb: str, pool: str, digests: Sequence[bytes]) -> Iterator[Call]:
        """Record a call that lasts as long as the body."""
        call = Call(verb, pool, digests, self._clock())
        for listener in self._listeners:
            listener.began(call, self._running)
        self._running.append(call)
        try:
            yield call
        finally:
            self._running.remove(call)
            call.ended = self._clock()
            self._ended.append(call)

    def answered(self, call: Call, answer: Sequence[bool] | Sequence[Outcome]) -> None:
        for listener in self._listeners:
            listener.ended(call, answer)

    def oldest(self) -> float:
        """Age of the oldest call in flight, in seconds."""
        return max((self._clock() - call.began for call in self._running), default=0.0)

    def slowest(self, verb: str, since: float) -> float:
        """Longest duration of a call that was in flight at any time after `since`."""
        times = [call.ended - call.began for call in self._ended if call.verb == verb and call.ended >= since]
        times += [self._clock() - call.began for call in self._running if call.verb == verb]
        return max(times, default=0.0)
