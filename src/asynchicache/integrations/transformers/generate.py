"""A blocking `generate` with a prefix cache, for programs without an event loop."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, nullcontext, suppress
from typing import Any

import torch
from transformers import PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from asynchicache.cache import CacheStatistics, Hit, HybridCache
from asynchicache.config import CacheConfig
from asynchicache.errors import CapacityError, UsageError
from asynchicache.integrations.bridge import LoopBridge
from asynchicache.integrations.transformers.calls import Restore, SequenceMemory, Trim
from asynchicache.integrations.transformers.forward import feeds_one_by_one
from asynchicache.integrations.transformers.prefill_runner import (
    Prefilled,
    PrefillRunner,
    open_prefill_runner,
)
from asynchicache.integrations.transformers.prefix import PrefixContext
from asynchicache.integrations.transformers.snapshot import save_states
from asynchicache.storage.protocol import StorageBackend
from asynchicache.types import MissReason, token_array

_REFUSED: Mapping[str, str] = {
    "past_key_values": "the cache gives it",
    "inputs_embeds": "prefixes are known by their token ids",
    "assistant_model": "it takes back tokens that the cache has seen",
    "prompt_lookup_num_tokens": "it takes back tokens that the cache has seen",
    "cache_implementation": "the cache reads DynamicCache only",
}
_ONE = ("num_beams", "num_return_sequences")


class CachedGenerate:
    """A model whose `generate` reuses cached prefixes; created by `prefix_cached`. Runs one call at a time.

    Attributes:
        hit: the part of the last prompt that the cache served.
    """

    def __init__(
        self, model: PreTrainedModel, bridge: LoopBridge, cache: HybridCache, runner: PrefillRunner
    ) -> None:
        self.hit = Hit(0)
        self._model = model
        self._bridge = bridge
        self._cache = cache
        self._runner = runner
        self._one_at_a_time = threading.Lock()

    def generate(
        self,
        inputs: torch.Tensor | None = None,
        *,
        namespace: str | None = None,
        salt: str | None = None,
        **options: Any,
    ) -> Any:
        """Call the model's `generate`, with the same options and the same result.

        Args:
            inputs: token ids `[1, length]`; or pass them as `input_ids`, as tokenizers name them.
            namespace, salt: prefixes are shared only if both are equal; see `HybridCache.request`.
            options: options of `generate`, except those that bring their own cache, and beams.

        Raises:
            UsageError: several prompts, padding, or an unsupported option.
            InvalidTokensError: no tokens.
            ClosedError: the cache is closed.
        """
        ids = _checked_ids(inputs, options)
        tokens = ids[0].tolist()
        calls = self._runner.context.calls
        with self._one_at_a_time, calls.sequence() as sequence:
            self.hit = self._bridge.call(self._begin(sequence, tokens, namespace, salt)).hit
            memory = calls.rank.sequences[sequence]
            known = int(memory.cache.get_seq_length())
            tap = _PageTap(memory, self._runner.context, sequence)
            criteria = StoppingCriteriaList([*(options.pop("stopping_criteria", None) or ()), tap])
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=memory.cache,
                stopping_criteria=criteria,
                **options,
            )
            told = (output if isinstance(output, torch.Tensor) else output.sequences)[0].tolist()
            self._bridge.call(self._end(sequence, told, known, namespace, salt))
        return output

    def statistics(self) -> CacheStatistics:
        """Return the statistics of the cache."""
        return self._bridge.call(self._read_statistics())

    async def _read_statistics(self) -> CacheStatistics:
        return self._cache.statistics()

    async def _begin(
        self, sequence: int, tokens: list[int], namespace: str | None, salt: str | None
    ) -> Prefilled:
        """Restore the cached prefix, and prefill up to where `generate` takes over."""
        try:
            async with self._cache.request(tokens, namespace=namespace, salt=salt) as request:
                await request.prefetch()
                begun = await self._runner.begin(request, sequence, tokens, nullcontext())
                end = self._end_of_prefill(len(tokens))
                return await self._runner.prefill(request, sequence, tokens, end, begun=begun)
        except CapacityError:  # longer than all device pages
            await self._runner.context.calls.run(Restore(sequence))
            return Prefilled(Hit(0, reason=MissReason.DEVICE_CAPACITY), None)

    def _end_of_prefill(self, length: int) -> int:
        """Return where the prefill ends: the last point to save states and windows before `generate`."""
        if feeds_one_by_one(self._model):
            return length - 1
        context = self._runner.context
        return context.whole(length - 1) if context.has_states or context.window_pages else 0

    async def _end(
        self, sequence: int, tokens: list[int], known: int, namespace: str | None, salt: str | None
    ) -> None:
        """Publish the tokens that `generate` computed."""
        memory = self._runner.context.calls.rank.sequences[sequence]
        length = int(memory.cache.get_seq_length())
        kept = None if memory.kept is None else memory.kept.tokens
        with suppress(CapacityError):  # longer than all device pages
            async with self._cache.request(tokens, namespace=namespace, salt=salt) as request:
                await self._runner.publish(request, sequence, length, kept, known=known)


class _PageTap(StoppingCriteria):  # type: ignore[misc]
    """Never stops; keeps the states at page boundaries, and trims windows."""

    def __init__(self, memory: SequenceMemory, context: PrefixContext, sequence: int) -> None:
        self._memory = memory
        self._context = context
        self._sequence = sequence

    def __call__(self, input_ids: torch.Tensor, scores: object, **options: object) -> torch.Tensor:
        held = int(self._memory.cache.get_seq_length())
        if held % self._context.page_size == 0:
            self._context.calls.rank.run(Trim(self._sequence))
            if self._context.has_states:
                self._memory.kept = save_states(self._memory.cache, held)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _checked_ids(inputs: torch.Tensor | None, options: dict[str, Any]) -> torch.Tensor:
    """Check the options, and return the prompt's ids `[1, length]`; removes ids and mask from `options`.

    Raises:
        UsageError, InvalidTokensError: invalid ids, or an unsupported option.
    """
    ids = options.pop("input_ids", inputs)
    mask = options.pop("attention_mask", None)
    if not isinstance(ids, torch.Tensor) or ids.ndim != 2 or len(ids) != 1:
        shape = list(ids.shape) if isinstance(ids, torch.Tensor) else type(ids).__name__
        raise UsageError(
            f"token ids are {shape}; generate takes a tensor [1, length]: call it for each prompt, or serve "
            "many at once with PrefixCachedModel"
        )
    token_array(ids[0])
    if mask is not None and not bool(mask.all()):
        raise UsageError("attention_mask hides tokens; prefixes have no padding: leave it out")
    for name, why in _REFUSED.items():
        if options.get(name) is not None:
            raise UsageError(f"generate({name}=...) is not served: {why}")
    for name in _ONE:
        if options.get(name) not in (None, 1):
            raise UsageError(f"{name} {options[name]} must be 1: one sequence is served at a time")
    if options.get("use_cache") is False:
        raise UsageError("use_cache False leaves nothing to cache: leave it out")
    return ids


@contextmanager
def prefix_cached(
    model: PreTrainedModel,
    *,
    config: CacheConfig | None = None,
    page_size: int = 64,
    storage: StorageBackend | None = None,
    prefill_chunk: int = 512,
) -> Iterator[CachedGenerate]:
    """Add a prefix cache to a model's `generate` for the duration of a `with`; exit finishes pending writes.

    The cache runs on an event loop in its own thread. Arguments are those of `PrefixCachedModel.open`.

    Raises:
        UnsupportedModelError, ConfigError, CapacityError, StorageError: as in `PrefixCachedModel.open`.
    """
    bridge, stack = LoopBridge(name="prefix-cached"), AsyncExitStack()

    async def open_cache() -> tuple[HybridCache, PrefillRunner]:
        cache, runner = await open_prefill_runner(
            stack, model, config, page_size=page_size, storage=storage, prefill_chunk=prefill_chunk
        )
        return cache, runner

    try:
        cache, runner = bridge.call(open_cache())
        try:
            yield CachedGenerate(model, bridge, cache, runner)
        finally:
            bridge.call(stack.aclose())
    finally:
        bridge.close()
