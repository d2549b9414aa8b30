"""A record of a cache's calls to storage: those that run, and the last ones that ended."""

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
        pool, digests: what it is about.
        began, ended: when.
    """

    verb: str
    pool: str
    digests: Sequence[bytes]
    began: float
    ended: float = inf


class CallListener(Protocol):
    """Called when calls begin and end."""

    def began(self, call: Call, running: Iterable[Call]) -> None:
        """A call begins, while `running` others do."""
        ...

    def ended(self, call: Call, answer: Sequence[bool] | Sequence[Outcome]) -> None:
        """A call was answered."""
        ...


class Calls:
    """The calls of one cache.

    Attributes:
        listeners: called for each call.
        given_up: reads and writes whose caller was cancelled before they ended.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.listeners: list[CallListener] = []
        self.given_up = 0
        self._clock = clock
        self._running: list[Call] = []
        self._ended: deque[Call] = deque(maxlen=_REMEMBERED)

    @contextmanager
    def running(self, verb: str, pool: str, digests: Sequence[bytes]) -> Iterator[Call]:
        """A call runs for as long as the body does."""
        call = Call(verb, pool, digests, self._clock())
        for listener in self.listeners:
            listener.began(call, self._running)
        self._running.append(call)
        try:
            yield call
        finally:
            self._running.remove(call)
            call.ended = self._clock()
            self._ended.append(call)

    def answered(self, call: Call, answer: Sequence[bool] | Sequence[Outcome]) -> None:
        for listener in self.listeners:
            listener.ended(call, answer)

    def oldest(self) -> float:
        """How long the oldest of the calls that run has been running."""
        return max((self._clock() - call.began for call in self._running), default=0.0)

    def slowest(self, verb: str, since: float) -> float:
        """The longest time that a call took which ran at some time since then."""
        times = [call.ended - call.began for call in self._ended if call.verb == verb and call.ended >= since]
        times += [self._clock() - call.began for call in self._running if call.verb == verb]
        return max(times, default=0.0)
