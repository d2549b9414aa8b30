"""What an engine is measured against: the plainest client of the same medium, moving the same pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from asynchicache.ports import Port


class PlainClient(Protocol):
    """Moves pages by number, with nothing that a cache needs: no keys, headers or checksums.

    The bench runs engine and limit in turns, in one process, with the same batches, as many of them in
    flight, from and to the same memory. A failure raises: there is no miss here.
    """

    @property
    def evicts(self) -> bool:
        """Whether the medium is full and makes room by itself: pages of former rounds are left to it."""
        ...

    async def put(self, indices: Sequence[int]) -> None:
        """Write these pages; returns when they are as durable as the engine's own are by then."""
        ...

    async def get(self, indices: Sequence[int]) -> None:
        """Read these pages back into their memory."""
        ...

    async def clear(self) -> None:
        """Forget what was written, if the next round would write it under other names. Never timed."""
        ...

    async def server_seconds(self) -> float | None:
        """CPU time that the server has used on requests so far, of both sides; None without a server that
        tells. Never timed.
        """
        ...

    async def aclose(self) -> None:
        """Let go of the medium, and remove what was written."""
        ...


@dataclass(frozen=True, slots=True)
class Setup:
    """What a limit gets to work with.

    Attributes:
        page_bytes, pages: size and number of the pages.
        memory: the writable, page-aligned memory of a page.
        options: the engine's, as the user gave them.
        folder: an empty folder for files, removed in the end; on the medium that the engine uses.
        port: threads.
        pool: whose pages the engine moves, in turns with the limit.
    """

    page_bytes: int
    pages: int
    memory: Callable[[int], memoryview]
    options: Mapping[str, object]
    folder: Path
    port: Port
    pool: str


def as_given(options: Mapping[str, object], folder: Path) -> Mapping[str, object]:
    """The engine's options as the user gave them."""
    return options


class Peer(NamedTuple):
    """How to open the limit of one engine.

    Attributes:
        title: what it is, for people.
        open: opens it.
        engine_options: what the engine itself is opened with, from the user's options and a folder of
            the bench that is removed in the end; raises ConfigError for an option that makes no sense here.
        beside: other ways to move the same pages, which are measured and reported too.
    """

    title: str
    open: Callable[[Setup], Awaitable[PlainClient]]
    engine_options: Callable[[Mapping[str, object], Path], Mapping[str, object]] = as_given
    beside: tuple[Peer, ...] = ()
