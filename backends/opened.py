"""The engines of one backend: each pool is opened once, and closed with the backend."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Generic, NamedTuple, Protocol, TypeVar

from asynchicache.errors import StorageError
from asynchicache.storage.protocol import PoolBinding


class Closable(Protocol):
    """What is asked of an engine here."""

    @property
    def closed(self) -> bool: ...

    async def aclose(self) -> None: ...


E = TypeVar("E", bound=Closable)


class _Opened(NamedTuple, Generic[E]):
    binding: PoolBinding
    task: asyncio.Task[E]

    def usable(self) -> bool:
        """Whether it is open, or about to be."""
        if not self.task.done():
            return True
        return not self.task.cancelled() and self.task.exception() is None and not self.task.result().closed


class OpenEngines(Generic[E]):
    """Opens engines, and keeps them by pool, shard and fingerprint."""

    def __init__(self) -> None:
        self._opened: dict[tuple[str, str, bytes], _Opened[E]] = {}

    async def open(self, binding: PoolBinding, make: Callable[[], Awaitable[E]]) -> E:
        """The engine of `binding`: the one that is open with it, or what `make` gives.

        Opening goes on if the caller is cancelled: what it opens must not be lost.

        Raises:
            StorageError: the pool is open with another binding.
        """
        identity = (binding.pool, binding.shard, binding.fingerprint)
        opened = self._opened.get(identity)
        if opened is None or not opened.usable():
            opened = self._opened[identity] = _Opened(binding, asyncio.ensure_future(_run(make)))
        elif opened.binding is not binding:
            where = f"pool {binding.pool!r}, shard {binding.shard!r}"
            raise StorageError(f"{where} is open already, with other slots; close that engine first")
        return await asyncio.shield(opened.task)

    def usable(self) -> list[E]:
        """The engines that are open."""
        return [each.task.result() for each in self._opened.values() if each.task.done() and each.usable()]

    async def aclose(self) -> None:
        """Close every engine, those that are still being opened too."""
        tasks = [opened.task for opened in self._opened.values()]
        if tasks:
            await asyncio.wait(tasks)
        for task in tasks:
            if not task.cancelled() and task.exception() is None:
                await task.result().aclose()

    def __len__(self) -> int:
        return len(self._opened)


async def _run(make: Callable[[], Awaitable[E]]) -> E:
    return await make()
