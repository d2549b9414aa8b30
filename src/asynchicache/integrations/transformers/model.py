"""A transformers model with a prefix cache, which serves concurrent requests."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from contextlib import AsyncExitStack, ExitStack, suppress
from dataclasses import replace
from functools import partial
from typing import Self

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from asynchicache.cache import HybridCache, Request
from asynchicache.config import CacheConfig
from asynchicache.controller.tasks import OneLoop
from asynchicache.errors import CapacityError, ClosedError
from asynchicache.integrations.transformers.admission import (
    MAX_RUNNING,
    MAX_WAITING,
    AdmissionLimits,
    PromptAdmission,
    QueuedRequest,
)
from asynchicache.integrations.transformers.chat import Invitations, invitations_of
from asynchicache.integrations.transformers.decoding import Decoder, Row
from asynchicache.integrations.transformers.forward import known_tokens, steady_tokens, vocabulary_of
from asynchicache.integrations.transformers.generation import (
    Generation,
    GenerationJob,
    Handover,
    OutputOptions,
    TokenConstraint,
)
from asynchicache.integrations.transformers.prefill_runner import (
    PrefillRunner,
    open_prefill_runner,
)
from asynchicache.integrations.transformers.sampling import GREEDY, Sampling
from asynchicache.integrations.transformers.sharing import PromptSharing
from asynchicache.integrations.transformers.stopping import StopRule, end_tokens
from asynchicache.integrations.transformers.weights import base_model
from asynchicache.openings import Opening, caller
from asynchicache.options import check_kind
from asynchicache.planner.hints import NO_HINT, CacheHint
from asynchicache.ranks.group import RankGroup
from asynchicache.specs import ModelSpec
from asynchicache.storage.protocol import StorageBackend


class PrefixCachedModel:
    """Generates text; reuses cached prefixes of earlier prompts and outputs.

    Created by `open`; confined to the event loop that opened it. The model runs on a separate thread. Prompts
    are prefilled one at a time, in chunks; running sequences decode between the chunks. Prompts and outputs
    are published to the cache, so the next turn of a conversation resumes at the last whole page of this
    turn. A failure of the cache costs hits, and never fails a request.

    Attributes:
        cache: the prefix cache.
        capacity_tokens: most tokens of all running requests, prompt and output, in whole pages.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        cache: HybridCache,
        runner: PrefillRunner,
        decoder: Decoder,
        tokenizer: PreTrainedTokenizerBase | None,
        invitations: Invitations | None,
        limits: AdmissionLimits,
        stack: AsyncExitStack,
    ) -> None:
        self.cache = cache
        self.capacity_tokens = runner.capacity_tokens
        self._runner = runner
        self._decoder = decoder
        self._tokenizer = tokenizer
        self._invitations = invitations
        self._admission = PromptAdmission(self.capacity_tokens, limits)
        self._prefilling = asyncio.Lock()
        self._sharing = PromptSharing(cache.spec.page_size)
        self._vocabulary = vocabulary_of(model)
        self._ends = {token for token in end_tokens(model, tokenizer) if 0 <= token < self._vocabulary}
        self._steady = steady_tokens(model)
        self._tasks: set[asyncio.Task[None]] = set()
        self._closed = False
        self._stack = stack
        self._closing = asyncio.Lock()
        self._loop = OneLoop("the model")

    @classmethod
    def open(
        cls,
        model: PreTrainedModel,
        *,
        config: CacheConfig | None = None,
        page_size: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        storage: StorageBackend | None = None,
        spec: ModelSpec | None = None,
        group: RankGroup | None = None,
        max_running: int = MAX_RUNNING,
        max_waiting: int = MAX_WAITING,
        prefill_chunk: int = 512,
        decode_batch: int = 32,
    ) -> Opening[Self]:
        """Open a model: `async with` closes it at the end; after `await`, call `aclose`.

        Args:
            model: a causal language model in evaluation mode, for exclusive use.
            config: the cache's options. Default: those of `CacheConfig`, on the model's device.
            page_size: tokens per page. Default: those of `spec`, or 64.
            tokenizer: decodes tokens for stop strings, gives the end token, and says how its chat template
                ends a prompt, so that states are kept where the next turn goes on.
            storage: an open backend to use instead of the configured one; the caller closes it.
            spec: the model's pools. Default: those of its configuration, in pages of `page_size`.
            group: the ranks that the model is divided over, which this one leads; `spec` has the pools of its
                part (`ModelSpec.shard`), and the others call `run_follower`.
            max_running: most requests that prefill or decode at a time.
            max_waiting: most requests in the queue; more are refused.
            prefill_chunk: tokens per prefill forward; other requests run between chunks.
            decode_batch: most sequences per decode forward; 1 decodes each by itself.

        Raises:
            UnsupportedModelError: a layer of the model has no pool.
            ConfigError: options contradict each other or the model; or its tokenizer is another model's, or
                has a template that is none.
            CapacityError, StorageError: as of `HybridCache.open`.
            RankError: a rank of the group does not fit it, or is missing.
        """
        limits = AdmissionLimits(max_running, max_waiting, decode_batch)

        async def begin() -> Self:
            inner = base_model(model)
            invitations = invitations_of(tokenizer, inner)
            async with AsyncExitStack() as opening:
                cache, runner = await open_prefill_runner(
                    opening,
                    inner,
                    config,
                    page_size=page_size,
                    storage=storage,
                    prefill_chunk=prefill_chunk,
                    spec=spec,
                    group=group,
                )
                decoder = Decoder(inner, runner.context, batch_size=decode_batch)
                return cls(inner, cache, runner, decoder, tokenizer, invitations, limits, opening.pop_all())

        return Opening(f"{cls.__name__}.open(...)", begin, caller())

    @property
    def spec(self) -> ModelSpec:
        """The model's pools."""
        return self.cache.spec

    @property
    def running(self) -> int:
        """Number of running requests."""
        return self._admission.running

    @property
    def waiting(self) -> int:
        """Number of requests in the queue."""
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
        hint: CacheHint = NO_HINT,
        logprobs: int | None = None,
        prompt_logprobs: bool = False,
        constraint: TokenConstraint | None = None,
        until: int = 0,
        seconds: float | None = None,
        durable: bool = False,
    ) -> Generation:
        """Start a generation; its tokens arrive as they are computed.

        Args:
            tokens: token ids of the prompt. A later turn hits if it begins with this prompt and its output.
            max_new_tokens: most tokens of the output.
            sampling: how tokens are chosen. Default: greedy.
            namespace, salt: prefixes are shared only if both are equal; see `HybridCache.request`.
            stop_token_ids: tokens that end the output. Default: the model's end tokens.
            stop: strings; the output ends with the token that completes one. Needs a tokenizer.
            traceparent: W3C header of the parent span, for a tracer of the cache.
            hint: what the client knows about the future of these pages.
            logprobs: score the output, and name so many of the likeliest tokens. Default: None, no scores.
            prompt_logprobs: score the prompt too, which is computed whole: the cache keeps no logits.
            constraint: what the output may be; for this generation only.
            until, seconds: first wait for what another process computes: see `Request.prefetch`.
            durable: the generation ends when storage has prompt and output, see `Request.durable`, at most
                `seconds` after its last token. Without these, the deadlines of storage end the wait.

        Raises:
            InvalidTokensError: no tokens, or ids outside the model's vocabulary.
            UsageError: invalid options.
            CapacityError: prompt and output exceed `capacity_tokens`, or the length from which on the model's
                keys depend on how long the sequence is.
            BusyError: the queue is full.
            ClosedError: the model is closed.
        """
        self._check_open()
        check_kind("sampling", sampling, Sampling, "pass Sampling(...)")
        check_kind("hint", hint, CacheHint, "pass CacheHint(...)")
        more = OutputOptions(logprobs, prompt_logprobs, constraint, Handover(until, seconds, durable))
        more.check(self._vocabulary)
        ends = self._ends if stop_token_ids is None else stop_token_ids
        rule = StopRule(max_new_tokens, ends, stop, self._tokenizer, self._vocabulary)
        prompt = known_tokens(tokens, self._vocabulary)[:]
        self._check_steady(len(prompt), max_new_tokens)
        if self._invitations is not None and not hint.repeats:
            hint = replace(hint, repeats=self._invitations.repeated(prompt))
        job = GenerationJob(
            prompt, sampling, rule, more, namespace=namespace, salt=salt, traceparent=traceparent, hint=hint
        )
        return self._begin(job)

    def _check_open(self) -> None:
        self._loop.check()
        if self._closed:
            raise ClosedError("the model is closed: generate inside `async with`")

    def _check_steady(self, prompt: int, new: int) -> None:
        if self._steady is not None and prompt + new > self._steady:
            raise CapacityError(
                f"{prompt} + {new} tokens: beyond {self._steady}, the rotary embedding of this model depends "
                "on the length, so no prefix can be shared"
            )

    def _begin(self, job: GenerationJob) -> Generation:
        """Queue a generation."""
        request = self._request(job)
        most = len(job.prompt) + job.rule.max_new_tokens + self.spec.page_size - 1
        queued = self._admission.join(self._runner.context.whole(most))
        self._sharing.join(job)
        job.task = asyncio.create_task(self._serve(job, queued, request), name="generation")
        self._tasks.add(job.task)
        job.task.add_done_callback(partial(self._ended, job, queued))
        return Generation(job)

    async def update_weights(self, version: str, change: Callable[[], object] | None = None) -> None:
        """Go on with other weights, which other processes know by a name: see `HybridCache.update_weights`.

        Running requests end first; those that come meanwhile wait. Weights that change without this call are
        noticed, and their pages found by this process only.

        Args:
            version: the new `weight_version`.
            change: puts the weights into the model; runs on its thread. Default: they are there. On other
                ranks of a group they must be.

        Raises:
            ConfigError, StorageError: as `HybridCache.update_weights`.
            ClosedError: the model is closed.
        """
        self._loop.check()
        async with self._admission.pause():
            if self._closed:
                raise ClosedError("the model is closed: update weights inside `async with`")
            if change is not None:
                await self._runner.context.calls.here(change)
            await self.cache.update_weights(version)

    async def drain(self) -> None:
        """Wait until no request is running or queued and published pages are written. Stays usable."""
        self._loop.check()
        while self._tasks:
            await asyncio.wait(self._tasks)
        await self.cache.drain()

    def _ended(self, job: GenerationJob, queued: QueuedRequest, task: asyncio.Task[None]) -> None:
        queued.leave()
        self._sharing.leave(job)
        self._tasks.discard(task)
        if job.finish_reason is None and task.cancelled():
            job.finish_reason = "cancelled"
        job.news.set()

    async def aclose(self) -> None:
        """Cancel running requests and close the cache; idempotent. The end of `async with` calls it."""
        self._loop.check()
        async with self._closing, self._stack:
            await self._stop()

    async def _stop(self) -> None:
        self._closed = True
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)
        await self._decoder.aclose()

    def __repr__(self) -> str:
        state = "closed" if self._closed else "open"
        return (
            f"<{type(self).__name__} {state}, {self.running} running, {self.waiting} waiting, {self.cache!r}>"
        )

    # Serving

    async def _serve(self, job: GenerationJob, queued: QueuedRequest, request: Request) -> None:
        await queued.entered.wait()
        request.keeps_record = True
        with ExitStack() as stack:
            stack.callback(request.end_record)
            memory = stack.enter_context(ExitStack())
            sequence = memory.enter_context(self._runner.context.calls.sequence())
            if job.prompt_scores is not None:
                row, published = await self._score(job, sequence), 0
            else:
                row, published = await self._prefilled(job, request, sequence), len(job.prompt)
            await self._decoder.run(row)
            if not self._runner.context.is_current(request):
                return
            ending = self._request(job)
            ending.record_of = request
            async with ending as output:
                await self._runner.publish(output, sequence, row.length, row.kept, known=published)
                if job.handover.durable:
                    memory.close()  # others may compute while this is written
                    queued.leave()
                    with suppress(TimeoutError):
                        async with asyncio.timeout(job.handover.seconds):
                            job.durable = output.published if await output.durable() else 0

    def _request(self, job: GenerationJob) -> Request:
        return self._runner.context.request(
            self.cache,
            job.tokens,
            namespace=job.namespace,
            salt=job.salt,
            traceparent=job.traceparent,
            hint=job.hint,
        )

    async def _prefilled(self, job: GenerationJob, request: Request, sequence: int) -> Row:
        async with request:
            await request.prefetch(until=job.handover.until, seconds=job.handover.seconds)
            prompt = job.prompt.tolist()
            request.rest()  # releases its leases, so that they do not block eviction while it waits
            async with self._prefilling:
                self._sharing.leave(job)
                return await self._prefill(job, request, sequence, prompt)

    async def _score(self, job: GenerationJob, sequence: int) -> Row:
        """Compute the whole prompt, score its tokens, and choose the first token of the output."""
        async with self._prefilling:
            self._sharing.leave(job)
            logits = await self._runner.score(sequence, job.prompt.tolist(), job.score_prompt)
            return await self._first(job, logits, sequence)

    async def _first(self, job: GenerationJob, logits: torch.Tensor, sequence: int) -> Row:
        """Choose the first token by the logits after the prompt."""
        job.take(await self._runner.context.calls.here(partial(job.choose, logits)))
        return Row(job, sequence)

    async def _prefill(self, job: GenerationJob, request: Request, sequence: int, prompt: list[int]) -> Row:
        """Prefill the prompt and choose the first token of the output."""
        prefilled = await self._runner.prefill(
            request, sequence, prompt, len(prompt), shared=partial(self._sharing.cut, job)
        )
        assert prefilled.logits is not None, "a hit leaves a token to compute"
        job.hit = prefilled.hit
        return await self._first(job, prefilled.logits, sequence)
