"""One pool's pages in objects: received in pieces and copied to their slots.

An object holds one page, or consecutive pages of a path (`objects`). Either way pages are found, read,
checked and dropped one by one.
"""

from __future__ import annotations

import logging
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Collection, Iterable, Iterator, Sequence
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import partial
from itertools import chain, pairwise
from math import inf
from typing import Any, TypeVar

import obstore
from obstore.store import LocalStore, MemoryStore

from asynchicache.backends.compute import over_page
from asynchicache.backends.object.claims import PageClaims
from asynchicache.backends.object.clock import ObjectClock
from asynchicache.backends.object.conditions import Conditions
from asynchicache.backends.object.creation import NewObjects
from asynchicache.backends.object.finder import Found, PageFinder, Whereabouts
from asynchicache.backends.object.objects import LABEL, StoredObject, object_alone, object_of
from asynchicache.backends.object.options import ObjectOptions
from asynchicache.backends.object.requests import Requests, failed, noting
from asynchicache.backends.object.stores import FAILURES, delete_all, refuses_writes, summary
from asynchicache.errors import StorageError
from asynchicache.failure_log import FailureLog
from asynchicache.hashing import ObjectKey
from asynchicache.ports import Port
from asynchicache.storage.protocol import Capabilities, PoolBinding
from asynchicache.types import Outcome

logger = logging.getLogger(__name__)

T = TypeVar("T")

_CALL_BYTES = 64 << 20
_MAX_PAGES = 160  # two groups, so that a call ends where one does
_MAX_KEYS = 4096  # lists of groups run at once, as `requests` allows
_PIECE_BYTES = 2 << 20
"""Copied in one step of the loop; a fifth of a millisecond."""
_DAY = 86_400.0
_TOUCHED_GROUPS = 1 << 16
_FRESH_SECONDS = 30.0
"""How long `put` believes a lookup, instead of asking again: others may store the page meanwhile."""

_WORST = (Outcome.FAILED, Outcome.HIT, Outcome.MISS)
"""The outcome of a page that is dropped from several objects is the first of these."""


class ObjectEngine:
    """One pool below one prefix of a store.

    Args:
        binding: the pool's slots in host memory.
        port: the clock, and threads to seal and check large pages.
        requests: its requests to the store.
        options: the user's options.
        clock: the store's.
    """

    def __init__(
        self,
        binding: PoolBinding,
        port: Port,
        requests: Requests,
        options: ObjectOptions,
        clock: ObjectClock,
    ) -> None:
        self.corrupt = 0
        """Pages that were found damaged, and dropped."""
        self._binding = binding
        self._port = port
        self._requests = requests
        self._options = options
        self._finder = PageFinder(binding, requests, port.now, alone=options.object_pages == 1)
        self._conditions = Conditions(f"{options.url}, pool {binding.pool}", port.now)
        self._claims = PageClaims(self._finder, requests, self._conditions, clock, port.now)
        if options.object_pages > 1 and not (
            options.index or options.read_only or options.scheme == "memory"
        ):
            self.claim = self._claim  # elsewhere it has no other writers, or costs more than it saves
        self._frame_bytes = binding.header_bytes + binding.page_bytes
        self._failures = FailureLog(logger)
        self._touched: OrderedDict[bytes, float] = OrderedDict()  # when, by group
        self.load_index = self._finder.load_index
        self.aclose = requests.aclose
        self.capabilities = Capabilities(
            durable=options.scheme != "memory",
            checks=True,
            shared=True,
            batch_pages=max(1, min(_MAX_PAGES, _CALL_BYTES // self._frame_bytes)),
            batch_keys=_MAX_KEYS,
            object_pages=options.object_pages,
        )

    @property
    def closed(self) -> bool:
        return self._requests.closed

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        """
        Raises:
            StorageError: the store does not answer, or refuses.
            ClosedError: the engine is closed; as all four calls.
        """
        with noting() as failures:
            found = await self._finder.locate(keys, turns=self._requests.turns.lookups)
        if failures:
            raise StorageError(f"{self._options.url}: {summary(failures[0])}") from failures[0]
        return bytearray(map(self._finder.is_whole, found))

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        with self._telling("get", keys):
            found = await self._finder.locate(keys, seconds=inf, assume=True)
            outcomes = await self._get(found, keys, slots)
            await self._get_moved(found, outcomes, keys, slots)
        self._finder.forget(
            key for key, outcome in zip(keys, outcomes, strict=True) if outcome is not Outcome.HIT
        )
        damaged = [one for one, outcome in zip(found, outcomes, strict=True) if outcome is Outcome.CORRUPT]
        self.corrupt += len(damaged)
        if damaged and not self._options.read_only:
            with self._telling("delete", damaged):
                await self._drop(one for one in damaged if isinstance(one, Found))
        return outcomes

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        if self._options.read_only:
            return [Outcome.REJECTED] * len(keys)
        with self._telling("put", keys):
            found = await self._finder.locate(keys, seconds=_FRESH_SECONDS)  # cheaper than to send twice
            outcomes = [Outcome.EXISTS if self._finder.is_whole(one) else Outcome.FAILED for one in found]
            missing = [
                number
                for number, one in enumerate(found)
                if one is not Outcome.FAILED and outcomes[number] is not Outcome.EXISTS
            ]
            runs = self._runs(keys, missing)
            new = NewObjects(self._requests, self._conditions)
            answers = await self._requests.each(partial(self._put, new, keys, slots), runs)
            await self._claims.release(keys)
        for number, outcome in _by_number(runs, answers):
            outcomes[number] = outcome
        return outcomes

    async def _claim(self, keys: Sequence[ObjectKey], seconds: float) -> list[Outcome]:
        with self._telling("claim", keys):
            return await self._claims.take(keys, seconds)

    async def delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        if self._options.read_only:
            return [Outcome.REJECTED] * len(keys)
        with self._telling("delete", keys):
            everywhere = await self._finder.everywhere(keys, self._requests.turns.pages)
            dropped = await self._drop({one for found in everywhere for one in found or ()})
        self._finder.forget(keys)
        return [
            Outcome.FAILED
            if found is None
            else min((dropped[one.stored] for one in found), key=_WORST.index, default=Outcome.MISS)
            for found in everywhere
        ]

    @property
    def evicts(self) -> bool:
        """Whether it wants `touch`: a rule of the store that expires objects evicts by age."""
        return self._options.refresh_days > 0 and not self._options.read_only

    async def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Make objects of used pages young again that are older than `refresh_days`."""
        days, now = self._options.refresh_days, self._port.now()
        asked = [
            key
            for key in keys
            if not self._finder.is_alone(key) and now - self._touched.get(key.group, -inf) > days * _DAY / 8
        ]
        for key in asked if self.evicts else ():
            self._touched[key.group] = now
            self._touched.move_to_end(key.group)
        while len(self._touched) > _TOUCHED_GROUPS:
            self._touched.popitem(last=False)
        if not (asked and self.evicts):
            return
        oldest = datetime.now(UTC) - timedelta(days=days)
        with self._telling("touch", keys):
            places = await self._finder.everywhere(asked, self._requests.turns.pages, listing=True)
            used = {one.stored for found in places for one in found or ()}
            old = [one for one in used if one.modified is not None and one.modified < oldest]
            await self._requests.each(self._renew, old)

    async def _renew(self, stored: StoredObject) -> None:
        young = stored.other_name(self._finder.folder)
        try:
            await self._send(obstore.copy_async, stored.path, young.path)
        except FileNotFoundError:
            return  # another replica was first
        except FAILURES as error:
            failed(error)
            return
        self._finder.add(young)
        await self._remove(stored)

    async def clear(self) -> int:
        """
        Raises:
            StorageError: the store does not answer, or refuses.
        """
        try:
            claims: list[str] = []
            stored = [one async for one in self._finder.all(claims)]
            if claims:
                await self._send(delete_all, claims)
        except FAILURES as error:
            raise StorageError(f"{self._options.url} cannot be listed: {summary(error)}") from error
        with self._telling("delete", stored):
            outcomes = await self._requests.each(self._remove, stored)
        self._finder.forget_all()
        if Outcome.FAILED in outcomes:
            raise StorageError(
                f"{self._options.url}: {outcomes.count(Outcome.FAILED)} objects cannot be deleted"
            )
        return len({page for one in stored for page in one.each()})

    async def label(self, label: bytes) -> None:
        """
        Raises:
            StorageError: the store does not answer, or refuses.
        """
        if self._options.read_only:
            return
        path = f"{self._finder.folder}/{LABEL}"
        try:
            await self._send(obstore.put_async, path, label, use_multipart=False)
        except FAILURES as error:
            raise StorageError(f"{self._options.url}: {summary(error)}") from error

    # Reading

    async def _get(
        self, found: Sequence[Whereabouts], keys: Sequence[ObjectKey], slots: Sequence[int]
    ) -> list[Outcome]:
        """Read pages, those that lie side by side in one request."""
        outcomes = [one if isinstance(one, Outcome) else Outcome.CORRUPT for one in found]
        firsts: list[Found] = []
        rows: list[list[int]] = []
        for number, one in enumerate(found):
            if not (isinstance(one, Found) and self._finder.is_whole(one)):
                continue
            if rows and rows[-1][-1] == number - 1 and firsts[-1].after(len(rows[-1])) == one:
                rows[-1].append(number)
            else:
                firsts.append(one)
                rows.append([number])
        answers = await self._requests.each(partial(self._receive, keys, slots), firsts, rows)
        for number, outcome in _by_number(rows, answers):
            outcomes[number] = outcome
        return outcomes

    async def _get_moved(
        self,
        found: list[Whereabouts],
        outcomes: list[Outcome],
        keys: Sequence[ObjectKey],
        slots: Sequence[int],
    ) -> None:
        """Look once more for pages that are not where they were seen: others may have divided an object."""
        gone = [
            n for n, one in enumerate(found) if outcomes[n] is Outcome.MISS and self._finder.may_move(one)
        ]
        self._finder.remove(found[number] for number in gone)
        gone = [number for number in gone if not self._finder.is_alone(keys[number])]
        if not gone:
            return
        some = [keys[number] for number in gone]
        again = await self._finder.locate(some, listing=True)
        answers = await self._get(again, some, [slots[number] for number in gone])
        for number, one, outcome in zip(gone, again, answers, strict=True):
            found[number], outcomes[number] = one, outcome

    async def _receive(
        self, keys: Sequence[ObjectKey], slots: Sequence[int], first: Found, row: Sequence[int]
    ) -> Sequence[Outcome]:
        """Read pages side by side into their slots, and check them. `row`: the numbers of their keys."""
        keys, slots = [keys[number] for number in row], [slots[number] for number in row]
        binding, size = self._binding, len(keys) * self._frame_bytes
        views = list(chain(*map(self._frame, slots)))
        done, rest = 0, Outcome.CORRUPT
        try:
            answer = await self._request(first, size)
            stored = first.stored._replace(size=answer.meta["size"])
            if not stored.has_whole(first.number + len(keys) - 1, self._frame_bytes):
                return [Outcome.CORRUPT] * len(keys)
            async for piece in self._pieces(answer):
                done += _scatter(piece, views, done)
        except FileNotFoundError:
            return [Outcome.MISS] * len(keys)
        except FAILURES as error:
            rest = failed(error)
        count = done // self._frame_bytes if done <= size else 0
        checks = list(zip(slots[:count], keys[:count], strict=True))
        checked = await self._over(count, lambda: [binding.check(slot, key) for slot, key in checks])
        return [*checked, *[rest] * (len(keys) - count)]

    async def _request(self, first: Found, size: int) -> obstore.GetResult:
        """Begin to read some bytes of an object, from a page on."""
        if first.stored.pages == 1:
            return await self._send(obstore.get_async, first.stored.path)
        start = first.number * self._frame_bytes
        return await self._send(
            obstore.get_async, first.stored.path, options={"range": (start, start + size)}
        )

    async def _pieces(self, answer: obstore.GetResult) -> AsyncIterator[memoryview]:
        """The bytes of an answer. Of a file obstore streams 8 KiB at a time, each read in a thread, so pieces
        of files are asked for one by one."""
        if not isinstance(self._requests.store, LocalStore):
            async for piece in answer.stream(min_chunk_size=_PIECE_BYTES):
                yield memoryview(piece)
            return
        path, (first, stop) = answer.meta["path"], answer.range
        for start in range(first, stop, _PIECE_BYTES):
            end = min(start + _PIECE_BYTES, stop)
            yield memoryview(await self._send(obstore.get_range_async, path, start=start, end=end))

    async def _send(self, request: Callable[..., Awaitable[T]], *given: Any, **named: Any) -> T:
        """Send one request of obstore."""
        return await self._requests.send(partial(request, self._requests.store, *given, **named))

    async def _over(self, pages: int, work: Callable[[], T]) -> T:
        """Run work over so many pages, here or in a thread."""
        return await over_page(self._port, pages * self._binding.page_bytes, work)

    # Writing

    def _runs(self, keys: Sequence[ObjectKey], numbers: Iterable[int]) -> list[list[int]]:
        """The keys of each new object, as numbers."""
        runs: list[list[int]] = []
        for number in numbers:
            key, before = keys[number], keys[runs[-1][-1]] if runs else None
            if (
                before is not None
                and runs[-1][-1] == number - 1
                and key.place == before.place + 1
                and self.capabilities.object_of(key) == self.capabilities.object_of(before)
            ):
                runs[-1].append(number)
            else:
                runs.append([number])
        return runs

    def _object(self, keys: Sequence[ObjectKey]) -> StoredObject:
        folder, size = self._finder.folder, len(keys) * self._frame_bytes
        alone = self._finder.is_alone(keys[0])
        return object_alone(folder, keys[0], size) if alone else object_of(folder, keys, size)

    def _frame(self, slot: int) -> tuple[memoryview, memoryview]:
        """A page as it is stored."""
        return self._binding.header(slot), self._binding.page(slot)[: self._binding.page_bytes]

    async def _put(
        self, new: NewObjects, keys: Sequence[ObjectKey], slots: Sequence[int], run: Sequence[int]
    ) -> list[Outcome]:
        """Store pages in one object."""
        binding, mine = self._binding, [keys[number] for number in run]
        stored = self._object(mine)
        try:
            await self._over(len(run), lambda: [binding.seal(slots[number], keys[number]) for number in run])
            parts = list(chain(*(self._frame(slots[number]) for number in run)))
            if isinstance(self._requests.store, MemoryStore):
                parts = [memoryview(b"".join(parts))]  # obstore would keep our memory instead of a copy
            outcome = await new.store(stored, parts)
        except FAILURES as error:
            outcome = failed(error)
            # A full store can still be read.
            return [Outcome.REJECTED if refuses_writes(error) else outcome] * len(run)
        self._finder.add(stored)
        for index, key in enumerate(mine):
            self._finder.remember(key, Found(stored, index))
        return [outcome] * len(run)

    async def _drop(self, found: Iterable[Found]) -> dict[StoredObject, Outcome]:
        """Take pages out of their objects; returns how that went."""
        doomed: defaultdict[StoredObject, set[int]] = defaultdict(set)
        for one in found:
            doomed[one.stored].add(one.number)
        outcomes = await self._requests.each(self._take_out, list(doomed), list(doomed.values()))
        return dict(zip(doomed, outcomes, strict=True))

    async def _take_out(self, stored: StoredObject, doomed: Collection[int]) -> Outcome:
        """Store the other pages of an object in objects of their own, and remove it."""
        frame = self._frame_bytes
        kept = [n for n in range(stored.pages) if n not in doomed and stored.has_whole(n, frame)]
        bounds = [0, *(at for at in range(1, len(kept)) if kept[at] != kept[at - 1] + 1), len(kept)]
        try:
            for start, stop in pairwise(bounds):
                if start < stop:
                    await self._copy_part(stored, kept[start], kept[stop - 1] + 1)
        except FileNotFoundError:
            return Outcome.MISS
        except FAILURES as error:
            return failed(error)
        return await self._remove(stored)

    async def _copy_part(self, stored: StoredObject, first: int, stop: int) -> None:
        frame = self._frame_bytes
        part = stored.part(self._finder.folder, first, stop, frame)
        content = await self._send(
            obstore.get_range_async, stored.path, start=first * frame, end=stop * frame
        )
        await self._send(obstore.put_async, part.path, content, use_multipart=False)
        self._finder.add(part)

    async def _remove(self, stored: StoredObject) -> Outcome:
        try:
            await self._send(obstore.delete_async, stored.path)
        except FileNotFoundError:
            return Outcome.MISS
        except FAILURES as error:
            return failed(error)
        finally:
            self._finder.remove([Found(stored, 0)])
        return Outcome.HIT

    @contextmanager
    def _telling(self, verb: str, keys: Sequence[object]) -> Iterator[None]:
        """Log in one line the failures of the requests that the body makes."""
        try:
            with noting() as failures:
                yield
        finally:
            if failures:
                where, why, count = self._options.url, summary(failures[0]), len(failures)
                self._failures.warning(
                    (verb, type(failures[0])),
                    "%s, pool %s: %s of %d pages: %d requests failed: %s",
                    where,
                    self._binding.pool,
                    verb,
                    len(keys),
                    count,
                    why,
                    pages=count,
                )

    def __repr__(self) -> str:
        return f"<ObjectEngine {self._binding.pool} at {self._options.url}: {self.corrupt} corrupt>"


def _by_number(
    rows: Iterable[Iterable[int]], answers: Iterable[Iterable[Outcome]]
) -> Iterator[tuple[int, Outcome]]:
    """The answers of rows of keys, by the number of the key."""
    return zip(chain(*rows), chain(*answers), strict=True)


def _scatter(piece: memoryview, views: Sequence[memoryview], start: int) -> int:
    """Copy `piece` to where it lies in `views`, seen as one, from byte `start` on; too much is left out.

    Returns:
        Bytes of the piece, whether they had room or not.
    """
    offset = 0  # of the view
    for view in views:
        first, last = max(start, offset), min(start + len(piece), offset + len(view))
        if first < last:
            view[first - offset : last - offset] = piece[first - start : last - start]
        offset += len(view)
    return len(piece)
