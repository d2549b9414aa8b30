"""Requests that mean something are understood; all others are refused with what to change."""

from __future__ import annotations

import json
from typing import Any

import msgspec
import pytest

from asynchicache.integrations.serve.messages import (
    ChatRequest,
    CompletionRequest,
    decode_request,
    token_ids,
)
from asynchicache.integrations.serve.problems import ApiError
from asynchicache.integrations.serve.tokenizers import Conversation

CONTEXT = 100


def chat(**fields: Any) -> ChatRequest:
    body = {"messages": [{"role": "user", "content": "hi"}], **fields}
    return decode_request(json.dumps(body).encode(), ChatRequest, context=CONTEXT)


def completion(**fields: Any) -> CompletionRequest:
    return decode_request(json.dumps({"prompt": "hi", **fields}).encode(), CompletionRequest, context=CONTEXT)


def test_null_is_as_good_as_left_out() -> None:
    nulls = ["model", "max_tokens", "temperature", "top_p", "seed", "stop", "stream", "stream_options"]
    request = completion(**dict.fromkeys([*nulls, "n", "logprobs", "suffix", "cache_salt"]))
    assert request == completion()
    assert request.limit == 16


def test_what_changes_nothing_is_taken() -> None:
    request = chat(
        n=1,
        logprobs=False,
        presence_penalty=0,
        parallel_tool_calls=True,
        prediction={"type": "content", "content": "hello"},
        stream_options=None,
        response_format={"type": "text"},
        user="u",
        metadata={"a": "b"},
        conversation_id="7",
        skip_special_tokens=True,
        lora_path="",
    )
    assert msgspec.structs.replace(request, n=None, logprobs=None, response_format=None) == chat()


def test_both_names_of_the_limit_are_known() -> None:
    assert chat(max_tokens=3).limit == 3
    assert chat(max_tokens=3, max_completion_tokens=4).limit == 4
    assert completion(max_tokens=3, max_completion_tokens=4).limit == 4
    assert chat().limit is None


def test_messages_of_parts_are_joined() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    request = chat(
        messages=[
            {"role": "developer", "content": parts},
            {"role": "assistant", "content": "c", "tool_calls": None},
        ]
    )
    assert request.conversation().messages == [
        {"role": "developer", "content": "ab"},
        {"role": "assistant", "content": "c"},
    ]


def test_what_agents_send_reaches_the_template() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "look", "arguments": '{"at": "sky"}'}}
    broken = {"id": "2", "type": "function", "function": {"name": "look", "arguments": "{"}}
    request = chat(
        messages=[
            {"role": "assistant", "content": None, "tool_calls": [call, broken], "reasoning": "hm"},
            {"role": "tool", "tool_call_id": "1", "name": "look", "content": "blue"},
        ],
        tools=[{"type": "function", "function": {"name": "look"}}],
        tool_choice="auto",
        chat_template_kwargs={"enable_thinking": False, "reasoning_effort": "high"},
        reasoning_effort="low",
    )
    parsed = {**call, "function": {"name": "look", "arguments": {"at": "sky"}}}

    assert request.conversation() == Conversation(
        messages=[
            {"role": "assistant", "content": "", "tool_calls": [parsed, broken], "reasoning_content": "hm"},
            {"role": "tool", "content": "blue", "name": "look", "tool_call_id": "1"},
        ],
        tools=[{"type": "function", "function": {"name": "look"}}],
        variables={"enable_thinking": False, "reasoning_effort": "high"},
    )


def test_unknown_fields_may_be_left_out_instead() -> None:
    message = {"role": "user", "content": "hi", "mood": "good"}
    body = {"messages": [message], "frobnicate": 1, "stream_options": {"include_usage": True, "x": 1}}
    request = decode_request(json.dumps(body).encode(), ChatRequest, context=CONTEXT, ignore_unknown=True)

    assert request == chat(stream_options={"include_usage": True})
    with pytest.raises(ApiError, match="min_p is not supported"):  # what would change the answer stays so
        decode_request(b'{"prompt": "a", "min_p": 1}', CompletionRequest, context=9, ignore_unknown=True)


@pytest.mark.parametrize(
    ("prompt", "prompts"),
    [
        ("a", ["a"]),
        ([1, 2], [[1, 2]]),
        (["a"], ["a"]),
        ([[1, 2]], [[1, 2]]),
        (["a", [1], "b"], ["a", [1], "b"]),
    ],
)
def test_prompts_have_many_shapes(prompt: Any, prompts: Any) -> None:
    assert completion(prompt=prompt).prompts() == prompts


def test_likely_tokens_are_counted_as_each_endpoint_does() -> None:
    assert completion().likely is None
    assert [completion(logprobs=n).likely for n in (0, 20)] == [0, 20]
    assert chat(logprobs=False, top_logprobs=0).likely is None
    assert (chat(logprobs=True).likely, chat(logprobs=True, top_logprobs=3).likely) == (0, 3)
    with pytest.raises(ApiError, match="top_logprobs without logprobs"):
        _ = chat(top_logprobs=3).likely


@pytest.mark.parametrize(
    ("fields", "param", "words"),
    [
        ({"n": 0}, "n", ">= 1"),
        ({"n": 129}, "n", "<= 128"),
        ({"n": True}, "n", "got `bool`"),
        ({"echo": 1}, "echo", "got `int`"),
        ({"logprobs": 21}, "logprobs", "<= 20"),
        ({"logprobs": True}, "logprobs", "got `bool`"),
        ({"top_logprobs": 3}, "top_logprobs", "/v1/completions"),
        ({"tools": [{"type": "function"}]}, "tools", "/v1/chat/completions"),
        ({"tool_choice": "required"}, "tool_choice", "decides itself"),
        ({"reasoning_effort": "low"}, "reasoning_effort", "/v1/chat/completions"),
        ({"web_search_options": {}}, "web_search_options", "nothing is searched"),
        ({"response_format": {"type": "xml"}}, "response_format.type", "'xml'"),
        ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
        ({"frequency_penalty": 0.5}, "frequency_penalty", "temperature"),
        ({"temprature": 1}, "temprature", "not known"),
        ({"temperature": 3}, "temperature", "<= 2"),
        ({"temperature": "hot"}, "temperature", "got `str`"),
        ({"top_p": 0}, "top_p", "> 0"),
        ({"max_tokens": -1}, "max_tokens", ">= 0"),
        ({"max_tokens": 1.5}, "max_tokens", "int"),
        ({"seed": 2**64}, "seed", "<="),
        ({"stop": ["a", ""]}, "stop", "empty"),
        ({"stop": ["a"] * 17}, "stop", "16"),
        ({"cache_salt": ""}, "cache_salt", "length >= 1"),
        (
            {"stream_options": {"include_usages": True}},
            "stream_options.include_usages",
            "--ignore-unknown-fields",
        ),
        ({"prompt": 3}, "prompt", "int"),
        ({"prompt": [1, 1.5]}, "prompt[1]", "float"),
    ],
)
def test_what_cannot_be_meant_is_named(fields: dict[str, Any], param: str, words: str) -> None:
    with pytest.raises(ApiError) as caught:
        completion(**fields)
    assert caught.value.status == 400
    assert caught.value.param == param
    assert words in str(caught.value)


@pytest.mark.parametrize("prompt", ["", [], [""], [[]], ["a", ""], [1, "a"], [1, [2]]])
def test_no_prompt_and_a_mixture_are_refused(prompt: Any) -> None:
    with pytest.raises(ApiError, match="prompt"):
        completion(prompt=prompt).prompts()


@pytest.mark.parametrize(
    ("messages", "param"),
    [
        ([], "messages"),
        ([{"role": "pirate", "content": "a"}], "messages[0].role"),
        ([{"content": "a"}], "messages[0]"),
        ([{"role": "user"}], "messages[0].content"),
        ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0]"),
        ([{"role": "assistant", "content": "a", "function_call": {"name": "f"}}], "messages[0]"),
    ],
)
def test_messages_that_are_no_text_are_refused(messages: Any, param: str) -> None:
    with pytest.raises(ApiError) as caught:
        chat(messages=messages).conversation()
    assert caught.value.param == param


@pytest.mark.parametrize(
    "body", [b"", b"{", b"[]", b"3", b"null", b'{"prompt": "\xff"}', b'{"prompt": "a"}}']
)
def test_what_is_no_json_object_is_refused(body: bytes) -> None:
    with pytest.raises(ApiError, match="the body"):
        decode_request(body, CompletionRequest, context=CONTEXT)


def test_a_deep_body_is_refused() -> None:
    with pytest.raises(ApiError):
        decode_request(
            b'{"prompt": ' + b"[" * 60_000 + b"]" * 60_000 + b"}", CompletionRequest, context=CONTEXT
        )


MANY = 70_000  # more lists, or more values behind a context, than a request needs
BEGUN = '{"messages": [{"role": "user", "content": '


@pytest.mark.parametrize(
    ("opening", "item", "closing"),
    [
        ('{"prompt": [', "7", "]}"),
        ('{"prompt": [[', "7", "]]}"),
        ('{"prompt": [ [], ', "7", "]}"),
        ('{"prompt": ["", ', "7", "]}"),
        ('{"prompt": [', "[]", "]}"),
        ('{"prompt": [', '"a"', "]}"),
        ('{"prompt": "a", "stop": [', '"a"', "]}"),
        ('{"prompt": "a", "unheard_of": [', "{}", "]}"),
        ('{"prompt": "a", ', '"n": 1', "}"),
        ('{"messages": [', '{"role": "user", "content": "a"}', "]}"),
        (BEGUN + "[", '{"type": "text", "text": ""}', "]}]}"),
        (BEGUN + '"a", "annotations": [', "{}", "]}]}"),
        (BEGUN + '"\\\\\\"", "annotations": [', '"\\\\"', "]}]}"),
    ],
)
@pytest.mark.parametrize("kind", [CompletionRequest, ChatRequest])
def test_more_values_than_a_request_needs_are_refused_before_they_are_read(
    opening: str, item: str, closing: str, kind: type[CompletionRequest | ChatRequest]
) -> None:
    text = opening + ",".join([item] * MANY) + closing
    json.loads(text)
    with pytest.raises(ApiError, match="than 65,636 values, or 65,536 lists") as caught:
        decode_request(text.encode(), kind, context=CONTEXT)
    assert caught.value.code == "context_length_exceeded"


def test_as_many_ids_as_there_is_room_for_are_read() -> None:
    body = json.dumps({"prompt": [7] * MANY}).encode()
    assert decode_request(body, CompletionRequest, context=MANY).prompts() == [[7] * MANY]


@pytest.mark.parametrize(
    "text", [",[{" * MANY, '\\",[' * MANY, '"' * MANY * 4, "\\" * MANY, "\\" + '"[' * MANY]
)
def test_a_text_is_one_value(text: str) -> None:
    assert completion(prompt=text, stop=[text]).prompts() == [text]


def test_a_missing_field_is_named() -> None:
    with pytest.raises(ApiError, match="prompt") as caught:
        decode_request(b"{}", CompletionRequest, context=CONTEXT)
    assert caught.value.param == "prompt"


def test_tokens_of_other_vocabularies_are_refused() -> None:
    assert token_ids([0, 255], 256) == [0, 255]
    for ids in ([-1], [256], [1, 2**70]):
        with pytest.raises(ApiError, match="0 to 255"):
            token_ids(ids, 256)


def test_the_error_has_openais_shape() -> None:
    error = ApiError("no", status=429, param="p", code="c", retry_after=3)
    assert json.loads(error.body()) == {
        "error": {"message": "no", "type": "rate_limit_error", "param": "p", "code": "c"}
    }
    assert error.response().headers["retry-after"] == "3"


def test_the_log_leaves_out_a_long_field() -> None:
    field = "private " * 11
    assert ApiError(f"{field} is not known", param=field).logged == "... is not known"
    assert ApiError("is not known", param=field).logged == "...: is not known"


BOTH = "a person's matter, \"they\" say, and 'none' of the log's"


@pytest.mark.parametrize(
    ("message", "logged"),
    [
        ("model 'small' is not here: this server has 'tiny'" + " of ours" * 9 + " ('x')", None),
        ("the model's file and the clients' words, of which there are many, are not 'quoted'", None),
        (f"role {'private ' * 9!r} is none", "role '...' is none"),
        (f"role {BOTH!r} is 'none'", "role '...' is 'none'"),
        (f"role {BOTH.replace(chr(34), '')!r}", 'role "..."'),
        (f"role {'private ' * 99!r:.80}", "role '...'"),  # cut, so that its second quote is missing
    ],
)
def test_the_log_leaves_out_what_is_long_within_quotes_only(message: str, logged: str | None) -> None:
    assert ApiError(message).logged == (logged or message)
