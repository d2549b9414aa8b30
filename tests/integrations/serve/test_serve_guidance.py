"""Answers that are held to a JSON schema, and schemas that nobody can be held to."""

from __future__ import annotations

import json
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio

from asynchicache.integrations.serve.loading import load_checkpoint
from integrations.serve.checkpoints import ending_as_its_tokenizer, save_checkpoint, tiny_loaded
from integrations.serve.serving import Running, body, running

SCHEMA = {
    "type": "object",
    "properties": {"kind": {"enum": ["page", "state"]}, "kept": {"type": "boolean"}},
    "required": ["kind", "kept"],
    "additionalProperties": False,
}
HELD = {"type": "json_schema", "json_schema": {"name": "kept", "schema": SCHEMA, "strict": True}}

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Running]:
    folder = ending_as_its_tokenizer(save_checkpoint(tmp_path_factory.mktemp("guided") / "model"))
    async with running(load_checkpoint(folder)) as one:
        yield one
        await one.idle()


def check(text: str) -> None:
    found = json.loads(text)
    assert list(found) == ["kind", "kept"]
    assert found["kind"] in {"page", "state"}
    assert isinstance(found["kept"], bool)


async def test_every_choice_is_within_the_schema_drawn_cold_and_warm(server: Running) -> None:
    """Random weights write no JSON by themselves."""
    fields: Any = {
        "model": "model",
        "messages": [{"role": "user", "content": "a cache keeps what a model has computed"}],
        "max_tokens": 60,
        "temperature": 1.5,
        "n": 4,
        "logprobs": True,
    }
    free = await server.openai.chat.completions.create(**fields)
    with pytest.raises(json.JSONDecodeError, match="line 1"):
        check(free.choices[0].message.content or "")
    for _ in range(2):
        answer = await server.openai.chat.completions.create(response_format=HELD, **fields)
        for choice in answer.choices:
            check(choice.message.content or "")
            assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens


async def test_any_object_and_a_stream_and_a_completion(server: Running) -> None:
    fields = body(max_tokens=60, response_format=HELD, stream=True)
    text = (await server.http.post("/v1/completions", json=fields)).text
    chunks = [json.loads(line[6:]) for line in text.split("\n\n") if line and not line.endswith("[DONE]")]
    check("".join(chunk["choices"][0]["text"] for chunk in chunks))
    fields = body(max_tokens=60, response_format={"type": "json_object"})
    answer = (await server.http.post("/v1/completions", json=fields)).json()["choices"][0]
    assert answer["text"].startswith("{")


def tool(name: str) -> dict[str, Any]:
    return {"type": "function", "function": {"name": name, "parameters": SCHEMA}}


CALLED: Any = {
    "model": "model",
    "messages": [{"role": "user", "content": "a cache keeps what a model has computed"}],
    "tools": [tool("keep"), tool("drop")],
    "max_tokens": 100,
    "temperature": 1.5,
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "function": {"name": "drop"}}])
async def test_a_tool_that_has_to_be_called_is_called(server: Running, choice: Any) -> None:
    names = {"keep", "drop"} if choice == "required" else {"drop"}
    answer = await server.openai.chat.completions.create(tool_choice=choice, n=2, **CALLED)
    for one in answer.choices:
        (call,) = one.message.tool_calls or ()
        assert call.type == "function"
        assert call.function.name in names
        check(call.function.arguments)
        assert (one.finish_reason, one.message.content) == ("tool_calls", None)
    stream = await server.openai.chat.completions.create(tool_choice=choice, stream=True, **CALLED)
    deltas = [chunk.choices[0] async for chunk in stream]
    (streamed,) = [call for delta in deltas for call in delta.delta.tool_calls or ()]
    assert streamed.function is not None
    check(streamed.function.arguments or "")
    assert deltas[-1].finish_reason == "tool_calls"


async def test_a_call_that_reaches_its_limit_is_text(server: Running) -> None:
    fields = {**CALLED, "max_tokens": 9}
    answer = await server.openai.chat.completions.create(tool_choice="required", **fields)
    assert (answer.choices[0].finish_reason, answer.choices[0].message.tool_calls) == ("length", None)
    assert (answer.choices[0].message.content or "").startswith('{"name"')


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"tools": []}, "one of tools is not among tools"),
        ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "'fly' is not among tools"),
        ({"response_format": HELD}, "send one of them"),
        ({"tool_choice": "always"}, "always"),
    ],
)
async def test_a_tool_that_is_not_there_is_refused(
    server: Running, wrong: dict[str, Any], words: str
) -> None:
    fields = {**CALLED, "tool_choice": "required", **wrong}
    answer = await server.http.post("/v1/chat/completions", json=fields)
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], words in error["message"]) == ("tool_choice", True), error


async def refused(server: Running, form: dict[str, Any], words: str) -> None:
    answer = await server.http.post("/v1/completions", json=body(response_format=form))
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["param"], words in error["message"]) == ("response_format", True), error


async def test_what_cannot_be_held_to_is_refused_by_name(
    server: Running, monkeypatch: pytest.MonkeyPatch
) -> None:
    wrong = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"type": "letter"}}}
    await refused(server, wrong, "letter")
    monkeypatch.setitem(sys.modules, "llguidance", None)
    await refused(server, HELD, "pip install 'asynchicache[guidance]'")


async def test_a_server_of_bytes_says_that_it_cannot() -> None:
    async with running(tiny_loaded()) as one:
        await refused(one, HELD, "reads bytes")
        fields = {**CALLED, "model": None, "tool_choice": "required"}
        error = (await one.http.post("/v1/chat/completions", json=fields)).json()["error"]
        assert (error["param"], error["message"].split()[0]) == ("tool_choice", "tool_choice")
