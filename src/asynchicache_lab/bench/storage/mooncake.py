"""The limit of the mooncake engine: Mooncake's client, called directly."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from asynchicache.backends.mooncake.joining import join
from asynchicache.backends.mooncake.options import MooncakeOptions
from asynchicache.backends.mooncake.store import address_of
from asynchicache.errors import ConfigError, StorageError
from asynchicache_lab.bench.storage.limits import Peer, PlainClient, Setup

_MooncakeCall = Callable[[list[str], list[int], list[int]], list[int]]


class DirectLimit:
    """One Mooncake call per batch, one buffer per page.

    Args:
        setup: the pages; its folder's name is the prefix of every key.
        store: a separate client, with the pages' memory registered.
    """

    evicts = False

    def __init__(self, setup: Setup, store: Any) -> None:
        self._setup = setup
        self._store = store
        self._base = address_of(setup.memory(0))
        self._turns = [0] * setup.pages

    async def put(self, indices: Sequence[int]) -> None:
        """Write under new names, like the engine: Mooncake does not overwrite objects."""
        await self._setup.port.run_blocking(partial(self._put, indices))

    async def get(self, indices: Sequence[int]) -> None:
        expected = self._setup.page_bytes
        await self._setup.port.run_blocking(
            partial(self._move, self._store.batch_get_into, indices, expected)
        )

    async def clear(self) -> None:
        names = self._names(range(self._setup.pages))
        await self._setup.port.run_blocking(partial(self._store.batch_remove, names, True))

    async def server_seconds(self) -> None:
        """None: Mooncake's servers do not report it."""

    async def aclose(self) -> None:
        await self._setup.port.run_blocking(self._close)

    def register(self) -> None:
        """
        Raises:
            StorageError: Mooncake refuses.
        """
        code = self._store.register_buffer(self._base, self._setup.pages * self._setup.page_bytes)
        if code != 0:
            raise StorageError(f"Mooncake does not register the pages of the bench: code {code}")

    def _put(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._turns[index] += 1
        self._move(self._store.batch_put_from, indices, 0)

    def _move(self, move: _MooncakeCall, indices: Sequence[int], expected: int) -> None:
        size = self._setup.page_bytes
        pointers = [self._base + index * size for index in indices]
        codes = move(self._names(indices), pointers, [size] * len(pointers))
        wrong = [code for code in codes if code != expected]
        if wrong:
            raise StorageError(f"Mooncake returned {wrong[0]} for {len(wrong)} of {len(codes)} pages")

    def _close(self) -> None:
        self._store.batch_remove(self._names(range(self._setup.pages)), True)
        self._store.unregister_buffer(self._base)
        self._store.close()

    def _names(self, indices: Sequence[int]) -> list[str]:
        prefix = f"{self._setup.folder.name}.limit.{self._setup.pool}"
        return [f"{prefix}:{index}.{self._turns[index]}" for index in indices]


async def open_limit(setup: Setup) -> PlainClient:
    """Open a client of the cluster that the engine uses.

    Raises:
        StorageError: the cluster cannot be joined, or refuses the memory.
    """
    options = MooncakeOptions.of(setup.options)
    limit = DirectLimit(setup, await setup.port.run_blocking(partial(join, options)))
    limit.register()
    return limit


def engine_options(options: Mapping[str, object], folder: Path) -> Mapping[str, object]:
    """The engine's options, with a separate namespace.

    Raises:
        ConfigError: the user did not set the cluster, or set the namespace.
    """
    if "namespace" in options:
        raise ConfigError(f"--option namespace={options['namespace']}: the bench has one of its own")
    if "master" not in options:
        raise ConfigError("--engine mooncake: say which cluster, --option master=127.0.0.1:50051")
    return {**options, "namespace": folder.name}


PEER = Peer("Mooncake's client, called directly", open_limit, engine_options)
