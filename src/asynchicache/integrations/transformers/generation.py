"""One request as its reader sees it, and as those who serve it do."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Mapping
from types import TracebackType
from typing import Self

from asynchicache.cache import Hit
from asynchicache.integrations.transformers.sampling import Sampler, Sampling
from asynchicache.integrations.transformers.stopping import FinishReason, StopRule
from asynchicache.types import MissReason, Tier


class GenerationJob:
    """What is served: a prompt, the tokens that follow, and how it ended.

    Attributes:
        prompt: its token ids.
        namespace, salt, traceparent: as of `HybridCache.request`.
        sampler, rule: how tokens are chosen, and which is the last.
        generated: token ids so far; the last of them was not fed to the model yet.
        hit: what the cache served.
        decoding: it is past its prefill, so it ends at its next token when it is told to.
        finish_reason, ttft_s: None until known.
    """

    def __init__(
        self,
        prompt: array[int],
        sampling: Sampling,
        rule: StopRule,
        *,
        namespace: str | None,
        salt: str | None,
        traceparent: str | None = None,
    ) -> None:
        self.prompt = prompt
        self.namespace, self.salt, self.traceparent = namespace, salt, traceparent
        self.sampler = Sampler(sampling)
        self.rule = rule
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
        """The prompt and what was generated."""
        return self.prompt + array("q", self.generated)

    def take(self, token: int) -> None:
        """The model's next token."""
        if self.ttft_s is None:
            self.ttft_s = self._loop.time() - self._arrived
        self.generated.append(token)
        self.finish_reason = self.finish_reason or self.rule.reached(self.generated)
        self.news.set()

    def cancel(self) -> None:
        """Have it end soon, and keep what was computed."""
        if self.finish_reason is None:
            self.finish_reason = "cancelled"
            if not self.decoding and self.task is not None:
                self.task.cancel()

    def abandon(self) -> None:
        """As `cancel`, from whichever thread collects garbage."""
        if self.finish_reason is None and not self._loop.is_closed():
            self._loop.call_soon_threadsafe(self.cancel)


class Generation:
    """The tokens of one request: an async iterator of ids, and a context manager that closes it.

    Work goes on whether or not anybody reads. When the iteration ends, the output is published: the next
    turn meets it. Cancelling a reader that waits for a token cancels the
    generation; so does letting go of it.
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
        """The ids generated so far, those that were not read yet included."""
        return list(self._job.generated)

    @property
    def cached_tokens(self) -> int:
        """Tokens of the prompt that were not computed; known at the first token, as the next two are."""
        return self._job.hit.tokens

    @property
    def tokens_by_tier(self) -> Mapping[Tier, int]:
        """The same tokens, counted at the farthest tier that any of them came from."""
        return self._job.hit.by_tier

    @property
    def miss_reason(self) -> MissReason:
        """Why it was not more."""
        return self._job.hit.reason

    @property
    def ttft_s(self) -> float | None:
        """Seconds from the call of `generate` to the first token, waiting included."""
        return self._job.ttft_s

    @property
    def finish_reason(self) -> FinishReason | None:
        """`stop` (an end token or stop string), `length` (`max_new_tokens`) or `cancelled`; None before."""
        return self._job.finish_reason

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> int:
        """The next token id.

        Raises:
            StopAsyncIteration: there are no more.
            Exception: what the model raised.
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
        """End it, wherever it is. When this returns nothing is held for it any more.

        What was computed is published before, so that a reader who has seen enough loses nothing.
        """
        self._closed = True
        self._job.cancel()
        if self._job.task is not None:
            await asyncio.wait([self._job.task])

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self.aclose()

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
