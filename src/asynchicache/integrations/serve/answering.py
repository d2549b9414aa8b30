"""One generation as the text of an answer."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Collection, Sequence

from asynchicache.integrations.serve.replies import FinishReason, Usage
from asynchicache.integrations.serve.stops import StopStrings
from asynchicache.integrations.serve.tokenizers import Detokenizer
from asynchicache.integrations.transformers.generation import Generation


class Answer:
    """Text that is generated; an async context manager, left when nothing more is wanted of it.

    Args:
        generation: the tokens; ended when the block is left.
        detokenizer: makes text of them.
        stops: strings that end the answer.
        stop_ids: tokens that end it, and are no text.
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
        """Text as it comes, one piece a token; a piece may be empty.

        Raises:
            CacheError, RuntimeError: the model failed.
        """
        async for token in self._generation:
            self._tokens += 1
            if token not in self._stop_ids:
                yield self._stops.push(self._detokenizer.push(token))
            if self._stops.found:
                await self._generation.aclose()  # published before the answer ends, as without stop strings
                return
        yield self._stops.push(self._detokenizer.finish()) + self._stops.finish()

    @property
    def finish_reason(self) -> FinishReason:
        """Why it ended: by itself or a stop string, or because it was as long as it may be."""
        return "stop" if self._stops.found or self._generation.finish_reason == "stop" else "length"

    @property
    def first_token_seconds(self) -> float:
        """From the request's tokens to the answer's first, waiting included."""
        return self._generation.ttft_s or 0.0

    @property
    def usage(self) -> Usage:
        """What it took so far."""
        generation = self._generation
        return Usage(generation.prompt_tokens, self._tokens, generation.cached_tokens)
