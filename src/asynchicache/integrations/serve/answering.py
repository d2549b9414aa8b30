"""Convert one generation to the text of an answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence

from asynchicache.integrations.serve.replies import ApiFinishReason, Usage
from asynchicache.integrations.serve.stops import StopStrings
from asynchicache.integrations.serve.tokenizers import Detokenizer
from asynchicache.integrations.transformers.generation import Generation
from asynchicache.types import Tier


class Answer:
    """The text of one generation; an async context manager that ends the generation on exit.

    Args:
        generation: the tokens.
        detokenizer: converts tokens to text.
        stops: strings that end the answer.
        stop_ids: tokens that end the answer; not part of the text.
    """

    def __init__(
        self,
        generation: Generation,
        detokenizer: Detokenizer,
        stops: Sequence[str],
        stop_ids: Collection[int],
    ) -> None:
        self._generation = generation
        self._detokenizer = detokenizer
        self._stops = StopStrings(stops)
        self._stop_ids = stop_ids
        self._tokens = 0

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._generation.aclose()

    async def pieces(self) -> AsyncGenerator[str, None]:
        """Yield text as tokens arrive, one piece per token; a piece may be empty.

        Raises:
            CacheError, RuntimeError: the model failed.
        """
        async for token in self._generation:
            self._tokens += 1
            if token not in self._stop_ids:
                yield self._stops.push(self._detokenizer.push(token))
            if self._stops.found:
                await self._generation.aclose()  # publishes its pages before the answer ends
                return
        yield self._stops.push(self._detokenizer.finish()) + self._stops.finish()

    @property
    def finish_reason(self) -> ApiFinishReason:
        """`stop` for a stop token or stop string, `length` if the answer reached its limit."""
        return "stop" if self._stops.found or self._generation.finish_reason == "stop" else "length"

    @property
    def first_token_seconds(self) -> float:
        """Seconds from receiving the prompt's tokens to the first output token, including queueing."""
        return self._generation.ttft_s or 0.0

    @property
    def usage(self) -> Usage:
        """Token counts so far."""
        generation = self._generation
        by_tier = {tier.name.lower(): generation.tokens_by_tier.get(tier, 0) for tier in Tier}
        return Usage(generation.prompt_tokens, self._tokens, generation.cached_tokens, by_tier)
