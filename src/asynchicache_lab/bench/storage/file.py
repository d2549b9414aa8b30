"""The limit of the file engine: plain `preadv` and `pwritev` with O_DIRECT on a preallocated file."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path

from asynchicache.backends.file.segments import SegmentShape
from asynchicache.errors import ConfigError
from asynchicache_lab.bench.storage.limits import Peer, PlainClient, Setup

_STORE = "store"
_MAX_VIEWS = 1000  # IOV_MAX is 1,024 on Linux

_PlainIo = Callable[[int, list[memoryview], int], int]


class RawFileLimit:
    """Writes and reads at the engine's positions in its files: a virtual disk's speed varies by position.

    Of two files created one after the other, one was up to 20% faster throughout a run. So page `i` uses the
    position of the pool's slot `i`, which is free during the limit's turn. One call moves adjacent pages;
    `fdatasync` ends a batch of writes.

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
        """Do nothing: the next round overwrites the pages."""

    async def server_seconds(self) -> None:
        """There is no server."""

    async def aclose(self) -> None:
        while self._descriptors:
            os.close(self._descriptors.pop())

    def _open(self) -> None:
        """Open the files that the engine created in its first turn. Call on the loop: threads would race."""
        if not self._descriptors:
            paths = sorted((self._setup.folder / _STORE).glob(f"{self._setup.pool}-*/*.pages"))
            flags = os.O_RDWR | os.O_CLOEXEC | os.O_DIRECT
            self._descriptors = [os.open(path, flags) for path in paths]

    def _put(self, indices: Sequence[int]) -> None:
        for descriptor in self._move(os.pwritev, indices):
            os.fdatasync(descriptor)

    def _move(self, io: _PlainIo, indices: Sequence[int]) -> set[int]:
        """Move pages; return the descriptors of the files used."""
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
    """Split ascending numbers into runs of adjacent ones, none of which crosses a file of `slots`."""
    run: list[int] = []
    for index in indices:
        if run and (index != run[-1] + 1 or index % slots == 0 or len(run) == _MAX_VIEWS):
            yield run
            run = []
        run.append(index)
    if run:
        yield run


async def open_limit(setup: Setup) -> PlainClient:
    """Open the limit. It opens the pool's files later, after the engine's first turn has created them."""
    return RawFileLimit(setup)


def engine_options(options: Mapping[str, object], folder: Path) -> Mapping[str, object]:
    """The engine's options, with the store in the bench's folder.

    Raises:
        ConfigError: the user set another path.
    """
    if "path" in options:
        raise ConfigError(f"--option path={options['path']}: say --folder; the store in it is removed again")
    return {**options, "path": folder / _STORE}


PEER = Peer("preadv and pwritev with O_DIRECT", open_limit, engine_options)
