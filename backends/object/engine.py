"""One pool's pages as objects: one object per header and page, received in pieces and copied to the slot."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from functools import partial
from typing import NamedTuple, TypeVar

import obstore
from obstore.store import MemoryStore, ObjectStore

from asynchicache.backends.compute import over_page
from asynchicache.backends.object.options import ObjectOptions
from asynchicache.backends.object.stores import FAILURES, refuses_writes, summary
from asynchicache.errors import ClosedError, StorageError
from asynchicache.failure_log import FailureLog
from asynchicache.hashing import DIGEST_BYTES, ObjectKey
from asynchicache.ports import Port
from asynchicache.storage.protocol import Capabilities, PoolBinding
from asynchicache.types import Outcome

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FAILURES: ContextVar[list[Exception]] = ContextVar("failures of the requests of one call")

_CALL_BYTES = 64 << 20
_MAX_PAGES = 128
_PIECE_BYTES = 1 << 20
"""Copied in one step of the loop; a tenth of a millisecond."""


class RequestTurns(NamedTuple):
    """Limits of concurrent requests, of all pools: those for pages, and lookups, which wait for no page."""

    pages: asyncio.Semaphore
    lookups: asyncio.Semaphore


class ObjectEngine:
    """One pool below one prefix of a store.

    Requests cannot be cancelled, because obstore may still read a page that it is storing. So a cancelled
    call waits for its requests, whose own timeouts end them.

    Args:
        binding: the pool's slots in host memory.
        port: threads to seal and check large pages.
        store: the object store.
        turns: limits concurrent requests.
        options: the user's options.
    """

    def __init__(
        self,
        binding: PoolBinding,
        port: Port,
        store: ObjectStore,
        turns: RequestTurns,
        options: ObjectOptions,
    ) -> None:
        self.closed = False
        self.corrupt = 0
        """Pages that were found damaged, and dropped."""
        self._binding = binding
        self._store = store
        self._turns = turns
        self._options = options
        self._over_page = partial(over_page, port, binding.page_bytes)
        self._frame_bytes = binding.header_bytes + binding.page_bytes
        self._failures = FailureLog(logger)
        self._known: set[bytes] | None = None
        self._running: set[asyncio.Task[object]] = set()
        self.capabilities = Capabilities(
            durable=options.scheme != "memory",
            checks=True,
            shared=True,
            batch_pages=max(1, min(_MAX_PAGES, _CALL_BYTES // self._frame_bytes)),
        )

    async def load_index(self) -> None:
        """List the stored pages.

        Raises:
            BaseError, OSError: the store does not answer, or refuses.
        """
        self._known = {digest async for digest in self._listed()}

    async def _listed(self) -> AsyncIterator[bytes]:
        """Digests of the pool's pages."""
        mine = self._binding
        folder = _folder(ObjectKey(mine.fingerprint, bytes(DIGEST_BYTES), mine.pool, mine.shard))
        async for found in obstore.list(self._store, prefix=folder, chunk_size=1000):
            for entry in found:
                name = entry["path"].removeprefix(f"{folder}/")  # deeper names keep a slash: not ours
                if entry["size"] == self._frame_bytes and _is_digest(name):
                    yield bytes.fromhex(name)

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        """
        Raises:
            StorageError: the store does not answer, or refuses.
            ClosedError: the engine is closed; as all four calls.
        """
        return bytearray(await self._each(self._is_there, keys, turns=self._turns.lookups))

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        with self._telling("get", keys):
            outcomes = await self._each(self._get, keys, slots)
        damaged = [key for key, found in zip(keys, outcomes, strict=True) if found is Outcome.CORRUPT]
        self.corrupt += len(damaged)
        if damaged and not self._options.read_only:
            await self.delete(damaged)
        return outcomes

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        with self._telling("put", keys):
            return await self._each(self._put, keys, slots)

    async def delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        with self._telling("delete", keys):
            return await self._each(self._delete, keys)

    async def clear(self) -> int:
        """
        Raises:
            StorageError: the store does not answer, or refuses.
        """
        mine = self._binding
        try:
            digests = [digest async for digest in self._listed()]
        except FAILURES as error:
            raise StorageError(f"{self._options.url} cannot be listed: {summary(error)}") from error
        outcomes = await self.delete([ObjectKey(mine.fingerprint, d, mine.pool, mine.shard) for d in digests])
        if Outcome.FAILED in outcomes:
            raise StorageError(
                f"{self._options.url}: {outcomes.count(Outcome.FAILED)} pages cannot be deleted"
            )
        return outcomes.count(Outcome.HIT)

    async def aclose(self) -> None:
        self.closed = True
        while self._running:
            await asyncio.wait(self._running)

    async def _each(
        self,
        work: Callable[..., Awaitable[T]],
        *columns: Sequence[object],
        turns: asyncio.Semaphore | None = None,
    ) -> list[T]:
        """Run `work` for every row, several concurrently, as `turns` (default: those for pages) allow. A
        cancelled caller still waits for started work.

        Raises:
            StorageError: the first error that `work` raised.
        """
        if self.closed:
            raise ClosedError(f"object engine of pool {self._binding.pool!r} is closed")
        waiting: set[asyncio.Task[T]] = set()
        rows = zip(*columns, strict=True)
        turns = turns or self._turns.pages
        tasks = [asyncio.create_task(self._in_turn(turns, waiting, work, *row)) for row in rows]
        waiting.update(tasks)
        for task in tasks:
            self._running.add(task)
            task.add_done_callback(self._ended)
        try:
            await _all_done(tasks)
        except asyncio.CancelledError:
            for task in waiting:  # they have not touched their slots yet
                task.cancel()
            await _all_done(tasks)
            raise
        return [task.result() for task in tasks]

    async def _in_turn(
        self,
        turns: asyncio.Semaphore,
        waiting: set[asyncio.Task[T]],
        work: Callable[..., Awaitable[T]],
        *row: object,
    ) -> T:
        async with turns:
            waiting.discard(asyncio.current_task())
            return await work(*row)

    def _ended(self, task: asyncio.Task[object]) -> None:
        self._running.discard(task)
        if not task.cancelled():
            task.exception()  # looked at, since only the first of a call's errors is raised

    async def _is_there(self, key: ObjectKey) -> bool:
        if self._known is not None:
            return key.digest in self._known
        try:
            found = await obstore.head_async(self._store, page_path(key))
        except FileNotFoundError:
            return False
        except FAILURES as error:
            raise StorageError(f"{self._options.url}: {summary(error)}") from error
        return found["size"] == self._frame_bytes

    async def _get(self, key: ObjectKey, slot: int) -> Outcome:
        try:
            outcome = await self._receive(key, slot)
        except FileNotFoundError:
            outcome = Outcome.MISS
        except FAILURES as error:
            outcome = _failed(error)
        if outcome is not Outcome.HIT:
            self._forget(key, outcome)
            return outcome
        return await self._over_page(partial(self._binding.check, slot, key))

    async def _receive(self, key: ObjectKey, slot: int) -> Outcome:
        """Read header and page into the slot. HIT does not include the checksum."""
        answer = await obstore.get_async(self._store, page_path(key))
        if answer.meta["size"] != self._frame_bytes:
            return Outcome.CORRUPT
        views = (self._binding.header(slot), self._binding.page(slot)[: self._binding.page_bytes])
        done = 0
        async for piece in answer.stream(min_chunk_size=_PIECE_BYTES):
            done += _scatter(memoryview(piece), views, done)
        return Outcome.HIT if done == self._frame_bytes else Outcome.CORRUPT

    async def _put(self, key: ObjectKey, slot: int) -> Outcome:
        if self._options.read_only:
            return Outcome.REJECTED
        try:
            if await self._is_there(key):  # cheaper than to send a page once more
                return Outcome.EXISTS
            await self._over_page(partial(self._binding.seal, slot, key))
            parts = [self._binding.header(slot), self._binding.page(slot)[: self._binding.page_bytes]]
            if isinstance(self._store, MemoryStore):
                parts = [memoryview(b"".join(parts))]  # obstore would keep our memory instead of a copy
            await obstore.put_async(self._store, page_path(key), parts, use_multipart=False)
        except FAILURES as error:
            failed = _failed(error)
            return Outcome.REJECTED if refuses_writes(error) else failed  # pages can still be read
        if self._known is not None:
            self._known.add(key.digest)
        return Outcome.STORED

    async def _delete(self, key: ObjectKey) -> Outcome:
        if self._options.read_only:
            return Outcome.REJECTED
        try:
            await obstore.head_async(self._store, page_path(key))  # to delete nothing is no error
            await obstore.delete_async(self._store, page_path(key))
        except FileNotFoundError:
            return Outcome.MISS
        except FAILURES as error:
            return _failed(error)
        finally:
            self._forget(key, Outcome.MISS)
        return Outcome.HIT

    def _forget(self, key: ObjectKey, outcome: Outcome) -> None:
        if self._known is not None and outcome is not Outcome.FAILED:
            self._known.discard(key.digest)

    @contextmanager
    def _telling(self, verb: str, keys: Sequence[ObjectKey]) -> Iterator[None]:
        """Log in one line the failures of the requests that the body makes."""
        failures: list[Exception] = []
        outer = _FAILURES.set(failures)
        try:
            yield
        finally:
            _FAILURES.reset(outer)
            if failures:
                where, why, count = self._options.url, summary(failures[0]), len(failures)
                self._failures.warning(
                    (verb, type(failures[0])),
                    "%s, pool %s: %s of %d pages, %d failed: %s",
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


def _failed(error: Exception) -> Outcome:
    _FAILURES.get().append(error)
    return Outcome.FAILED


async def _all_done(tasks: Sequence[asyncio.Task[T]]) -> None:
    """Wait for tasks, without cancelling them if the caller is cancelled."""
    if tasks:
        await asyncio.wait(tasks)


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


def page_path(key: ObjectKey) -> str:
    """An object's name below the prefix. Each pool has one folder, so that its pages can be listed."""
    return f"{_folder(key)}/{key.digest.hex()}"


def _folder(key: ObjectKey) -> str:
    return key.text().rpartition(".")[0]


def _is_digest(name: str) -> bool:
    return len(name) == 2 * DIGEST_BYTES and all(letter in "0123456789abcdef" for letter in name)
