"""Decode and check requests. An unsupported field is refused with an error that names it.

The shapes are those of OpenAI's completions and chat completions; `cache_salt`, `ignore_eos` and `top_k`
are vLLM's extensions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Literal, TypeVar

import msgspec
from msgspec import Meta

from asynchicache.integrations.serve.problems import ApiError

RequestT = TypeVar("RequestT", bound="GenerationRequest")

MOST_STOPS = 16
_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions

_UNSUPPORTED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "n": ((1,), "send as many requests instead: they share the cached prompt"),
    "best_of": ((1,), "send as many requests, and choose"),
    "echo": ((False,), "the prompt is known to the client"),
    "suffix": (("",), "text is continued, not filled in"),
    "logprobs": ((False,), "probabilities are not told"),
    "top_logprobs": ((0,), "probabilities are not told"),
    "presence_penalty": ((0,), "use temperature and top_p"),
    "frequency_penalty": ((0,), "use temperature and top_p"),
    "repetition_penalty": ((1,), "use temperature and top_p"),
    "min_p": ((0,), "use top_p"),
    "logit_bias": (({},), "tokens cannot be weighted"),
    "min_tokens": ((0,), "ignore_eos generates up to max_tokens"),
    "tools": (([],), "no tools are called"),
    "tool_choice": (("none", "auto"), "no tools are called"),
    "parallel_tool_calls": ((True, False), "no tools are called"),
    "functions": (([],), "no functions are called"),
    "function_call": (("none", "auto"), "no functions are called"),
    "response_format": (({"type": "text"},), "outputs are text"),
    "modalities": ((["text"],), "outputs are text"),
    "audio": ((), "outputs are text"),
    "prediction": ((), "leave it out"),
    "reasoning_effort": ((), "leave it out"),
    "web_search_options": ((), "leave it out"),
}
"""Unsupported fields that would change the answer: the accepted neutral values, and the alternative."""

_WITHOUT_EFFECT = frozenset(
    {
        "user",
        "metadata",
        "store",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
    }
)
"""Fields that do not change the answer; accepted and ignored."""

_MOST_LISTS = 1 << 16
"""Most lists and objects in a body; a message is one object, plus one for each of its parts."""

_PLACE = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a streamed answer.

    Attributes:
        include_usage: end the stream with a chunk of token counts.
    """

    include_usage: bool | None = None


class GenerationRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Fields of both endpoints. Null is the same as an omitted field.

    Attributes:
        model: name of the model. Default: this server's.
        temperature: 0 takes the likeliest token, 1 samples from the model's distribution.
        top_p: sample from the likeliest tokens that have this share of the probability.
        top_k: sample from the `top_k` likeliest tokens; 0 or -1: from all.
        seed: seed of the sampling; equal requests with a seed get equal answers.
        stop: strings that end the answer and are not part of it.
        ignore_eos: generate up to the limit, even past end-of-text tokens.
        cache_salt: requests with different salts share nothing in the cache.
    """

    model: str | None = None
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1)] | None = None
    seed: Annotated[int, Meta(ge=-(2**63), le=2**63 - 1)] | None = None
    stop: str | list[str] | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    ignore_eos: bool | None = None
    cache_salt: Annotated[str, Meta(min_length=1, max_length=256)] | None = None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def usage_wanted(self) -> bool:
        """Whether a stream ends with token counts."""
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def limit(self) -> int | None:
        """Most tokens to generate; None for the server's default."""
        return None


class CompletionRequest(GenerationRequest, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/completions`."""

    prompt: str | list[int | str | list[int]]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_tokens or _COMPLETION_TOKENS

    def one_prompt(self) -> str | list[int]:
        """Return the prompt, as text or as token ids.

        Raises:
            ApiError: the prompt is empty, or there are several.
        """
        prompt: str | Sequence[int | str | list[int]] = self.prompt
        if isinstance(prompt, list) and len(prompt) == 1 and not isinstance(prompt[0], int):
            prompt = prompt[0]
        if not prompt:
            raise ApiError("prompt is empty: send text, or token ids", param="prompt")
        if isinstance(prompt, str):
            return prompt
        ids = [token for token in prompt if isinstance(token, int)]
        if len(ids) != len(prompt):
            raise ApiError(
                f"prompt holds {len(prompt)} prompts: send one text, or one list of token ids, a request",
                param="prompt",
            )
        return ids


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation.

    Attributes:
        name: name of the speaker; ignored.
        refusal, annotations, audio, tool_calls, function_call: fields that clients copy from earlier
            answers; `audio`, `tool_calls` and `function_call` must be null or empty.
    """

    role: Literal["system", "developer", "user", "assistant"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[object] | None = None
    audio: object = None
    tool_calls: list[object] | None = None
    function_call: object = None

    def text(self, number: int) -> str:
        """Return the text of the message.

        Args:
            number: index of the message, for errors.

        Raises:
            ApiError: the content is not text, or contains a tool call.
        """
        place = f"messages[{number}]"
        if self.tool_calls or self.function_call or self.audio:
            raise ApiError(f"{place}: tools and audio are not supported here", param=place)
        if isinstance(self.content, str):
            return self.content
        if self.content is None:
            raise ApiError(f"{place}.content is missing: send text", param=f"{place}.content")
        for index, part in enumerate(self.content):
            if part.type != "text" or part.text is None:
                where = f"{place}.content[{index}]"
                raise ApiError(f"{where} of type {part.type!r} is not supported: send text", param=where)
        return "".join(part.text or "" for part in self.content)


class ChatRequest(GenerationRequest, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[Message], Meta(min_length=1)]
    max_tokens: Annotated[int, Meta(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Meta(ge=1)] | None = None

    @property
    def limit(self) -> int | None:
        return self.max_completion_tokens or self.max_tokens

    def conversation(self) -> list[dict[str, str]]:
        """Return the messages in the form that chat templates take.

        Raises:
            ApiError: a message is not text.
        """
        return [
            {"role": message.role, "content": message.text(number)}
            for number, message in enumerate(self.messages)
        ]


def decode_request(body: bytes, kind: type[RequestT], *, context: int) -> RequestT:
    """Decode and check the body of a request.

    Args:
        body: JSON.
        kind: type of the request.
        context: most tokens of prompt and answer together.

    Raises:
        ApiError: the body is not JSON, a field is unknown, of a wrong type or out of range, or the body has
            more values than a request needs.
    """
    _check_size(body, context)
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        wanted = _checked(fields, kind)
        request = msgspec.convert(wanted, kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _unfit(error) from error
    if len(request.stops) > MOST_STOPS or not all(request.stops):
        raise ApiError(f"stop must be up to {MOST_STOPS} strings, none of them empty", param="stop")
    return request


def _checked(fields: Mapping[str, msgspec.Raw], kind: type[GenerationRequest]) -> dict[str, object]:
    """Return the values of fields that `kind` has; refuse unsupported fields that are not neutral."""
    wanted: dict[str, object] = {}
    for name, raw in fields.items():
        if name in _WITHOUT_EFFECT:
            continue
        value = msgspec.json.decode(raw)
        if name in kind.__struct_fields__:
            wanted[name] = value
        elif name in _UNSUPPORTED:
            _check_neutral(name, value)
        else:
            raise ApiError(f"{name} is not known: leave it out", param=name, code="unknown_parameter")
    return wanted


def _check_size(body: bytes, context: int) -> None:
    """Refuse a body with too many values before decoding: decoding it would block the loop for seconds.

    A string counts as one value, regardless of its content.
    """
    most = context + _MOST_LISTS
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")  # now each quote begins or ends a string
    fits = bare.count(b'"') <= 4 * most  # at most two strings per value: its key and the value
    if fits:
        bare = b"".join(bare.split(b'"')[::2])
        lists = bare.count(b"[") + bare.count(b"{")
        fits = lists <= _MOST_LISTS and lists + bare.count(b",") <= most
    if not fits:
        raise ApiError(
            f"the body has more than {most:,} values, or {_MOST_LISTS:,} lists and objects; a request of "
            f"{context:,} tokens, which there is room for, needs no more: shorten the prompt",
            code="context_length_exceeded",
        )


def _check_neutral(name: str, value: object) -> None:
    neutral, instead = _UNSUPPORTED[name]
    if value is None or any(_same(value, one) for one in neutral):
        return
    raise ApiError(f"{name} is not supported: leave it out; {instead}", param=name, code="unsupported_value")


def _same(value: object, other: object) -> bool:
    """Compare as JSON values: false is not 0."""
    return value == other and isinstance(value, bool) == isinstance(other, bool)


def _unfit(error: Exception) -> ApiError:
    place = _PLACE.search(str(error))
    if isinstance(error, msgspec.ValidationError) and place:
        return ApiError(f"{place['path']}: {_PLACE.sub('', str(error))}", param=place["path"] or None)
    if isinstance(error, msgspec.ValidationError):
        missing = re.search(r"required field `(\w+)`", str(error))
        return ApiError(f"the body does not fit: {error}", param=missing[1] if missing else None)
    return ApiError(f"the body is no JSON object: {error}")


def token_ids(ids: Sequence[int], vocabulary: int) -> list[int]:
    """Check the token ids of a prompt.

    Raises:
        ApiError: an id is outside the model's vocabulary.
    """
    for token in ids:
        if not 0 <= token < vocabulary:
            raise ApiError(
                f"prompt: token {token} is not of this model: 0 to {vocabulary - 1}", param="prompt"
            )
    return list(ids)
