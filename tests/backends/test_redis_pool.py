"""The pool of connections to a server: how it closes while connections are lent."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack

import pytest

from asynchicache.backends.redis.connection import Connection
from asynchicache.backends.redis.pool import ConnectionPool
from turns import turns


class Silent:
    """A wire to nobody."""

    def quiet(self) -> bool:
        return True

    def close(self) -> None:
        """There is nothing to drop."""


async def dial() -> Connection:
    return Connection(Silent())  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_whoever_closes_waits_for_nobody_else_who_does() -> None:
    pool = ConnectionPool(dial, 4)
    async with AsyncExitStack() as lent, asyncio.TaskGroup() as group:
        connections = [await lent.enter_async_context(pool.connection()) for _ in range(3)]
        for _ in range(2):
            group.create_task(pool.aclose())
        await turns()
        await lent.aclose()
    assert all(connection.closed for connection in connections)


@pytest.mark.asyncio
async def test_a_pool_can_be_closed_after_a_close_was_cancelled() -> None:
    pool = ConnectionPool(dial, 2)
    async with pool.connection() as connection:
        closing = asyncio.create_task(pool.aclose())
        await turns()
        closing.cancel()
        await turns()
    await pool.aclose()
    assert connection.closed
