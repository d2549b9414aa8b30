"""Presence queries: which pages storage has. All requests that wait share each query and its answer."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import NamedTuple

from asynchicache.controller.executor import Executor
from asynchicache.controller.storage_pools import Presence, StoragePools
from asynchicache.hashing import PlacedPage, common_pages, naming_page, placed_pages
from asynchicache.types import MissReason

_MAX_CALLS = 3
"""Concurrent calls of one kind; queries made meanwhile go with the next call."""

_TURNS_TO_GATHER = 3
"""Loop iterations, some microseconds each, that a query waits so that others can join its call."""


@dataclass(slots=True, eq=False)
class PresenceQuery:
    """A query for which pages of a path, of one component, storage has.

    Attributes:
        digests: of all pages of the path, from its first.
        pages: numbers of the pages to ask for.
        fresh: cached answers must not be used.
        everywhere: what `StoragePools.exists` asks; the answer is none to another question.
        before: None. Or the digests are of pages that follow the last of these, each of them instead of the
            others.
        askers: how many wait for the answer; a query that nobody waits for is not made.
        answer: set when storage has answered, or will not.
    """

    component_id: int
    digests: Sequence[bytes]
    pages: range
    fresh: bool
    before: Sequence[bytes] | None = None
    everywhere: bool = False
    askers: int = 0
    answer: asyncio.Future[Presence] = field(init=False)

    def __post_init__(self) -> None:
        self.answer = asyncio.get_running_loop().create_future()

    def placed(self) -> list[PlacedPage]:
        """The pages to ask for."""
        if self.before is None:
            return placed_pages(self.digests, self.pages)
        last, head = len(self.before), naming_page(len(self.before))
        digests = self.digests[self.pages.start : self.pages.stop]
        return [PlacedPage(one, self.before[head] if last else one, last - head) for one in digests]


class _QueryKind(NamedTuple):
    """What queries have in common that one call asks."""

    component_id: int
    fresh: bool
    everywhere: bool


@dataclass(frozen=True, slots=True, eq=False)
class _Listener:
    """Who waits, and collects the queries about its path that are answered meanwhile."""

    digests: Sequence[bytes]
    answered: list[PresenceQuery]


class PresenceQueries:
    """The presence queries of one cache that are in flight."""

    def __init__(self, stored: StoragePools, executor: Executor) -> None:
        self._storage = stored
        self._executor = executor
        self._in_flight: list[PresenceQuery] = []
        self._listeners: set[_Listener] = set()
        self._waiting: dict[_QueryKind, list[PresenceQuery]] = {}
        self._calls: dict[_QueryKind, asyncio.Semaphore] = {}

    @contextmanager
    def listen(self, digests: Sequence[bytes], answered: list[PresenceQuery]) -> Iterator[None]:
        """During the body, add the queries of all requests about a path to `answered`, as they are."""
        listener = _Listener(digests, answered)
        self._listeners.add(listener)
        try:
            yield
        finally:
            self._listeners.remove(listener)

    async def ask(
        self,
        component_id: int,
        digests: Sequence[bytes],
        pages: range,
        *,
        fresh: bool = False,
        everywhere: bool = False,
        answered: Sequence[PresenceQuery] = (),
        before: Sequence[bytes] | None = None,
    ) -> Presence:
        """Ask which of some pages storage has.

        Pages in a query in flight are not asked for again; its answer is awaited. Paths with a common
        prefix share the digests of that prefix, so it is asked for once.

        Args:
            digests: of all pages of the path, from its first.
            pages: numbers of the pages to ask for, ascending and without gaps.
            fresh, everywhere: see `StoragePools.exists`.
            answered: queries whose answers are recent enough, see `listen`.
            before: see `PresenceQuery`. Who listens does not know yet that it will ask for such pages.
        """
        known, kind = [*answered, *self._in_flight], _QueryKind(component_id, fresh, everywhere)
        parts = list(self._parts(known, kind, digests, pages))
        new = [question for question, _, mine in parts if mine]
        for question in new:
            question.before = before
        for question, _, _ in parts:
            question.askers += 1
        try:
            self._put(new, kind)
            return await self._joined([(question, span) for question, span, _ in parts])
        finally:
            for question, _, _ in parts:
                question.askers -= 1

    @staticmethod
    async def _joined(parts: Sequence[tuple[PresenceQuery, range]]) -> Presence:
        """The answers of queries for consecutive spans, as one."""
        flags, reason = bytearray(), MissReason.NONE
        for question, span in parts:
            answer = await asyncio.shield(question.answer)
            begin = span.start - question.pages.start
            flags += answer.flags[begin : begin + len(span)]
            reason = answer.reason if reason is MissReason.NONE else reason
        return Presence(bytes(flags), reason)

    def _parts(
        self,
        known: Sequence[PresenceQuery],
        kind: _QueryKind,
        digests: Sequence[bytes],
        pages: range,
    ) -> Iterator[tuple[PresenceQuery, range, bool]]:
        """Queries that cover `pages` in order, each with the span it answers and whether it is new."""
        at = pages.start
        for span, question in _shared(known, kind, digests, pages):
            if span.stop <= at:
                continue
            if span.start > at:
                yield self._new(kind, digests, range(at, span.start))
            yield question, range(max(at, span.start), span.stop), False
            at = span.stop
        if at < pages.stop:
            yield self._new(kind, digests, range(at, pages.stop))

    def _new(
        self, kind: _QueryKind, digests: Sequence[bytes], pages: range
    ) -> tuple[PresenceQuery, range, bool]:
        question = PresenceQuery(kind.component_id, digests, pages, kind.fresh, everywhere=kind.everywhere)
        self._in_flight.append(question)
        return question, pages, True

    def _put(self, queries: Sequence[PresenceQuery], kind: _QueryKind) -> None:
        """Ask storage, together with all waiting queries of the same kind.

        An engine takes many keys per call, but few concurrent calls. The call is a task of its own: others
        wait for it too, so it goes on when whoever asked first is cancelled.
        """
        if self._executor.stopped:
            self._end(queries, MissReason.CLOSED)
            return
        waiting = self._waiting.setdefault(kind, [])
        is_first = not waiting
        waiting += queries
        if queries and is_first:
            task = self._executor.call(self._call(kind, waiting))
            task.add_done_callback(partial(self._call_ended, kind, waiting))

    async def _call(self, kind: _QueryKind, waiting: list[PresenceQuery]) -> None:
        async with self._calls.setdefault(kind, asyncio.Semaphore(_MAX_CALLS)):
            await self._gather(waiting)
            del self._waiting[kind]  # later queries need another call
            self._end([one for one in waiting if not one.askers], MissReason.CLOSED)
            asked = [one for one in waiting if one.askers]
            if asked:
                self._answered(asked, await self._answer(kind, asked))

    def _call_ended(self, kind: _QueryKind, batch: Sequence[PresenceQuery], task: asyncio.Task[None]) -> None:
        """Nobody waits for a call that was cancelled, perhaps before it began, or that failed."""
        if self._waiting.get(kind) is batch:
            del self._waiting[kind]
        self._end(batch, MissReason.CLOSED if task.cancelled() else MissReason.STORAGE_FAILED)

    @staticmethod
    async def _gather(waiting: Sequence[PresenceQuery]) -> None:
        """Let requests that arrived at the same time join: they reach this point a few iterations later."""
        before = 0
        while len(waiting) > before:
            before = len(waiting)
            for _ in range(_TURNS_TO_GATHER):
                await asyncio.sleep(0)

    async def _answer(self, kind: _QueryKind, batch: Sequence[PresenceQuery]) -> Presence:
        """Storage's answer for the pages of all queries in `batch`, concatenated."""
        pages = [page for one in batch for page in one.placed()]
        return await self._storage.exists(
            kind.component_id, pages, fresh=kind.fresh, everywhere=kind.everywhere
        )

    def _answered(self, batch: Sequence[PresenceQuery], answer: Presence) -> None:
        """Give each query of a batch its part of the answer."""
        begin = 0
        for question in batch:
            end = begin + len(question.pages)
            self._in_flight.remove(question)
            question.answer.set_result(Presence(answer.flags[begin:end], answer.reason))
            if answer.reason is MissReason.NONE:
                for listener in self._listeners:
                    if question.before is not None or _is_common(
                        question.digests, listener.digests, question.pages.start
                    ):
                        listener.answered.append(question)
            begin = end

    def _end(self, batch: Sequence[PresenceQuery], reason: MissReason) -> None:
        """Answer what has no answer: nothing is known to be there."""
        for question in batch:
            if not question.answer.done():
                self._in_flight.remove(question)
                question.answer.set_result(Presence(bytes(len(question.pages)), reason))


def _shared(
    known: Sequence[PresenceQuery], kind: _QueryKind, digests: Sequence[bytes], pages: range
) -> list[tuple[range, PresenceQuery]]:
    """Queries of `known` that answer part of `pages`, in page order."""
    found = []
    for question in known:
        if question.component_id != kind.component_id or question.everywhere != kind.everywhere:
            continue
        if kind.fresh and not question.fresh:
            continue
        start = max(question.pages.start, pages.start)
        if _is_common(question.digests, digests, start):
            stop = min(question.pages.stop, pages.stop, common_pages(question.digests, digests))
            if start < stop:
                found.append((range(start, stop), question))
    return sorted(found, key=lambda one: one[0].start)


def _is_common(digests: Sequence[bytes], others: Sequence[bytes], page: int) -> bool:
    """Whether two paths agree up to and with a page: each digest covers all pages before it."""
    return page < min(len(digests), len(others)) and digests[page] == others[page]
