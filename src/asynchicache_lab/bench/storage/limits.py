"""The limit of an engine: the simplest client of the same medium, moving the same pages."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, Protocol

from asynchicache.ports import Port


class PlainClient(Protocol):
    """Moves pages by number, without the keys, headers and checksums that a cache needs.

    The bench alternates engine and limit in one process, with the same batches, concurrency and memory.
    Failures raise; there are no misses.
    """

    @property
    def evicts(self) -> bool:
        """Whether the medium is full and evicts by itself; the bench then does not delete earlier pages."""
        ...

    async def put(self, indices: Sequence[int]) -> None:
        """Write these pages; return when they are as durable as the engine's would be."""
        ...

    async def get(self, indices: Sequence[int]) -> None:
        """Read these pages into their memory."""
        ...

    async def clear(self) -> None:
        """Delete the written pages if the next round uses other names. Not timed."""
        ...

    async def server_seconds(self) -> float | None:
        """CPU time that the server has used for requests of both sides so far; None if unknown or without a
        server. Not timed.
        """
        ...

    async def aclose(self) -> None:
        """Close the medium, and remove the written pages."""
        ...


@dataclass(frozen=True, slots=True)
class Setup:
    """The inputs of a limit.

    Attributes:
        page_bytes, pages: size and number of the pages.
        memory: returns the writable, page-aligned memory of a page.
        options: the engine's options, as the user gave them.
        folder: an empty folder on the engine's medium, removed at the end.
        port: threads.
        pool: the pool whose pages the engine moves, alternating with the limit.
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
        title: its description in reports.
        open: opens the limit.
        engine_options: returns the engine's options for the user's options and the bench's temporary folder;
            raises ConfigError for an option that makes no sense here.
        beside: other ways to move the same pages, which are also measured and reported.
    """

    title: str
    open: Callable[[Setup], Awaitable[PlainClient]]
    engine_options: Callable[[Mapping[str, object], Path], Mapping[str, object]] = as_given
    beside: tuple[Peer, ...] = ()
