"""A blocking `generate` with a prefix cache, for programs without an event loop."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import AsyncExitStack, closing, contextmanager, suppress
from typing import Any

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase, StoppingCriteria, StoppingCriteriaList
from transformers.generation import MaxTimeCriteria

from asynchicache.cache import CacheStatistics, Hit, HybridCache
from asynchicache.config import CacheConfig
from asynchicache.errors import CapacityError
from asynchicache.integrations.bridge import LoopBridge
from asynchicache.integrations.transformers.allowed import check_generates, checked_ids
from asynchicache.integrations.transformers.calls import Restore, SequenceMemory, Trim
from asynchicache.integrations.transformers.chat import Invitations, invitations_of
from asynchicache.integrations.transformers.forward import feeds_one_by_one, steady_tokens
from asynchicache.integrations.transformers.prefill_runner import (
    Prefilled,
    PrefillRunner,
    open_prefill_runner,
)
from asynchicache.integrations.transformers.prefix import PrefixContext
from asynchicache.integrations.transformers.snapshot import release_windows, save_states
from asynchicache.integrations.transformers.weights import base_model
from asynchicache.openings import Blocking
from asynchicache.planner.hints import CacheHint
from asynchicache.storage.protocol import StorageBackend
from asynchicache.types import MissReason


class CachedGenerate:
    """A model whose `generate` reuses cached prefixes; created by `prefix_cached`. Runs one call at a time.

    Attributes:
        hit: the part of the last prompt that the cache served.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        bridge: LoopBridge,
        cache: HybridCache,
        runner: PrefillRunner,
        invitations: Invitations | None = None,
    ) -> None:
        self._invitations = invitations
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

        Weights and adapters may change between calls: prefixes of others are not used.

        Args:
            inputs: token ids `[1, length]`; or pass them as `input_ids`, as tokenizers name them. Each
                counts, as with an `attention_mask` of ones.
            namespace, salt: prefixes are shared only if both are equal; see `HybridCache.request`.
            options: options of `generate` that are known to give the same with a cache.

        Raises:
            UsageError: several prompts, padding, or an option or input that is not known to give the same;
                names it.
            InvalidTokensError: no tokens.
            ClosedError: the cache is closed.
        """
        began = time.time()
        ids = checked_ids(self._model, inputs, options)
        tokens = ids[0].tolist()
        calls = self._runner.context.calls
        with self._one_at_a_time, calls.sequence() as sequence:
            self.hit = self._bridge.call(self._begin(sequence, tokens, namespace, salt)).hit
            weights = self._runner.context.weights.changes
            memory = calls.rank.sequences[sequence]
            known = int(memory.cache.get_seq_length())
            tap = _PageTap(memory, self._runner.context, sequence)
            criteria = StoppingCriteriaList(
                [*(options.pop("stopping_criteria", None) or ()), *self._deadline(options, began), tap]
            )
            output = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                past_key_values=memory.cache,
                stopping_criteria=criteria,
                **options,
            )
            told = (output if isinstance(output, torch.Tensor) else output.sequences)[0].tolist()
            self._runner.context.weights.look()
            steady = steady_tokens(self._model)
            if self._runner.context.weights.changes == weights and (steady is None or len(ids[0]) <= steady):
                self._bridge.call(self._end(sequence, told, known, namespace, salt))
            release_windows(memory.cache)
        return output

    def _deadline(self, options: dict[str, Any], began: float) -> Iterator[StoppingCriteria]:
        """`max_time` counts from the call: a part of the prompt may be computed before `generate`."""
        given = options.get("generation_config") or self._model.generation_config
        limit = options.get("max_time", given.max_time)
        if limit is not None:
            yield _CallTime(limit, initial_timestamp=began)

    def update_weights(self, version: str) -> None:
        """Say what the weights are called that the model has now: see `HybridCache.update_weights`.

        Weights that change without this call are noticed, and their pages found by this process only.

        Args:
            version: the new `weight_version`.

        Raises:
            ConfigError, StorageError, ClosedError: as `HybridCache.update_weights`.
        """
        with self._one_at_a_time:
            self._bridge.call(self._cache.update_weights(version))

    def statistics(self) -> CacheStatistics:
        """Return the statistics of the cache."""
        return self._bridge.call(self._read_statistics())

    async def _read_statistics(self) -> CacheStatistics:
        return self._cache.statistics()

    async def _begin(
        self, sequence: int, tokens: list[int], namespace: str | None, salt: str | None
    ) -> Prefilled:
        """Restore the cached prefix, and prefill up to where `generate` takes over."""
        steady = steady_tokens(self._model)
        if steady is not None and len(tokens) > steady:
            await self._runner.context.calls.run(Restore(sequence))
            return Prefilled(Hit(0, reason=MissReason.COLD), None)
        try:
            context = self._runner.context
            repeats = () if self._invitations is None else self._invitations.repeated(tokens)
            async with context.request(
                self._cache, tokens, namespace=namespace, salt=salt, hint=CacheHint(repeats=repeats)
            ) as request:
                await request.prefetch()
                end = self._end_of_prefill(len(tokens))
                return await self._runner.prefill(request, sequence, tokens, end)
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
            context = self._runner.context
            async with context.request(self._cache, tokens, namespace=namespace, salt=salt) as request:
                await self._runner.publish(request, sequence, length, kept, known=known)


class _CallTime(MaxTimeCriteria):  # type: ignore[misc]
    """A class of its own, as `generate` takes a criterion of the same class for its own one."""


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


def prefix_cached(
    model: PreTrainedModel,
    *,
    config: CacheConfig | None = None,
    page_size: int = 64,
    storage: StorageBackend | None = None,
    prefill_chunk: int = 512,
    tokenizer: PreTrainedTokenizerBase | None = None,
) -> Blocking[CachedGenerate]:
    """Add a prefix cache to a model's `generate` for the duration of a `with`; exit finishes pending writes.

    The cache runs on an event loop in its own thread. Arguments are those of `PrefixCachedModel.open`.

    Raises:
        UnsupportedModelError, ConfigError, CapacityError, StorageError: as in `PrefixCachedModel.open`.
    """
    base = base_model(model)
    check_generates(base)
    opened = _opened(base, config, page_size, storage, prefill_chunk, invitations_of(tokenizer, base))
    return Blocking("prefix_cached(...)", opened)


@contextmanager
def _opened(
    base: PreTrainedModel,
    config: CacheConfig | None,
    page_size: int,
    storage: StorageBackend | None,
    prefill_chunk: int,
    invitations: Invitations | None,
) -> Iterator[CachedGenerate]:
    stack = AsyncExitStack()
    with closing(LoopBridge(name="prefix-cached")) as bridge:
        opening = open_prefill_runner(
            stack, base, config, page_size=page_size, storage=storage, prefill_chunk=prefill_chunk
        )
        cache, runner = bridge.call(opening)
        try:
            yield CachedGenerate(base, bridge, cache, runner, invitations)
        finally:
            bridge.call(stack.aclose())
