"""A request: `Generation` for its reader, `GenerationJob` for the code that serves it."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple, Protocol, Self, runtime_checkable

import torch

from asynchicache.cache import Hit
from asynchicache.errors import UsageError
from asynchicache.integrations.transformers.sampling import Sampler, Sampling
from asynchicache.integrations.transformers.scores import TokenScore, check_scores, token_scores
from asynchicache.integrations.transformers.stopping import FinishReason, StopRule
from asynchicache.options import check_kind
from asynchicache.planner.hints import NO_HINT, CacheHint
from asynchicache.types import MissReason, Tier


@runtime_checkable
class TokenConstraint(Protocol):
    """What an output may be, token by token. Used on the model's thread."""

    def allow(self, logits: torch.Tensor) -> torch.Tensor:
        """Return logits `[vocabulary]`, minus infinity for tokens that must not come next."""
        ...

    def take(self, token: int) -> bool:
        """Go on with the token that was chosen; returns whether the output ends with it."""
        ...


class Handover(NamedTuple):
    """What a generation shares with another process, by storage: see `PrefixCachedModel.generate`."""

    until: int = 0
    seconds: float | None = None
    durable: bool = False


ALONE = Handover()


class OutputOptions(NamedTuple):
    """What an output may be, and what is told of it: see `PrefixCachedModel.generate`."""

    logprobs: int | None = None
    prompt_logprobs: bool = False
    constraint: TokenConstraint | None = None
    handover: Handover = ALONE

    def check(self, vocabulary: int) -> None:
        """
        Raises:
            UsageError: one of them is none; `until` and `seconds` are for `Request.prefetch` to check.
        """
        check_kind("durable", self.handover.durable, bool, "pass True or False")
        check_kind("prompt_logprobs", self.prompt_logprobs, bool, "pass True or False")
        if self.constraint is not None:
            cure = "pass an object with `allow` and `take`"
            check_kind("constraint", self.constraint, TokenConstraint, cure)
        check_scores(self.logprobs, vocabulary, prompt=self.prompt_logprobs)


PLAIN = OutputOptions()


class GenerationJob:
    """A prompt, its output so far, and its result.

    Attributes:
        namespace, salt, traceparent, hint: as in `HybridCache.request`.
        sampler: chooses tokens.
        rule: decides when the output ends.
        handover: what it shares with another process.
        durable: tokens that storage has, if that is asked.
        logprobs: how many likely tokens the scores name; None for no scores.
        constraint: what the output may be.
        complete: whether the constraint ends the output with the last chosen token.
        scores: of the generated tokens, if wanted; written on the model's thread, ahead of `generated`.
        prompt_scores: of the prompt's tokens but the first, if wanted; else None.
        generated: token ids so far; the last one was not fed to the model yet.
        hit: the part of the prompt that the cache served.
        decoding: whether the prefill is done; `cancel` then takes effect at the next token.
        finish_reason, ttft_s: None until known.
    """

    def __init__(
        self,
        prompt: array[int],
        sampling: Sampling,
        rule: StopRule,
        options: OutputOptions = PLAIN,
        *,
        namespace: str | None,
        salt: str | None,
        traceparent: str | None = None,
        hint: CacheHint = NO_HINT,
    ) -> None:
        self.prompt = prompt
        self.namespace, self.salt, self.traceparent, self.hint = namespace, salt, traceparent, hint
        self.sampler = Sampler(sampling)
        self.rule = rule
        self.handover = options.handover
        self.durable = 0 if self.handover.durable else None
        self.logprobs, self.constraint = options.logprobs, options.constraint
        self.complete = False
        self.scores: list[TokenScore] = []
        self.prompt_scores: list[TokenScore] | None = [] if options.prompt_logprobs else None
        self.generated: list[int] = []
        self.hit = Hit(0)
        self.decoding = False
        self.finish_reason: FinishReason | None = None
        self.ttft_s: float | None = None
        self.task: asyncio.Task[None] | None = None
        self.news = asyncio.Event()
        self._loop = asyncio.get_running_loop()
        self._arrived = self._loop.time()

    @property
    def tokens(self) -> array[int]:
        """The prompt and the generated tokens."""
        return self.prompt + array("q", self.generated)

    def choose(self, logits: torch.Tensor) -> int:
        """Choose the next token by its logits `[vocabulary]`; runs on the model's thread.

        Raises:
            RuntimeError: as of `Sampler.choose`.
        """
        constraint = self.constraint
        token = self.sampler.choose(logits if constraint is None else constraint.allow(logits))
        if constraint is not None:
            self.complete = constraint.take(token)
        if self.logprobs is not None:
            self.scores += token_scores(logits.unsqueeze(0), [token], self.logprobs)
        return token

    def score_prompt(self, start: int, logits: torch.Tensor) -> None:
        """Score the prompt's tokens that follow each of some; runs on the model's thread.

        Args:
            start: where these tokens begin in the prompt.
            logits: after each of them, `[n, vocabulary]`.
        """
        assert self.prompt_scores is not None, "the scores are wanted"
        following = self.prompt[start + 1 : start + 1 + len(logits)].tolist()
        self.prompt_scores += token_scores(logits[: len(following)], following, self.logprobs or 0)

    def take(self, token: int) -> None:
        """Append the model's next token."""
        if self.ttft_s is None:
            self.ttft_s = self._loop.time() - self._arrived
        self.generated.append(token)
        complete: FinishReason | None = "stop" if self.complete else None
        self.finish_reason = self.finish_reason or complete or self.rule.reached(self.generated)
        self.news.set()

    def cancel(self) -> None:
        """End the generation soon; tokens computed so far are kept."""
        if self.finish_reason is None:
            self.finish_reason = "cancelled"
            if not self.decoding and self.task is not None:
                self.task.cancel()

    def abandon(self) -> None:
        """Call `cancel` from any thread; for `__del__`, which may run in any thread."""
        if self.finish_reason is None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.cancel)


class Generation:
    """The tokens of one request: an async iterator of ids, and a context manager that closes it.

    The generation continues even if no one reads it. When the iteration ends, the output has been published
    for the next turn. Cancelling a reader that waits for a token cancels the generation, and so does dropping
    the last reference to it.
    """

    def __init__(self, job: GenerationJob) -> None:
        self._job = job
        self._read = 0
        self._closed = False

    @property
    def prompt_tokens(self) -> int:
        return len(self._job.prompt)

    @property
    def token_ids(self) -> list[int]:
        """The ids generated so far, including ids not yet read."""
        return list(self._job.generated)

    @property
    def scores(self) -> list[TokenScore]:
        """Log probabilities of `token_ids`, if `logprobs` were asked for."""
        return self._job.scores[: len(self._job.generated)]

    @property
    def prompt_scores(self) -> list[TokenScore] | None:
        """Log probabilities of the prompt's tokens but the first, if asked for; known at the first token."""
        return self._job.prompt_scores

    @property
    def cached_tokens(self) -> int:
        """Prompt tokens served from the cache; known at the first token.

        `tokens_by_tier` and `miss_reason` are known from then on, too.
        """
        return self._job.hit.tokens

    @property
    def tokens_by_tier(self) -> Mapping[Tier, int]:
        """`cached_tokens` by tier; all count at the farthest tier that any of them came from."""
        return self._job.hit.by_tier

    @property
    def miss_reason(self) -> MissReason:
        """Why the hit was not longer."""
        return self._job.hit.reason

    @property
    def durable_tokens(self) -> int | None:
        """Tokens of prompt and output that storage says it has, known at the end; None if nobody asks it."""
        return self._job.durable

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the call of `generate` to the first token, including queueing."""
        return self._job.ttft_s

    @property
    def finish_reason(self) -> FinishReason | None:
        """`stop` (an end token or stop string), `length` (`max_new_tokens`) or `cancelled`; None before."""
        return self._job.finish_reason

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        """Return the next token id.

        Raises:
            StopAsyncIteration: the output has ended.
            Exception: the model's error.
        """
        job = self._job
        try:
            while not self._closed and self._read == len(job.generated) and not _ended(job):
                job.news.clear()
                await job.news.wait()
        except asyncio.CancelledError:
            job.cancel()
            raise
        if not self._closed and self._read < len(job.generated):
            self._read += 1
            return job.generated[self._read - 1]
        _raise_failure(job)
        raise StopAsyncIteration

    async def aclose(self) -> None:
        """End the generation, and release its resources before returning.

        Tokens computed so far are published first, so stopping early loses no cache content.
        """
        self._closed = True
        self._job.cancel()
        if not _ended(self._job):  # no await then: whoever has its answer may cancel what tidies up
            assert self._job.task is not None, "what has not ended runs"
            await asyncio.wait([self._job.task])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self.aclose()

    if not TYPE_CHECKING:  # a type checker knows

        def __enter__(self) -> None:
            raise UsageError("a generation is used by `async with`, and read by `async for`")

        def __exit__(self, *error: object) -> None:
            pass

        __iter__ = __enter__

    def __del__(self) -> None:
        self._job.abandon()

    def __repr__(self) -> str:
        state = self.finish_reason or "running"
        return f"<Generation {state}, {self.prompt_tokens} + {len(self._job.generated)} tokens>"


def _ended(job: GenerationJob) -> bool:
    return job.task is None or job.task.done()


def _raise_failure(job: GenerationJob) -> None:
    if job.task is not None and job.task.done() and not job.task.cancelled():
        error = job.task.exception()
        if error is not None:
            raise error
