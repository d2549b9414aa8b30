"""Clients that leave, that are too many, and that are there when the server stops."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import time
from dataclasses import replace
from typing import Any

import httpx
import pytest
import torch

from asynchicache.cli.options import ServeOptions
from asynchicache.cli.serve import settings_of
from asynchicache.errors import ConfigError
from asynchicache.integrations.serve.connections import while_connected
from asynchicache.integrations.transformers.forward import feed
from integrations.serve.checkpoints import tiny_loaded
from integrations.serve.peers import connected
from integrations.serve.serving import (
    SMALL,
    Running,
    as_text,
    before_each_forward,
    body,
    held,
    running,
    uncached,
    until,
)

LOADED = tiny_loaded()
LONG = {"prompt": "a", "max_tokens": 1500, "temperature": 0, "stream": True}


def post(server: Running, request: dict[str, Any]) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(server.http.post("/v1/completions", json=request))


async def hang_up(call: asyncio.Task[httpx.Response]) -> None:
    call.cancel()
    await asyncio.wait((call,))


@pytest.mark.asyncio
@pytest.mark.parametrize("streamed", [True, False])
async def test_who_leaves_while_the_prompt_is_computed_frees_everything(streamed: bool) -> None:
    async with running(LOADED) as server:
        with held(LOADED):
            call = post(server, body(stream=streamed))
            await until(lambda: server.api.model.running)
            await hang_up(call)
        await server.idle()
        assert (server.api.counts.answered, server.api.counts.cancelled) == (0, 1)


@pytest.mark.asyncio
async def test_who_leaves_while_tokens_come_frees_everything() -> None:
    async with running(LOADED) as server:
        async with server.http.stream("POST", "/v1/completions", json=LONG) as answer:
            await anext(answer.aiter_lines())
        await server.idle()
        assert (server.api.counts.answered, server.api.counts.cancelled) == (0, 1)


@pytest.mark.asyncio
async def test_who_leaves_in_the_line_is_never_served() -> None:
    async with running(LOADED, max_running=1) as server:
        with held(LOADED):
            first = post(server, body())
            await until(lambda: server.api.model.running)
            second = post(server, body())
            await until(lambda: server.api.model.waiting)
            await hang_up(second)
            await until(lambda: not server.api.model.waiting)
            assert server.api.model.running == 1
        assert (await first).status_code == 200
        assert (server.api.counts.answered, server.api.counts.cancelled) == (1, 1)


@pytest.mark.asyncio
async def test_too_many_are_told_to_come_back() -> None:
    async with running(LOADED, max_running=1, max_waiting=1) as server:
        with held(LOADED):
            calls = [post(server, body()), post(server, body())]
            await until(lambda: server.api.model.waiting)

            refused = await server.http.post("/v1/completions", json=body())
            assert refused.status_code == 429
            assert int(refused.headers["retry-after"]) >= 1
            assert refused.json()["error"]["type"] == "rate_limit_error"
        assert [(await call).status_code for call in calls] == [200, 200]


@pytest.mark.asyncio
async def test_bodies_have_so_much_room_together_and_give_it_back() -> None:
    request = body(prompt="a" * 600)
    async with running(LOADED, max_body_bytes=1000, max_bodies_bytes=1000) as server:
        with held(LOADED):
            first = post(server, request)
            await until(lambda: server.api.model.running)
            refused = await server.http.post("/v1/completions", json=request)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert "may have 1,000" in refused.json()["error"]["message"]
        assert (await first).status_code == 200
        assert (await server.http.post("/v1/completions", json=request)).status_code == 200
        await server.idle()


def test_room_for_less_than_one_body_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_bodies_bytes 9 must have room for one of 10"):
        replace(settings_of(ServeOptions(), SMALL), max_body_bytes=10, max_bodies_bytes=9)


@pytest.mark.asyncio
async def test_who_is_being_answered_when_it_stops_is_answered() -> None:
    async with running(LOADED) as server:
        with held(LOADED):
            call = post(server, body(stream=True))
            await until(lambda: server.api.model.running)
            server.api.stopping = True  # `stop` says so too, but may close the door before one is in
            late = await server.http.get("/health")
            assert late.status_code == 503
            server.server.stop()
        assert (await call).text.endswith("data: [DONE]\n\n")
        assert (await server.task).answered == 1
        with pytest.raises(httpx.ConnectError):
            await server.http.get("/health")


@pytest.mark.asyncio
async def test_idle_connections_are_closed_when_it_stops_and_a_body_that_comes_then_is_refused() -> None:
    async with running(LOADED) as server, connected(server, 3) as (fresh, used, late):
        assert (await used.ask("/health")).status_code == 200
        content = json.dumps(body()).encode()
        late.announce("/v1/completions", len(content))
        await until(lambda: server.server.server_state.tasks)
        server.server.stop()
        assert await fresh.closed()
        assert await used.closed()
        late.send(content)
        assert is_told_of_the_end(await late.answer())
        assert await late.closed()


def is_told_of_the_end(answer: httpx.Response) -> bool:
    error = answer.json()["error"]
    return (answer.status_code, error["code"], answer.headers["retry-after"]) == (503, "stopping", "1")


@pytest.mark.asyncio
async def test_the_second_signal_waits_for_nobody(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    async with running(LOADED) as server:
        async with server.http.stream("POST", "/v1/completions", json=LONG) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            with held(LOADED):
                whole = post(server, body())
                await until(lambda: server.api.model.running + server.api.model.waiting == 2)
                server.server.stop()
                server.server.stop()
            *_, last = [line async for line in lines if line]
        assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"
        assert is_told_of_the_end(await whole)
        assert (await server.task).answered == 0
    assert "Exception in ASGI application" not in caplog.text
    lines = [record.getMessage() for record in caplog.records if record.name.endswith("serve.access")]
    assert sorted(line.split()[3] for line in lines) == ["200", "503"]
    assert all(line.endswith("the server is shutting down; try another") for line in lines)


@pytest.mark.soak
@pytest.mark.asyncio
async def test_who_takes_longer_than_draining_may_is_cut_off() -> None:
    with before_each_forward(LOADED, lambda *_: time.sleep(0.01)):
        async with running(LOADED, drain_seconds=1) as server:
            async with server.http.stream("POST", "/v1/completions", json=LONG) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                server.server.stop()
                *_, last = [line async for line in lines if line]
            assert json.loads(last.removeprefix("data: "))["error"]["code"] == "stopping"
            counts = await server.task
    assert (counts.answered, counts.cancelled) == (0, 1)


@pytest.mark.parametrize("streamed", [True, False])
@pytest.mark.asyncio
async def test_a_model_that_fails_is_told_and_the_next_request_is_served(streamed: bool) -> None:
    forwards = itertools.count()

    def fail(*_: object) -> None:
        if next(forwards) == 2 * streamed:
            raise RuntimeError("out of everything")

    async with running(LOADED) as server:
        with before_each_forward(LOADED, fail):
            answer = await server.http.post("/v1/completions", json=body(stream=streamed))
        if streamed:  # it has begun, so there is no other status any more
            *_, last, _ = answer.text.splitlines()
            assert answer.status_code == 200
            error = json.loads(last.removeprefix("data: "))["error"]
        else:
            assert answer.status_code == 500
            error = answer.json()["error"]
        assert error["code"] == "internal_error"
        assert "everything" not in error["message"]
        assert (await server.http.post("/v1/completions", json=body())).status_code == 200
        await server.idle()


@pytest.mark.asyncio
async def test_a_model_that_gives_no_numbers_fails_and_says_no_token(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*arguments: Any, **options: Any) -> torch.Tensor:
        return torch.full_like(feed(*arguments, **options), torch.nan)

    async with running(LOADED) as server:
        with monkeypatch.context() as patch:
            patch.setattr("asynchicache.integrations.transformers.calls.feed", broken)
            answer = await server.http.post("/v1/completions", json=body())
        assert answer.status_code == 500
        assert answer.json()["error"]["code"] == "internal_error"
        assert "the model gave nan as its likeliest token's logit" in caplog.text
        assert (await server.http.post("/v1/completions", json=body())).status_code == 200
        await server.idle()


async def converse(server: Running, number: int, turns: int, *, leaves: bool) -> None:
    """A conversation that compares each answer; one that leaves does so within its last answer."""
    prompt = LOADED.tokenizer.encode(f"conversation {number}: ")
    for turn in range(turns):
        prompt += LOADED.tokenizer.encode(f"turn {turn} of {turns}. ")
        request = {"prompt": prompt, "max_tokens": 6 + number % 5, "temperature": 0}
        if leaves and turn == turns - 1:
            call = asyncio.create_task(
                server.http.post("/v1/completions", json=request | {"max_tokens": 400})
            )
            for _ in range(number):
                await asyncio.sleep(0)
            call.cancel()
            await asyncio.wait((call,))
            return
        answer = await server.openai.completions.create(model="qwen3_5", **request)
        tokens = await asyncio.to_thread(uncached, LOADED, prompt, 6 + number % 5)
        assert answer.choices[0].text == as_text(LOADED, tokens)
        prompt += tokens


@pytest.mark.parametrize(
    ("clients", "turns"), [(8, 2), pytest.param(50, 4, marks=pytest.mark.soak)], ids=["8", "50"]
)
@pytest.mark.asyncio
async def test_conversations_go_on_while_half_of_them_hang_up(clients: int, turns: int) -> None:
    async with running(LOADED, max_running=8, cache=SMALL) as server:
        async with asyncio.TaskGroup() as group:
            for number in range(clients):
                group.create_task(converse(server, number, turns, leaves=number % 2 == 1))
        await server.idle()
        assert server.api.counts.refused == {}
        assert server.api.counts.answered >= clients // 2 * turns


@pytest.mark.asyncio
async def test_work_ends_with_its_client_and_its_own_errors_are_raised() -> None:
    gone = asyncio.Event()
    ended: list[str] = []

    async def receive() -> dict[str, Any]:
        await gone.wait()
        return {"type": "http.disconnect"}

    async def work(*, fails: bool) -> None:
        try:
            if fails:
                raise ValueError("mine")
            gone.set()
            await asyncio.Event().wait()
        finally:
            await asyncio.sleep(0)
            ended.append("tidied up")

    with pytest.raises(ValueError, match="mine"):
        await while_connected(receive, work(fails=True))
    await while_connected(receive, work(fails=False))
    assert ended == ["tidied up"] * 2
