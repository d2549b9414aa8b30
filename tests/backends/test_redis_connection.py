"""Blocking connections of the redis engine: bytes in order however they are cut, and waits that end."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import pytest

from asynchicache.backends.redis.connection import RedisConnection, SocketAddress
from asynchicache.backends.redis.resp import ErrorReply, ProtocolError

MUCH = 64 << 20
"""More than the kernel keeps for a peer that does not read."""

Pair = tuple[RedisConnection, socket.socket]


@contextmanager
def connected(timeout_seconds: float = 30) -> Iterator[Pair]:
    """A connection by TCP, and the server's end of it."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        connection = RedisConnection(timeout_seconds)
        stack.callback(connection.close)
        connection.connect([SocketAddress(socket.AF_INET, listener.getsockname())])
        other, _ = listener.accept()
        yield connection, stack.enter_context(other)


@pytest.fixture
def pair() -> Iterator[Pair]:
    with connected() as made:
        yield made


@contextmanager
def beside(call: Callable[[], object]) -> Iterator[list[BaseException]]:
    """Run `call` in a thread during the block, and wait for it; gives what it raised."""
    raised: list[BaseException] = []

    def run() -> None:
        try:
            call()
        except OSError as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield raised
    thread.join(30)
    assert not thread.is_alive()


def receive(other: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        received += other.recv(1 << 20)
    return bytes(received)


@pytest.mark.parametrize(
    "sizes", [[0], [1, 0, 2], [100, 3_000_000], [3_000_000, 100, 0, 700_000], [1_000_000] * 4, [3] * 5000]
)
def test_parts_arrive_in_order(pair: Pair, sizes: list[int]) -> None:
    connection, other = pair
    chance = random.Random(len(sizes))
    parts = [chance.randbytes(size) for size in sizes]
    with beside(lambda: connection.send(parts)) as raised:
        assert receive(other, sum(sizes)) == b"".join(parts)
    assert raised == []


@pytest.mark.parametrize("cut", [1, 2, 7, 4096, 70_000])
def test_replies_are_read_however_they_are_cut(pair: Pair, cut: int) -> None:
    connection, other = pair
    value = random.Random(cut).randbytes(200_000)
    stream = b":1\r\n+OK\r\n$%d\r\n%b\r\n*2\r\n$1\r\nx\r\n-ERR no\r\n$-1\r\n" % (len(value), value)

    def feed() -> None:
        cuts = [*range(0, 40, cut), *range(40, len(stream), max(cut, 1000)), len(stream)]
        for start, end in pairwise(cuts):
            other.sendall(stream[start:end])

    with beside(feed):
        assert [connection.read_reply(), connection.read_reply()] == [1, b"OK"]
        memory = bytearray(len(value) + 2)
        views = [memoryview(memory)[start:end] for start, end in pairwise([0, 0, 5, 4096, 150_000, 200_000])]
        assert connection.read_value_size() == len(value)
        connection.read_value_into(*views)
        assert bytes(memory) == value + bytes(2)
        assert connection.read_reply() == [b"x", ErrorReply("ERR no")]
        assert connection.read_value_size() is None
    assert connection.usable


@pytest.mark.parametrize("size", [0, 1, 16 << 10, 100_000])
def test_a_value_may_be_skipped(pair: Pair, size: int) -> None:
    connection, other = pair
    with beside(lambda: other.sendall(b"$%d\r\n%b\r\n:7\r\n" % (size, bytes(size)))):
        assert connection.read_value_size() == size
        connection.skip_value(size)
        assert connection.read_reply() == 7


def test_nothing_is_received_after_a_value_that_goes_on(pair: Pair) -> None:
    connection, other = pair
    other.sendall(b"$3\r\nabcde\r\n")
    memory = bytearray(5)
    assert connection.read_value_size() == 3
    with pytest.raises(ProtocolError, match="followed by b'de'"):
        connection.read_value_into(memoryview(memory)[:3])
    assert memory == b"abc\0\0"


def until(condition: Callable[[], bool]) -> None:
    """Wait for what the kernel does by itself."""
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


def test_a_connection_with_an_unexpected_reply_is_not_used_again(pair: Pair) -> None:
    connection, other = pair
    assert connection.usable
    other.sendall(b"+surprise\r\n")
    until(lambda: not connection.usable)


def test_unexpected_bytes_that_came_with_a_reply_are_noticed(pair: Pair) -> None:
    connection, other = pair
    other.sendall(b":1\r\n:2\r\n")
    assert connection.read_reply() == 1
    assert not connection.usable


def test_a_connection_that_the_server_closed_is_not_used_again(pair: Pair) -> None:
    connection, other = pair
    other.close()
    until(lambda: not connection.usable)
    with pytest.raises(ConnectionResetError, match="the server closed"):
        connection.read_reply()


def test_a_closed_connection_says_so(pair: Pair) -> None:
    connection, _ = pair
    for _ in range(2):
        connection.close()
    assert not connection.usable
    connection.interrupt()
    with pytest.raises(ConnectionAbortedError, match="closed"):
        connection.send([b"x"])


# Waits that end.


def test_an_interrupted_receive_ends_and_touches_its_view_no_more(pair: Pair) -> None:
    connection, other = pair
    memory = bytearray(10)
    other.sendall(b"$10\r\n01234")
    assert connection.read_value_size() == 10
    with beside(lambda: connection.read_value_into(memoryview(memory))) as raised:
        until(lambda: memory.startswith(b"01234"))
        connection.interrupt()
    assert len(raised) == 1
    raised.clear()  # with its traceback, whose frames hold a view
    memory.clear()  # refused while there is a view
    assert not connection.usable


def test_an_interrupted_send_ends(pair: Pair) -> None:
    connection, other = pair
    with beside(lambda: connection.send([bytes(MUCH)])) as raised:
        other.recv(1)
        connection.interrupt()
    assert len(raised) == 1


def test_an_interrupted_connect_ends() -> None:
    connection = RedisConnection(30)
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=0))
        address = listener.getsockname()
        for _ in range(2):  # fill the backlog: the kernel answers no more
            waiting = stack.enter_context(socket.socket())
            waiting.setblocking(False)
            waiting.connect_ex(address)
        with beside(lambda: connection.connect([SocketAddress(socket.AF_INET, address)])) as raised:
            until(lambda: connection._open is not None)
            time.sleep(0.05)
            connection.interrupt()
    assert len(raised) == 1
    connection.close()


def test_an_interrupted_handshake_ends(pair: Pair) -> None:
    connection, other = pair
    with beside(lambda: connection.start_tls("127.0.0.1", None)) as raised:
        assert other.recv(1) == b"\x16"  # a handshake, which gets no answer
        connection.interrupt()
    assert len(raised) == 1


def test_a_connection_that_was_interrupted_before_it_began_does_not_begin() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        connection = RedisConnection(30)
        connection.interrupt()
        with pytest.raises(ConnectionAbortedError):
            connection.connect([SocketAddress(socket.AF_INET, listener.getsockname())] * 2)
        connection.close()


@pytest.mark.parametrize(
    "wait",
    [
        lambda connection: connection.send([bytes(MUCH)]),
        lambda connection: connection.read_reply(),
        lambda connection: connection.start_tls("127.0.0.1", None),
    ],
)
def test_a_socket_timeout_ends_a_wait_while_the_loop_is_blocked(
    wait: Callable[[RedisConnection], None],
) -> None:
    with connected(0.05) as (connection, _), pytest.raises(TimeoutError):
        wait(connection)


# Connecting.


def test_the_first_address_that_answers_is_taken() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))  # nobody listens
        dead, alive = (SocketAddress(socket.AF_INET, one.getsockname()) for one in (unused, listener))
        connection = RedisConnection(30)
        with pytest.raises(ConnectionRefusedError):
            connection.connect([dead, dead])
        connection.connect([dead, alive, dead])
        assert connection.usable
        connection.close()


@pytest.mark.skipif(not hasattr(socket, "TCP_CONGESTION"), reason="there is a choice on Linux only")
def test_nothing_is_paced_on_the_way_to_this_machine(pair: Pair) -> None:
    connection, _ = pair
    chosen = connection._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_CONGESTION, 16)
    assert chosen.rstrip(b"\0") == b"reno"
