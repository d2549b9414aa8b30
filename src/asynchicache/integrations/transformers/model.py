"""A transformers model with a cache before it, which serves many requests at once."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from typing import Self

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from asynchicache.cache import HybridCache, Request
from asynchicache.config import CacheConfig
from asynchicache.errors import ClosedError, InvalidTokensError
from asynchicache.integrations.transformers.admission import AdmissionLimits, PromptAdmission, QueuedRequest
from asynchicache.integrations.transformers.decoding import Decoder, Row
from asynchicache.integrations.transformers.generation import Generation, GenerationJob
from asynchicache.integrations.transformers.prefill_runner import PrefillRunner, open_prefill_runner
from asynchicache.integrations.transformers.sampling import GREEDY, Sampling
from asynchicache.integrations.transformers.stopping import StopRule, end_tokens
from asynchicache.specs import ModelSpec
from asynchicache.storage.protocol import StorageBackend
from asynchicache.types import token_array


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
        runner: PrefillRunner,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase | None,
        limits: AdmissionLimits,
    ) -> None:
        self.cache = cache
        self.capacity_tokens = runner.capacity_tokens
        self._runner = runner
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._admission = PromptAdmission(self.capacity_tokens, limits)
        self._prefilling = asyncio.Lock()
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
        limits = AdmissionLimits(max_running, max_waiting, decode_batch)
        async with AsyncExitStack() as stack:
            cache, thread, runner = await open_prefill_runner(
                stack, model, config, page_size=page_size, storage=storage, prefill_chunk=prefill_chunk
            )
            decoder = Decoder(thread, model, runner.context, batch_size=decode_batch)
            served = cls(model, cache, runner, decoder, tokenizer, limits)
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
        traceparent: str | None = None,
    ) -> Generation:
        """Begin to serve a prompt; the tokens come as they are computed.

        Args:
            tokens: ids of the prompt, prefix-stable: the next turn repeats them and the output.
            max_new_tokens: where the output ends at the latest.
            sampling: how tokens are chosen; by default the likeliest.
            namespace, salt: prefixes of different ones never meet, as of `HybridCache.request`.
            stop_token_ids: the output ends with any of these; None: with the model's end tokens.
            stop: strings; the output ends with the token that completes one. They need a tokenizer.
            traceparent: the W3C header of the span that the request belongs to, for a tracer of the cache.

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
        job = GenerationJob(prompt, sampling, rule, namespace=namespace, salt=salt, traceparent=traceparent)
        request = self._request(job)
        most = len(prompt) + max_new_tokens + self.spec.page_size - 1
        queued = self._admission.join(self._runner.context.whole(most))
        job.task = asyncio.create_task(self._serve(job, queued, request), name="generation")
        self._tasks.add(job.task)
        job.task.add_done_callback(partial(self._ended, job, queued))
        return Generation(job)

    async def drain(self) -> None:
        """Until no request runs or waits, and what they published is written; new ones may follow."""
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self.cache.drain()

    def _ended(self, job: GenerationJob, queued: QueuedRequest, task: asyncio.Task[None]) -> None:
        queued.leave()
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

    async def _serve(self, job: GenerationJob, queued: QueuedRequest, request: Request) -> None:
        await queued.entered.wait()
        async with request:
            await request.prefetch()
            request.rest()  # it keeps nothing from others while it waits for its turn
            async with self._prefilling:
                request.rematch()  # those before it may have published a part of its prompt
                row = await self._prefill(job, request)
        await self._decoder.run(row)
        async with self._request(job) as output:
            await self._runner.publish(output, row.memory, row.length, row.states, known=len(job.prompt))

    def _request(self, job: GenerationJob) -> Request:
        return self.cache.request(
            job.tokens, namespace=job.namespace, salt=job.salt, traceparent=job.traceparent
        )

    async def _prefill(self, job: GenerationJob, request: Request) -> Row:
        """The prompt up to the first token of its output."""
        prefilled = await self._runner.prefill(request, job.prompt.tolist(), len(job.prompt))
        assert prefilled.logits is not None, "a hit leaves a token to compute"
        job.hit = prefilled.hit
        job.take(await self._runner.context.thread.run(partial(job.sampler.choose, prefilled.logits)))
        return Row(job, prefilled.memory)
