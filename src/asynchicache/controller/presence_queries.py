"""Questions to storage which pages it has: one that is in flight serves everyone who asks it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from asynchicache.controller.storage_pools import Presence, StoragePools
from asynchicache.hashing import common_pages
from asynchicache.types import MissReason

_MOST_CALLS = 3
"""Calls of one kind at once; what is asked meanwhile goes with the next one."""

_TURNS_TO_GATHER = 3
"""Turns of the loop, some microseconds each, for which a question waits for others to go along."""


@dataclass(slots=True, eq=False)
class _PresenceQuery:
    """Which pages of a path storage has of one component.

    Attributes:
        component_id: the component.
        digests: of all pages of the path, from its first.
        pages: numbers of the pages that are asked for.
        fresh: nothing that was remembered may answer it.
        answer: done when storage has answered; None if whoever asked was cancelled first.
    """

    component_id: int
    digests: Sequence[bytes]
    pages: range
    fresh: bool
    answer: asyncio.Future[Presence | None] = field(init=False)

    def __post_init__(self) -> None:
        self.answer = asyncio.get_running_loop().create_future()


class PresenceQueries:
    """The questions of one cache that are in flight."""

    def __init__(self, stored: StoragePools) -> None:
        self._storage = stored
        self._in_flight: list[_PresenceQuery] = []
        self._waiting: dict[tuple[int, bool], list[_PresenceQuery]] = {}  # by component, and whether fresh
        self._calls: dict[tuple[int, bool], asyncio.Semaphore] = {}

    async def ask(
        self, component_id: int, digests: Sequence[bytes], pages: range, *, fresh: bool = False
    ) -> Presence:
        """Which of some pages storage has.

        What others are asking already is not asked again: their answer is waited for. Paths that begin
        alike share the digests of their common pages, so the common part of two paths is one question.

        Args:
            component_id: the component.
            digests: of all pages of the path, from its first.
            pages: numbers of the pages to ask for, ascending and without gaps.
            fresh: ask also for what was seen in storage a moment ago.
        """
        parts = list(self._parts(component_id, digests, pages, fresh))
        await asyncio.gather(*(self._put(question) for question, _, mine in parts if mine))
        flags, reason = bytearray(), MissReason.NONE
        for question, span, _ in parts:
            answer = await asyncio.shield(question.answer)
            begin = span.start - question.pages.start
            if answer is None:
                answer, begin = await self.ask(component_id, digests, span, fresh=fresh), 0
            flags += answer.flags[begin : begin + len(span)]
            reason = answer.reason if reason is MissReason.NONE else reason
        return Presence(bytes(flags), reason)

    def _parts(
        self, component_id: int, digests: Sequence[bytes], pages: range, fresh: bool
    ) -> Iterator[tuple[_PresenceQuery, range, bool]]:
        """Questions that cover `pages` in order, which of them each one answers, and whether it is new."""
        at = pages.start
        for span, question in self._shared(component_id, digests, pages, fresh):
            if span.stop <= at:
                continue
            if span.start > at:
                yield self._new(component_id, digests, range(at, span.start), fresh)
            yield question, range(max(at, span.start), span.stop), False
            at = span.stop
        if at < pages.stop:
            yield self._new(component_id, digests, range(at, pages.stop), fresh)

    def _shared(
        self, component_id: int, digests: Sequence[bytes], pages: range, fresh: bool
    ) -> list[tuple[range, _PresenceQuery]]:
        """What questions in flight answer of `pages`, in the order of the pages."""
        found = []
        for question in self._in_flight:
            if question.component_id == component_id and (question.fresh or not fresh):
                stop = min(question.pages.stop, pages.stop, common_pages(question.digests, digests))
                span = range(max(question.pages.start, pages.start), stop)
                if span:
                    found.append((span, question))
        return sorted(found, key=lambda one: one[0].start)

    def _new(
        self, component_id: int, digests: Sequence[bytes], pages: range, fresh: bool
    ) -> tuple[_PresenceQuery, range, bool]:
        question = _PresenceQuery(component_id, digests, pages, fresh)
        self._in_flight.append(question)
        return question, pages, True

    async def _put(self, question: _PresenceQuery) -> None:
        """Ask storage, together with all that is waiting to be asked of the same component.

        Whoever is first asks for the others: an engine takes many keys a call, but few calls at once.
        """
        kind = (question.component_id, question.fresh)
        waiting = self._waiting.setdefault(kind, [])
        waiting.append(question)
        if len(waiting) > 1:
            await asyncio.shield(question.answer)
            return
        batch: list[_PresenceQuery] = []
        try:
            async with self._calls.setdefault(kind, asyncio.Semaphore(_MOST_CALLS)):
                await self._gather(waiting)
                batch = self._waiting.pop(kind)
                answer = await self._answer(kind, batch)
                self._end(batch, answer)
        finally:
            self._end(batch or self._waiting.pop(kind, []), None)

    @staticmethod
    async def _gather(waiting: Sequence[_PresenceQuery]) -> None:
        """Let requests that came at the same time ask along: they have as many steps before this one."""
        before = 0
        while len(waiting) > before:
            before = len(waiting)
            for _ in range(_TURNS_TO_GATHER):
                await asyncio.sleep(0)

    async def _answer(self, kind: tuple[int, bool], batch: Sequence[_PresenceQuery]) -> Presence:
        """What storage says of the pages of all presence, one after the other."""
        component_id, fresh = kind
        digests = [one.digests[one.pages.start : one.pages.stop] for one in batch]
        every = digests[0] if len(digests) == 1 else [digest for some in digests for digest in some]
        return await self._storage.exists(component_id, every, fresh=fresh)

    def _end(self, batch: Sequence[_PresenceQuery], answer: Presence | None) -> None:
        """Let everyone know who waits for an answer; None: whoever asked was cancelled."""
        begin = 0
        for question in batch:
            end = begin + len(question.pages)
            if not question.answer.done():
                self._in_flight.remove(question)
                own = None if answer is None else Presence(answer.flags[begin:end], answer.reason)
                question.answer.set_result(own)
            begin = end
