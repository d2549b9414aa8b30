"""Computes the part of a prompt that is not cached, and publishes the result to the cache."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from dataclasses import dataclass
from functools import partial
from weakref import WeakSet

import torch
from transformers import PreTrainedModel

from asynchicache.cache import Hit, HybridCache, Request
from asynchicache.config import CacheConfig
from asynchicache.errors import ConfigError
from asynchicache.integrations.transformers.asking import check_spec, spec_from_model
from asynchicache.integrations.transformers.bridge import CacheBridge
from asynchicache.integrations.transformers.calls import Feed, ModelCalls, ModelRank, Restore, Trim
from asynchicache.integrations.transformers.forward import feeds_one_by_one
from asynchicache.integrations.transformers.prefix import CachedPrefix, PrefixContext
from asynchicache.integrations.transformers.snapshot import new_cache
from asynchicache.integrations.transformers.thread import ModelThread
from asynchicache.integrations.transformers.weights import ModelWeights
from asynchicache.options import check_kind
from asynchicache.ranks.group import RankGroup
from asynchicache.specs import ModelSpec
from asynchicache.storage.protocol import StorageBackend
from asynchicache.types import check_number

logger = logging.getLogger(__name__)

_PAGE_SIZE = 64
_OPEN: WeakSet[PreTrainedModel] = WeakSet()
"""Models that a runner's thread computes with."""
_FEW = 16
"""One-token forwards in a row before calls of other requests run."""
_SCORED = 128
"""Most tokens of a forward whose logits are all kept: of a large vocabulary, each takes half a megabyte."""


@dataclass(frozen=True, slots=True)
class Prefilled:
    """A prompt in the model's memory.

    Attributes:
        hit: the part that came from the cache.
        logits: logits after the last computed token, `[vocabulary]`; None if no token was computed.
    """

    hit: Hit
    logits: torch.Tensor | None


@dataclass(slots=True, eq=False)
class Prefill:
    """A prompt that is being computed.

    Attributes:
        prefix: its pages in the cache.
        at: tokens in the model's memory.
        logits: logits after the last computed token, `[vocabulary]`; None if no token was computed.
    """

    prefix: CachedPrefix
    at: int
    logits: torch.Tensor | None = None


class PrefillRunner:
    """One model, and a cache of its pages.

    Attributes:
        context: how the model's thread uses the cache.
        capacity_tokens: tokens that the device pages of the cache hold.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: HybridCache,
        thread: ModelThread,
        *,
        prefill_chunk: int,
        group: RankGroup | None = None,
    ) -> None:
        """
        Args:
            model: this rank's part, if there is a group.
            cache: of its pages.
            prefill_chunk: tokens per forward; calls of other requests run between forwards.
            group: the ranks that the model is divided over.
        """
        bridge, size = CacheBridge(model.config, cache), cache.spec.page_size
        calls = ModelCalls(ModelRank(model, bridge.copies), thread, group)
        full, *windows = [_device_pages(cache, pool.name) for pool in cache.spec.owners if pool.per_token]
        # A window pool need not hold a whole prompt: one chunk must fit beside one window.
        piece = min([prefill_chunk, *((pages - bridge.copies.window_pages) * size for pages in windows)])
        self.context = PrefixContext(
            calls, bridge, size, piece, ModelWeights(model, lambda: cache.config.weight_version)
        )
        self.capacity_tokens = full * size
        self._one_by_one = feeds_one_by_one(model)

    async def prefill(
        self,
        request: Request,
        sequence: int,
        tokens: Sequence[int],
        end: int,
        *,
        shared: Callable[[int], int | None] = lambda at: None,
    ) -> Prefilled:
        """Compute the part of `tokens[:end]` that is not cached, and publish it.

        Args:
            request: of the tokens; entered, and not loaded.
            sequence: its number in the model's memory.
            end: where to stop. A longer hit is used as a whole.
            shared: asked before each forward with the length so far: where other prompts leave this one.
        """
        request.rematch()  # earlier requests may have published a part of this prompt
        running = await self._restore(request, sequence)
        await self._compute(running, request, tokens, end, shared)
        return Prefilled(running.prefix.hit, running.logits)

    async def score(
        self, sequence: int, tokens: Sequence[int], use: Callable[[int, torch.Tensor], None]
    ) -> torch.Tensor:
        """Compute a whole prompt without the cache, which keeps no logits.

        Args:
            sequence: its number in the model's memory.
            use: gets each forward's start and its logits after each token, `[n, vocabulary]`, on the model's
                thread.

        Returns:
            logits after the last token, `[vocabulary]`.
        """
        calls, at = self.context.calls, 0
        await calls.run(Restore(sequence))
        while at < len(tokens):
            stop = self._stop(at, min(len(tokens), at + _SCORED))
            call = Feed(sequence, at, list(tokens[at:stop]), every=True)
            logits = await calls.compute(call, partial(_used, use, at))
            if self.context.window_pages:
                await calls.run(Trim(sequence))
            at = stop
        return logits

    async def _restore(self, request: Request, sequence: int) -> Prefill:
        prefix = CachedPrefix(self.context, request, sequence)
        await prefix.restore()
        return Prefill(prefix, prefix.hit.tokens)

    async def _compute(
        self,
        running: Prefill,
        request: Request,
        tokens: Sequence[int],
        end: int,
        shared: Callable[[int], int | None] = lambda at: None,
    ) -> None:
        """Compute a prompt up to `end`; publish it at cuts, at `end`, and after each chunk with windows."""
        prefix, calls, cuts = running.prefix, self.context.calls, set(request.cuts)
        while (at := running.at) < end:
            if self._needs_cuts and (length := shared(at)) is not None:
                cuts.add(length)
            stop = self._stop(at, min(cut for cut in (*cuts, end) if at < cut <= end))
            began = time.perf_counter()
            call = Feed(prefix.sequence, at, list(tokens[at:stop]))
            running.logits = await calls.compute(call, lambda logits: logits)
            if request.reports_costs:
                request.computed(stop - at, time.perf_counter() - began, context=at)
            await prefix.save(stop)
            # A window moves on with the next chunk, so models with windows publish after each one.
            if stop in cuts or stop == end or self.context.window_pages:
                # A cut that this prefill does not reach is made where it ends.
                wanted = stop in cuts or (stop == end and max(cuts, default=0) > end)
                await prefix.publish(stop, final=stop >= self.context.publishable(end), states=wanted)
            if self.context.window_pages:
                await calls.run(Trim(prefix.sequence))
            running.at = stop

    @property
    def _needs_cuts(self) -> bool:
        """Whether a prompt can be resumed only where a forward ended."""
        return self.context.has_states or bool(self.context.window_pages)

    def _stop(self, start: int, wanted: int) -> int:
        """Return where the next forward ends on the way from `start` to `wanted`: after one chunk at most."""
        if self._one_by_one and start == 0:
            return wanted  # from the beginning one forward may compute many tokens
        return self.context.pieces(start, wanted, _FEW if self._one_by_one else None)[0]

    async def publish(
        self, request: Request, sequence: int, length: int, kept: int | None, *, known: int
    ) -> None:
        """Publish the output of a prompt, up to the last whole page; with tails, also up to its end.

        Args:
            request: of prompt and output; entered, and not loaded.
            sequence: its number in the model's memory, which holds `length` tokens.
            length: computed tokens of the sequence.
            kept: the last page boundary that a decode step has reached, whose states were kept; None if it
                has reached none.
            known: tokens that were published before.
        """
        context, states = self.context, request.keeps_output
        ends: list[tuple[int, bool]] = []  # and whether its states were kept
        if context.has_states and states:
            if kept is not None and kept > known:
                ends.append((kept, True))
            if context.bridge.tails and length > max(known, kept or 0):
                ends.append((length, False))  # the states in memory are those of its end
        elif (length if context.bridge.tails and not context.has_states else context.whole(length)) > known:
            ends.append((length, False))
        if not ends:
            return
        prefix = CachedPrefix(context, request, sequence)
        await prefix.load(counted=False)
        for end, was_kept in ends:
            await prefix.save_late(end, kept=was_kept)
            await prefix.publish(end, final=end == ends[-1][0], states=states)


def _used(use: Callable[[int, torch.Tensor], None], start: int, logits: torch.Tensor) -> torch.Tensor:
    use(start, logits)
    return logits[-1]


async def open_prefill_runner(
    stack: AsyncExitStack,
    model: PreTrainedModel,
    config: CacheConfig | None,
    *,
    page_size: int | None,
    storage: StorageBackend | None,
    prefill_chunk: int,
    spec: ModelSpec | None = None,
    group: RankGroup | None = None,
) -> tuple[HybridCache, PrefillRunner]:
    """Open a cache for a model and the thread that runs the model; `stack` closes both.

    Raises:
        RankError: a rank of the group does not fit it, or is missing.
        UnsupportedModelError: a layer of the model has no pool.
        ConfigError: options contradict each other or the model.
        CapacityError, StorageError: as of `HybridCache.open`.
    """
    config = config or CacheConfig(device=str(model.device))
    check_kind("config", config, CacheConfig, "pass CacheConfig(...)")
    check_number("prefill_chunk", prefill_chunk)
    if spec is not None:
        check_kind("spec", spec, ModelSpec, "pass ModelSpec.from_config(model.config)")
        if page_size not in (None, spec.page_size):
            raise ConfigError(f"page_size {page_size}, and the spec has {spec.page_size}: leave it out")
    if spec is None:
        spec = spec_from_model(model, page_size=_PAGE_SIZE if page_size is None else page_size)
    else:
        check_spec(model, spec)
    check_model(model, config, spec)
    if prefill_chunk < 1:
        raise ConfigError(f"prefill_chunk {prefill_chunk} must be 1 token at least")
    if model in _OPEN:  # no error: whoever was cancelled, or whose loop is gone, could never open it again
        logger.warning(
            "this %s was opened before and not closed: two threads compute with it, each behind its own "
            "cache. One opening serves many requests",
            type(model).__name__,
        )
    _OPEN.add(model)
    stack.callback(_OPEN.discard, model)
    cache = await stack.enter_async_context(HybridCache.open(spec, config, storage=storage, group=group))
    runner = PrefillRunner(model, cache, ModelThread(model.device), prefill_chunk=prefill_chunk, group=group)
    stack.callback(runner.context.calls.close)
    return cache, runner


def check_model(model: PreTrainedModel, config: CacheConfig, spec: ModelSpec) -> None:
    """
    Raises:
        ConfigError: the model cannot be used with a cache of these options and pools.
    """
    if model.training:
        raise ConfigError("the model is in training mode, where dropout is random: call model.eval()")
    if torch.device(config.device).type != model.device.type:
        raise ConfigError(f"the model is on {model.device}, the cache on {config.device}: set config.device")
    if spec.place.cp.size > 1:
        raise ConfigError(
            f"cp {tuple(spec.place.cp)}: a model of transformers keeps every token on each rank; "
            "context parallelism needs an engine of its own (RankWorker)"
        )
    layers = len(new_cache(model.config))
    if layers != len(spec.stage):
        raise ConfigError(
            f"the model has {layers} layers, and the spec those from {spec.stage.start} to "
            f"{spec.stage.stop - 1}: a rank's model has the layers of its stage, and no others"
        )


def _device_pages(cache: HybridCache, pool: str) -> int:
    tensor = cache.spec.pool(pool).tensors[0]
    return int(cache.device_tensor(pool, tensor.name).shape[1])
