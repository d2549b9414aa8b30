"""What a storage backend is to the core: engines of one pool each, one outcome per key.

A backend author implements `StorageBackend` and `PoolEngine`, and runs
`asynchicache.testing.backends.BackendConformance` over them. Names, keys, checksums, deadlines,
limits and retries are the core's; an engine moves bytes between its medium and the binding's slots.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from asynchicache.errors import ConfigError
from asynchicache.hashing import ObjectKey
from asynchicache.types import Outcome, check_number


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine promises.

    Attributes:
        durable: STORED means that the page survives the end of this process. Nothing checks that: see
            `testing.backends.BackendConformance`.
        checks: the engine calls `binding.check`, or `restore`, in its own thread hop, and answers HIT only
            where that did; else the core calls `check`. A page is not hashed twice, so the core believes the
            bytes of an engine that checks; of one that is `shared` it still compares whose header is in the
            slot, where `check` found it or `restore` wrote it.
        shared: other processes may read and write the same pages.
        batch_pages: most pages of one `get` or `put` that it handles well.
        batch_keys: the same of one `exists` or `delete`, which moves no pages.
        concurrency: most calls at once that it handles well.
        immediate: calls never suspend (memory); the core awaits them directly, without a task, a
            deadline or a turn, and gives the loop a turn between batches. One that does suspend has failed.

    Raises:
        ConfigError: `batch_pages`, `batch_keys` or `concurrency` is no whole number above 0.
    """

    durable: bool
    checks: bool
    shared: bool = False
    batch_pages: int = 128
    batch_keys: int = 128
    concurrency: int = 4
    immediate: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_pages", "batch_keys", "concurrency"):
            value = getattr(self, name)
            check_number(f"capability {name}", value)
            if value < 1:
                raise ConfigError(f"capability {name} {value} must be above 0")


class PoolBinding(Protocol):
    """One pool's host slots, as an engine sees them; valid until the engine is closed.

    All methods may be called from any thread; a slot handed to a call is that call's alone.
    """

    @property
    def pool(self) -> str: ...

    @property
    def fingerprint(self) -> bytes: ...

    @property
    def shard(self) -> str: ...

    @property
    def depends_on(self) -> str | None:
        """Name of the pool whose page of the same digest a page of this pool is useless without: the pool
        that covers every page. None for that one. An engine that chooses what to evict evicts pages first
        that lost what they stand on."""
        ...

    @property
    def header_bytes(self) -> int:
        """Bytes of a slot's header in memory and in storage, a multiple of `ALIGNMENT`."""
        ...

    @property
    def slot_bytes(self) -> int:
        """Bytes of a slot in memory and in storage, a multiple of `ALIGNMENT`."""
        ...

    @property
    def page_bytes(self) -> int:
        """Bytes of a slot that mean something; the rest, up to `slot_bytes`, is padding."""
        ...

    def header(self, slot: int) -> memoryview:
        """The slot's header, writable, aligned; its neighbour's follows at once."""
        ...

    def page(self, slot: int) -> memoryview:
        """The slot's `slot_bytes`, writable, aligned; its neighbour's follow at once."""
        ...

    def regions(self) -> tuple[memoryview, memoryview]:
        """All headers and all pages, each one run of memory, for an engine that must register it.

        Slot `i` lies at `i * header_bytes` and `i * slot_bytes`. Whoever holds a view keeps its memory.
        """
        ...

    def seal(self, slot: int, key: ObjectKey) -> bytes:
        """Write the header for the page now in `slot`: format, key, length, checksum (xxh3-64).

        Returns:
            The checksum of the page, 8 bytes.
        """
        ...

    def check(self, slot: int, key: ObjectKey) -> Outcome:
        """HIT if header and page of `slot` are what was sealed for `key`, else CORRUPT."""
        ...

    def restore(self, slot: int, key: ObjectKey, checksum: bytes) -> Outcome:
        """For an engine that keeps what `seal` returned, and no header: HIT, and the header is written, if
        the page now in `slot` has that checksum, else CORRUPT."""
        ...

    def identify(
        self, header: bytes | bytearray | memoryview, page: memoryview | None = None
    ) -> ObjectKey | None:
        """The key that `header` was sealed for, None if it is damaged or not of this pool's pages, or if
        `page` is given and damaged; how an engine finds its pages again after a restart.
        """
        ...


class PoolEngine(Protocol):
    """One pool in one backend. Every coroutine may be cancelled; bytes then still may move until
    the engine's thread is done with them, so the caller keeps the slots until the call has ended.

    The keys of one `get` or `put` come in the order of their path, its beginning first. An engine that evicts
    by itself counts the first key as the most recently used, and evicts no page of a `put` to make room for
    another page of the same call: it rejects what has no room. So a path loses its end before its beginning.

    Three more attributes are optional, and looked for by name: `touch`, see `TouchableEngine`; `evicts`, a
    bool, False where it never evicts and need not be told of uses; and `full`, a bool, true while the medium
    refuses to take more.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        """One byte a key: 1 if a `get` now would very likely hit, else 0."""
        ...

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        """Read page `i` and its header into `slots[i]`: HIT, MISS, CORRUPT, FAILED."""
        ...

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        """Seal and write `slots[i]`: STORED, EXISTS, REJECTED, FAILED. Visible only when whole."""
        ...

    async def delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        """Forget pages: HIT if it was there, MISS if not, REJECTED by a medium that is read only, FAILED."""
        ...

    async def clear(self) -> int:
        """Forget every page of the binding's pool, fingerprint and shard, and nothing else; returns how
        many there were."""
        ...

    async def aclose(self) -> None:
        """Finish what was acknowledged and let go of the medium; twice is harmless."""
        ...


@runtime_checkable
class TouchableEngine(Protocol):
    """An engine that evicts by order of use, and can be told of uses that it does not see.

    Optional: an engine without it, an object store say, is as good. The core looks for the attribute.
    """

    async def touch(self, keys: Sequence[ObjectKey]) -> None:
        """These pages were used in memory: count them as used now, in the order given, the last one most
        recently. Keys that are not there are skipped. Moves no bytes, and is never waited for by a request.
        """
        ...


def touch_of(engine: PoolEngine) -> Callable[[Sequence[ObjectKey]], Awaitable[None]] | None:
    """The engine's `touch`, for a wrapper to pass on; None if it has none."""
    return engine.touch if isinstance(engine, TouchableEngine) else None


@runtime_checkable
class StorageBackend(Protocol):
    """A place that holds pages of many pools."""

    @property
    def name(self) -> str: ...

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:
        """The engine for this pool; in any order, at run time too. Opened again with the same binding
        while it is open it is the same engine, and after it was closed a new one onto the same pages.

        Raises:
            StorageError: the place cannot be used; says what to do.
        """
        ...

    async def aclose(self) -> None:
        """Close every engine, then the place itself; twice is harmless."""
        ...
