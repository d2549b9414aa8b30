"""A transformers model with a cache before it, which serves many requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from functools import partial
from typing import Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from asynchicache.cache import HybridCache, Request
from asynchicache.config import CacheConfig
from asynchicache.errors import ClosedError, ConfigError, InvalidTokensError
from asynchicache.integrations.transformers.admission import Admission, Limits, Place
from asynchicache.integrations.transformers.bridge import CacheBridge
from asynchicache.integrations.transformers.decoding import Decoder, Row
from asynchicache.integrations.transformers.forward import feeds_one_by_one, prefill
from asynchicache.integrations.transformers.generation import Generation, Job
from asynchicache.integrations.transformers.prefix import CachedPrefix, PrefixStore
from asynchicache.integrations.transformers.sampling import GREEDY, Sampling
from asynchicache.integrations.transformers.stopping import StopRule, end_tokens
from asynchicache.integrations.transformers.thread import ModelThread
from asynchicache.specs import ModelSpec
from asynchicache.storage.protocol import StorageBackend
from asynchicache.types import token_array


@dataclass(frozen=True, slots=True)
class ForwardSizes:
    """Tokens of one prompt, and sequences that decode, that are computed at once.

    Raises:
        ConfigError: nothing would be.
    """

    prefill_chunk: int
    decode_batch: int

    def __post_init__(self) -> None:
        if self.prefill_chunk < 1:
            raise ConfigError(f"prefill_chunk {self.prefill_chunk} must be 1 token at least")
        if self.decode_batch < 1:
            raise ConfigError(f"decode_batch {self.decode_batch} must be 1 sequence at least")


class PrefixCachedModel:
    """Generates text with a model that computes no prefix twice.

    Made by `open`; confined to the loop that opened it. One thread of its own runs the model: the loop
    computes nothing. Prompts are prefilled one after the other, in pieces, and sequences decode between
    the pieces. Prompts and outputs are published, so that the next turn of a conversation resumes at the
    last whole page of this one. A failure of the cache costs hits, never a request.

    Attributes:
        cache: what was computed; its statistics, storage and invariants.
        capacity_tokens: prompts and outputs of all requests that run, in whole pages, are never more.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: HybridCache,
        thread: ModelThread,
        tokenizer: PreTrainedTokenizerBase | None,
        limits: Limits,
        sizes: ForwardSizes,
    ) -> None:
        bridge = CacheBridge(model.config, cache)
        size = cache.spec.page_size
        self.cache = cache
        self.capacity_tokens = _device_pages(cache, 0) * size
        self._model = model
        self._tokenizer = tokenizer
        self._thread = thread
        self._store = PrefixStore(
            thread, model.config, bridge, size, _piece(cache, bridge, sizes.prefill_chunk)
        )
        self._admission = Admission(self.capacity_tokens, limits)
        self._decoder = Decoder(thread, model, self._store, batch_size=sizes.decode_batch)
        self._turn = asyncio.Lock()
        self._vocabulary = model.get_input_embeddings().num_embeddings
        self._ends = end_tokens(model, tokenizer)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False

    @classmethod
    @asynccontextmanager
    async def open(
        cls,
        model: PreTrainedModel,
        *,
        config: CacheConfig | None = None,
        page_size: int = 64,
        tokenizer: PreTrainedTokenizerBase | None = None,
        storage: StorageBackend | None = None,
        max_running: int = 32,
        max_waiting: int = 256,
        prefill_chunk: int = 512,
        decode_batch: int = 32,
    ) -> AsyncIterator[Self]:
        """A model that serves for the duration of an `async with`; leaving it cancels what runs.

        Args:
            model: a causal language model in evaluation mode; nobody else may use it meanwhile.
            config: the cache's options; by default those of `CacheConfig`, on the model's device.
            page_size: tokens of a page.
            tokenizer: reads tokens for stop strings, and knows the end token.
            storage: an open backend to use instead of the configured one; it stays the caller's.
            max_running: requests that are prefilled or decode.
            max_waiting: requests that wait for room; more are refused.
            prefill_chunk: tokens of a prompt that are computed at once, before others have their turn.
            decode_batch: sequences that decode in one forward; 1 computes each by itself.

        Raises:
            UnsupportedModelError: a layer of the model has no pool.
            ConfigError: options contradict each other or the model.
            CapacityError, StorageError: as of `HybridCache.open`.
        """
        config = config or CacheConfig(device=str(model.device))
        _check(model, config)
        limits, sizes = Limits(max_running, max_waiting), ForwardSizes(prefill_chunk, decode_batch)
        dtype = str(model.dtype).removeprefix("torch.")
        spec = ModelSpec.from_config(model.config, page_size=page_size, dtype=dtype)
        async with AsyncExitStack() as stack:
            cache = await stack.enter_async_context(HybridCache.open(spec, config, storage=storage))
            thread = stack.enter_context(ModelThread(model.device))
            served = cls(model, cache, thread, tokenizer, limits, sizes)
            try:
                yield served
            finally:
                await served._close()

    @property
    def spec(self) -> ModelSpec:
        """The model's pools."""
        return self.cache.spec

    @property
    def running(self) -> int:
        """Requests that are served now."""
        return self._admission.running

    @property
    def waiting(self) -> int:
        """Requests that wait for room."""
        return self._admission.waiting

    def generate(
        self,
        tokens: Sequence[int],
        *,
        max_new_tokens: int,
        sampling: Sampling = GREEDY,
        namespace: str | None = None,
        salt: str | None = None,
        stop_token_ids: Collection[int] | None = None,
        stop: Sequence[str] = (),
    ) -> Generation:
        """Begin to serve a prompt; the tokens come as they are computed.

        Args:
            tokens: ids of the prompt, prefix-stable: the next turn repeats them and the output.
            max_new_tokens: where the output ends at the latest.
            sampling: how tokens are chosen; by default the likeliest.
            namespace, salt: prefixes of different ones never meet, as of `HybridCache.request`.
            stop_token_ids: the output ends with any of these; None: with the model's end tokens.
            stop: strings; the output ends with the token that completes one. They need a tokenizer.

        Raises:
            InvalidTokensError: no tokens, or ids that the model does not know.
            UsageError: options that cannot be.
            CapacityError: prompt and output can never fit into `capacity_tokens`.
            BusyError: too many requests wait.
            ClosedError: it is closed.
        """
        if self._closed:
            raise ClosedError("the model is closed: generate inside `async with`")
        prompt = token_array(tokens)[:]
        if max(prompt) >= self._vocabulary:
            raise InvalidTokensError(f"token id {max(prompt)}: the model knows {self._vocabulary}, from 0")
        ends = self._ends if stop_token_ids is None else stop_token_ids
        rule = StopRule(max_new_tokens, ends, stop, self._tokenizer)
        job = Job(prompt, sampling, rule, namespace=namespace, salt=salt)
        request = self._request(job)
        most = len(prompt) + max_new_tokens + self._store.page_size - 1
        place = self._admission.join(self._store.whole(most))
        job.task = asyncio.create_task(self._serve(job, place, request), name="generation")
        self._tasks.add(job.task)
        job.task.add_done_callback(partial(self._ended, job, place))
        return Generation(job)

    async def drain(self) -> None:
        """Until no request runs or waits, and what they published is written; new ones may follow."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self.cache.drain()

    def _ended(self, job: Job, place: Place, task: asyncio.Task[None]) -> None:
        place.leave()
        self._tasks.discard(task)
        if job.finish_reason is None and task.cancelled():
            job.finish_reason = "cancelled"
        job.news.set()

    async def _close(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._decoder.aclose()

    # Serving

    async def _serve(self, job: Job, place: Place, request: Request) -> None:
        await place.entered.wait()
        async with request:
            await request.prefetch()
            request.rest()  # it keeps nothing from others while it waits for its turn
            async with self._turn:
                request.rematch()  # those before it may have published a part of its prompt
                row = await self._prefill(job, request)
        await self._decoder.run(row)
        await self._publish_output(job, row)

    def _request(self, job: Job) -> Request:
        return self.cache.request(job.tokens, namespace=job.namespace, salt=job.salt)

    async def _prefill(self, job: Job, request: Request) -> Row:
        """Compute what the cache does not have of a prompt, publish it, and choose the first token."""
        prefix = CachedPrefix(self._store, request)
        memory = await prefix.restore()
        job.hit, at = prefix.hit, prefix.hit.tokens
        tokens, cuts, end = job.prompt.tolist(), set(request.cuts), len(job.prompt)
        for stop in self._stops(at, cuts | {end}):
            logits = await self._thread.run(partial(prefill, self._model, memory, tokens, at, stop))
            await prefix.save(memory, stop)
            if stop in cuts or stop == end or self._store.bridge.window_pages:
                await prefix.publish(stop, final=stop >= self._store.whole(end))
            await self._thread.run(partial(self._store.trim, memory))
            at = stop
        job.take(await self._thread.run(partial(job.sampler.choose, logits)))
        return Row(job, memory)

    def _stops(self, start: int, ends: Collection[int]) -> list[int]:
        """Where forwards end: at `ends`, and between them as often as others are to have their turn."""
        stops = []
        for end in sorted(end for end in ends if end > start):
            # A model that is fed one by one behind a prefix does best with a long beginning.
            whole = start == 0 and feeds_one_by_one(self._model)
            stops += [end] if whole else self._store.pieces(start, end)
            start = end
        return stops

    async def _publish_output(self, job: Job, row: Row) -> None:
        """Publish what was computed behind the prompt, up to the last whole page."""
        async with self._request(job) as request:
            keeps_state = self._store.bridge.has_states and request.keeps_output
            states = row.states if keeps_state else None
            stop = row.length if states is None else states.tokens
            if self._store.whole(stop) <= len(job.prompt):
                return
            prefix = CachedPrefix(self._store, request)
            await prefix.load(counted=False)
            await prefix.save_late(row.memory, stop, states)
            await prefix.publish(stop, final=True)


def _check(model: PreTrainedModel, config: CacheConfig) -> None:
    """
    Raises:
        ConfigError: the model would not run as it is, or not beside the cache.
    """
    if model.training:
        raise ConfigError("the model is in training mode, where dropout is random: call model.eval()")
    if torch.device(config.device).type != model.device.type:
        raise ConfigError(f"the model is on {model.device}, the cache on {config.device}: set config.device")


def _device_pages(cache: HybridCache, owner: int) -> int:
    """Device slots of the pool with that number among those that own slots."""
    pool = cache.spec.owners[owner]
    return cache.device_tensor(pool.name, pool.tensors[0].name).shape[1]


def _piece(cache: HybridCache, bridge: CacheBridge, chunk: int) -> int:
    """Tokens that every pool has room for beside one window."""
    room = [
        _device_pages(cache, number) - bridge.window_pages
        for number, pool in enumerate(cache.spec.owners)
        if pool.per_token and pool.coverage.trailing
    ]
    return min([chunk, *(pages * cache.spec.page_size for pages in room)])
