"""Computes the part of a prompt that is not cached, and publishes the result to the cache."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack
from dataclasses import dataclass, replace
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
"""One-token forwards in a row before calls of other requests run."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt in the model's memory.

    Attributes:
        memory: the model's cache from now on.
        hit: the part that came from the cache.
        logits: logits after the last computed token, `[vocabulary]`; None if no token was computed.
    """

    memory: DynamicCache
    hit: Hit
    logits: torch.Tensor | None


@dataclass(slots=True, eq=False)
class Prefill:
    """A prompt that is being computed.

    Attributes:
        prefix: its pages in the cache.
        memory: the model's cache.
        at: tokens in `memory`.
        logits: logits after the last computed token, `[vocabulary]`; None if no token was computed.
    """

    prefix: CachedPrefix
    memory: DynamicCache
    at: int
    logits: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Beginning:
    """What a request computed of its prompt before the rest of its prefix was read.

    Attributes:
        computed: tokens that it computed and published, and finds again as a part of its hit.
        running: the prefill to continue, if the request could not be suspended; else None.
    """

    computed: int = 0
    running: Prefill | None = None


class PrefillRunner:
    """One model, its thread, and a cache of its pages.

    Attributes:
        context: how the model's thread uses the cache.
        capacity_tokens: tokens that the device pages of the cache hold.
    """

    def __init__(
        self, model: PreTrainedModel, cache: HybridCache, thread: ModelThread, *, prefill_chunk: int
    ) -> None:
        """`prefill_chunk`: tokens per forward; calls of other requests run between forwards."""
        bridge, size = CacheBridge(model.config, cache), cache.spec.page_size
        full, *windows = [_device_pages(cache, pool.name) for pool in cache.spec.owners if pool.per_token]
        # A window pool need not hold a whole prompt: one chunk must fit beside one window.
        piece = min([prefill_chunk, *((pages - bridge.window_pages) * size for pages in windows)])
        self.context = PrefixContext(thread, model.config, bridge, size, piece)
        self.capacity_tokens = full * size
        self._model = model
        self._thread = thread

    async def prefill(
        self,
        request: Request,
        tokens: Sequence[int],
        end: int,
        *,
        begun: Beginning = Beginning(),
        shared: Callable[[int], int | None] = lambda at: None,
    ) -> Prefilled:
        """Compute the part of `tokens[:end]` that is not cached, and publish it.

        Args:
            request: of the tokens; entered, and not loaded but by `begin`.
            tokens: the prompt.
            end: where to stop. A longer hit is used as a whole.
            begun: what `begin` returned.
            shared: asked before each forward with the length so far: where other prompts leave this one.
        """
        running = begun.running
        if running is None:
            request.rematch()  # earlier requests may have published a part of this prompt
            running = await self._restore(request)
        await self._compute(running, request, tokens, end, shared)
        return Prefilled(running.memory, _without(running.prefix.hit, begun.computed), running.logits)

    async def begin(
        self, request: Request, tokens: Sequence[int], turn: AbstractAsyncContextManager[object]
    ) -> Beginning:
        """Rest until `prefill`. If storage reads only the end of the prefix, compute the beginning meanwhile;
        see `Request.split`.

        Args:
            request: of the tokens; after `prefetch`.
            tokens: the prompt.
            turn: entered while the model computes.
        """
        request.rest()  # releases its leases, so that they do not block eviction while it waits
        if not request.split:
            return Beginning()
        computed = 0
        async with turn:
            if request.rematch().tokens < request.split:  # else another request has published it meanwhile
                running = await self._restore(request)
                await self._compute(running, request, tokens, request.split, publish=False)
                if not running.prefix.suspend(running.at):
                    return Beginning(running=running)
                computed = max(running.at - running.prefix.hit.tokens, 0)
                request.rematch()
        await request.prefetch()
        request.rest()
        return Beginning(computed)

    async def _restore(self, request: Request) -> Prefill:
        prefix = CachedPrefix(self.context, request)
        memory = await prefix.restore()
        return Prefill(prefix, memory, prefix.hit.tokens)

    async def _compute(
        self,
        running: Prefill,
        request: Request,
        tokens: Sequence[int],
        end: int,
        shared: Callable[[int], int | None] = lambda at: None,
        *,
        publish: bool = True,
    ) -> None:
        """Compute a prompt up to `end`; `publish` it at cuts, at `end`, and after each chunk with windows."""
        prefix, memory, cuts = running.prefix, running.memory, set(request.cuts)
        while (at := running.at) < end:
            if self._needs_cuts and (length := shared(at)) is not None:
                cuts.add(length)
            stop = self._stop(at, min(cut for cut in (*cuts, end) if at < cut <= end))
            began = time.perf_counter()
            running.logits = await self._thread.run(partial(prefill, self._model, memory, tokens, at, stop))
            if request.reports_costs:
                request.computed(stop - at, time.perf_counter() - began, context=at)
            await prefix.save(memory, stop)
            # A window moves on with the next chunk, so models with windows publish after each one.
            if publish and (stop in cuts or stop == end or self.context.bridge.window_pages):
                await prefix.publish(stop, final=stop >= self.context.publishable(end))
            await self._thread.run(partial(self.context.trim, memory))
            running.at = stop

    @property
    def _needs_cuts(self) -> bool:
        """Whether a prompt can be resumed only where a forward ended."""
        return self.context.bridge.has_states or bool(self.context.bridge.window_pages)

    def _stop(self, start: int, wanted: int) -> int:
        """Return where the next forward ends on the way from `start` to `wanted`: after one chunk at most."""
        one_by_one = feeds_one_by_one(self._model)
        if one_by_one and start == 0:
            return wanted  # from the beginning one forward may compute many tokens
        return self.context.pieces(start, wanted, _FEW if one_by_one else None)[0]

    async def publish(
        self, request: Request, memory: DynamicCache, length: int, states: SavedStates | None, *, known: int
    ) -> None:
        """Publish the output of a prompt, up to the last whole page; with tails, also up to its end.

        Args:
            request: of prompt and output; entered, and not loaded.
            memory: holds `length` tokens.
            length: computed tokens of the sequence.
            states: at the last page boundary that a decode step has reached; None if it has reached none.
            known: tokens that were published before.
        """
        bridge = self.context.bridge
        ends: list[tuple[int, SavedStates | None]] = []
        if bridge.has_states and request.keeps_output:
            if states is not None and states.tokens > known:
                ends.append((states.tokens, states))
            if bridge.tails and length > max(known, states.tokens if states is not None else 0):
                ends.append((length, None))  # the states in `memory` are those of its end
        elif (length if bridge.tails else self.context.whole(length)) > known:
            ends.append((length, None))
        if not ends:
            return
        prefix = CachedPrefix(self.context, request)
        await prefix.load(counted=False)
        for end, saved in ends:
            await prefix.save_late(memory, end, saved)
            await prefix.publish(end, final=end == ends[-1][0])


async def open_prefill_runner(
    stack: AsyncExitStack,
    model: PreTrainedModel,
    config: CacheConfig | None,
    *,
    page_size: int,
    storage: StorageBackend | None,
    prefill_chunk: int,
) -> tuple[HybridCache, ModelThread, PrefillRunner]:
    """Open a cache for a model and the thread that runs the model; `stack` closes both.

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


def _without(hit: Hit, computed: int) -> Hit:
    """A hit less the tokens that the request computed itself."""
    if not computed:
        return hit
    tokens = max(hit.tokens - computed, 0)
    return replace(hit, tokens=tokens, by_tier=dict.fromkeys(hit.by_tier, tokens))


def _check(model: PreTrainedModel, config: CacheConfig, prefill_chunk: int) -> None:
    """
    Raises:
        ConfigError: the model or the chunk cannot be used with the cache.
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
