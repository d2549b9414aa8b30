"""Prompts computed behind what the cache has of them, and what was computed given to the cache."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial

import torch
from transformers import DynamicCache, PreTrainedModel

from asynchicache.cache import Hit, HybridCache, Request
from asynchicache.config import CacheConfig
from asynchicache.errors import ConfigError
from asynchicache.integrations.transformers.bridge import CacheBridge
from asynchicache.integrations.transformers.forward import feeds_one_by_one, prefill
from asynchicache.integrations.transformers.prefix import CachedPrefix, PrefixContext
from asynchicache.integrations.transformers.snapshot import SavedStates
from asynchicache.integrations.transformers.thread import ModelThread
from asynchicache.specs import ModelSpec
from asynchicache.storage.protocol import StorageBackend

_FEW = 16
"""Forwards of a token each, before others have their turn."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt in the model's memory.

    Attributes:
        memory: what the model works on from now on.
        hit: what the cache served of it.
        logits: after the last token that was computed, `[vocabulary]`; None if none was.
    """

    memory: DynamicCache
    hit: Hit
    logits: torch.Tensor | None


class PrefillRunner:
    """One model, its thread, and a cache of its pages.

    Attributes:
        store: how the model's thread uses the cache.
        capacity_tokens: that the device pages of the cache hold.
    """

    def __init__(
        self, model: PreTrainedModel, cache: HybridCache, thread: ModelThread, *, prefill_chunk: int
    ) -> None:
        """`prefill_chunk`: tokens that are computed at once, before others have their turn."""
        bridge, size = CacheBridge(model.config, cache), cache.spec.page_size
        full, *windows = [_device_pages(cache, pool.name) for pool in cache.spec.owners if pool.per_token]
        # A pool of windows need not hold a prompt: what is computed at once must fit beside one window.
        piece = min([prefill_chunk, *((pages - bridge.window_pages) * size for pages in windows)])
        self.context = PrefixContext(thread, model.config, bridge, size, piece)
        self.capacity_tokens = full * size
        self._model = model
        self._thread = thread

    async def prefill(self, request: Request, tokens: Sequence[int], end: int) -> Prefilled:
        """Compute what the cache does not have of `tokens[:end]`, and publish it.

        Args:
            request: of the tokens; entered, and not loaded.
            tokens: the prompt.
            end: where to stop; what the cache has beyond that is taken nevertheless.
        """
        prefix = CachedPrefix(self.context, request)
        memory = await prefix.restore()
        cuts, at, logits = set(request.cuts), prefix.hit.tokens, None
        for stop in self._stops(at, {*cuts, end}, end):
            logits = await self._thread.run(partial(prefill, self._model, memory, tokens, at, stop))
            await prefix.save(memory, stop)
            # Pieces of models with windows are published as they come, while their windows are there.
            if stop in cuts or stop == end or self.context.bridge.window_pages:
                await prefix.publish(stop, final=stop >= self.context.whole(end))
            await self._thread.run(partial(self.context.trim, memory))
            at = stop
        return Prefilled(memory, prefix.hit, logits)

    def _stops(self, start: int, wanted: Collection[int], end: int) -> list[int]:
        """Where forwards end on the way to `end`: where it is wanted, and between as often as others are to
        have their turn."""
        stops: list[int] = []
        one_by_one = feeds_one_by_one(self._model)
        for stop in sorted(stop for stop in wanted if start < stop <= end):
            if one_by_one and start == 0:
                stops.append(stop)  # one forward, and the only one of more than a token
            else:
                stops += self.context.pieces(start, stop, _FEW if one_by_one else None)
            start = stop
        return stops

    async def publish(
        self, request: Request, memory: DynamicCache, length: int, states: SavedStates | None, *, known: int
    ) -> None:
        """Publish what was computed behind a prompt, up to the last whole page.

        Args:
            request: of prompt and output; entered, and not loaded.
            memory: holds `length` tokens.
            length: tokens of the sequence that were computed.
            states: at the last page boundary that a decode step has reached; None if none has.
            known: tokens that were published before.
        """
        if self.context.bridge.has_states and request.keeps_output:
            length = 0 if states is None else states.tokens
        else:
            states = None
        if self.context.whole(length) <= known:
            return
        prefix = CachedPrefix(self.context, request)
        await prefix.load(counted=False)
        await prefix.save_late(memory, length, states)
        await prefix.publish(length, final=True)


async def open_prefill_runner(
    stack: AsyncExitStack,
    model: PreTrainedModel,
    config: CacheConfig | None,
    *,
    page_size: int,
    storage: StorageBackend | None,
    prefill_chunk: int,
) -> tuple[HybridCache, ModelThread, PrefillRunner]:
    """A cache for a model, and the thread that runs it; `stack` closes both.

    Raises:
        UnsupportedModelError: a layer of the model has no pool.
        ConfigError: options contradict each other or the model.
        CapacityError, StorageError: as of `HybridCache.open`.
    """
    config = config or CacheConfig(device=str(model.device))
    _check(model, config, prefill_chunk)
    dtype = str(model.dtype).removeprefix("torch.")
    spec = ModelSpec.from_config(model.config, page_size=page_size, dtype=dtype)
    cache = await stack.enter_async_context(HybridCache.open(spec, config, storage=storage))
    thread = stack.enter_context(ModelThread(model.device))
    return cache, thread, PrefillRunner(model, cache, thread, prefill_chunk=prefill_chunk)


def _check(model: PreTrainedModel, config: CacheConfig, prefill_chunk: int) -> None:
    """
    Raises:
        ConfigError: the model would not run as it is, or not beside the cache.
    """
    if prefill_chunk < 1:
        raise ConfigError(f"prefill_chunk {prefill_chunk} must be 1 token at least")
    if model.training:
        raise ConfigError("the model is in training mode, where dropout is random: call model.eval()")
    if torch.device(config.device).type != model.device.type:
        raise ConfigError(f"the model is on {model.device}, the cache on {config.device}: set config.device")


def _device_pages(cache: HybridCache, pool: str) -> int:
    tensor = cache.spec.pool(pool).tensors[0]
    return int(cache.device_tensor(pool, tensor.name).shape[1])
