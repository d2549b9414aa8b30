"""Copy one request's prefix between the cache and the model's memory.

A failure here never fails the request: it costs hits, and the request publishes nothing more.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from typing import Any
from weakref import WeakKeyDictionary

from asynchicache.cache import Hit, HybridCache, Request
from asynchicache.errors import CacheError, CapacityError, UsageError
from asynchicache.integrations.transformers.bridge import CacheBridge
from asynchicache.integrations.transformers.calls import ModelCalls, Restore, Save
from asynchicache.integrations.transformers.weights import ModelWeights
from asynchicache.types import MissReason

_log = logging.getLogger(__name__)

_WAIT_SECONDS = 5.0
"""How long a request waits for free pages; then it continues with fewer hits, or unpublished."""


class PrefixContext:
    """How a model uses a cache.

    Attributes:
        bridge: knows the slots of requests.
        piece: most tokens to reserve pages for at once, so that a window pool need not hold a whole prompt.
        has_states: whether the model keeps states.
        window_pages: pages of sliding windows that are kept at the end of a prefix; 0 without windows.
        weights: what the model computes with.
    """

    def __init__(
        self, calls: ModelCalls, bridge: CacheBridge, page_size: int, piece: int, weights: ModelWeights
    ) -> None:
        self.weights = weights
        self._made: WeakKeyDictionary[Request, int] = WeakKeyDictionary()
        self.calls = calls
        self.bridge = bridge
        self.page_size = page_size
        self.piece = piece
        self.has_states = bridge.copies.has_states
        self.window_pages = bridge.copies.window_pages

    def request(
        self, cache: HybridCache, tokens: Iterable[int], *, salt: str | None, **options: Any
    ) -> Request:
        """Make a request for a prompt that is computed with the current weights and adapters.

        Raises:
            UsageError: an adapter is active whose keys depend on more than tokens and weights.
            InvalidTokensError, ClosedError: as of `HybridCache.request`.
        """
        self.weights.look()
        request = cache.request(tokens, salt=self.weights.salted(salt), **options)
        self._made[request] = self.weights.changes
        return request

    def is_current(self, request: Request) -> bool:
        """Whether weights and adapters are those that the request was made for."""
        self.weights.look()
        return self._made.get(request) == self.weights.changes

    def pieces(self, start: int, stop: int, most: int | None = None) -> list[int]:
        """Return the ends of pieces of at most `most` tokens from `start` to `stop`."""
        piece = self.piece if most is None else min(self.piece, most)
        return [*range(start + piece, stop, piece), stop] if stop > start else []

    def whole(self, tokens: int) -> int:
        """Round `tokens` down to whole pages."""
        return tokens - tokens % self.page_size

    def publishable(self, tokens: int) -> int:
        """Round `tokens` of a prompt down to where a prefix may end while its request goes on."""
        attention_alone = not (self.has_states or self.window_pages)
        return tokens if self.bridge.tails and attention_alone else self.whole(tokens)


class CachedPrefix:
    """A request of the cache, from its match to its last publication.

    Attributes:
        sequence: its number in the model's memory.
        hit: the part that the model need not compute.
    """

    def __init__(self, context: PrefixContext, request: Request, sequence: int) -> None:
        self.sequence = sequence
        self._context = context
        self._request = request
        self._over = False
        self.hit = Hit(0)

    async def restore(self) -> None:
        """Begin the sequence in the model's memory, with the `hit.tokens` cached tokens."""
        await self.load()
        call = Restore(self.sequence)
        if not self._over:
            slots = self._context.bridge.hit_slots(self._request)
            call = Restore(self.sequence, self.hit.tokens, slots)
        await self._context.calls.run(call)

    async def load(self, *, counted: bool = True) -> None:
        """Load the match to device pages."""
        if not self._context.is_current(self._request):
            self.hit = Hit(0, reason=MissReason.WEIGHTS)
            return self._outdated()
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                await self._request.admit()
        except (CapacityError, TimeoutError) as error:  # `load` then takes what fits
            _log.debug("loading without room for all: %s", error)
        try:
            ticket = self._request.load(counted=counted)
            self.hit = self._request.hit
            await ticket
        except CacheError as error:
            self._give_up(error)
            self.hit = Hit(0, reason=MissReason.TRANSFER_FAILED)

    async def save(self, stop: int) -> None:
        """Copy tokens computed by a forward that ended at `stop` to pages that the request owns.

        The model's memory holds `stop` tokens, and in window layers all rows since the last call.
        """
        if self._over:
            return
        start = self._request.reserved
        if stop > start and await self._reserve(stop):
            await self._copy(start, stop, kept=False)

    async def save_late(self, stop: int, *, kept: bool) -> None:
        """Save after windows have been trimmed: window pages are copied only if `stop` needs them.

        Args:
            stop: end of a forward; the model's memory holds `stop` tokens, or more if states are `kept`.
            kept: use the states that were kept at `stop`.
        """
        if self._over:
            return
        start = self._request.reserved
        for end in self._context.pieces(start, stop):
            if self._over or not await self._reserve(end):
                return
            self._request.advance(end)
        if not self._over and stop > start:
            await self._copy(start, stop, kept=kept)

    async def _copy(self, start: int, stop: int, *, kept: bool) -> None:
        slots = self._context.bridge.new_slots(self._request, start, stop)
        try:
            await self._context.calls.run(Save(self.sequence, stop, slots, kept))
            self._context.bridge.saved(self._request, stop, slots)
        except CacheError as error:
            self._give_up(error)

    async def _reserve(self, stop: int) -> bool:
        try:
            async with asyncio.timeout(_WAIT_SECONDS):
                await self._request.reserve(stop - self._request.reserved)
        except (CacheError, TimeoutError) as error:
            self._give_up(error)
        return not self._over

    async def publish(self, stop: int, *, final: bool, states: bool) -> None:
        """Publish tokens saved up to `stop`, maybe with states; `final`: it publishes nothing more."""
        if self._over or stop > self._request.reserved:
            return None
        if not self._context.is_current(self._request):
            return self._outdated()
        try:
            await self._request.checkpoint(stop, final=final, states=states)  # they may be overwritten then
            self._over = final
        except CacheError as error:
            self._give_up(error)

    def _outdated(self) -> None:
        """The model has other weights or adapters now: what it computed is of no use for others."""
        self._over = True
        _log.info("nothing more of a request is published: the model's weights or adapters changed")

    def _give_up(self, error: CacheError | TimeoutError) -> None:
        self._over = True
        level = logging.WARNING if isinstance(error, UsageError) else logging.INFO
        _log.log(level, "nothing more of a request is published: %r", error)
