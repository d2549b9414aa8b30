"""The limit of the memory engine: plain copies on the loop."""

from __future__ import annotations

from collections.abc import Sequence

from asynchicache_lab.bench.storage.limits import Peer, PlainClient, Setup


class CopyLimit:
    """Pages as a list of byte arrays."""

    evicts = False

    def __init__(self, setup: Setup) -> None:
        self._memory = setup.memory
        self._stored = [bytearray(setup.page_bytes) for _ in range(setup.pages)]

    async def put(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._stored[index][:] = self._memory(index)

    async def get(self, indices: Sequence[int]) -> None:
        for index in indices:
            self._memory(index)[:] = self._stored[index]

    async def clear(self) -> None:
        """Do nothing: the next round overwrites the pages."""

    async def server_seconds(self) -> None:
        """There is no server."""

    async def aclose(self) -> None:
        self._stored.clear()


async def open_limit(setup: Setup) -> PlainClient:
    """Open a limit with separate memory for every page."""
    return CopyLimit(setup)


PEER = Peer("plain copies in memory", open_limit)
