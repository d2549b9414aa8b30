"""The limit of the file engine: plain `preadv` and `pwritev` with O_DIRECT on a preallocated file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from asynchicache.backends.file.shape import SegmentShape
from asynchicache.bench.storage.limits import Peer, PlainClient, Setup
from asynchicache.errors import ConfigError

_STORE = "store"
_MOST_VIEWS = 1000  # IOV_MAX is 1,024 on Linux

Io = Callable[[int, list[memoryview], int], int]


class RawFileLimit:
    """Writes and reads where the engine does, in its files: how fast a virtual disk is depends on the place.

    Of two files that were made one after the other, one was up to a fifth faster all through a run. So page
    `i` lies where slot `i` of the pool does, which is free while the limit has its turn. Neighbours go in
    one call; `fdatasync` ends a batch of writes.

    Args:
        setup: the pages; sizes are multiples of 4,096.
    """

    evicts = False

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        self._shape = SegmentShape.of(setup.page_bytes)
        self._descriptors: list[int] = []

    async def put(self, indices: Sequence[int]) -> None:
        self._open()
        await self._setup.port.run_blocking(partial(self._put, indices))

    async def get(self, indices: Sequence[int]) -> None:
        self._open()
        await self._setup.port.run_blocking(partial(self._move, os.preadv, indices))

    async def clear(self) -> None:
        """Nothing: the next round writes over it."""

    async def server_seconds(self) -> None:
        """There is no server."""

    async def aclose(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _open(self) -> None:
        """Files that the engine has made in its first turn, on the loop: threads would race for it."""
        if not self._descriptors:
            paths = sorted((self._setup.folder / _STORE).glob(f"{self._setup.pool}-*/*.pages"))
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT
            self._descriptors = [os.open(path, flags) for path in paths]

    def _put(self, indices: Sequence[int]) -> None:
        for descriptor in self._move(os.pwritev, indices):
            os.fdatasync(descriptor)

    def _move(self, io: Io, indices: Sequence[int]) -> set[int]:
        """Returns the descriptors of files that were used."""
        used = set()
        for run in neighbours(sorted(indices), self._shape.slots):
            number, place = divmod(run[0], self._shape.slots)
            descriptor = self._descriptors[number]
            views = [self._setup.memory(index) for index in run]
            moved = io(descriptor, views, self._shape.file_bytes(place))
            if moved != len(run) * self._setup.page_bytes:
                raise OSError(f"{moved} bytes of {len(run)} pages were moved")
            used.add(descriptor)
        return used


def neighbours(indices: Sequence[int], slots: int) -> Iterator[list[int]]:
    """Ascending numbers, cut where one does not follow the one before, and where a file of `slots` ends."""
    run: list[int] = []
    for index in indices:
        if run and (index != run[-1] + 1 or index % slots == 0 or len(run) == _MOST_VIEWS):
            yield run
            run = []
        run.append(index)
    if run:
        yield run


async def open_limit(setup: Setup) -> PlainClient:
    """The pool's files are opened once they are there: the engine has the first turn."""
    return RawFileLimit(setup)


def engine_options(options: Mapping[str, object], folder: Path) -> Mapping[str, object]:
    """The store lies in the bench's folder.

    Raises:
        ConfigError: the user named another place.
    """
    if "path" in options:
        raise ConfigError(f"--option path={options['path']}: say --folder; the store in it is removed again")
    return {**options, "path": folder / _STORE}


PEER = Peer("preadv and pwritev with O_DIRECT", open_limit, engine_options)
