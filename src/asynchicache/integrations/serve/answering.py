"""Convert generations to the text of answers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from asynchicache.integrations.serve.replies import AnswerPiece, ApiFinishReason, Score, Usage
from asynchicache.integrations.serve.stops import StopStrings
from asynchicache.integrations.serve.tokenizers import Tokenizer
from asynchicache.integrations.transformers.generation import Generation
from asynchicache.integrations.transformers.scores import TokenScore
from asynchicache.types import Tier

T = TypeVar("T")


class Wanted(NamedTuple):
    """What an answer shows.

    Attributes:
        stops: strings that end the answer.
        stop_ids: tokens that end the answer; not part of the text.
        echo: the text of the prompt comes first.
        answer: the answer is shown; else the prompt is computed only.
        calls: the answer is a call of a tool, which is shown as a whole.
    """

    stops: Sequence[str] = ()
    stop_ids: Collection[int] = ()
    echo: bool = False
    answer: bool = True
    calls: bool = False


class Answer:
    """The text of one generation; an async context manager that ends the generation on exit.

    Args:
        prompt: token ids.
        wanted: what is shown.
    """

    def __init__(
        self, generation: Generation, tokenizer: Tokenizer, prompt: Sequence[int], wanted: Wanted
    ) -> None:
        self._generation = generation
        self._tokenizer = tokenizer
        self._detokenizer = tokenizer.detokenizer(prompt)
        self._prompt = prompt
        self._wanted = wanted
        self._stops = StopStrings(wanted.stops)
        self._tokens = 0
        self._offset = 0

    async def __aenter__(self) -> Answer:
        return self

    async def __aexit__(self, *error: object) -> None:
        await self._generation.aclose()

    async def pieces(self) -> AsyncGenerator[AnswerPiece, None]:
        """Yield text as tokens arrive, one piece per token; the text of a piece may be empty.

        Raises:
            CacheError, RuntimeError: the model failed.
        """
        whole = ""
        async for token in self._generation:
            if self._wanted.echo and not self._tokens:
                yield await asyncio.to_thread(self._echo)  # a long prompt would block the loop
            if not self._wanted.answer:
                break
            self._tokens += 1
            scores = self._scored(self._generation.scores[self._tokens - 1 : self._tokens])
            shown = token not in self._wanted.stop_ids
            text = self._stops.push(self._detokenizer.push(token)) if shown else ""
            if self._wanted.calls:
                whole, text = whole + text, ""
            yield AnswerPiece(text, scores)
            if self._stops.found:
                break
        await self._generation.aclose()  # publishes its pages before the answer ends
        yield AnswerPiece(whole + self._stops.push(self._detokenizer.finish()) + self._stops.finish())

    def _echo(self) -> AnswerPiece:
        """The prompt, with the scores of its tokens if they are wanted."""
        detokenizer = self._tokenizer.detokenizer(())
        text = "".join(map(detokenizer.push, self._prompt)) + detokenizer.finish()
        found = self._generation.prompt_scores
        if found is None:
            self._offset = len(text)
            return AnswerPiece(text)
        first = self._tokenizer.token_text(self._prompt[0])
        self._offset = len(first)
        return AnswerPiece(text, [Score(first, None, (), 0), *self._scored(found)])

    def _scored(self, scores: Sequence[TokenScore]) -> list[Score]:
        shown = []
        for one in scores:
            text = self._tokenizer.token_text(one.token)
            top = [(self._tokenizer.token_text(token), logprob) for token, logprob in one.top]
            shown.append(Score(text, one.logprob, top, self._offset))
            self._offset += len(text)
        return shown

    @property
    def finish_reason(self) -> ApiFinishReason:
        """`stop` for a stop token or stop string, `length` if the answer reached its limit."""
        if self._wanted.calls and self._generation.finish_reason == "stop":
            return "tool_calls"
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
        durable = generation.durable_tokens
        return Usage(generation.prompt_tokens, self._tokens, generation.cached_tokens, by_tier, durable)


class AnswerSet:
    """The answers of one request: `choices` to each prompt, in the order of the prompts."""

    def __init__(self, answers: Sequence[Answer], choices: int) -> None:
        self._answers = answers
        self._choices = choices

    def __len__(self) -> int:
        return len(self._answers)

    async def pieces(self) -> AsyncGenerator[tuple[int, AnswerPiece | ApiFinishReason], None]:
        """Yield the number of an answer and a piece of it as they come, or how it ended.

        Raises:
            CacheError, RuntimeError: the model failed.
        """
        came: asyncio.Queue[tuple[int, AnswerPiece | asyncio.Task[ApiFinishReason]]] = asyncio.Queue()
        readers = []
        for number, answer in enumerate(self._answers):
            reader = asyncio.create_task(_read(answer, partial(_put, came, number)))
            reader.add_done_callback(partial(_put, came, number))
            readers.append(reader)
        left = len(readers)
        try:
            while left:
                number, piece = await came.get()
                if isinstance(piece, AnswerPiece):
                    yield number, piece
                else:
                    left -= 1
                    yield number, piece.result()
        finally:
            for reader in readers:
                reader.cancel()
            await asyncio.wait(readers)

    @property
    def usage(self) -> Usage:
        """Token counts so far. A prompt counts once, as the first of its choices found it in the cache."""
        each = [answer.usage for answer in self._answers]
        durable = min((usage.durable for usage in each if usage.durable is not None), default=None)
        total = Usage(0, 0, 0, {tier.name.lower(): 0 for tier in Tier}, durable)
        for begin in range(0, len(each), self._choices):
            choices = each[begin : begin + self._choices]
            first = min(choices, key=lambda usage: usage.cached_tokens)
            total = Usage(
                total.prompt_tokens + first.prompt_tokens,
                total.completion_tokens + sum(usage.completion_tokens for usage in choices),
                total.cached_tokens + first.cached_tokens,
                {tier: count + first.by_tier[tier] for tier, count in total.by_tier.items()},
                durable,
            )
        return total

    @property
    def first_token_seconds(self) -> float:
        return min(answer.first_token_seconds for answer in self._answers)


def _put(came: asyncio.Queue[tuple[int, T]], number: int, one: T) -> None:
    came.put_nowait((number, one))


async def _read(answer: Answer, put: Callable[[AnswerPiece], None]) -> ApiFinishReason:
    async for piece in answer.pieces():
        put(piece)
    return answer.finish_reason
