"""What a cache asks of its storage, call by call: what runs, since when, and how long the last ones took."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple, Protocol

from asynchicache.types import Outcome

_REMEMBERED = 256
"""Calls that have ended."""


class Call(NamedTuple):
    """One call of one pool's engine.

    Attributes:
        verb: `exists`, `get` or `put`.
        pool, digests: what it is about.
        began: when.
    """

    verb: str
    pool: str
    digests: Sequence[bytes]
    began: float


class Listener(Protocol):
    """Is told of calls."""

    def began(self, call: Call, running: Iterable[Call]) -> None:
        """A call begins, while `running` others do."""
        ...

    def ended(self, call: Call, answer: Sequence[bool] | Sequence[Outcome]) -> None:
        """A call was answered."""
        ...


class Calls:
    """The calls of one cache.

    Attributes:
        listeners: who is told.
        given_up: reads and writes that had not ended when nobody waited for their end any more.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self.listeners: list[Listener] = []
        self.given_up = 0
        self._clock = clock
        self._running: dict[int, Call] = {}
        self._ended: deque[tuple[Call, float]] = deque(maxlen=_REMEMBERED)
        self._number = 0

    @contextmanager
    def running(self, verb: str, pool: str, digests: Sequence[bytes]) -> Iterator[Call]:
        """A call runs for as long as the body does."""
        self._number += 1
        number, call = self._number, Call(verb, pool, digests, self._clock())
        for listener in self.listeners:
            listener.began(call, self._running.values())
        self._running[number] = call
        try:
            yield call
        finally:
            del self._running[number]
            self._ended.append((call, self._clock()))

    def answered(self, call: Call, answer: Sequence[bool] | Sequence[Outcome]) -> None:
        for listener in self.listeners:
            listener.ended(call, answer)

    def oldest(self) -> float:
        """How long the oldest of the calls that run has been running."""
        return max((self._clock() - call.began for call in self._running.values()), default=0.0)

    def slowest(self, verb: str, since: float) -> float:
        """The longest time that a call took which ran at some time since then."""
        times = [ended - call.began for call, ended in self._ended if call.verb == verb and ended >= since]
        times += [self._clock() - call.began for call in self._running.values() if call.verb == verb]
        return max(times, default=0.0)
