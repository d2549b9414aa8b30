"""The way of pages over redis-py's connections: bytes in order however they are cut, and waits that end."""

from __future__ import annotations

import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from itertools import pairwise

import pytest
from redis import Connection
from redis.exceptions import RedisError

from asynchicache.backends.redis.wire import ErrorReply, ProtocolError, ValueReader, Wire

MUCH = 64 << 20
"""More than the kernel keeps for a peer that does not read."""

Pair = tuple[Wire, socket.socket]


@contextmanager
def connected(timeout_seconds: float = 30) -> Iterator[Pair]:
    """A connection by TCP, and the server's end of it."""
    with ExitStack() as stack:
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        host, port = listener.getsockname()
        connection = Connection(
            host=host, port=port, protocol=2, driver_info=None, socket_timeout=timeout_seconds
        )
        stack.callback(connection.disconnect)
        connection.connect()
        other, _ = listener.accept()
        yield Wire(connection), stack.enter_context(other)


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
        except (OSError, RedisError) as error:
            raised.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    yield raised
    thread.join(30)
    assert not thread.is_alive()


@pytest.mark.parametrize("cut", [1, 2, 7, 4096, 70_000])
def test_values_are_read_however_they_are_cut(pair: Pair, cut: int) -> None:
    wire, other = pair
    value = random.Random(cut).randbytes(200_000)
    stream = b"-ERR no\r\n$%d\r\n%b\r\n$-1\r\n$0\r\n\r\n:1\r\n" % (len(value), value)

    def feed() -> None:
        cuts = [*range(0, 40, cut), *range(40, len(stream), max(cut, 1000)), len(stream)]
        for start, end in pairwise(cuts):
            other.sendall(stream[start:end])

    with beside(feed):
        reader = ValueReader(wire)
        assert reader.size() == ErrorReply("ERR no")
        memory = bytearray(len(value) + 2)
        views = [memoryview(memory)[start:end] for start, end in pairwise([0, 0, 5, 4096, 150_000, 200_000])]
        assert reader.size() == len(value)
        reader.read_into(*views)
        assert bytes(memory) == value + bytes(2)
        assert reader.size() is None
        assert reader.size() == 0
        reader.skip(0)
        with pytest.raises(ProtocolError, match="begins no value"):
            reader.size()


def test_replies_of_both_readers_take_turns(pair: Pair) -> None:
    wire, other = pair
    for _ in range(2):
        other.sendall(b"$3\r\nabc\r\n")
        reader = ValueReader(wire)
        memory = bytearray(3)
        assert reader.size() == 3
        reader.read_into(memoryview(memory))
        assert (memory, reader.in_step) == (b"abc", True)
        other.sendall(b":1\r\n-OOM full\r\n-MISCONF no disk\r\n")
        assert wire.ask(("EXISTS", b"a"), ("SET", b"a", b"b"), ("SET", b"c", b"d")) == [
            1,
            ErrorReply("OOM full"),
            ErrorReply("MISCONF no disk"),
        ]


def test_nothing_is_received_after_a_value_that_goes_on(pair: Pair) -> None:
    wire, other = pair
    other.sendall(b"$3\r\nabcde\r\n")
    memory = bytearray(5)
    reader = ValueReader(wire)
    assert reader.size() == 3
    with pytest.raises(ProtocolError, match="followed by b'de'"):
        reader.read_into(memoryview(memory)[:3])
    assert memory == b"abc\0\0"
    assert not reader.in_step


def until(condition: Callable[[], bool]) -> None:
    """Wait for what the kernel does by itself."""
    limit = time.monotonic() + 30
    while not condition():
        assert time.monotonic() < limit
        time.sleep(0.001)


# Waits that end.


def test_an_interrupted_receive_ends_and_touches_its_view_no_more(pair: Pair) -> None:
    wire, other = pair
    memory = bytearray(10)
    other.sendall(b"$10\r\n01234")

    def read() -> None:
        with wire.slots():
            reader = ValueReader(wire)
            assert reader.size() == 10
            reader.read_into(memoryview(memory))

    with beside(read) as raised:
        until(lambda: wire._slots_in_use)
        assert wire.interrupt()
    assert len(raised) == 1
    raised.clear()  # with its traceback, whose frames hold a view
    memory.clear()  # refused while there is a view
    with pytest.raises(ConnectionAbortedError, match="the call has ended"), wire.slots():
        pass


def test_an_interrupted_send_ends(pair: Pair) -> None:
    wire, other = pair
    with beside(lambda: wire.send([bytes(MUCH)])) as raised:
        other.recv(1)
        assert not wire.interrupt()  # these bytes are no slots
    assert len(raised) == 1


def test_who_interrupts_a_connection_that_is_not_open_harms_nobody() -> None:
    wire = Wire(Connection())
    assert not wire.interrupt()
    with pytest.raises(ConnectionAbortedError):
        ValueReader(wire)


@pytest.mark.parametrize(
    "wait",
    [lambda wire: wire.send([bytes(MUCH)]), lambda wire: wire.reply(), lambda w: ValueReader(w).size()],
)
def test_a_socket_timeout_ends_a_wait_while_the_loop_is_blocked(wait: Callable[[Wire], None]) -> None:
    with connected(0.05) as (wire, _), pytest.raises((TimeoutError, RedisError)):
        wait(wire)
