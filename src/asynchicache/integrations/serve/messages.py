"""Decode and check requests. An unsupported field is refused with an error that names it.

The shapes are those of OpenAI's completions and chat completions; `cache_salt`, `ignore_eos` and `top_k`
are vLLM's extensions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec
from msgspec import Meta

from asynchicache.errors import ConfigError
from asynchicache.integrations.serve.problems import ApiError
from asynchicache.integrations.serve.replies import Extras
from asynchicache.integrations.serve.tokenizers import Conversation
from asynchicache.options import Natural
from asynchicache.planner.hints import MAX_KEEP_SECONDS, MAX_REPEATS, NO_HINT, CacheHint

RequestT = TypeVar("RequestT", bound="GenerationRequest")
OrderT = TypeVar("OrderT", bound=msgspec.Struct)

MAX_STOPS = 16
MAX_CHOICES = 128
MAX_LIKELY = 20
_COMPLETION_TOKENS = 16  # OpenAI's default for /v1/completions

_UNSUPPORTED: Mapping[str, tuple[tuple[object, ...], str]] = {
    "best_of": ((1,), "send n, and choose"),
    "echo": ((False,), "use /v1/completions"),
    "suffix": (("",), "text is continued, not filled in"),
    "top_logprobs": ((0,), "logprobs says how many, in /v1/completions"),
    "presence_penalty": ((0,), "use temperature and top_p"),
    "frequency_penalty": ((0,), "use temperature and top_p"),
    "repetition_penalty": ((1,), "use temperature and top_p"),
    "min_p": ((0,), "use top_p"),
    "logit_bias": (({},), "tokens cannot be weighted"),
    "min_tokens": ((0,), "ignore_eos generates up to max_tokens"),
    "tool_choice": (("none", "auto"), "the model decides itself whether it calls a tool"),
    "functions": (([],), "no functions are called"),
    "function_call": (("none", "auto"), "no functions are called"),
    "modalities": ((["text"],), "outputs are text"),
    "audio": ((), "outputs are text"),
    "tools": (([],), "use /v1/chat/completions, whose template knows them"),
    "chat_template_kwargs": (({},), "use /v1/chat/completions"),
    "reasoning_effort": ((), "use /v1/chat/completions"),
    "web_search_options": ((), "nothing is searched here"),
    "lora_path": (("",), "one model is served, without adapters"),
    "use_beam_search": ((False,), "send as many requests instead"),
    "length_penalty": ((1,), "there is no beam search"),
    "skip_special_tokens": ((True,), "tokens that begin, end or pad a text are not shown, all others are"),
    "spaces_between_special_tokens": ((True,), "the tokenizer decides"),
    "add_special_tokens": ((True,), "send token ids instead of text"),
    "add_generation_prompt": ((True,), "a chat is always answered"),
    "continue_final_message": ((False,), "use /v1/completions"),
    "include_stop_str_in_output": ((False,), "stop strings are not part of the answer"),
    "return_token_ids": ((False,), "answers are text"),
    "return_hidden_states": ((False,), "answers are text"),
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
        "prediction",
        "parallel_tool_calls",
        "verbosity",
        "conversation_id",
        "request_id",
        "rid",
        "priority",
    }
)
"""Fields that do not change the answer; accepted and ignored."""

_MAX_LISTS = 1 << 16
"""Most lists and objects in a body; a message is one object, plus one for each of its parts."""

_PLACE = re.compile(r" - at `\$\.?(?P<path>[^`]*)`$")
_UNKNOWN = re.compile(r"unknown field `(?P<name>[^`]*)`")


class StreamOptions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Options of a streamed answer.

    Attributes:
        include_usage: end the stream with a chunk of token counts.
        continuous_usage_stats: with `include_usage`, each chunk has the counts so far, as with vLLM.
        include_obfuscation: accepted and ignored: nothing is padded.
    """

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None
    include_obfuscation: bool | None = None


class CacheHintFields(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The fields of `cache_hint`, as in `planner.hints.CacheHint`."""

    continues: bool = False
    over: bool = False
    keep_seconds: Annotated[float, Meta(ge=0, le=MAX_KEEP_SECONDS)] = 0.0
    transient: bool = False
    repeats: Annotated[tuple[Annotated[int, Meta(ge=0)], ...], Meta(max_length=MAX_REPEATS)] = ()

    def hint(self) -> CacheHint:
        """
        Raises:
            ApiError: the fields contradict each other.
        """
        try:
            return CacheHint(self.continues, self.over, self.keep_seconds, self.transient, self.repeats)
        except ConfigError as error:
            raise ApiError(f"cache_hint: {error}", param="cache_hint") from error


class TextFormat(msgspec.Struct, frozen=True, tag="text", forbid_unknown_fields=True):
    """Text as the model writes it."""


class AnyJsonFormat(msgspec.Struct, frozen=True, tag="json_object", forbid_unknown_fields=True):
    """Any JSON object."""


class JsonSchema(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A JSON schema with a name. An answer is held to all of it, `strict` or not."""

    schema: dict[str, Any] | bool
    name: str = ""
    description: str | None = None
    strict: bool | None = None


class SchemaFormat(msgspec.Struct, frozen=True, tag="json_schema", forbid_unknown_fields=True):
    """JSON of a schema."""

    json_schema: JsonSchema


class TransferParams(msgspec.Struct, frozen=True):
    """What a prefill answers, and a proxy sends to a decoder; other fields, of other connectors, are ignored.

    Attributes:
        durable: tokens that storage has, of a prompt and what was computed after it.
    """

    durable: Annotated[int, Meta(ge=0)] | None = None


class GenerationRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Fields of both endpoints. Null is the same as an omitted field.

    Attributes:
        model: name of the model. Default: this server's.
        temperature: 0 takes the likeliest token, 1 samples from the model's distribution.
        top_p: sample from the likeliest tokens that have this share of the probability.
        top_k: sample from the `top_k` likeliest tokens; 0 or -1: from all.
        seed: seed of the sampling; equal requests with a seed get equal answers.
        stop: strings that end the answer and are not part of it.
        n: answers to each prompt; with a `seed`, each has the next one.
        max_tokens, max_completion_tokens: most tokens of an answer; 0 computes the prompt only.
        ignore_eos: generate up to the limit, even past end-of-text tokens.
        cache_salt: requests with different salts share nothing in the cache.
        cache_hint: whether the prompt will be continued, is over, or is to be kept; see `planner.hints`.
        response_format: text, any JSON object, or JSON of a schema.
        return_cached_tokens_details: tell the cached tokens of each tier, as SGLang does.
        kv_transfer_params: of a decoder's request, what its prefill answered.
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
    cache_hint: CacheHintFields | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_CHOICES)] | None = None
    max_tokens: Natural | None = None
    max_completion_tokens: Natural | None = None
    return_cached_tokens_details: bool | None = None
    response_format: TextFormat | AnyJsonFormat | SchemaFormat | None = None
    kv_transfer_params: TransferParams | None = None

    @property
    def hint(self) -> CacheHint:
        """The hint for the cache.

        Raises:
            ApiError: its fields contradict each other.
        """
        return NO_HINT if self.cache_hint is None else self.cache_hint.hint()

    @property
    def schema(self) -> dict[str, Any] | bool | None:
        """The JSON schema of the answer; None: it is text."""
        if isinstance(self.response_format, SchemaFormat):
            return self.response_format.json_schema.schema
        return {"type": "object"} if isinstance(self.response_format, AnyJsonFormat) else None

    @property
    def stops(self) -> list[str]:
        return [self.stop] if isinstance(self.stop, str) else self.stop or []

    @property
    def extras(self) -> Extras:
        """What a reply tells beside the answer."""
        options = self.stream_options or StreamOptions()
        return Extras(
            usage=bool(options.include_usage),
            usage_always=bool(options.include_usage and options.continuous_usage_stats),
            tiers=bool(self.return_cached_tokens_details),
        )

    @property
    def limit(self) -> int | None:
        """Most tokens to generate; None for the server's default."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def likely(self) -> int | None:
        """How many likely tokens to name for each token of the answer; None: no log probabilities.

        Raises:
            ApiError: it is not said whether there are any.
        """
        return None


class WeightsRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /update_weights`."""

    weight_version: Annotated[str, Meta(min_length=1, max_length=256)]


class AttachRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /attach_storage`: a storage engine and its options, or the stages of a chain and the
    options of each; empty for the configured one."""

    storage: Annotated[str, Meta(min_length=1)] | list[Any] | None = None
    storage_options: dict[str, Any] | list[dict[str, Any]] | None = None


def decode_order(body: bytes, kind: type[OrderT]) -> OrderT:
    """Decode the body of an operator's request.

    Raises:
        ApiError: it is not JSON of this form.
    """
    try:
        return msgspec.json.decode(body, type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _unfit(error) from error


class CompletionRequest(GenerationRequest, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/completions`.

    Attributes:
        prompt: one or several, each a text or token ids.
        echo: the prompt comes before its answer, in `logprobs` too.
        logprobs: how many likely tokens to name for each token.
    """

    prompt: str | list[int | str | list[int]]
    echo: bool | None = None
    logprobs: Annotated[int, Meta(ge=0, le=MAX_LIKELY)] | None = None

    @property
    def limit(self) -> int:
        given = super().limit
        return _COMPLETION_TOKENS if given is None else given

    @property
    def likely(self) -> int | None:
        return self.logprobs

    def prompts(self) -> list[str | list[int]]:
        """Return each prompt, as text or as token ids.

        Raises:
            ApiError: a prompt is empty, or there is none; or token ids stand beside other prompts.
        """
        prompts: list[str | list[int]] = [self.prompt] if isinstance(self.prompt, str) else []
        if not prompts:
            ids = [one for one in self.prompt if isinstance(one, int)]
            prompts = [one for one in self.prompt if not isinstance(one, int)]
            if ids and prompts:
                rule = "put each prompt's ids into a list of its own"
                raise ApiError(f"prompt mixes token ids and prompts: {rule}", param="prompt")
            prompts = prompts or [ids]
        if not all(prompts):
            raise ApiError("prompt is empty: send text, or token ids", param="prompt")
        return prompts


class ContentPart(msgspec.Struct, frozen=True):
    """A part of a message's content."""

    type: str
    text: str | None = None


class Message(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One turn of a conversation.

    Attributes:
        name: name of the speaker; ignored.
        tool_calls: calls of an earlier answer, for the chat template.
        tool_call_id: the call that a message of role `tool` answers.
        reasoning_content, reasoning: thoughts of an earlier answer, for the chat template.
        refusal, annotations, audio, function_call: fields that clients copy from earlier answers; `audio`
            and `function_call` must be null or empty.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[ContentPart] | None = None
    name: str | None = None
    refusal: str | None = None
    annotations: list[object] | None = None
    audio: object = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    reasoning: str | None = None
    function_call: object = None

    def for_template(self, number: int) -> dict[str, Any]:
        """Return the message in the form that chat templates take; see `text`."""
        given = {
            "name": self.name if self.role == "tool" else None,
            "tool_calls": [_with_parsed_arguments(call) for call in self.tool_calls or ()] or None,
            "tool_call_id": self.tool_call_id,
            "reasoning_content": self.reasoning_content or self.reasoning,
        }
        extra = {name: value for name, value in given.items() if value is not None}
        return {"role": self.role, "content": self.text(number), **extra}

    def text(self, number: int) -> str:
        """Return the text of the message.

        Args:
            number: index of the message, for errors.

        Raises:
            ApiError: the content is not text.
        """
        place = f"messages[{number}]"
        if self.function_call or self.audio:
            raise ApiError(f"{place}: function_call and audio are not supported: use tool_calls", param=place)
        if isinstance(self.content, str):
            return self.content
        if self.content is None and self.tool_calls:
            return ""
        if self.content is None:
            raise ApiError(f"{place}.content is missing: send text", param=f"{place}.content")
        for index, part in enumerate(self.content):
            if part.type != "text" or part.text is None:
                where = f"{place}.content[{index}]"
                raise ApiError(f"{where} of type {part.type!r} is not supported: send text", param=where)
        return "".join(part.text or "" for part in self.content)


def _call_schema(function: Mapping[str, Any]) -> dict[str, Any]:
    arguments = function.get("parameters") or {"type": "object"}
    return {
        "type": "object",
        "properties": {"name": {"const": function.get("name")}, "arguments": arguments},
        "required": ["name", "arguments"],
        "additionalProperties": False,
    }


def _with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """OpenAI's clients send arguments as a string of JSON; chat templates write a mapping."""
    function = call.get("function")
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = msgspec.json.decode(function["arguments"] or "{}")
    except (msgspec.MsgspecError, RecursionError):
        return call  # a model's call may be no JSON: the template writes it as it is
    return {**call, "function": {**function, "arguments": arguments}}


class FunctionName(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names a function."""

    name: str


class NamedTool(msgspec.Struct, frozen=True, tag="function", forbid_unknown_fields=True):
    """The tool that is to be called."""

    function: FunctionName


class ChatRequest(GenerationRequest, frozen=True, forbid_unknown_fields=True):
    """The body of `POST /v1/chat/completions`.

    Attributes:
        logprobs: tell the log probability of each token of the answer.
        top_logprobs: how many likely tokens to name in its place.
        tools: what the chat template is to offer the model. Calls in a free answer are not parsed.
        tool_choice: `required` or a tool: the answer is a call. Otherwise the model decides.
        chat_template_kwargs: more variables of the chat template, such as `enable_thinking`.
        reasoning_effort: likewise.
    """

    messages: Annotated[list[Message], Meta(min_length=1)]
    tools: list[dict[str, Any]] | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: str | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_LIKELY)] | None = None

    @property
    def likely(self) -> int | None:
        if self.top_logprobs and not self.logprobs:
            raise ApiError(
                "top_logprobs without logprobs: send logprobs true too, or leave it out", param="top_logprobs"
            )
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def calls(self) -> bool:
        """Whether the answer has to be a call of a tool."""
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def extras(self) -> Extras:
        return super().extras._replace(calls=self.calls)

    @property
    def schema(self) -> dict[str, Any] | bool | None:
        if not self.calls:
            return super().schema
        if super().schema is not None:
            raise ApiError("response_format with a forced tool_choice: send one of them", param="tool_choice")
        named = self.tool_choice.function.name if isinstance(self.tool_choice, NamedTool) else None
        offered = [tool.get("function") for tool in self.tools or ()]
        functions = [one for one in offered if isinstance(one, dict) and named in (None, one.get("name"))]
        if not functions:
            wanted = "one of tools" if named is None else repr(named)
            raise ApiError(f"tool_choice {wanted} is not among tools: send it there too", param="tool_choice")
        return {"anyOf": [_call_schema(one) for one in functions]}

    def conversation(self) -> Conversation:
        """Return what the chat template takes.

        Raises:
            ApiError: a message is not text.
        """
        messages = [message.for_template(number) for number, message in enumerate(self.messages)]
        effort = {} if self.reasoning_effort is None else {"reasoning_effort": self.reasoning_effort}
        return Conversation(messages, self.tools or [], effort | (self.chat_template_kwargs or {}))


def decode_request(
    body: bytes, kind: type[RequestT], *, context: int, ignore_unknown: bool = False
) -> RequestT:
    """Decode and check the body of a request.

    Args:
        body: JSON.
        context: most tokens of prompt and answer together.
        ignore_unknown: leave out unknown fields instead of refusing them; also within messages.

    Raises:
        ApiError: the body is not JSON, a field is unknown, of a wrong type or out of range, or the body has
            more values than a request needs.
    """
    _check_size(body, context)
    try:
        fields = msgspec.json.decode(body, type=dict[str, msgspec.Raw])
        wanted = _checked(fields, kind, ignore_unknown=ignore_unknown)
        request = msgspec.convert(wanted, kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise _unfit(error) from error
    if len(request.stops) > MAX_STOPS or not all(request.stops):
        raise ApiError(f"stop must be up to {MAX_STOPS} strings, none of them empty", param="stop")
    return request


def _checked(
    fields: Mapping[str, msgspec.Raw], kind: type[GenerationRequest], *, ignore_unknown: bool
) -> dict[str, object]:
    """Return the values of fields that `kind` has; refuse unsupported fields that are not neutral."""
    wanted: dict[str, object] = {}
    for name, raw in fields.items():
        if name in _WITHOUT_EFFECT:
            continue
        value = msgspec.json.decode(raw)
        if name in kind.__struct_fields__:
            wanted[name] = _known_only(name, value) if ignore_unknown else value
        elif name in _UNSUPPORTED:
            _check_neutral(name, value)
        elif not ignore_unknown:
            raise _unknown(name)
    return wanted


def _unknown(name: str) -> ApiError:
    return ApiError(
        f"{name} is not known: leave it out, or serve with --ignore-unknown-fields",
        param=name,
        code="unknown_parameter",
    )


def _known_only(name: str, value: object) -> object:
    """Leave unknown fields out of what a field holds."""
    if name == "messages" and isinstance(value, list):
        return [_fields_of(Message, message) for message in value]
    kinds: dict[str, type[msgspec.Struct]] = {"stream_options": StreamOptions, "cache_hint": CacheHintFields}
    return _fields_of(kinds[name], value) if name in kinds else value


def _fields_of(kind: type[msgspec.Struct], value: object) -> object:
    known = kind.__struct_fields__
    return {name: one for name, one in value.items() if name in known} if isinstance(value, dict) else value


def _check_size(body: bytes, context: int) -> None:
    """Refuse a body with too many values before decoding: decoding it would block the loop for seconds.

    A string counts as one value, regardless of its content.
    """
    most = context + _MAX_LISTS
    bare = body.replace(rb"\\", b"").replace(rb"\"", b"")  # now each quote begins or ends a string
    fits = bare.count(b'"') <= 4 * most  # at most two strings per value: its key and the value
    if fits:
        bare = b"".join(bare.split(b'"')[::2])
        lists = bare.count(b"[") + bare.count(b"{")
        fits = lists <= _MAX_LISTS and lists + bare.count(b",") <= most
    if not fits:
        raise ApiError(
            f"the body has more than {most:,} values, or {_MAX_LISTS:,} lists and objects; a request of "
            f"{context:,} tokens, which there is room for, needs no more: shorten the prompt, or send fewer "
            "prompts at once",
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
    unknown = _UNKNOWN.search(str(error))
    if place and unknown and place["path"]:
        return _unknown(f"{place['path']}.{unknown['name']}")
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
