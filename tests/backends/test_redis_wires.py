"""Sockets under the redis engine: what is sent arrives in order, whatever the kernel takes at once."""

from __future__ import annotations

import asyncio
import random
import select
import socket
from collections.abc import AsyncIterator
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
    with socket.create_server(("127.0.0.1", 0)) as server:
        wire = await connect_socket(socket.AF_INET, server.getsockname(), sender)
        other, _ = server.accept()
        with other:
            chosen = wire._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
            wire.close()
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
        await connection.read_into(view)
        await connection.end_value()
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
        await Connection(wire).read_into(memoryview(bytearray(ready)))
        ticking.cancel()
        wire.close()
    assert turns >= ready // (512 << 10)
