"""The limit of the file engine: plain `preadv` and `pwritev` with O_DIRECT on one preallocated file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from asynchicache.bench.storage.limits import Limit, Peer, Setup
from asynchicache.errors import ConfigError

_MOST_VIEWS = 1000  # IOV_MAX is 1,024 on Linux

Io = Callable[[int, list[memoryview], int], int]


class RawFileLimit:
    """One file, page `i` at `i * page_bytes`; neighbours go in one call, `fdatasync` ends a batch of writes.

    Args:
        setup: the pages; sizes are multiples of 4,096.
        descriptor: the file, preallocated.
    """

    evicts = False

    def __init__(self, setup: Setup, descriptor: int) -> None:
        self._setup = setup
        self._descriptor = descriptor

    async def put(self, indices: Sequence[int]) -> None:
        await self._setup.port.run_blocking(partial(self._put, indices))

    async def get(self, indices: Sequence[int]) -> None:
        await self._setup.port.run_blocking(partial(self._move, os.preadv, indices))

    async def clear(self) -> None:
        """Nothing: the next round writes over it."""

    async def server_seconds(self) -> None:
        """There is no server."""

    async def aclose(self) -> None:
        os.close(self._descriptor)

    def _put(self, indices: Sequence[int]) -> None:
        self._move(os.pwritev, indices)
        os.fdatasync(self._descriptor)

    def _move(self, io: Io, indices: Sequence[int]) -> None:
        size = self._setup.page_bytes
        for run in neighbours(sorted(indices)):
            views = [self._setup.memory(index) for index in run]
            moved = io(self._descriptor, views, run[0] * size)
            if moved != len(run) * size:
                raise OSError(f"{moved} bytes of {len(run)} pages were moved")


def neighbours(indices: Sequence[int]) -> Iterator[list[int]]:
    """Ascending numbers, cut where one does not follow the one before."""
    run: list[int] = []
    for index in indices:
        if run and (index != run[-1] + 1 or len(run) == _MOST_VIEWS):
            yield run
            run = []
        run.append(index)
    if run:
        yield run


async def open_limit(setup: Setup) -> Limit:
    """A file in the setup's folder.

    Raises:
        OSError: the file system has no O_DIRECT, or no room.
    """
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_DIRECT
    descriptor = os.open(setup.folder / "limit.bin", flags, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, setup.pages * setup.page_bytes)
    except OSError:
        os.close(descriptor)
        raise
    return RawFileLimit(setup, descriptor)


def engine_options(options: Mapping[str, object], folder: Path) -> Mapping[str, object]:
    """The store lies beside the limit's file, on the same disk.

    Raises:
        ConfigError: the user named another place.
    """
    if "path" in options:
        raise ConfigError(f"--option path={options['path']}: say --folder; the store in it is removed again")
    return {**options, "path": folder / "store"}


PEER = Peer("preadv and pwritev with O_DIRECT", open_limit, engine_options)
