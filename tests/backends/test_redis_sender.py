"""The thread that sends pages: bytes in order, calls by turns, and a call that has ended is left alone."""

from __future__ import annotations

import asyncio
import random
import socket
import threading
from collections.abc import AsyncIterator, Iterable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

import pytest
import pytest_asyncio

from asynchicache.backends.redis.sender import Sender
from asynchicache.ports import AsyncioPort

pytestmark = pytest.mark.asyncio

MUCH = 64 << 20
"""More than the kernel keeps for who does not read."""


@pytest_asyncio.fixture
async def sender() -> AsyncIterator[Sender]:
    port = AsyncioPort(threads=1, seed=0)
    made = Sender(port)
    yield made
    await made.aclose()
    await port.aclose()


@pytest.fixture
def pairs() -> Iterator[list[tuple[socket.socket, socket.socket]]]:
    """Connected sockets: ours, and the server's end."""
    with ExitStack() as stack:
        made = [socket.socketpair() for _ in range(3)]
        for one in (end for pair in made for end in pair):
            stack.enter_context(one).setblocking(False)
        yield made


Pairs = list[tuple[socket.socket, socket.socket]]


async def receive(other: socket.socket, size: int) -> bytes:
    received = bytearray()
    while len(received) < size:
        received += await asyncio.get_running_loop().sock_recv(other, 1 << 20)
    return bytes(received)


class Groups:
    """Groups that tell when each is asked for; from the second on each waits until it is let go.

    Args:
        groups: what is sent.
        held: whether they wait.
    """

    def __init__(self, *groups: bytes, held: bool = False) -> None:
        self.asked = [threading.Event() for _ in groups]
        self.go_on = threading.Event()
        if not held:
            self.go_on.set()
        self._groups = groups

    def __iter__(self) -> Iterator[Sequence[bytes]]:
        for number, (group, asked) in enumerate(zip(self._groups, self.asked, strict=True)):
            asked.set()
            if number:
                assert self.go_on.wait(30)
            yield [group]


async def until(event: threading.Event) -> None:
    assert await asyncio.get_running_loop().run_in_executor(None, event.wait, 30)


async def cancelled(call: asyncio.Task[None]) -> bool:
    call.cancel()
    done, _ = await asyncio.wait([call], timeout=30)
    return bool(done) and call.cancelled()


async def ticks(count: int = 20) -> None:
    for _ in range(count):
        await asyncio.sleep(0)


async def test_groups_arrive_in_order_and_the_socket_is_as_it_was(sender: Sender, pairs: Pairs) -> None:
    ours, other = pairs[0]
    parts = [random.Random(number).randbytes(600_000) for number in range(6)]
    groups: Iterator[list[bytes]] = iter([[parts[n], b"", parts[n + 1]] for n in range(0, 6, 2)])
    sending = asyncio.create_task(sender.send(ours, groups, 1))
    assert await receive(other, 3_600_000) == b"".join(parts)
    await sending
    with pytest.raises(BlockingIOError):  # would wait for ever if the socket still blocked
        ours.recv(1)


async def test_calls_go_by_turns_in_the_order_in_which_they_came(sender: Sender, pairs: Pairs) -> None:
    held = Groups(b"a", b"b", held=True)
    others = [Groups(b"%d" % number) for number in (1, 2)]
    calls = [
        asyncio.create_task(sender.send(ours, iter(groups), 1))
        for (ours, _), groups in zip(pairs, [held, *others], strict=True)
    ]
    await until(held.asked[1])
    await ticks()
    assert not any(one.asked[0].is_set() for one in others)
    held.go_on.set()
    await asyncio.gather(*calls)
    assert [await receive(other, size) for (_, other), size in zip(pairs, (2, 1, 1), strict=True)] == [
        b"ab",
        b"1",
        b"2",
    ]


async def test_a_call_ends_while_the_next_one_sends_once_it_is_answered(sender: Sender, pairs: Pairs) -> None:
    (ours, other), (second, _), (third, _) = pairs
    opening = Groups(b"p", b"q", held=True)
    steps = [Groups(b"a", b"b", held=True), Groups(b"c", b"d", held=True)]
    first = asyncio.create_task(sender.send(ours, iter(opening), 2))
    await until(opening.asked[1])
    others = [
        asyncio.create_task(sender.send(one, iter(groups), 1))
        for one, groups in zip((second, third), steps, strict=True)
    ]
    await ticks()
    other.send(b"+OK\r\n")
    opening.go_on.set()
    await until(steps[0].asked[1])  # the first was looked at behind `a`
    await ticks()
    assert not first.done()
    other.send(b"-ERR no\r\n")
    steps[0].go_on.set()
    await until(steps[1].asked[1])  # and behind `b`
    await ticks()
    assert first.done()
    assert ours.recv(100) == b"+OK\r\n-ERR no\r\n"
    steps[1].go_on.set()
    await asyncio.gather(*others)


class Reluctant(socket.socket):
    """Takes at most seven bytes of the first part."""

    def sendmsg(self, buffers: Iterable[Any], *rest: Any) -> int:
        for part in buffers:
            if len(memoryview(part)):
                return self.send(memoryview(part)[:7])
        return 0


async def test_what_the_kernel_did_not_take_is_sent_again(sender: Sender, pairs: Pairs) -> None:
    with Reluctant(fileno=pairs[0][0].detach()) as ours:
        await sender.send(ours, iter([[b"0123456789", b"", b"abc"], [b"defghijk"]]), 1)
    assert await receive(pairs[0][1], 21) == b"0123456789abcdefghijk"


async def test_a_call_ends_unanswered_when_no_other_waits(sender: Sender, pairs: Pairs) -> None:
    await sender.send(pairs[0][0], iter([[b"a"]]), 5)


async def test_a_cancelled_call_leaves_its_parts_alone(sender: Sender, pairs: Pairs) -> None:
    groups = Groups(b"a", bytes(MUCH), b"never")
    sending = asyncio.create_task(sender.send(pairs[0][0], iter(groups), 1))
    await until(groups.asked[1])  # nobody reads: the kernel holds the thread, or will
    assert await cancelled(sending)
    assert not groups.asked[2].is_set()
    served = asyncio.create_task(sender.send(pairs[1][0], iter([[b"b"]]), 1))
    assert await receive(pairs[1][1], 1) == b"b"
    await served


async def test_a_call_that_is_cancelled_before_its_turn_sends_nothing(sender: Sender, pairs: Pairs) -> None:
    stuck, mine = Groups(bytes(MUCH)), Groups(b"b")
    first = asyncio.create_task(sender.send(pairs[0][0], iter(stuck), 1))
    await until(stuck.asked[0])
    second = asyncio.create_task(sender.send(pairs[1][0], iter(mine), 1))
    await ticks()
    assert await cancelled(second)  # though the first one still holds the thread
    assert not first.done()
    assert await cancelled(first)
    await sender.send(pairs[2][0], iter([[b"c"]]), 1)
    assert not mine.asked[0].is_set()
    with pytest.raises(BlockingIOError):
        pairs[1][1].recv(1)


async def test_a_call_that_waits_for_answers_is_cancelled_at_once(sender: Sender, pairs: Pairs) -> None:
    opening, stuck = Groups(b"p", b"q", held=True), Groups(b"a", bytes(MUCH))
    first = asyncio.create_task(sender.send(pairs[0][0], iter(opening), 1))
    await until(opening.asked[1])
    second = asyncio.create_task(sender.send(pairs[1][0], iter(stuck), 1))
    await ticks()
    opening.go_on.set()
    await until(stuck.asked[1])
    assert await cancelled(first)  # sent, not answered, and the thread is held by the second
    assert not second.done()
    assert await cancelled(second)


class Deaf(socket.socket):
    """Goes on when it is shut, so that a call that is taken back meanwhile is sent all the same."""

    def shutdown(self, how: int) -> None:
        pass


async def test_a_call_that_is_cancelled_while_its_last_group_goes_does_not_wait_for_the_next(
    sender: Sender, pairs: Pairs
) -> None:
    last, stuck = Groups(b"a", b"b", held=True), Groups(bytes(MUCH))
    with Deaf(fileno=pairs[0][0].detach()) as ours:
        first = asyncio.create_task(sender.send(ours, iter(last), 1))
        await until(last.asked[1])
        second = asyncio.create_task(sender.send(pairs[1][0], iter(stuck), 1))
        await ticks()
        first.cancel()
        await ticks()
        last.go_on.set()
        done, _ = await asyncio.wait([first], timeout=30)
        assert done
        assert first.cancelled()
        assert await cancelled(second)


async def test_a_broken_connection_ends_a_call_with_an_error(sender: Sender, pairs: Pairs) -> None:
    ours, other = pairs[0]
    other.close()
    with pytest.raises(OSError, match="Broken pipe"):
        await sender.send(ours, iter([[bytes(1 << 20)]] * 64), 1)
    await sender.send(pairs[1][0], iter([[b"b"]]), 1)  # the thread goes on


async def test_what_makes_the_groups_may_fail(sender: Sender, pairs: Pairs) -> None:
    def groups() -> Iterator[Sequence[bytes]]:
        yield [b"a"]
        raise ValueError("no such page")

    with pytest.raises(ValueError, match="no such page"):
        await sender.send(pairs[0][0], groups(), 1)
    await sender.send(pairs[1][0], iter([[b"b"]]), 1)


async def test_a_server_that_goes_or_talks_too_much_is_waited_for_no_longer(
    sender: Sender, pairs: Pairs
) -> None:
    for (ours, other), answer in zip(pairs[:2], (b"", b"x" * (64 << 10)), strict=True):
        opening, held = Groups(b"p", b"q", held=True), Groups(b"a", b"b", held=True)
        first = asyncio.create_task(sender.send(ours, iter(opening), 1))
        await until(opening.asked[1])
        second = asyncio.create_task(sender.send(pairs[2][0], iter(held), 1))
        await ticks()
        other.send(answer) if answer else other.shutdown(socket.SHUT_WR)
        opening.go_on.set()
        await first
        assert not second.done()
        held.go_on.set()
        await second


async def test_a_call_for_which_there_is_no_thread_is_forgotten(
    sender: Sender, pairs: Pairs, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    with monkeypatch.context() as broken:
        broken.setattr(threading.Thread, "start", refuse)
        with pytest.raises(RuntimeError, match="new thread"):
            await sender.send(pairs[0][0], iter([[b"lost"]]), 1)
    ours, other = pairs[1]
    sending = asyncio.create_task(sender.send(ours, iter([[b"sent"]]), 1))
    assert await asyncio.wait_for(receive(other, 4), 30) == b"sent"
    await asyncio.wait_for(sending, 30)
    with pytest.raises(BlockingIOError):
        pairs[0][1].recv(1)


async def test_a_sender_ends_its_thread_though_the_port_is_closed(pairs: Pairs) -> None:
    port = AsyncioPort(threads=1, seed=0)
    sender = Sender(port)
    before = set(threading.enumerate())
    sending = asyncio.create_task(sender.send(pairs[0][0], iter([[b"sent"]]), 1))
    assert await receive(pairs[0][1], 4) == b"sent"
    await sending
    (thread,) = set(threading.enumerate()) - before
    await port.aclose()

    await sender.aclose()
    await sender.aclose()
    thread.join(30)
    assert not thread.is_alive()
