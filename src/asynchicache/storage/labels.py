"""What a store says of its pools to whoever runs it: of which model they are, and until when they are in use.

Whoever opens a pool keeps a label beside its pages, and renews it while the pool is used. A pool whose label
has expired belongs to a model or to weights that nobody serves any more. Labels decide nothing in the cache.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from importlib.metadata import PackageNotFoundError, version
from typing import NamedTuple, Protocol, TypeAlias, runtime_checkable

import msgspec

from asynchicache.errors import StorageError
from asynchicache.layouts import HEADER_BYTES
from asynchicache.ports import Port
from asynchicache.storage.deadlines import with_deadline
from asynchicache.storage.limits import PoolLimits
from asynchicache.storage.protocol import PoolBinding

logger = logging.getLogger(__name__)

LABEL_FORMAT = 1
RENEWALS = 7
"""How often a label is renewed in the time for which it holds."""

_SKEW_SECONDS = 3600.0
"""How far clocks of machines may differ."""


class PoolLabel(msgspec.Struct, frozen=True, kw_only=True):
    """The label of one pool, fingerprint and shard.

    Attributes:
        format: `LABEL_FORMAT` of the library that wrote it.
        model, weight_version: what the pages were computed with.
        pool, shard, fingerprint: of the keys; the fingerprint in hex.
        page_bytes: bytes of a page.
        written_by: version of the library that wrote it.
        written, until: when it was written, and until when the pool is in use, in seconds of Unix time.
    """

    model: str
    weight_version: str
    pool: str
    shard: str
    fingerprint: str
    page_bytes: int
    written: float
    until: float
    format: int = LABEL_FORMAT
    written_by: str = ""


def library_version() -> str:
    """The version of this library; empty where its metadata is missing."""
    try:
        return version("asynchicache")
    except PackageNotFoundError:
        return ""


def label_maker(binding: PoolBinding, model: str, weight_version: str) -> Callable[[float], bytes]:
    """Makes the label of a pool, given the seconds for which it holds."""

    def label(seconds: float) -> bytes:
        now = time.time()
        made = PoolLabel(
            model=model,
            weight_version=weight_version,
            pool=binding.pool,
            shard=binding.shard,
            fingerprint=binding.fingerprint.hex(),
            page_bytes=binding.page_bytes,
            written_by=library_version(),
            written=now,
            until=now + seconds,
        )
        return msgspec.json.encode(made)

    return label


def read_label(data: bytes | None) -> PoolLabel | None:
    """The label in `data`; None if there is none, or one of another version."""
    try:
        label = msgspec.json.decode(data or b"", type=PoolLabel)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return None
    return label if label.format == LABEL_FORMAT else None


LabelWriter: TypeAlias = "Callable[[bytes], Coroutine[object, object, None]]"


class KeptLabel:
    """The label of an open pool, written anew while the pool is used.

    Args:
        write: stores a label beside the pages; None where the engine keeps none.
        pool: its name, for the log.
    """

    def __init__(self, write: LabelWriter | None, pool: str, limits: PoolLimits, port: Port) -> None:
        self._store = write
        self._pool = pool
        self._limits = limits
        self._port = port
        self._make: Callable[[float], bytes] | None = None
        self._due = 0.0
        self._writing: asyncio.Task[None] | None = None

    def begin(self, make: Callable[[float], bytes]) -> None:
        """Write the first one. `make`: makes a label, given the seconds for which it holds."""
        self._make = make
        self.due_now()
        self.renew()

    def due_now(self) -> None:
        self._due = self._port.now()

    def renew(self) -> None:
        """Write it if it is time for it."""
        running = self._writing is not None and not self._writing.done()
        if self._store is None or self._make is None or self._port.now() < self._due or running:
            return
        self._due = self._port.now() + self._limits.label_seconds / RENEWALS
        label = self._make(self._limits.label_seconds)
        self._writing = asyncio.get_running_loop().create_task(self._write(self._store, label))

    async def _write(self, store: LabelWriter, label: bytes) -> None:
        try:
            await with_deadline(store(label), self._limits.deadline, "label")
        except Exception as error:  # noqa: BLE001 - the boundary to the backend's engine
            self._due = self._port.now() + self._limits.cooldown
            logger.info("pool %s: its label was not written: %r", self._pool, error)

    async def wait_written(self) -> None:
        """Wait for a write that is under way, for a limited time."""
        if self._writing is not None:
            await asyncio.wait([self._writing], timeout=self._limits.closing)


class PoolListing(NamedTuple):
    """One pool in a store, as an inventory finds it.

    Attributes:
        name: of its folder or prefix.
        pool, shard, fingerprint: as far as the store says; the fingerprint in hex, maybe its beginning.
        pages: how many it has of each namespace, by `ObjectKey.namespace`.
        nbytes: bytes of all pages; None if nobody knows.
        label: None if there is none that this version can read.
        problem: why it cannot be read, and what to do; empty if it can.
    """

    name: str
    pool: str
    shard: str
    fingerprint: str
    pages: dict[bytes, int]
    nbytes: int | None
    label: PoolLabel | None = None
    problem: str = ""

    @classmethod
    def of(cls, name: str, pages: dict[bytes, int], label: PoolLabel | None) -> PoolListing:
        """The pool that a name says, for stores that know no sizes."""
        fingerprint, _, rest = name.partition(".")
        pool, _, shard = rest.partition(".")
        nbytes = None if label is None else sum(pages.values()) * (HEADER_BYTES + label.page_bytes)
        return cls(name, pool, shard, fingerprint, dict(pages), nbytes, label)

    def state(self, now: float) -> str:
        """`live`, `expired`, `damaged`, or `unknown`: nobody knows who reads it, so it stays."""
        if self.problem:
            return "damaged"
        if self.label is None:
            return "unknown"
        return "live" if now < self.label.until else "expired"


class PagesChecked(NamedTuple):
    """Pages that were read: how many, how many are damaged, and their bytes."""

    pages: int
    corrupt: int
    nbytes: int


GoOn: TypeAlias = "Callable[[int], Awaitable[int]]"
"""Given how many pages were removed since it was asked last: pauses, and returns how many may be removed
until it is asked again; 0 if no more."""


class Inventory(Protocol):
    """All pools of a store, whoever they belong to; a backend has one if it can list its pages."""

    async def pools(self) -> list[PoolListing]:
        """
        Raises:
            StorageError: the store cannot be read, or is in use in a way that forbids it.
        """
        ...

    async def label(self, pool: PoolListing) -> PoolLabel | None:
        """The label of a pool as it is now.

        Raises:
            StorageError: the store cannot be read.
        """
        ...

    async def remove(self, pool: PoolListing, namespace: bytes | None, go_on: GoOn) -> int:
        """Remove a pool with its label, or its pages of one namespace; returns how many pages that were. A
        label that has changed since the pool was listed stays.

        Args:
            namespace: as in `PoolListing.pages`; None for all.
            go_on: asked before the first page, and after each batch.

        Raises:
            StorageError: the store refuses, or is in use by a process that would not notice.
        """
        ...

    async def aclose(self) -> None: ...


@runtime_checkable
class PageReading(Protocol):
    """An inventory that reads pages too; for files there is `backends.file.verify`, which sees more."""

    def check(self, pool: PoolListing) -> AsyncIterator[PagesChecked]:
        """Read the pages of a pool, some at a time, and compare them with their checksums.

        Raises:
            StorageError: the store cannot be read.
        """
        ...


@runtime_checkable
class Tidying(Protocol):
    """An inventory of a store where writers that died leave something beside the pages: their claims."""

    async def tidy(self, pool: PoolListing, before: float) -> None:
        """Remove what was left in a pool before that Unix time, of what was there when pools were listed.

        Raises:
            StorageError: the store refuses.
        """
        ...


def check_clock(pools: list[PoolListing], now: float) -> None:
    """
    Raises:
        StorageError: a label was written later than now: this clock, or another one, is wrong.
    """
    ahead = [one for one in pools if one.label is not None and one.label.written > now + _SKEW_SECONDS]
    if ahead and (label := ahead[0].label) is not None:
        raise StorageError(
            f"the label of {ahead[0].name} was written {label.written - now:,.0f} s from now: a clock is "
            "wrong, so nobody can tell what is in use; nothing was removed"
        )


@runtime_checkable
class TimeTelling(Protocol):
    """An inventory of a store with a clock of its own."""

    async def time(self) -> float:
        """The store's Unix time, in seconds.

        Raises:
            StorageError: the store cannot be asked, or refuses.
        """
        ...


async def check_clocks(inventory: Inventory, now: float) -> None:
    """
    Raises:
        StorageError: this clock is not that of the store.
    """
    ahead = now - await inventory.time() if isinstance(inventory, TimeTelling) else 0.0
    if abs(ahead) > _SKEW_SECONDS:
        raise StorageError(
            f"this clock is {ahead:,.0f} s from that of the store, so nobody can tell what is in use; "
            "nothing was removed"
        )


@runtime_checkable
class StoreFaults(Protocol):
    """An inventory of a store that can be set up so that it loses pages."""

    async def faults(self) -> list[str]:
        """What should be set otherwise, in words.

        Raises:
            StorageError: the store cannot be reached.
        """
        ...
