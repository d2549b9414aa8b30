"""Connections: how many, how long they may say nothing, and what a head may be."""

from __future__ import annotations

import asyncio
import json
from contextlib import suppress

import pytest

from asynchicache.integrations.serve import protocol
from integrations.serve.checkpoints import tiny_loaded
from integrations.serve.peers import connected
from integrations.serve.serving import body, held, running, until

LOADED = tiny_loaded()


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


BODY = json.dumps(body()).encode()
CHUNKED = b"%x\r\n%s\r\n0\r\n\r\n" % (len(BODY), BODY)
LENGTH = b"content-length: %d\r\n"
NEXT = b"GET /stats HTTP/1.1\r\nhost: here\r\n\r\n"


@pytest.mark.parametrize(
    ("version", "framing", "sent"),
    [
        (b"1.1", LENGTH % len(CHUNKED) + b"transfer-encoding: chunked\r\n", CHUNKED),
        (b"1.1", b"Transfer-Encoding: Chunked\r\n" + LENGTH % len(CHUNKED), CHUNKED),
        (b"1.1", LENGTH % 4 + b"transfer-encoding: chunked\r\n", b"0\r\n\r\n" + NEXT),
        (b"1.1", LENGTH % 0 + b"transfer-encoding: identity\r\n", NEXT),
        (b"1.1", LENGTH % 5 + LENGTH % 6, b"12345" + NEXT),
        (b"1.0", b"transfer-encoding: chunked\r\n", CHUNKED),
    ],
    ids=["both", "the other way round", "a request inside", "no chunks", "two lengths", "HTTP/1.0"],
)
@pytest.mark.asyncio
async def test_a_request_that_ends_in_two_ways_is_refused(
    version: bytes, framing: bytes, sent: bytes
) -> None:
    """A proxy may believe the other one: what it takes for the next request could be of another client."""
    head = b"POST /v1/completions HTTP/%s\r\nhost: here\r\ncontent-type: application/json\r\n" % version
    async with running(LOADED) as server, connected(server, 2) as (wrong, right):
        wrong.send(head + framing + b"\r\n" + sent + NEXT)
        said = await wrong.rest()
        assert said.startswith(b"HTTP/1.1 400")
        assert said.count(b"HTTP/1.1") == 1, "nothing behind it is answered"
        right.send(head.replace(b"1.0", b"1.1") + b"transfer-encoding: chunked\r\n\r\n" + CHUNKED)
        assert (await right.answer()).status_code == 200
        assert (await right.ask("/v1/completions", body())).status_code == 200


@pytest.mark.parametrize("said", [b"", b"GET /health HTTP/1.1\r\nhost: "], ids=["nothing", "half"])
@pytest.mark.asyncio
async def test_who_sends_no_request_is_closed(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(LOADED) as server:
        monkeypatch.setattr(protocol, "_OWED_SECONDS", 0.05)
        async with connected(server, 1) as (new,):
            new.send(said)
            assert await new.closed()
        assert not server.server.server_state.connections


@pytest.mark.asyncio
async def test_the_second_request_too_must_not_stop_in_its_head(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(LOADED) as server, connected(server, 1) as (known,):
        assert (await known.ask("/health")).status_code == 200
        monkeypatch.setattr(protocol, "_OWED_SECONDS", 0.05)
        known.send(b"GET /health HTTP/1.1\r\nhost: ")
        assert await known.closed()


@pytest.mark.timeout(30)
@pytest.mark.asyncio
async def test_a_body_that_goes_on_after_its_answer_is_cut_off(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each byte would else begin the minute anew for which a connection may be idle."""
    async with running(LOADED) as server, connected(server, 1) as (slow,):
        slow.announce("/nowhere", 1 << 30)
        slow.send(b" ")
        assert (await slow.answer()).status_code == 404
        monkeypatch.setattr(protocol, "_OWED_SECONDS", 0.05)
        while not slow.gone():
            slow.send(b" ")
            await asyncio.sleep(0)
        await until(lambda: not server.server.server_state.connections)


@pytest.mark.asyncio
async def test_who_waits_for_an_answer_may_be_silent_and_after_it_too() -> None:
    async with running(LOADED) as server, connected(server, 1) as (known,):
        await until(lambda: server.server.server_state.connections)
        (connection,) = server.server.server_state.connections
        assert connection.deadline is not None
        with held(LOADED):
            call = asyncio.create_task(known.ask("/v1/completions", body()))
            await until(lambda: server.api.model.running)
            assert connection.deadline is None
        assert (await call).status_code == 200
        assert connection.deadline is None


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
