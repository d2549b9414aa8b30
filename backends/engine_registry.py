"""The engines of one backend: each pool is opened once, and closed with the backend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from asynchicache.errors import ClosedError, StorageError
from asynchicache.storage.protocol import PoolBinding


class ClosableEngine(Protocol):
    """What is asked of an engine here."""

    @property
    def closed(self) -> bool: ...

    async def aclose(self) -> None: ...


E = TypeVar("E", bound=ClosableEngine)


@dataclass(slots=True, eq=False)
class _RegisteredEngine(Generic[E]):
    """
    Attributes:
        task: opens the engine.
        users: callers that wait for it, or have got it.
        closing: closes it, since all of them were cancelled before it came; or waits while its user does.
    """

    binding: PoolBinding
    task: asyncio.Task[E]
    users: int = 0
    closing: asyncio.Task[None] | None = None

    def usable(self) -> bool:
        """Whether it is open, or about to be."""
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
        """Close the engine, or wait with whoever closes it already; the task that does."""
        self.closing = self.closing or asyncio.ensure_future(self.close())
        return self.closing

    async def close(self) -> None:
        """Close the engine, as soon as it is open; twice is harmless."""
        await _until_done([self.task])
        if self._came():
            await self.task.result().aclose()

    def _came(self) -> bool:
        return not self.task.cancelled() and self.task.exception() is None


class EngineRegistry(Generic[E]):
    """Opens engines, and keeps them by pool, shard and fingerprint."""

    def __init__(self) -> None:
        self._opened: dict[tuple[str, str, bytes], _RegisteredEngine[E]] = {}
        self._closed = False

    async def open(self, binding: PoolBinding, make: Callable[[], Awaitable[E]]) -> E:
        """The engine of `binding`: the one that is open with it, or what `make` gives.

        Opening goes on if the caller is cancelled: what it opens must not be lost. It is closed if nobody
        else waits for it, and only then can the pool be opened again.

        Raises:
            StorageError: the pool is open with another binding.
            ClosedError: all engines were closed meanwhile.
        """
        identity = (binding.pool, binding.shard, binding.fingerprint)
        opened = await self._settled(identity)
        if opened is None or not opened.usable():
            opened = self._opened[identity] = _RegisteredEngine(binding, asyncio.ensure_future(_run(make)))
        elif opened.binding is not binding:
            where = f"pool {binding.pool!r}, shard {binding.shard!r}"
            raise StorageError(f"{where} is open already, with other slots; close that engine first")
        return await opened.engine()

    async def _settled(self, identity: tuple[str, str, bytes]) -> _RegisteredEngine[E] | None:
        """What is known of a pool, once nothing of it is about to be closed."""
        opened = self._opened.get(identity)
        while opened is not None and not opened.usable() and not opened.begin_closing().done():
            await _until_done([opened.begin_closing()])
            if self._closed:
                raise ClosedError(f"the backend was closed while pool {identity[0]!r} was opened")
            opened = self._opened.get(identity)
        return opened

    def usable(self) -> list[E]:
        """The engines that are open."""
        return [each.task.result() for each in self._opened.values() if each.task.done() and each.usable()]

    async def aclose(self) -> None:
        """Close every engine, those that are still being opened too."""
        self._closed = True
        await _until_done([opened.closing or opened.task for opened in self._opened.values()])
        for opened in self._opened.values():
            await opened.close()

    def __len__(self) -> int:
        return len(self._opened)


async def _until_done(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Those that are done may be of a loop that is closed: a backend may outlive it."""
    running = [task for task in tasks if not task.done()]
    if running:
        await asyncio.wait(running)


async def _run(make: Callable[[], Awaitable[E]]) -> E:
    return await make()
