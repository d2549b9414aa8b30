"""The five kinds of call that an engine takes: how to ask, what may be answered."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import NamedTuple

from asynchicache.errors import StorageError
from asynchicache.hashing import ObjectKey
from asynchicache.storage.protocol import PoolEngine, TouchableEngine
from asynchicache.types import Outcome

Ask = Callable[[PoolEngine, Sequence[ObjectKey], Sequence[int]], Awaitable[Sequence[Outcome]]]


class Verb(NamedTuple):
    """One kind of call.

    Attributes:
        name: the engine's method.
        ask: calls it; the slots are ignored where it takes none.
        answers: outcomes that mean something.
        refused: the outcome of pages for which the engine was not asked.
        moves: whether pages move between slots and storage.
        repeatable: asking again after a failure can do no harm.
        vital: its failures open the breaker. Else it is only tried while the breaker is closed.
    """

    name: str
    ask: Ask
    answers: tuple[Outcome, ...]
    refused: Outcome
    moves: bool
    repeatable: bool = True
    vital: bool = True

    def tally(self, outcomes: list[Outcome]) -> Mapping[Outcome, int]:
        """How many pages came to which outcome."""
        # list.count compares identities in C; an Enum's hash, which a Counter needs, is Python code.
        return {outcome: outcomes.count(outcome) for outcome in self.answers}

    def check(self, outcomes: list[Outcome], pages: int) -> None:
        """
        Raises:
            StorageError: these are no answers, or not one a page.
        """
        if len(outcomes) != pages:
            raise StorageError(f"{len(outcomes)} outcomes for {pages} keys")
        if sum(map(outcomes.count, self.answers)) != pages:
            strange = next(outcome for outcome in outcomes if outcome not in self.answers)
            raise StorageError(f"{strange} is no answer to {self.name}")


async def _exists(engine: PoolEngine, keys: Sequence[ObjectKey], _: Sequence[int]) -> list[Outcome]:
    hit, miss = Outcome.HIT, Outcome.MISS  # to look a member up costs more than all else a key does here
    return [hit if there else miss for there in _bits(await engine.exists(keys))]


def _bits(answers: bytes | bytearray) -> bytes | bytearray:
    """
    Raises:
        StorageError: one is neither 0 nor 1: outcomes, say, all of which are true.
    """
    binary = isinstance(answers, bytes | bytearray)  # then it is looked at in C
    strange = answers.translate(None, b"\0\1") if binary else [bit for bit in answers if bit not in (0, 1)]
    if strange:
        raise StorageError(f"{strange[0]!r} is no answer to exists, which is 0 or 1")
    return answers


async def _touch(engine: PoolEngine, keys: Sequence[ObjectKey], _: Sequence[int]) -> list[Outcome]:
    if isinstance(engine, TouchableEngine):
        await engine.touch(keys)
    return [Outcome.HIT] * len(keys)


EXISTS = Verb("exists", _exists, (Outcome.HIT, Outcome.MISS, Outcome.FAILED), Outcome.FAILED, moves=False)
GET = Verb(
    "get",
    lambda engine, keys, slots: engine.get(keys, slots),
    (Outcome.HIT, Outcome.MISS, Outcome.CORRUPT, Outcome.FAILED),
    Outcome.FAILED,
    moves=True,
)
PUT = Verb(
    "put",
    lambda engine, keys, slots: engine.put(keys, slots),
    (Outcome.STORED, Outcome.EXISTS, Outcome.REJECTED, Outcome.FAILED),
    Outcome.REJECTED,
    moves=True,
    repeatable=False,  # half of it may have been written, and a full disk gets no emptier
)
DELETE = Verb(
    "delete",
    lambda engine, keys, _: engine.delete(keys),
    (Outcome.HIT, Outcome.MISS, Outcome.REJECTED, Outcome.FAILED),
    Outcome.FAILED,
    moves=False,
)
TOUCH = Verb(
    "touch",
    _touch,
    (Outcome.HIT, Outcome.FAILED),
    Outcome.FAILED,
    moves=False,
    repeatable=False,  # the next use says it again
    vital=False,  # an engine that cannot be told of uses can be read and written all the same
)
VERBS = (EXISTS, GET, PUT, DELETE, TOUCH)


def failed(outcomes: Sequence[Outcome] | None, pages: int) -> list[int]:
    """Numbers of the pages that failed; None is an engine that gave no answer."""
    if outcomes is None:
        return list(range(pages))
    if Outcome.FAILED not in outcomes:  # in C; nearly always so
        return []
    return [index for index, outcome in enumerate(outcomes) if outcome is Outcome.FAILED]
