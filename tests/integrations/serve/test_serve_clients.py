"""Clients that leave, that are too many, and that are there when the server stops."""

from __future__ import annotations

import asyncio
import itertools
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from typing import Any

import httpx
import pytest
import torch

from asynchicache.errors import ConfigError
from asynchicache.integrations.serve import protocol
from asynchicache.integrations.serve.connections import while_connected
from asynchicache.integrations.serve.server import ServeSettings
from asynchicache.integrations.transformers.forward import prefill
from integrations.serve.checkpoints import tiny_loaded
from integrations.serve.serving import SMALL, Running, as_text, running, uncached

LOADED = tiny_loaded()
LONG = {"prompt": "a", "max_tokens": 1500, "temperature": 0, "stream": True}


def body(**fields: Any) -> dict[str, Any]:
    return {"prompt": "hello " * 20, "max_tokens": 4, "temperature": 0, **fields}


async def until(condition: Callable[[], object]) -> None:
    """Other tasks go on until it holds."""
    while not condition():  # noqa: ASYNC110 - it is another task's doing
        await asyncio.sleep(0)


@contextmanager
def before_each_forward(action: Callable[..., None]) -> Iterator[None]:
    hook = LOADED.model.register_forward_pre_hook(action)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def held() -> Iterator[None]:
    """The model's next forward ends with the block."""
    let_go = threading.Event()

    def wait(*_: object) -> None:
        let_go.wait()

    try:
        with before_each_forward(wait):
            yield
    finally:
        let_go.set()


def post(server: Running, request: dict[str, Any]) -> asyncio.Task[httpx.Response]:
    return asyncio.create_task(server.http.post("/v1/completions", json=request))


async def hang_up(call: asyncio.Task[httpx.Response]) -> None:
    call.cancel()
    await asyncio.wait((call,))


@pytest.mark.asyncio
@pytest.mark.parametrize("streamed", [True, False])
async def test_who_leaves_while_the_prompt_is_computed_frees_everything(streamed: bool) -> None:
    async with running(LOADED) as server:
        with held():
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
        with held():
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
        with held():
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
        with held():
            first = post(server, request)
            await until(lambda: server.api.model.running)
            refused = await server.http.post("/v1/completions", json=request)
            assert refused.status_code == 429
            assert refused.headers["retry-after"] == "1"
            assert "may have 1,000" in refused.json()["error"]["message"]
        assert (await first).status_code == 200
        assert (await server.http.post("/v1/completions", json=request)).status_code == 200
        await server.idle()


class Peer:
    """A client by hand, over a connection that is kept."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader = reader
        self._writer = writer

    def send(self, data: bytes) -> None:
        self._writer.write(data)

    async def closed(self) -> bool:
        """Waits until it is; whether nothing was said before."""
        try:
            return not await self._reader.read()
        except ConnectionError:
            return True

    async def ask(self, path: str, request: dict[str, Any] | None = None) -> httpx.Response:
        content = json.dumps(request).encode()
        head = f"{'POST' if request else 'GET'} {path} HTTP/1.1\r\nhost: here\r\n"
        head += f"content-type: application/json\r\ncontent-length: {len(content)}\r\n\r\n"
        self.send(head.encode() + content)
        status, *lines = (await self._reader.readuntil(b"\r\n\r\n")).decode().splitlines()
        headers = dict(line.lower().split(": ", 1) for line in lines if line)
        text = await self._reader.readexactly(int(headers["content-length"]))
        return httpx.Response(int(status.split()[1]), headers=headers, content=text)


@asynccontextmanager
async def connected(server: Running, count: int) -> AsyncIterator[list[Peer]]:
    """Connections that the server has all taken, in this order."""
    port = int(server.url.rpartition(":")[2])
    streams = [await asyncio.open_connection("127.0.0.1", port) for _ in range(count)]
    try:
        yield [Peer(*stream) for stream in streams]
    finally:
        for _, writer in streams:
            writer.close()


@pytest.mark.asyncio
async def test_connections_beyond_the_limit_are_told_so_and_the_others_are_served() -> None:
    async with (
        running(LOADED, max_connections=2) as server,
        connected(server, 5) as (first, second, late, probe, _silent),
    ):
        refused = await late.ask("/v1/completions", body())
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "too_many_connections"
        assert refused.headers["retry-after"] == "1"
        assert refused.headers["connection"] == "close"
        assert await late.closed()
        assert (await probe.ask("/health")).status_code == 200
        assert await probe.closed()
        for _ in range(2):
            assert (await first.ask("/v1/completions", body())).status_code == 200
            assert (await second.ask("/v1/completions", body())).status_code == 200
        assert server.api.counts.refused == {503: 1}


@pytest.mark.asyncio
async def test_one_who_leaves_makes_room_for_another() -> None:
    async with running(LOADED, max_connections=1) as server:
        for _ in range(2):
            async with connected(server, 1) as (only,):
                assert (await only.ask("/v1/completions", body())).status_code == 200
            await until(lambda: not server.server.server_state.connections)


@pytest.mark.asyncio
async def test_connections_far_beyond_the_limit_are_closed_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(protocol, "_SPARE", 1)
    async with running(LOADED, max_connections=1) as server, connected(server, 3) as (first, spare, last):
        assert await last.closed()
        assert (await spare.ask("/health")).status_code == 200
        assert (await first.ask("/v1/completions", body())).status_code == 200


@pytest.mark.parametrize("said", [b"", b"GET /health HTTP/1.1\r\nhost: "], ids=["nothing", "half"])
@pytest.mark.asyncio
async def test_who_sends_no_request_is_closed(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(LOADED) as server:
        monkeypatch.setattr(protocol, "_HEAD_SECONDS", 0.05)
        async with connected(server, 1) as (new,):
            new.send(said)
            assert await new.closed()
        assert not server.server.server_state.connections


@pytest.mark.asyncio
async def test_the_second_request_too_must_not_stop_in_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(LOADED) as server, connected(server, 1) as (known,):
        assert (await known.ask("/health")).status_code == 200
        monkeypatch.setattr(protocol, "_HEAD_SECONDS", 0.05)
        known.send(b"GET /health HTTP/1.1\r\nhost: ")
        assert await known.closed()


@pytest.mark.asyncio
async def test_who_waits_for_an_answer_may_be_silent_and_after_it_too() -> None:
    async with running(LOADED) as server, connected(server, 1) as (known,):
        await until(lambda: server.server.server_state.connections)
        (connection,) = server.server.server_state.connections
        assert connection.deadline is not None
        with held():
            call = asyncio.create_task(known.ask("/v1/completions", body()))
            await until(lambda: server.api.model.running)
            assert connection.deadline is None
        assert (await call).status_code == 200
        assert connection.deadline is None


def test_room_for_less_than_one_body_is_refused() -> None:
    with pytest.raises(ConfigError, match="max_bodies_bytes 9 must have room for one of 10"):
        ServeSettings(max_body_bytes=10, max_bodies_bytes=9)


@pytest.mark.asyncio
async def test_who_is_being_answered_when_it_stops_is_answered() -> None:
    async with running(LOADED) as server:
        with held():
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
async def test_the_second_signal_waits_for_nobody() -> None:
    async with running(LOADED) as server:
        async with server.http.stream("POST", "/v1/completions", json=LONG) as answer:
            lines = answer.aiter_lines()
            await anext(lines)
            with held():
                server.server.stop()
                server.server.stop()
            with pytest.raises(httpx.RemoteProtocolError):
                await anext(line async for line in lines if "[DONE]" in line)
        assert (await server.task).answered == 0


@pytest.mark.soak
@pytest.mark.asyncio
async def test_who_takes_longer_than_draining_may_is_cut_off() -> None:
    with before_each_forward(lambda *_: time.sleep(0.01)):
        async with running(LOADED, drain_seconds=1) as server:
            async with server.http.stream("POST", "/v1/completions", json=LONG) as answer:
                lines = answer.aiter_lines()
                await anext(lines)
                server.server.stop()
                with pytest.raises(httpx.RemoteProtocolError):
                    await anext(line async for line in lines if "[DONE]" in line)
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
        with before_each_forward(fail):
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
        return torch.full_like(prefill(*arguments, **options), torch.nan)

    async with running(LOADED) as server:
        with monkeypatch.context() as patch:
            patch.setattr("asynchicache.integrations.transformers.turns.prefill", broken)
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
async def test_headers_that_do_not_end_are_refused() -> None:
    async with running(LOADED) as server:
        reader, writer = await asyncio.open_connection("127.0.0.1", int(server.url.rpartition(":")[2]))
        try:
            writer.write(b"GET /health HTTP/1.1\r\nHost: here\r\n" + b"X-Long: " + b"a" * (1 << 20))
            writer.write(b"\r\n\r\n")
            with suppress(ConnectionError):  # refused while it writes
                await writer.drain()
                assert b" 200 " not in await reader.readline()
        finally:
            writer.close()
        assert (await server.http.get("/health")).status_code == 200


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
