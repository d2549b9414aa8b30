"""Replies in OpenAI's format: whole, or as the chunks of a stream."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import msgspec

ApiFinishReason: TypeAlias = Literal["stop", "length", "tool_calls"]
Body: TypeAlias = dict[str, Any]

STREAM_END = b"data: [DONE]\n\n"
_IMPOSSIBLE = -9999.0
"""Told in place of the logarithm of 0, as vLLM does."""


class Score(NamedTuple):
    """The log probability of one token.

    Attributes:
        text: the token's.
        logprob: natural logarithm of its probability; None for the first token of a prompt.
        top: the likeliest tokens in its place, with theirs.
        offset: characters before it.
    """

    text: str
    logprob: float | None
    top: Sequence[tuple[str, float]]
    offset: int


class AnswerPiece(NamedTuple):
    """What one token adds to an answer; of the first one also what it adds to an echo."""

    text: str
    scores: Sequence[Score] = ()


Choice: TypeAlias = tuple[str, Sequence[Score], ApiFinishReason]
"""A whole answer: its text, the scores of its tokens, and why it ended."""


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer.

    Attributes:
        completion_tokens: generated tokens, including a stop string or end of text that is not shown.
        cached_tokens: tokens of the prompt that came from the cache.
        by_tier: these, by the name of the farthest tier that any of them came from.
        durable: tokens of each prompt and answer that storage has at least; None: nobody asked storage.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    by_tier: Mapping[str, int] = field(default_factory=dict)
    durable: int | None = None

    def as_json(self) -> Body:
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


class Extras(NamedTuple):
    """What a reply tells beside the answer.

    Attributes:
        usage: a stream ends with token counts; its chunks have the field `usage`, null until then.
        usage_always: each chunk has the counts so far.
        calls: the answers are calls of tools, `{"name": ..., "arguments": {...}}`.
        tiers: the cached tokens of each tier, in the last chunk of a choice, or in the whole reply.
    """

    usage: bool = False
    usage_always: bool = False
    tiers: bool = False
    calls: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """Formats one reply of an endpoint.

    Args:
        number: unique part of the id.
        created: seconds since the epoch.
        extras: what it tells beside the answer.
    """

    number: str
    created: int
    model: str
    extras: Extras

    PREFIX: ClassVar[str]
    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]

    def whole(self, choices: Sequence[Choice], usage: Usage) -> bytes:
        """Return the body of a reply that is not streamed."""
        shown = [
            self._choice(number, self._full(text), scores, reason)
            for number, (text, scores, reason) in enumerate(choices)
        ]
        body = self._body(self.WHOLE, shown) | {"usage": usage.as_json()} | self._tiers(usage)
        if usage.durable is not None:
            body["kv_transfer_params"] = {"durable": usage.durable}
        return msgspec.json.encode(body)

    def opening(self, number: int, usage: Usage | None) -> bytes:
        """Return the first chunk of a choice, before any text; may be empty."""
        return b""

    def piece(self, number: int, piece: AnswerPiece, usage: Usage | None) -> bytes:
        """Return a chunk of a choice; empty if it tells nothing. `usage`: the counts so far, if told."""
        if not piece.text and not piece.scores:
            return b""
        return self._chunk([self._choice(number, self._part(piece.text), piece.scores, None)], usage)

    def closing(self, number: int, reason: ApiFinishReason, usage: Usage | None, *, last: bool) -> bytes:
        """Return the chunk with the finish reason of a choice, which is the `last` of a stream or not."""
        # Tiers stand beside a choice: SGLang's own benchmark reads no chunk without one.
        more = self._tiers(usage) if last and usage else {}
        return self._chunk([self._choice(number, self._part(""), (), reason)], usage, more)

    def used(self, usage: Usage) -> bytes:
        """Return the chunk with token counts, after all choices; empty if not requested."""
        return self._chunk([], None, {"usage": usage.as_json()}) if self.extras.usage else b""

    def _full(self, text: str) -> Body:
        return {"text": text}

    def _part(self, text: str) -> Body:
        return {"text": text}

    def _choice(
        self, number: int, content: Body, scores: Sequence[Score], reason: ApiFinishReason | None
    ) -> Body:
        told = self._scores(scores) if scores else None
        return {"index": number, **content, "logprobs": told, "finish_reason": reason}

    def _scores(self, scores: Sequence[Score]) -> Body:
        return {
            "tokens": [score.text for score in scores],
            "token_logprobs": [_told(score.logprob) for score in scores],
            "top_logprobs": [_likeliest(score) for score in scores],
            "text_offset": [score.offset for score in scores],
        }

    def _tiers(self, usage: Usage) -> Body:
        return {"sglext": {"cached_tokens_details": dict(usage.by_tier)}} if self.extras.tiers else {}

    def _chunk(self, choices: list[Body], usage: Usage | None, more: Body | None = None) -> bytes:
        body = self._body(self.CHUNK, choices)
        if self.extras.usage:
            body["usage"] = usage.as_json() if usage and self.extras.usage_always else None
        return server_sent(msgspec.json.encode(body | (more or {})))

    def _body(self, kind: str, choices: list[Body]) -> Body:
        name = f"{self.PREFIX}-{self.number}"
        return {"id": name, "object": kind, "created": self.created, "model": self.model, "choices": choices}


class CompletionReply(Reply):
    """Replies of `/v1/completions`."""

    __slots__ = ()
    PREFIX, WHOLE, CHUNK = "cmpl", "text_completion", "text_completion"


class ToolCall(msgspec.Struct):
    """A call as the model writes it, if it has to."""

    name: str
    arguments: msgspec.Raw


class ChatReply(Reply):
    """Of `/v1/chat/completions`."""

    __slots__ = ()
    PREFIX, WHOLE, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, number: int, usage: Usage | None) -> bytes:
        delta = {"delta": {"role": "assistant", "content": ""}}
        return self._chunk([self._choice(number, delta, (), None)], usage)

    def _full(self, text: str) -> Body:
        return {"message": {"role": "assistant", "refusal": None} | self._said(text)}

    def _part(self, text: str) -> Body:
        return {"delta": self._said(text) if text else {}}

    def _said(self, text: str) -> Body:
        if not self.extras.calls:
            return {"content": text}
        try:
            call = msgspec.json.decode(text, type=ToolCall)
        except msgspec.MsgspecError:  # it reached its limit first
            return {"content": text}
        function = {"name": call.name, "arguments": bytes(call.arguments).decode()}
        made = {"index": 0, "id": f"call_{uuid.uuid4().hex}", "type": "function", "function": function}
        return {"content": None, "tool_calls": [made]}

    def _scores(self, scores: Sequence[Score]) -> Body:
        return {
            "content": [
                _token(score.text, score.logprob)
                | {"top_logprobs": [_token(text, logprob) for text, logprob in score.top]}
                for score in scores
            ]
        }


def _token(text: str, logprob: float | None) -> Body:
    return {"token": text, "logprob": _told(logprob), "bytes": list(text.encode("utf-8", "replace"))}


def _told(logprob: float | None) -> float | None:
    """JSON has no infinity."""
    return None if logprob is None else max(logprob, _IMPOSSIBLE)


def _likeliest(score: Score) -> dict[str, float | None] | None:
    """The likeliest tokens and the chosen one; of equal texts, the likelier token's."""
    if score.logprob is None:
        return None
    pairs = sorted([*score.top, (score.text, score.logprob)], key=lambda pair: pair[1])
    return {text: _told(logprob) for text, logprob in pairs}


def server_sent(data: bytes) -> bytes:
    """Format one server-sent event."""
    return b"data: " + data + b"\n\n"
