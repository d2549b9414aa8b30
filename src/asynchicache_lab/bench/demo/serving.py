"""A small serving engine: one model on one thread, with a cache and batched decoding.

The model works on separate memory, a transformers `DynamicCache`; the cache
keeps data for later turns. A request is open during its prefill, and again while the end of its turn is
published, but not while the batch decodes. So conversations can share device pages that are too few for all
of them.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial

from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel

from asynchicache.cache import Hit, HybridCache, Request
from asynchicache.errors import CapacityError
from asynchicache.integrations.transformers.batches import stack
from asynchicache.integrations.transformers.bridge import CacheBridge
from asynchicache.integrations.transformers.forward import decode, prefill
from asynchicache.integrations.transformers.snapshot import new_cache
from asynchicache.integrations.transformers.thread import ModelThread
from asynchicache_lab.bench.demo.results import ServedPrompt


@dataclass(frozen=True, slots=True)
class OwnedModel:
    """A model, and the only thread that may use it or its memory."""

    model: PreTrainedModel
    config: PreTrainedConfig
    thread: ModelThread


@dataclass(slots=True, eq=False)
class _Running:
    """An admitted sequence.

    Attributes:
        tokens: prompt and generated ids; the last one was not yet fed to the model.
        prompt: length of the prompt in tokens.
        memory: the model's memory of the sequence.
        hit, ttft_ms: the cache's hit, and the time to the first token.
    """

    tokens: list[int]
    prompt: int
    memory: DynamicCache
    hit: Hit
    ttft_ms: float

    def served(self) -> ServedPrompt:
        generated = self.tokens[self.prompt :]
        return ServedPrompt(self.prompt, self.hit.tokens, self.hit.by_tier, self.ttft_ms, generated)


class ServingEngine:
    """Serves prompts greedily, from a cache or without one."""

    def __init__(self, owned: OwnedModel, cache: HybridCache | None) -> None:
        """`cache`: serves previously computed prefixes; None computes everything."""
        self._model, self._config, self._thread = owned.model, owned.config, owned.thread
        self._store = None if cache is None else PrefixStore(owned, cache)

    async def serve(self, prompts: Sequence[Sequence[int]], new_tokens: int) -> list[ServedPrompt]:
        """Admit prompts one after the other, then decode all of them as one batch.

        Args:
            prompts: prompts of equal length, because the batch has no padding.
            new_tokens: number of tokens to generate per prompt.
        """
        batch = [await self._admit(list(prompt)) for prompt in prompts]
        await self._decode(batch, new_tokens)
        return [running.served() for running in batch]

    async def _admit(self, prompt: list[int]) -> _Running:
        """Run one request from its arrival to its first token."""
        if self._store is None:
            return await self._admit_uncached(prompt)
        arrived = time.perf_counter()
        async with self._store.request(prompt) as request:
            memory = await self._store.restore(request)
            at = request.hit.tokens
            for cut in request.cuts:  # a state exists only where a forward ends
                if cut < len(prompt):
                    await self._prefill(memory, prompt, at, cut)
                    await self._store.publish(request, memory, cut)
                    at = cut
            first = await self._prefill(memory, prompt, at, len(prompt))
            ttft_ms = _milliseconds_since(arrived)
            await self._store.publish(request, memory, len(prompt), final=True)
            return _Running([*prompt, first], len(prompt), memory, request.hit, ttft_ms)

    async def _admit_uncached(self, prompt: list[int]) -> _Running:
        arrived = time.perf_counter()
        memory = new_cache(self._config)
        first = await self._prefill(memory, prompt, 0, len(prompt))
        return _Running([*prompt, first], len(prompt), memory, Hit(0), _milliseconds_since(arrived))

    async def _prefill(self, memory: DynamicCache, tokens: list[int], start: int, stop: int) -> int:
        """Compute `tokens[start:stop]`; return the next token."""
        logits = await self._thread.run(partial(prefill, self._model, memory, tokens, start, stop))
        return int(logits.argmax())

    async def _decode(self, batch: Sequence[_Running], new_tokens: int) -> None:
        """Generate the remaining tokens of a batch. Their number is known, so one state is kept, at the last
        page boundary; an engine that does not know it would take a snapshot at each boundary.
        """
        memory = await self._thread.run(partial(stack, [running.memory for running in batch]))
        length = batch[0].prompt
        computed = length + new_tokens - 1  # the last token is never fed to the model
        for _ in range(new_tokens - 1):
            latest = [running.tokens[-1] for running in batch]
            logits = await self._thread.run(partial(decode, self._model, memory, latest, length))
            length += 1
            for running, token in zip(batch, logits.argmax(-1).tolist(), strict=True):
                running.tokens.append(token)
            if self._store is not None and length == self._store.whole_pages(computed):
                await self._publish_turns(self._store, batch, memory, length)

    @staticmethod
    async def _publish_turns(
        store: PrefixStore, batch: Sequence[_Running], memory: DynamicCache, length: int
    ) -> None:
        """Publish the first `length` tokens of every sequence of a batch.

        Each sequence opens a new request, because its prefix may have been evicted since the prefill. Lost
        pages are still in the model's memory, and are published again.
        """
        for row, running in enumerate(batch):
            async with store.request(running.tokens) as request:
                await store.load(request)
                await store.publish(request, memory, length, row=row, final=True)


class PrefixStore:
    """A `HybridCache` whose pages are copied from and to the model's memory."""

    def __init__(self, owned: OwnedModel, cache: HybridCache) -> None:
        self._thread = owned.thread
        self._cache = cache
        self._page_size = cache.spec.page_size
        self._bridge = CacheBridge(owned.config, cache)

    def request(self, tokens: Sequence[int]) -> Request:
        return self._cache.request(tokens)

    def whole_pages(self, length: int) -> int:
        """`length` rounded down to whole pages."""
        return length // self._page_size * self._page_size

    async def load(self, request: Request) -> None:
        """Load the request's hit from all tiers to device pages."""
        await request.prefetch()
        with suppress(CapacityError):  # `load` then loads what fits
            await request.admit()
        await request.load()

    async def restore(self, request: Request) -> DynamicCache:
        """Return model memory with the first `request.hit.tokens` tokens, from the cache."""
        await self.load(request)
        return await self._thread.run(partial(self._bridge.restore, request))

    async def publish(
        self, request: Request, memory: DynamicCache, length: int, *, row: int = 0, final: bool = False
    ) -> None:
        """Copy tokens that the request has no pages for from the model's memory, and publish them.

        Args:
            request: a loaded request; everything it published before ended at a page boundary.
            memory: model memory with `length` tokens.
            length: at a page boundary, states are published too; otherwise this is the last publication.
            row: index of the sequence in `memory`.
            final: whether this is the request's last publication; its state then needs no second slot.
        """
        done = request.reserved
        if length <= done:
            return
        try:
            await request.reserve(length - done)
        except CapacityError:
            return  # a full cache costs later hits, but must not fail this request
        await self._thread.run(partial(self._bridge.save, request, memory, done, length, row=row))
        await request.checkpoint(length, final=final)  # afterwards the working state may be overwritten


def _milliseconds_since(start: float) -> float:
    return (time.perf_counter() - start) * 1e3
