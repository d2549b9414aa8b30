"""Sockets under the redis engine: what is sent arrives in order, whatever the kernel takes at once."""

from __future__ import annotations

import asyncio
import random
import select
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from itertools import pairwise

import pytest
import pytest_asyncio

from asynchicache.backends.redis.connection import Connection
from asynchicache.backends.redis.sender import Sender
from asynchicache.backends.redis.wires import SocketWire, connect_socket
from asynchicache.ports import AsyncioPort, Port

pytestmark = pytest.mark.asyncio


@pytest_asyncio.fixture
async def port() -> AsyncIterator[Port]:
    made = AsyncioPort(threads=1, seed=0)
    yield made
    await made.aclose()


@pytest_asyncio.fixture
async def sender(port: Port) -> AsyncIterator[Sender]:
    made = Sender(port)
    yield made
    await made.aclose()


def connected(sender: Sender) -> tuple[SocketWire, socket.socket]:
    """A wire, and the other end of it."""
    ours, theirs = socket.socketpair()
    for one in (ours, theirs):
        one.setblocking(False)
        one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8 << 20)  # as far as the system lets us
    return SocketWire(ours, sender), theirs


@asynccontextmanager
async def connected_by_tcp(sender: Sender) -> AsyncIterator[tuple[SocketWire, socket.socket]]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        wire = await connect_socket(socket.AF_INET, server.getsockname(), sender)
        other, _ = server.accept()
        with other:
            yield wire, other
            wire.close()


async def receive(other: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        received += await asyncio.get_running_loop().sock_recv(other, 1 << 20)
    return bytes(received)


@pytest.mark.parametrize(
    "sizes",
    [[0], [1, 0, 2], [100, 3_000_000], [3_000_000, 100, 0, 700_000], [524_288, 524_288, 1], [1_000_000] * 4],
)
async def test_parts_arrive_in_order(sender: Sender, sizes: list[int]) -> None:
    chance = random.Random(len(sizes))
    parts = [chance.randbytes(size) for size in sizes]
    wire, other = connected(sender)
    with other:
        sending = asyncio.create_task(wire.send(parts))
        assert await receive(other, sum(sizes)) == b"".join(parts)
        await sending
        wire.close()


async def test_a_cancelled_send_waits_for_room_no_more(sender: Sender) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    with ours, theirs:
        sending = asyncio.create_task(SocketWire(ours, sender).send([bytes(1 << 20)] * 4))
        await asyncio.sleep(0)
        while select.select([], [ours], [], 0)[1]:  # noqa: ASYNC110 - nothing tells when the kernel is full
            await asyncio.sleep(0)
        await asyncio.sleep(0)

        sending.cancel()
        await asyncio.wait([sending])

        assert sending.cancelled()
        assert not asyncio.get_running_loop().remove_writer(ours)


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="there is a choice on Linux only")
async def test_nothing_is_paced_on_the_way_to_this_machine(sender: Sender) -> None:
    async with connected_by_tcp(sender) as (wire, _):
        chosen = wire._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert chosen.rstrip(b"\0") == b"reno"


@pytest.mark.parametrize("cut", [1, 2, 7, 4096, 70_000])
async def test_replies_are_read_however_they_are_cut(sender: Sender, cut: int) -> None:
    value = random.Random(cut).randbytes(200_000)
    stream = b":1\r\n+OK\r\n$%d\r\n%b\r\n*2\r\n$1\r\nx\r\n-ERR no\r\n$-1\r\n" % (len(value), value)
    wire, other = connected(sender)
    connection = Connection(wire)

    async def feed() -> None:
        cuts = [*range(0, 40, cut), *range(40, len(stream), max(cut, 1000)), len(stream)]
        for start, end in pairwise(cuts):
            await asyncio.get_running_loop().sock_sendall(other, stream[start:end])

    with other:
        feeding = asyncio.create_task(feed())
        assert [await connection.read_reply(), await connection.read_reply()] == [1, b"OK"]
        size = await connection.read_value_size()
        assert size == len(value)
        view = memoryview(bytearray(size))
        await connection.read_value_into(view[:4096], view[4096:])
        assert view == value
        listed = await connection.read_reply()
        assert listed == [b"x", ("ERR no",)]
        assert await connection.read_value_size() is None
        await feeding
        assert connection.usable
        other.sendall(b"+surprise\r\n")
        assert not connection.usable
        connection.close()


async def test_the_loop_gets_its_turn_while_a_ready_socket_is_read(sender: Sender) -> None:
    wire, other = connected(sender)
    turns = 0

    async def tick() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    with other:
        ready = other.send(bytes(4 << 20))
        ticking = asyncio.create_task(tick())
        assert await wire.receive_into([memoryview(bytearray(ready))], ready) == ready
        ticking.cancel()
        wire.close()
    assert turns >= ready // (512 << 10)


@pytest.mark.parametrize("cut", [1, 5, 999, 1000, 1001, 2000])
async def test_views_are_filled_one_behind_the_other(sender: Sender, cut: int) -> None:
    stream = random.Random(cut).randbytes(2000)
    memory = bytearray(2500)
    views = [memoryview(memory)[start:end] for start, end in pairwise([0, 0, 5, 1000, 1990, 2500])]
    wire, other = connected(sender)

    with other:
        receiving = asyncio.create_task(wire.receive_into(views, 1995))
        for start in range(0, len(stream), cut):
            other.sendall(stream[start : start + cut])
            await asyncio.sleep(0)
        count = await receiving
        wire.close()

    assert 1995 <= count <= 2000
    assert bytes(memory) == stream[:count] + bytes(2500 - count)


async def test_a_server_that_closes_early_is_told_by_the_count(sender: Sender) -> None:
    wire, other = connected(sender)
    with other:
        receiving = asyncio.create_task(wire.receive_into([memoryview(bytearray(100))], 100))
        await asyncio.sleep(0)
        other.sendall(bytes(60))
    assert await receiving == 60
    assert await wire.receive_into([memoryview(bytearray(1))], 1) == 0
    wire.close()


async def test_the_loop_is_told_once_to_watch_a_value_that_comes_in_pieces(
    sender: Sender, monkeypatch: pytest.MonkeyPatch
) -> None:
    loop, watched = asyncio.get_running_loop(), []
    add_reader = loop.add_reader
    wire, other = connected(sender)
    monkeypatch.setattr(loop, "add_reader", lambda *seen: watched.append(seen) or add_reader(*seen))

    with other:
        receiving = asyncio.create_task(wire.receive_into([memoryview(bytearray(5000))], 5000))
        for _ in range(50):
            other.sendall(bytes(100))
            await asyncio.sleep(0)
        await receiving
        assert len(watched) == 1

        other.sendall(b"what nobody waits for")
        for _ in range(3):
            await asyncio.sleep(0)
        assert not loop.remove_reader(watched[0][0])
        wire.close()


async def test_a_large_value_by_tcp_is_taken_in_large_pieces(sender: Sender) -> None:
    part, rest, more = random.Random(0).randbytes(100_000), bytes(500_000), b"more"
    value, line = bytearray(len(part) + len(rest)), bytearray(len(more))
    async with connected_by_tcp(sender) as (wire, other):
        receiving = asyncio.create_task(wire.receive_into([memoryview(value)], len(value)))
        await asyncio.sleep(0)
        other.sendall(part)
        for _ in range(10):
            await asyncio.sleep(0)
        assert not any(value)  # the loop has not told of it yet

        await asyncio.get_running_loop().run_in_executor(None, other.sendall, rest)
        assert await receiving == len(value)
        assert value == part + rest

        asyncio.get_running_loop().call_soon(other.sendall, more)
        assert await wire.receive_into([memoryview(line)], len(more)) == len(more)
        assert line == more


async def test_the_rest_of_a_large_value_by_tcp_is_waited_for_whole(sender: Sender) -> None:
    value = bytearray(600_000)
    async with connected_by_tcp(sender) as (wire, other):
        other.sendall(bytes(200_000))
        receiving = asyncio.create_task(wire.receive_into([memoryview(value)], len(value)))
        await asyncio.sleep(0)
        await asyncio.get_running_loop().run_in_executor(None, other.sendall, bytes(400_000))
        assert await receiving == len(value)


async def test_a_large_value_by_tcp_that_ends_early_is_waited_for_no_longer(sender: Sender) -> None:
    async with connected_by_tcp(sender) as (wire, other):
        receiving = asyncio.create_task(wire.receive_into([memoryview(bytearray(2 << 20))], 2 << 20))
        await asyncio.sleep(0)
        other.sendall(bytes(1000))
        other.close()
        assert await receiving == 1000


async def test_a_socket_is_watched_no_more_once_it_is_closed(sender: Sender) -> None:
    ours, theirs = socket.socketpair()
    ours.setblocking(False)
    wire = SocketWire(ours, sender)
    with theirs:
        receiving = asyncio.create_task(wire.receive_into([memoryview(bytearray(1))], 1))
        await asyncio.sleep(0)
        receiving.cancel()
        await asyncio.wait([receiving])
        descriptor = ours.fileno()
        wire.close()
        assert not asyncio.get_running_loop().remove_reader(descriptor)


async def test_a_cancelled_receive_touches_its_view_no_more(sender: Sender) -> None:
    first, second = bytearray(10), bytearray(12)
    wire, other = connected(sender)
    with other:
        receiving = asyncio.create_task(wire.receive_into([memoryview(first)], 10))
        await asyncio.sleep(0)
        receiving.cancel()
        other.sendall(b"0123456789")
        wire._receiver._readable()  # as the loop may, before the task learns of it
        await asyncio.wait([receiving])
        assert receiving.cancelled()
        assert await wire.receive_into([memoryview(second)], 10) == 10
        wire.close()
    assert (bytes(first), bytes(second)) == (bytes(10), b"0123456789\0\0")
    second.clear()  # refused while a view of it is left
