"""A cache below SGLang's tree and device pool, which names pages by hashes.

A lookup answers from host memory, and locks what it promises. Storage is read by `read`, for a later lookup:
what was read stays in host memory until the request has its turn.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from typing import Protocol

from asynchicache.cache import EngineCache, EngineRequest
from asynchicache.errors import CacheError, TransferError
from asynchicache.transfer.ticket import Ticket

logger = logging.getLogger(__name__)

HashedPages = Mapping[str, Sequence[int]]
"""By pool, the engine's pages for the last pages of a prefix, in order."""


class SynchronizableEvent(Protocol):
    """An event of the engine's device."""

    def synchronize(self) -> None:
        """Block until it is reached."""


STEPS_KEPT = 2
"""Scheduler steps that a promise lasts. SGLang loads in the step in which it looked."""


@dataclass(slots=True, eq=False)
class _Promise:
    """What a lookup promised a waiting request.

    Attributes:
        request: locks the pages.
        keys: of all pages that were asked about, from the first page of the prompt on.
        known: pages of these that the engine has.
        weights: name of the weights that computed them.
        step: of the last lookup.
    """

    request: EngineRequest
    keys: list[bytes]
    known: int
    weights: str
    step: int


class LinkedCache:
    """Confined to the loop of its cache.

    Args:
        cache: over the engine's memory, with page keys.
        every_length: lookups name all lengths that can be restored, as several ranks need it, and not only
            the longest.
    """

    def __init__(self, cache: EngineCache, *, every_length: bool = False) -> None:
        self.cache = cache
        self._size = cache.spec.page_size
        self._every_length = every_length
        self._promises: dict[str, _Promise] = {}
        self._claimed: dict[str, _Promise] = {}
        self._read: dict[str, EngineRequest] = {}
        self._turn = asyncio.Lock()
        self._step = 0

    @property
    def promises(self) -> int:
        """Number of requests for which pages are locked."""
        return len(self._promises) + len(self._claimed) + len(self._read)

    def step(self, number: int) -> None:
        """Forget promises that the last steps of the scheduler did not renew.

        Args:
            number: of the current step.
        """
        self._step = number
        for rid in [rid for rid, one in self._promises.items() if one.step < self._step - STEPS_KEPT]:
            self._promises.pop(rid).request.close()

    async def look(self, rid: str, keys: Sequence[bytes], known: int, weights: str = "") -> list[int]:
        """Return the lengths, in pages behind the first `known`, that host memory can restore, ascending.

        The pages stay in host memory until `claim`, or for `STEPS_KEPT` steps.

        Args:
            rid: the request, whose earlier promise this one replaces.
            keys: of the whole pages of its prompt.
            known: pages that the engine has on its device.
            weights: name of the engine's weights, see `ServedWeights`; pages of others are not found.
        """
        before = self._promises.pop(rid, None)
        request = await self._request(keys, weights).__aenter__()
        whole = request.hit.tokens // self._size
        promise = self._promises[rid] = _Promise(request, list(keys), known, weights, self._step)
        if before is not None:
            before.request.close()
        lengths = await self._lengths(promise, whole, known) if self._every_length else [whole]
        return [length - known for length in lengths if length > known]

    def _request(self, keys: Sequence[bytes], weights: str) -> EngineRequest:
        return self.cache.request_keys(keys, namespace=weights or None)

    async def _lengths(self, promise: _Promise, whole: int, known: int) -> list[int]:
        """Every restorable length above `known`; a state or window may be there for few of them."""
        lengths: list[int] = []
        while whole > known:
            lengths.append(whole)
            async with self._request(promise.keys[: whole - 1], promise.weights) as shorter:
                whole = shorter.hit.tokens // self._size
        return lengths[::-1]

    async def read(self, rid: str, keys: Sequence[bytes], weights: str = "") -> None:
        """Read what storage has of a prefix into host memory, for as long as the option `prefetch` says.

        What was read stays there until `forget`: the request may wait long for its turn.

        Args:
            rid, keys, weights: as of `look`.
        """
        self.forget(rid)
        try:
            async with AsyncExitStack() as left:
                request = await left.enter_async_context(self._request(keys, weights))
                await request.prefetch()
                request.rest()
                left.pop_all()
        except CacheError as error:
            logger.warning("a read of %d pages ahead failed: %s", len(keys), error)
        else:
            self._read[rid] = request

    def forget(self, rid: str) -> None:
        """Keep no longer what was read for a request: it had its turn, or left; a no-op if nothing was."""
        request = self._read.pop(rid, None)
        if request is not None:
            request.close()

    def claim(self, rid: str) -> int | None:
        """Keep what was promised to a request until `load` or `drop`.

        Returns:
            the pages that the engine has before those, None if nothing was promised.
        """
        promise = self._promises.pop(rid, None)
        if promise is None:
            return None
        self._claimed[rid] = promise
        return promise.known

    def drop(self, rid: str) -> None:
        """Release what `claim` kept; a no-op if it kept nothing."""
        promise = self._claimed.pop(rid, None)
        if promise is not None:
            promise.request.close()

    async def load(self, rid: str, pages: int, into: HashedPages) -> Ticket:
        """Copy the last pages of a claimed prefix to the engine's pages.

        Args:
            pages: length of the prefix, one of those that `look` returned plus the engine's own pages.
            into: the engine's pages.

        Raises:
            TransferError: the promise could not be kept.
        """
        promise = self._claimed[rid]
        try:
            async with self._request(promise.keys[:pages], promise.weights) as request:
                found = request.hit.tokens // self._size
                if found != pages:
                    raise TransferError(f"{pages} pages were promised, and {found} are there")
                return request.load(into=into)
        finally:
            self.drop(rid)

    async def back_up(
        self,
        keys: Sequence[bytes],
        named: Callable[[], HashedPages],
        ready: Sequence[SynchronizableEvent],
        weights: str = "",
    ) -> bool:
        """Copy what host memory lacks of a prefix from the engine's pages; storage follows.

        Args:
            keys: of its pages.
            named: returns the engine's pages, which must not change until this returns; runs in a thread.
            ready: events to wait for first: objects with a blocking `synchronize`.
            weights: name of the weights that computed the pages.

        Returns:
            Whether host memory has all of its attention pages now.
        """
        async with self._turn:  # a prefix is copied before what follows it
            pages = await asyncio.to_thread(_named_after, ready, named)
            async with self._request(keys, weights) as request:
                ticket = request.checkpoint(len(keys) * self._size, pages=pages)
        try:
            await ticket
        except TransferError as error:
            logger.warning("%d pages were not copied to host memory: %s", len(keys), error)
            return False
        async with self._request(keys, weights) as request:
            return request.hit.full_tokens == len(keys) * self._size

    async def empty(self) -> None:
        """Release promises, and drop all pages in host memory. Storage keeps its own."""
        self._release()
        await self.cache.flush()

    async def aclose(self) -> None:
        """Release promises, and close the cache."""
        self._release()
        await self.cache.aclose()

    def _release(self) -> None:
        for promise in (*self._promises.values(), *self._claimed.values()):
            promise.request.close()
        for rid in list(self._read):
            self.forget(rid)
        self._promises.clear()
        self._claimed.clear()


def _named_after(events: Sequence[SynchronizableEvent], named: Callable[[], HashedPages]) -> HashedPages:
    for event in events:
        event.synchronize()
    return named()
