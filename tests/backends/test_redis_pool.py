"""The pool of connections and threads of the redis engine: calls that are cancelled or fail, and closing."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import TypeVar

import pytest
import redis

from asynchicache.backends.redis.pool import WorkerPool
from asynchicache.backends.redis.wire import RespReply, ValueReader, Wire
from asynchicache.errors import ClosedError
from asynchicache.ports import AsyncioPort
from storage.hostile_redis import HostileServer, hostile_server
from turns import turns

pytestmark = pytest.mark.asyncio

T = TypeVar("T")


class Pool:
    """Workers, and the one server that they are for."""

    def __init__(self, url: str, connections: int, port: AsyncioPort) -> None:
        self.workers = WorkerPool(connections, port)
        self.server = redis.ConnectionPool.from_url(url, protocol=2, driver_info=None, socket_timeout=30)
        self.port = port

    async def run(self, work: Callable[[Wire], T]) -> T:
        return await self.workers.run(self.server, work)

    async def ping(self) -> list[RespReply]:
        return await self.run(lambda wire: wire.ask(("PING",)))

    async def aclose(self) -> None:
        await self.workers.aclose()


@asynccontextmanager
async def scene(connections: int = 2) -> AsyncIterator[tuple[HostileServer, Pool]]:
    """A server, and connections to it; closed in the end."""
    async with hostile_server() as server:
        port = AsyncioPort(threads=1, seed=0)
        pool = Pool(server.url, connections, port)
        yield server, pool
        await pool.aclose()
        await port.aclose()


class Work:
    """Work with slots that goes on when the test says so."""

    def __init__(self) -> None:
        self.begun = threading.Event()
        self.go_on = threading.Event()
        self.ended = False

    def __call__(self, wire: Wire) -> None:
        with wire.slots():
            self.begun.set()
            assert self.go_on.wait(30)
            self.ended = True


async def until(event: threading.Event) -> None:
    assert await asyncio.get_running_loop().run_in_executor(None, event.wait, 30)


async def test_a_connection_is_used_again_and_one_that_failed_is_not() -> None:
    async with scene() as (server, pool):
        for _ in range(3):
            assert await pool.ping() == [b"OK"]
        assert server.connections == 1
        with pytest.raises(ZeroDivisionError):
            await pool.run(lambda wire: 1 // 0)
        assert await pool.ping() == [b"OK"]
        assert server.connections == 2


async def test_calls_that_fail_or_are_cancelled_use_nothing_up() -> None:
    async with scene(connections=1) as (server, pool):
        pool.server.max_connections = 4
        asked = asyncio.Event()

        async def say_nothing(words: list[bytes], writer: asyncio.StreamWriter) -> None:
            asked.set()

        for number in range(20):
            with pytest.raises(ZeroDivisionError):
                await pool.run(lambda wire: 1 // 0)
            server.lies[b"PING"] = say_nothing
            asked.clear()
            call = asyncio.create_task(pool.ping())
            await asked.wait()
            call.cancel()
            await asyncio.wait([call])
            server.lies.clear()
            assert await pool.ping() == [b"OK"], number


async def test_a_cancelled_call_ends_when_its_thread_has_left_the_slots() -> None:
    async with scene() as (_, pool):
        work = Work()
        call = asyncio.create_task(pool.run(work))
        await until(work.begun)
        for _ in range(3):  # however often
            call.cancel()
            await turns()
            assert not call.done()
        work.go_on.set()
        await asyncio.wait([call])
        assert call.cancelled()
        assert work.ended
        assert await pool.ping() == [b"OK"]


async def test_a_cancelled_call_does_not_wait_for_a_server_that_is_silent() -> None:
    async with scene() as (server, pool):
        asked = asyncio.Event()

        async def say_nothing(words: list[bytes], writer: asyncio.StreamWriter) -> None:
            asked.set()

        for verb in (b"AUTH", b"PING"):  # while it logs in, and afterwards
            if verb == b"AUTH":
                pool.server.connection_kwargs["password"] = "secret"
            server.lies = {verb: say_nothing}
            asked.clear()
            call = asyncio.create_task(pool.ping())
            await asked.wait()
            call.cancel()
            await asyncio.wait([call], timeout=20)
            assert call.cancelled()


@pytest.mark.parametrize("cancel", [False, True])
async def test_a_call_that_failed_holds_no_memory(cancel: bool) -> None:
    async with scene() as (server, pool):
        gone, asked = asyncio.Event(), asyncio.Event()

        async def hold(words: list[bytes], writer: asyncio.StreamWriter) -> None:
            asked.set()
            await gone.wait()
            writer.close()

        server.lies[b"GET"] = hold
        memory = bytearray(100)

        def read(wire: Wire) -> None:
            view = memoryview(memory)
            with wire.slots():
                wire.send(wire.packed([("GET", b"x")]))
                ValueReader(wire).read_into(view)

        gc.collect()
        gc.disable()
        try:
            call = asyncio.create_task(pool.run(read))
            await asked.wait()
            call.cancel() if cancel else gone.set()
            await asyncio.wait([call])
            assert call.cancelled() == cancel
            if not cancel:
                assert isinstance(call.exception(), ConnectionResetError)
                del call
            memory.clear()  # refused while a view of it is left
        finally:
            gc.enable()
            gone.set()


async def test_a_call_without_a_thread_fails_and_the_next_one_is_served(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    async with scene(connections=1) as (_, pool):
        with monkeypatch.context() as broken:
            broken.setattr(threading.Thread, "start", refuse)
            with pytest.raises(RuntimeError, match="new thread"):
                await pool.ping()
        assert await pool.ping() == [b"OK"]


# Closing.


async def test_two_tasks_may_close_a_pool_while_it_is_in_use() -> None:
    async with scene() as (_, pool), asyncio.TaskGroup() as group:
        work = Work()
        call = group.create_task(pool.run(work))
        await until(work.begun)
        closing = [group.create_task(pool.aclose()) for _ in range(2)]
        await turns()
        assert not any(one.done() for one in closing)
        work.go_on.set()
        await call
        await asyncio.gather(*closing)
        with pytest.raises(ClosedError):
            await pool.run(work)


async def test_a_pool_can_be_closed_after_a_close_was_cancelled() -> None:
    async with scene() as (_, pool):
        work = Work()
        call = asyncio.create_task(pool.run(work))
        await until(work.begun)
        closing = asyncio.create_task(pool.aclose())
        await turns()
        closing.cancel()
        await turns()
        work.go_on.set()
        await call
        await pool.aclose()


async def test_threads_end_though_the_port_is_closed() -> None:
    async with scene() as (_, pool):
        before = set(threading.enumerate())
        await pool.ping()
        (thread,) = (one for one in set(threading.enumerate()) - before if "redis" in one.name)
        await pool.port.aclose()
        await pool.aclose()
        await asyncio.get_running_loop().run_in_executor(None, thread.join, 30)
        assert not thread.is_alive()
