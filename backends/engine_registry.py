"""The open engines of one backend: each pool is opened once, and closed with the backend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from asynchicache.errors import ClosedError, StorageError
from asynchicache.storage.protocol import PoolBinding


class ClosableEngine(Protocol):
    """The part of an engine that the registry uses."""

    @property
    def closed(self) -> bool: ...

    async def aclose(self) -> None: ...


E = TypeVar("E", bound=ClosableEngine)


@dataclass(slots=True, eq=False)
class _RegisteredEngine(Generic[E]):
    """An engine that is open, opening or closing.

    Attributes:
        task: opens the engine.
        users: callers that wait for the engine or have received it.
        closing: closes the engine because all callers were cancelled before it opened, or waits for a user
            that is closing it.
    """

    binding: PoolBinding
    task: asyncio.Task[E]
    users: int = 0
    closing: asyncio.Task[None] | None = None

    def usable(self) -> bool:
        """Whether the engine is open or opening."""
        if self.closing is not None:
            return False
        return not self.task.done() or (self._came() and not self.task.result().closed)

    async def engine(self) -> E:
        self.users += 1
        try:
            return await asyncio.shield(self.task)
        except asyncio.CancelledError:
            self.users -= 1
            if not self.users:
                self.begin_closing()
            raise

    def begin_closing(self) -> asyncio.Task[None]:
        """The task that closes the engine; started on the first call."""
        self.closing = self.closing or asyncio.ensure_future(self.close())
        return self.closing

    async def close(self) -> None:
        """Close the engine as soon as it is open; closing twice is harmless."""
        await _until_done([self.task])
        if self._came():
            await self.task.result().aclose()

    def _came(self) -> bool:
        return not self.task.cancelled() and self.task.exception() is None


class EngineRegistry(Generic[E]):
    """Opens engines, and keeps them by pool, shard and fingerprint.

    Args:
        backend: of which, for messages.
    """

    def __init__(self, backend: str = "storage backend") -> None:
        self._backend = backend
        self._opened: dict[tuple[str, str, bytes], _RegisteredEngine[E]] = {}
        self._closed = False

    async def open(self, binding: PoolBinding, make: Callable[[], Awaitable[E]]) -> E:
        """The engine of `binding`: the open one, or the result of `make`.

        Opening continues if the caller is cancelled, so that the new engine is not leaked. If no other caller
        waits for it, the engine is closed; the pool can be opened again after that.

        Raises:
            StorageError: the pool is open with another binding.
            ClosedError: the backend is closed, or was meanwhile.
        """
        self.check_open()
        identity = (binding.pool, binding.shard, binding.fingerprint)
        opened = await self._settled(identity)
        if opened is None or not opened.usable():
            opened = self._opened[identity] = _RegisteredEngine(binding, asyncio.ensure_future(_run(make)))
        elif opened.binding is not binding:
            where = f"pool {binding.pool!r}, shard {binding.shard!r}"
            raise StorageError(f"{where} is open already, with other slots; close that engine first")
        return await opened.engine()

    async def _settled(self, identity: tuple[str, str, bytes]) -> _RegisteredEngine[E] | None:
        """The registered engine of a pool, after any closing in progress has ended; None if there is none."""
        opened = self._opened.get(identity)
        while opened is not None and not opened.usable() and not opened.begin_closing().done():
            await _until_done([opened.begin_closing()])
            if self._closed:
                raise ClosedError(f"the backend was closed while pool {identity[0]!r} was opened")
            opened = self._opened.get(identity)
        return opened

    def check_open(self) -> None:
        """
        Raises:
            ClosedError: the backend is closed.
        """
        if self._closed:
            raise ClosedError(f"{self._backend} is closed")

    def usable(self) -> list[E]:
        """The engines that are open."""
        return [each.task.result() for each in self._opened.values() if each.task.done() and each.usable()]

    async def aclose(self) -> None:
        """Close every engine, including those that are still opening."""
        self._closed = True
        await _until_done([opened.closing or opened.task for opened in self._opened.values()])
        for opened in self._opened.values():
            await opened.close()

    def __len__(self) -> int:
        return len(self._opened)


async def _until_done(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Wait for running tasks. Skip done ones: their loop may be closed, since a backend may outlive it."""
    running = [task for task in tasks if not task.done()]
    if running:
        await asyncio.wait(running)


async def _run(make: Callable[[], Awaitable[E]]) -> E:
    return await make()
