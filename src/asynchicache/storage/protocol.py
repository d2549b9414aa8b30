"""The storage backend protocol: one engine per pool, one outcome per key.

A backend author implements `StorageBackend` and `PoolEngine`, and runs
`asynchicache.testing.backends.BackendConformance` over them. The core handles names, keys, checksums,
deadlines, limits and retries; an engine moves bytes between its medium and the binding's slots.
"""

from __future__ import annotations

from collections.abc import Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from inspect import iscoroutinefunction
from typing import Any, Protocol, runtime_checkable

from asynchicache.errors import ConfigError
from asynchicache.hashing import ObjectKey
from asynchicache.types import Outcome, check_number


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine promises.

    Attributes:
        durable: STORED means that the page survives the end of this process. No test checks that: see
            `testing.backends.BackendConformance`.
        checks: the engine calls `binding.check` or `restore` in its own thread hop, and answers HIT only
            where that returned HIT; otherwise the core calls `check`. To avoid hashing a page twice, the
            core trusts the bytes of an engine that checks. If the engine is also `shared`, the core still
            compares the key in the slot's header, which `check` read or `restore` wrote.
        shared: other processes may read and write the same pages.
        batch_pages: most pages that one `get` or `put` handles well.
        batch_keys: most keys that one `exists` or `delete` handles well; these move no pages.
        object_pages: most pages of a path that the engine keeps in one object. If above 1, keys say where
            their pages lie (`ObjectKey.group`, `place`), and one call puts all pages of an object if it can.
        concurrency: most concurrent calls that the engine handles well; the core makes as many `exists` calls
            beside them.
        immediate: calls never suspend (memory). The core awaits them directly, without a task, a deadline or
            a permit, and yields to the event loop between batches. A call that suspends has failed.

    Raises:
        ConfigError: `batch_pages`, `batch_keys`, `object_pages` or `concurrency` is not an integer above 0.
    """

    durable: bool
    checks: bool
    shared: bool = False
    batch_pages: int = 128
    batch_keys: int = 128
    object_pages: int = 1
    concurrency: int = 4
    immediate: bool = False

    def __post_init__(self) -> None:
        for name in ("batch_pages", "batch_keys", "object_pages", "concurrency"):
            value = getattr(self, name)
            check_number(f"capability {name}", value)
            if value < 1:
                raise ConfigError(f"capability {name} {value} must be above 0")

    def object_of(self, key: ObjectKey) -> tuple[bytes, int]:
        """Which object of its path a page belongs to: those of one group have up to `object_pages` pages, and
        one more at the beginning of the path."""
        beginning = self.object_pages > 1
        return key.group, max(key.place - beginning, 0) // self.object_pages


class PoolBinding(Protocol):
    """One pool's host slots, as an engine sees them; valid until the engine is closed.

    All methods may be called from any thread. A slot passed to a call belongs to that call alone.
    """

    @property
    def pool(self) -> str: ...

    @property
    def fingerprint(self) -> bytes: ...

    @property
    def shard(self) -> str: ...

    @property
    def depends_on(self) -> str | None:
        """Name of the pool that covers every page; None for that pool itself.

        A page of this pool is useless without that pool's page of the same digest. An engine that chooses
        what to evict evicts pages first that have lost this page.
        """
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
        """Bytes of a slot that hold data; the rest, up to `slot_bytes`, is padding."""
        ...

    def header(self, slot: int) -> memoryview:
        """The slot's header, writable and aligned; the next slot's header follows without a gap."""
        ...

    def page(self, slot: int) -> memoryview:
        """The slot's `slot_bytes`, writable and aligned; the next slot's page follows without a gap."""
        ...

    def regions(self) -> tuple[memoryview, memoryview]:
        """All headers and all pages, each as one contiguous view, for an engine that registers memory.

        Slot `i` starts at `i * header_bytes` and `i * slot_bytes`. A view keeps its memory alive.
        """
        ...

    def seal(self, slot: int, key: ObjectKey) -> bytes:
        """Write the header for the page now in `slot`: format, key, length, checksum (xxh3-64).

        Returns:
            The checksum of the page, 8 bytes.
        """
        ...

    def check(self, slot: int, key: ObjectKey) -> Outcome:
        """HIT if the header and page in `slot` match what `seal` wrote for `key`, else CORRUPT."""
        ...

    def restore(self, slot: int, key: ObjectKey, checksum: bytes) -> Outcome:
        """HIT if the page now in `slot` has `checksum`, and write its header; else CORRUPT.

        For an engine that stores the checksum from `seal` instead of the header.
        """
        ...

    def identify(
        self, header: bytes | bytearray | memoryview, page: memoryview | None = None
    ) -> ObjectKey | None:
        """The key in `header`; None if the header is damaged or belongs to another pool, or if `page` is
        given and damaged. An engine can find its pages this way after a restart.
        """
        ...


class PoolEngine(Protocol):
    """One pool in one backend.

    Every coroutine may be cancelled. Bytes may then still move until the engine's thread is done with them,
    so the caller keeps the slots until the call has ended.

    The keys of one `get` or `put` are in path order, from the beginning of the path. An engine that evicts
    counts the first key as the most recently used. It never evicts a page of a `put` to make room for
    another page of the same call, but rejects the page that does not fit. So a path loses its end first.

    An engine may have more than these verbs, see `OptionalVerbs`.
    """

    @property
    def capabilities(self) -> Capabilities: ...

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        """One byte per key: 1 if a `get` now would very likely hit, 0 if not, 2 if nobody can tell because a
        part of the store does not answer.

        Never waits for pages that other calls move: not for their threads, connections or permits.
        """
        ...

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        """Read page `i` and its header into `slots[i]`: HIT, MISS, CORRUPT, FAILED."""
        ...

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        """Seal and write `slots[i]`: STORED, EXISTS, REJECTED, FAILED. A page is visible only when whole."""
        ...

    async def delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        """Delete pages: HIT if the page existed, MISS if not, REJECTED by a read-only medium, FAILED."""
        ...

    async def clear(self) -> int:
        """Delete every page of the binding's pool, fingerprint and shard, and no other page; returns how
        many there were."""
        ...

    async def aclose(self) -> None:
        """Finish acknowledged writes and release the medium; closing twice is harmless."""
        ...


class OptionalVerbs:
    """What an engine may have beside the verbs of `PoolEngine`: its own, or else the default here.

    The only list of such verbs. An engine has one if it has an attribute of that name that is not None, and
    inherits from nothing. The core asks through this class, so an engine without the verb works too, and
    wrappers pass on what they do not know, see `EngineWrapper`. So a new verb is a method here, with its
    default; a method of `storage.guard`; and a method of the engines that have it.

    A base class of engines with default methods would need less of this. But a wrapper that inherits a
    default hides the verb of the engine that it wraps, and engines of others have no base class.

    Args:
        engine: the engine. Nothing is kept of it: a new `OptionalVerbs` costs less than a call.
    """

    def __init__(self, engine: PoolEngine) -> None:
        self._engine = engine
        for verb in OPTIONAL_VERBS:
            if has_verb(engine, verb):
                setattr(self, verb, getattr(engine, verb))

    async def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Count pages as used now, in the given order, the last one most recently: they were used in memory.

        For an engine that evicts by order of use. Skips missing keys. Moves no bytes. No request waits for
        it. Default: nothing.
        """

    async def confirm(self, keys: Sequence[ObjectKey]) -> bytearray:
        """As `exists`, of what a restart would find on the medium; `durable` asks it.

        For an engine whose `exists` answers from memory. Default: `exists`.
        """
        return await self._engine.exists(keys)

    async def label(self, label: bytes) -> None:
        """Keep a few words beside the pages of the pool, in place of those before: see `storage.labels`.

        For a store that others look into, with `asynchicache ls`. Default: nothing.
        """

    async def claim(self, keys: Sequence[ObjectKey], seconds: float) -> list[Outcome]:
        """Which of the pages the caller shall `put` now: EXISTS: none, it is there; MISS: this one, and no
        other writer gets that answer until the `put` has ended, or `seconds` have passed; CLAIMED: not this
        one, another writer got that answer.

        For a store with many writers. Keys are in path order and say where their pages lie, so that one claim
        can be for several pages. A claim that is lost, or given to two, costs only bytes. Default: MISS.
        """
        return [Outcome.MISS] * len(keys)

    async def leaving(self, pages: int) -> list[ObjectKey]:
        """What the engine would evict now to take `pages` more pages of its pool, the first to go first.

        May have pages of other pools, and too many rather than too few: a chain of stores moves them to the
        next one. Default: nothing.
        """
        return []

    @property
    def evicts(self) -> bool:
        """False if the engine never evicts, and needs no `touch` calls. Default: whether it has `touch`."""
        return has_verb(self._engine, "touch") and bool(getattr(self._engine, "evicts", True))

    @property
    def full(self) -> bool:
        """Whether the medium refuses new pages now. Default: False."""
        return bool(getattr(self._engine, "full", False))

    @property
    def degraded(self) -> bool:
        """Whether a part of the store is away, and not asked now: that its pages fail says nothing of the
        others. Default: False.
        """
        return bool(getattr(self._engine, "degraded", False))


OPTIONAL_VERBS = tuple(name for name, verb in vars(OptionalVerbs).items() if iscoroutinefunction(verb))


def has_verb(engine: PoolEngine, verb: str) -> bool:
    """Whether an engine has an optional verb of its own."""
    return getattr(engine, verb, None) is not None


class EngineWrapper:
    """An engine around another one, to which it passes every call; the base of wrappers, which change some.

    It has the optional verbs of the wrapped engine, and no others. Every call goes through `call`, also that
    of an optional verb which is younger than the wrapper.
    """

    def __init__(self, engine: PoolEngine) -> None:
        self._engine = engine
        self.capabilities = engine.capabilities
        for verb in OPTIONAL_VERBS:
            if not has_verb(engine, verb):
                setattr(self, verb, None)  # the default of the core is that of the outermost engine
            elif not hasattr(type(self), verb):
                setattr(self, verb, partial(self.call, verb))

    async def call(self, verb: str, *arguments: Any) -> Any:
        """Call a verb of the wrapped engine; the first argument, if it is a sequence, are the keys."""
        return await getattr(self._engine, verb)(*arguments)

    @property
    def evicts(self) -> bool:
        return OptionalVerbs(self._engine).evicts

    @property
    def full(self) -> bool:
        return OptionalVerbs(self._engine).full

    @property
    def degraded(self) -> bool:
        return OptionalVerbs(self._engine).degraded

    def exists(self, keys: Sequence[ObjectKey]) -> Coroutine[Any, Any, bytearray]:
        return self.call("exists", keys)

    def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> Coroutine[Any, Any, list[Outcome]]:
        return self.call("get", keys, slots)

    def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> Coroutine[Any, Any, list[Outcome]]:
        return self.call("put", keys, slots)

    def delete(self, keys: Sequence[ObjectKey]) -> Coroutine[Any, Any, list[Outcome]]:
        return self.call("delete", keys)

    def clear(self) -> Coroutine[Any, Any, int]:
        return self.call("clear")

    def aclose(self) -> Coroutine[Any, Any, None]:
        return self.call("aclose")


@runtime_checkable
class StorageBackend(Protocol):
    """A store that holds the pages of many pools."""

    @property
    def name(self) -> str: ...

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:
        """Open the engine of a pool. Pools may be opened in any order and at any time.

        Opening a pool again with the same binding returns the same engine while it is open, and a new engine
        on the same pages after it was closed.

        Raises:
            StorageError: the store cannot be used; the message says what to do.
        """
        ...

    async def aclose(self) -> None:
        """Close every engine, then the store itself; closing twice is harmless."""
        ...


def check_backend(given: str, backend: object) -> StorageBackend:
    """What was given as a storage backend, if it is one.

    Args:
        given: where it comes from, for the message.

    Raises:
        ConfigError: it lacks something of `StorageBackend`; says what.
    """
    if isinstance(backend, StorageBackend):
        return backend
    lacking = [name for name in ("name", "open_pool", "aclose") if not hasattr(backend, name)]
    rule = f"it lacks {', '.join(lacking)}" if lacking else "its class must have name, open_pool and aclose"
    raise ConfigError(f"{given} is no StorageBackend: {rule}")
