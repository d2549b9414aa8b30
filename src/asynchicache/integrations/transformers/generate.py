"""`generate` for those who have no event loop: the model's own, resumed from a cache that it fills."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import AsyncExitStack, contextmanager, suppress
from typing import Any

import torch
from transformers import DynamicCache, PreTrainedModel, StoppingCriteria, StoppingCriteriaList

from asynchicache.cache import CacheStatistics, Hit, HybridCache
from asynchicache.config import CacheConfig
from asynchicache.errors import CapacityError, UsageError
from asynchicache.integrations.bridge import LoopBridge
from asynchicache.integrations.transformers.forward import feeds_one_by_one
from asynchicache.integrations.transformers.prefill_runner import (
    Prefilled,
    PrefillRunner,
    open_prefill_runner,
)
from asynchicache.integrations.transformers.prefix import PrefixContext
from asynchicache.integrations.transformers.snapshot import SavedStates, new_cache, save_states
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
    """A model whose `generate` computes no prefix twice; made by `prefix_cached`, one call at a time.

    Attributes:
        hit: what the cache served of the last prompt.
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
        """As the model's own `generate`, with the same options and the same result.

        Args:
            inputs: token ids `[1, length]`; or `input_ids`, as a tokenizer names them.
            namespace, salt: prefixes of different ones never meet, as of `HybridCache.request`.
            options: of `generate`, but for those that bring a cache of their own, and beams.

        Raises:
            UsageError: a batch of several prompts, padding, or an option that is not served.
            InvalidTokensError: no tokens.
            ClosedError: it is closed.
        """
        ids = _checked_ids(inputs, options)
        tokens = ids[0].tolist()
        with self._one_at_a_time:
            prefilled = self._bridge.call(self._begin(tokens, namespace, salt))
            self.hit, memory = prefilled.hit, prefilled.memory
            known = int(memory.get_seq_length())
            tap = _PageTap(memory, self._runner.context)
            criteria = StoppingCriteriaList([*(options.pop("stopping_criteria", None) or ()), tap])
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=memory,
                stopping_criteria=criteria,
                **options,
            )
            sequence = (output if isinstance(output, torch.Tensor) else output.sequences)[0].tolist()
            self._bridge.call(self._end(sequence, memory, tap.states, known, namespace, salt))
        return output

    def statistics(self) -> CacheStatistics:
        """What the cache did so far."""
        return self._bridge.call(self._read_statistics())

    async def _read_statistics(self) -> CacheStatistics:
        return self._cache.statistics()

    async def _begin(self, tokens: list[int], namespace: str | None, salt: str | None) -> Prefilled:
        """The prompt in the model's memory, as far as it must be computed before `generate`."""
        try:
            async with self._cache.request(tokens, namespace=namespace, salt=salt) as request:
                await request.prefetch()
                return await self._runner.prefill(request, tokens, self._end_of_prefill(len(tokens)))
        except CapacityError:  # longer than all device pages
            return Prefilled(new_cache(self._model.config), Hit(0, reason=MissReason.DEVICE_CAPACITY), None)

    def _end_of_prefill(self, length: int) -> int:
        """Where states can be saved, and windows are still there; what follows is left to `generate`."""
        if feeds_one_by_one(self._model):
            return length - 1
        context = self._runner.context
        return context.whole(length - 1) if context.bridge.has_states or context.bridge.window_pages else 0

    async def _end(
        self,
        tokens: list[int],
        memory: DynamicCache,
        states: SavedStates | None,
        known: int,
        namespace: str | None,
        salt: str | None,
    ) -> None:
        """Publish what `generate` has computed."""
        length = int(memory.get_seq_length())
        with suppress(CapacityError):  # longer than all device pages
            async with self._cache.request(tokens, namespace=namespace, salt=salt) as request:
                await self._runner.publish(request, memory, length, states, known=known)


class _PageTap(StoppingCriteria):  # type: ignore[misc]
    """Never stops; keeps the states at each page boundary, and drops what windows have left."""

    def __init__(self, memory: DynamicCache, context: PrefixContext) -> None:
        self.states: SavedStates | None = None
        self._memory = memory
        self._context = context

    def __call__(self, input_ids: torch.Tensor, scores: object, **options: object) -> torch.Tensor:
        held = int(self._memory.get_seq_length())
        if held % self._context.page_size == 0:
            self._context.trim(self._memory)
            if self._context.bridge.has_states:
                self.states = save_states(self._memory, held)
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


def _checked_ids(inputs: torch.Tensor | None, options: dict[str, Any]) -> torch.Tensor:
    """The prompt's ids `[1, length]`; takes them, and their mask, out of the options.

    Raises:
        UsageError, InvalidTokensError: they, or an option, cannot be served.
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
    """A cache before a model's `generate`, for the duration of a `with`; leaving it writes what is due.

    The cache lives on an event loop in a thread of its own; the arguments are those of
    `PrefixCachedModel.open`.

    Raises:
        UnsupportedModelError, ConfigError, CapacityError, StorageError: as there.
    """
    bridge, stack = LoopBridge(name="prefix-cached"), AsyncExitStack()

    async def open_cache() -> tuple[HybridCache, PrefillRunner]:
        cache, _, runner = await open_prefill_runner(
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
