"""Replies in OpenAI's format: whole, or as the chunks of a stream."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias

import msgspec

ApiFinishReason: TypeAlias = Literal["stop", "length"]
Body: TypeAlias = dict[str, Any]

STREAM_END = b"data: [DONE]\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of one answer.

    Attributes:
        prompt_tokens: tokens of the prompt.
        completion_tokens: generated tokens, including a stop string or end of text that is not shown.
        cached_tokens: tokens of the prompt that came from the cache.
        by_tier: these, by the name of the farthest tier that any of them came from.
    """

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int
    by_tier: Mapping[str, int] = field(default_factory=dict)

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
        tiers: the cached tokens of each tier, in the last chunk of a choice, or in the whole reply.
    """

    usage: bool = False
    usage_always: bool = False
    tiers: bool = False


@dataclass(frozen=True, slots=True)
class Reply:
    """Formats one reply of an endpoint.

    Args:
        number: unique part of the id.
        created: seconds since the epoch.
        model: name of the model.
        extras: what it tells beside the answer.
    """

    number: str
    created: int
    model: str
    extras: Extras

    PREFIX: ClassVar[str]
    WHOLE: ClassVar[str]
    CHUNK: ClassVar[str]

    def whole(self, text: str, reason: ApiFinishReason, usage: Usage) -> bytes:
        """Return the body of a reply that is not streamed."""
        body = self._body(self.WHOLE, [self._choice(self._full(text), reason)])
        return msgspec.json.encode(body | {"usage": usage.as_json()} | self._tiers(usage))

    def opening(self, usage: Usage) -> bytes:
        """Return the first chunk of a stream, before any text; may be empty."""
        return b""

    def piece(self, text: str, usage: Usage) -> bytes:
        """Return a chunk of text; `usage`: the counts so far."""
        return self._chunk([self._choice(self._part(text), None)], usage)

    def closing(self, reason: ApiFinishReason, usage: Usage) -> bytes:
        """Return the chunk with the finish reason."""
        return self._chunk([self._choice(self._part(""), reason)], usage, self._tiers(usage))

    def used(self, usage: Usage) -> bytes:
        """Return the chunk with token counts, after `closing`; empty if not requested."""
        return self._chunk([], None, {"usage": usage.as_json()}) if self.extras.usage else b""

    def _full(self, text: str) -> Body:
        return {"text": text}

    def _part(self, text: str) -> Body:
        return {"text": text}

    def _choice(self, content: Body, reason: ApiFinishReason | None) -> Body:
        return {"index": 0, **content, "logprobs": None, "finish_reason": reason}

    def _tiers(self, usage: Usage) -> Body:
        # With a choice: SGLang's own benchmark reads no chunk without one.
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


class ChatReply(Reply):
    """Of `/v1/chat/completions`."""

    __slots__ = ()
    PREFIX, WHOLE, CHUNK = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def opening(self, usage: Usage) -> bytes:
        delta = {"delta": {"role": "assistant", "content": ""}}
        return self._chunk([self._choice(delta, None)], usage)

    def _full(self, text: str) -> Body:
        return {"message": {"role": "assistant", "content": text, "refusal": None}}

    def _part(self, text: str) -> Body:
        return {"delta": {"content": text} if text else {}}


def server_sent(data: bytes) -> bytes:
    """Format one server-sent event."""
    return b"data: " + data + b"\n\n"
