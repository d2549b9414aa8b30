"""Bodies that come slowly: whom they keep out (nobody), and how long they may take."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import pytest

from asynchicache.integrations.serve import bodies
from asynchicache.integrations.serve.bodies import BodyRoom, seconds_for
from asynchicache.integrations.serve.problems import ApiError
from integrations.serve.checkpoints import tiny_loaded
from integrations.serve.peers import Peer, connected
from integrations.serve.serving import Running, body, held, running, until

LOADED = tiny_loaded()
ROOM = {"max_body_bytes": 1000, "max_bodies_bytes": 4000, "max_connections": 8}
SHARE = 250  # half of the room among 8; the other 2,000 are common
LARGE = body(prompt="a" * 600)


def room_of(server: Running) -> BodyRoom:
    room = server.server.config.app.state.bodies  # type: ignore[union-attr]
    assert isinstance(room, BodyRoom)
    return room


@asynccontextmanager
async def besieged(**settings: Any) -> AsyncIterator[tuple[Running, list[Peer], list[Peer]]]:
    """A server; four peers, which fill the common room with bodies that do not end; and two others."""
    async with running(LOADED, **ROOM, **settings) as server, connected(server, 6) as peers:
        for count, peer in enumerate(peers[:4], start=1):
            peer.announce("/v1/completions", 1000)
            peer.send(b" " * 750)
            await until(lambda count=count: room_of(server).held == count * 750)
        yield server, peers[:4], peers[4:]


@pytest.mark.asyncio
async def test_slow_bodies_give_way_to_an_honest_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_SLOW_SECONDS", 0.0)
    async with besieged() as (server, slow, (honest, _)):
        with held(LOADED):
            call = asyncio.create_task(honest.ask("/v1/completions", LARGE))
            await until(lambda: server.api.model.running)
            refused = await slow[0].answer()
            for peer in slow[1:]:
                peer.send(b" ")  # within the room that the first one had
        assert (await call).status_code == 200

        assert refused.status_code == 408
        assert "others needed its room" in refused.json()["error"]["message"]
        await until(lambda: room_of(server).held == 3 * 751)
        assert (await honest.ask("/v1/completions", LARGE)).status_code == 200
        assert server.api.counts.refused == {408: 1}


@pytest.mark.asyncio
async def test_a_share_is_left_to_every_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """Even while nobody gives way: bodies that are not slow yet are let come."""
    monkeypatch.setattr(bodies, "_SLOW_SECONDS", 3600.0)
    small = body(prompt="hello", seed=None)
    assert len(json.dumps(small)) <= SHARE < len(json.dumps(LARGE))
    async with besieged() as (server, _, (honest, late)):
        for _ in range(2):
            assert (await honest.ask("/v1/completions", small)).status_code == 200

        refused = await late.ask("/v1/completions", LARGE)
        assert refused.status_code == 429
        assert "may have 4,000" in refused.json()["error"]["message"]
        assert room_of(server).held == 3000


@pytest.mark.asyncio
async def test_a_body_that_has_come_gives_way_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bodies, "_SLOW_SECONDS", 0.0)
    room = {**ROOM, "max_bodies_bytes": 1000, "max_connections": 1}
    async with running(LOADED, **room) as server, connected(server, 1) as (first,):
        with held(LOADED):
            call = asyncio.create_task(first.ask("/v1/completions", LARGE))
            await until(lambda: server.api.model.running)
            with pytest.raises(ApiError, match="try again later"), room_of(server).memory() as second:
                second.take(600)
        assert (await call).status_code == 200
        await until(lambda: room_of(server).held == 0)


@pytest.mark.asyncio
async def test_a_body_that_trickles_is_not_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    async with running(LOADED, **ROOM) as server, connected(server, 2) as (slow, large):
        large.announce("/v1/completions", len(json.dumps(LARGE)))
        large.send(json.dumps(LARGE)[:500].encode())
        await until(lambda: room_of(server).held == 500)
        monkeypatch.setattr(bodies, "_FIRST_SECONDS", 0.05)
        slow.announce("/v1/completions", 1000)

        refused = await slow.answer()
        large.send(json.dumps(LARGE)[500:].encode())

        assert refused.status_code == 408
        assert "did not come within 0 s" in refused.json()["error"]["message"]
        assert (await large.answer()).status_code == 200
        await until(lambda: room_of(server).held == 0)


def test_a_body_has_more_time_the_more_of_it_has_come() -> None:
    assert [seconds_for(nbytes, 1000) for nbytes in (0, 500, 1000)] == [10, 35, 60]


@contextmanager
def at(monkeypatch: pytest.MonkeyPatch, seconds: float) -> Iterator[None]:
    with monkeypatch.context() as patch:
        patch.setattr(bodies, "_now", lambda: seconds)
        yield


def test_room_adds_up_whatever_gives_way(monkeypatch: pytest.MonkeyPatch) -> None:
    room = BodyRoom(4000, largest=1000, connections=8)
    assert room.share == SHARE
    with room.memory() as oldest, room.memory() as second, room.memory() as newest:
        with at(monkeypatch, 0):
            oldest.take(1000)
            oldest.complete()
            second.take(1000)
        with at(monkeypatch, 1), pytest.raises(ApiError, match="try again later"):
            newest.take(1000)
        assert (room.held, newest.nbytes, second.dismissed) == (2000, 0, False)
        with at(monkeypatch, 2):
            newest.take(1000)
        assert (room.held, oldest.dismissed, second.dismissed) == (2000, False, True)
        with pytest.raises(ApiError, match="others needed its room"):
            second.take(1)
    assert room.held == 0
    with at(monkeypatch, 3), room.memory() as again:
        again.take(1000)


@pytest.mark.parametrize(
    ("most", "largest", "connections", "share"),
    [(1000, 1000, 4096, 0), (1100, 1000, 10, 10), (4096, 10, 4, 512)],
)
def test_the_largest_body_fits_beside_all_shares(
    most: int, largest: int, connections: int, share: int
) -> None:
    assert BodyRoom(most, largest=largest, connections=connections).share == share
    assert most - share * connections >= largest
