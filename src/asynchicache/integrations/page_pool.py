"""One pool of an engine's pages in storage: units, merged transfers, staging, and one outcome per page."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from typing import Any, NamedTuple, TypeAlias, TypeVar

import numpy as np

from asynchicache.errors import ClosedError, UsageError
from asynchicache.hashing import NO_NAMESPACE, ObjectKey
from asynchicache.integrations.page_memory import ByteArray, PageMemory, copy_pieces
from asynchicache.integrations.page_slots import PlacedSlots, StagedSlots
from asynchicache.ports import Port
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.chain import AnyPool
from asynchicache.storage.limits import BatchResult
from asynchicache.storage.statistics import PoolStatistics
from asynchicache.types import Outcome

T = TypeVar("T")
PageKey: TypeAlias = str | bytes

logger = logging.getLogger(__name__)

_KEY_TAG = b"asynchicache-foreign-key-v1"
_CHUNK_BYTES = 16 << 20  # bytes staged at a time, so that copies overlap with storage calls
_ORDER = (
    Outcome.TIMEOUT,
    Outcome.CORRUPT,
    Outcome.FAILED,
    Outcome.REJECTED,
    Outcome.MISS,
    Outcome.STORED,
    Outcome.EXISTS,
    Outcome.HIT,
)
"""From worst to best: the outcome of a page is the worst of its units'."""


@dataclass(frozen=True, slots=True)
class PagePoolStatistics:
    """Statistics of one pool.

    Attributes:
        storage: calls, outcomes, bytes and latencies, in units; the breaker.
        units: objects per page.
        staged: whether pages are copied through staging slots.
        joined: units that a call did not transfer because another call was transferring them.
    """

    storage: PoolStatistics
    units: int
    staged: bool
    joined: int


@dataclass(slots=True, eq=False)
class _UnitTransfer:
    """One unit in flight between memory and storage.

    Attributes:
        key: key in storage.
        unit: index in memory.
        joined_units: units of other calls that need the same bytes.
        closing: whether joined_units are being served; no more can join.
    """

    key: ObjectKey
    unit: int
    outcome: asyncio.Future[Outcome]
    joined_units: list[int] = field(default_factory=list)
    closing: bool = False


class _PageCopy(NamedTuple):
    sources: list[ByteArray]
    destinations: list[ByteArray]


class PagePool:
    """One pool of pages; opened by `PageStore.open_pool`, confined to its loop.

    A key is any text or bytes that identify the content of a page. Keys are hashed and never part of a path.
    The content of a key must not change, because an existing page is not written again.
    """

    def __init__(
        self,
        memory: PageMemory,
        slots: PlacedSlots | StagedSlots,
        guard: AnyPool,
        binding: SlotBinding,
        port: Port,
        *,
        writes: bool,
    ) -> None:
        self.memory = memory
        self._slots = slots
        self._guard = guard
        self._binding = binding
        self._port = port
        self._writes = writes
        self._reading: dict[ObjectKey, _UnitTransfer] = {}
        self._writing: dict[ObjectKey, _UnitTransfer] = {}
        self._tasks: set[asyncio.Task[Any]] = set()
        self._joined = 0
        self._closed = False

    @property
    def staged(self) -> bool:
        """Whether pages are copied through staging slots."""
        return isinstance(self._slots, StagedSlots)

    async def exists(self, keys: Sequence[PageKey]) -> list[bool]:
        """Return for each key whether a `get` now would very likely hit.

        Raises:
            ClosedError: the pool is closed; all methods raise it.
        """
        self._check_open()
        if not keys:
            return []
        batch = await self._guard.exists([key for name in keys for key in self._object_keys(name)])
        present, step = batch.present, self.memory.units
        return [all(present[at : at + step]) for at in range(0, len(present), step)]

    async def get(self, keys: Sequence[PageKey], pages: Sequence[int]) -> list[Outcome]:
        """Read page `keys[i]` into memory page `pages[i]`: HIT, MISS, CORRUPT, FAILED or TIMEOUT.

        The content of a page that is not a HIT is undefined.

        Raises:
            UsageError: `keys` and `pages` differ in length, a page does not exist, or a key is neither text
                nor bytes.
        """
        transfers = self._unit_transfers(keys, pages)
        return await self._run_to_end(self._move(transfers, self._reading, self._read))

    async def put(self, keys: Sequence[PageKey], pages: Sequence[int]) -> list[Outcome]:
        """Store memory page `pages[i]` as `keys[i]`: STORED, EXISTS, REJECTED, FAILED or TIMEOUT.

        Raises:
            UsageError: as `get`.
        """
        transfers = self._unit_transfers(keys, pages)
        if not self._writes:
            return [Outcome.EXISTS] * len(keys)  # another rank writes these pages, before or after this call
        return await self._run_to_end(self._move(transfers, self._writing, self._write))

    async def delete(self, keys: Sequence[PageKey]) -> list[Outcome]:
        """Delete pages: HIT if one existed, MISS if not, FAILED or TIMEOUT."""
        self._check_open()
        if not self._writes:
            return [Outcome.MISS] * len(keys)
        batch = await self._guard.delete([key for name in keys for key in self._object_keys(name)])
        return self._by_page(batch.outcomes)

    async def clear(self) -> int:
        """Delete all pages; return the number of units.

        Raises:
            StorageError: the backend failed.
        """
        self._check_open()
        return await self._guard.clear() if self._writes else 0

    def statistics(self) -> PagePoolStatistics:
        return PagePoolStatistics(self._guard.statistics(), self.memory.units, self.staged, self._joined)

    async def aclose(self) -> None:
        """Wait for running calls, up to a time limit. Idempotent."""
        self._closed = True
        touched = await self._guard.aclose()
        if touched:
            logger.error("%r: the backend may still write to %d of its pages", self, len(touched))
        if self._tasks:
            await asyncio.wait(self._tasks)
        if not touched:  # otherwise the backend may still write to the memory
            self._slots.close()

    # Units.

    def _check_open(self) -> None:
        if self._closed:
            raise ClosedError(f"pool {self._binding.pool!r} of the page store is closed")

    def _object_keys(self, name: PageKey) -> list[ObjectKey]:
        """Return the keys of a page's units."""
        if not isinstance(name, str | bytes):
            raise UsageError(f"key {name!r} of pool {self._binding.pool!r} must be text or bytes")
        kind, data = (b"s", name.encode(errors="surrogatepass")) if isinstance(name, str) else (b"b", name)
        digest = sha256(_KEY_TAG + kind + data).digest()
        hashes = [digest]
        if self.memory.units > 1:
            hashes = [sha256(digest + bytes([part])).digest() for part in range(self.memory.units)]
        return [self._binding.key(NO_NAMESPACE + one) for one in hashes]  # an engine's keys tell no namespace

    def _unit_transfers(self, keys: Sequence[PageKey], pages: Sequence[int]) -> list[_UnitTransfer]:
        """Make a transfer for each unit, page by page.

        Raises:
            UsageError, ClosedError: see `get`.
        """
        self._check_open()
        count, pool = self.memory.pages, self._binding.pool
        if len(keys) != len(pages):
            raise UsageError(f"pool {pool!r}: {len(keys)} keys for {len(pages)} pages")
        for page in pages:
            if not 0 <= page < count:
                raise UsageError(f"pool {pool!r}: there is no page {page}; it has {count}")
        loop = asyncio.get_running_loop()
        return [
            _UnitTransfer(key, part * count + page, loop.create_future())
            for name, page in zip(keys, pages, strict=True)
            for part, key in enumerate(self._object_keys(name))
        ]

    # Transfers.

    async def _run_to_end(self, work: Coroutine[Any, Any, T]) -> T:
        """Run `work` to its end even if the caller is cancelled: the caller's pages are in use until then."""
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        try:
            return await asyncio.shield(task)
        except asyncio.CancelledError:
            while not task.done():
                with suppress(asyncio.CancelledError):
                    await asyncio.wait([task])
            raise

    async def _move(self, transfers: list[_UnitTransfer], table: _Table, carry: _Carry) -> list[Outcome]:
        """Transfer units, except those that another call is transferring; return the outcome of each page."""
        leaders = [self._lead_or_follow(transfer, table) for transfer in transfers]
        own = [transfer for transfer, leader in zip(transfers, leaders, strict=True) if transfer is leader]
        try:
            await carry(own)
        finally:
            for transfer in own:
                _settle(transfer, Outcome.FAILED, table)
        units = [await leader.outcome for leader in leaders]
        if table is self._writing:
            units = [
                Outcome.EXISTS if outcome is Outcome.STORED and leader is not transfer else outcome
                for outcome, leader, transfer in zip(units, leaders, transfers, strict=True)
            ]
        return self._by_page(units)

    def _by_page(self, units: Sequence[Outcome]) -> list[Outcome]:
        step = self.memory.units
        return [min(units[at : at + step], key=_ORDER.index) for at in range(0, len(units), step)]

    def _lead_or_follow(self, transfer: _UnitTransfer, table: _Table) -> _UnitTransfer:
        """Return the transfer of this unit: one that is in flight, or this one."""
        leader = table.get(transfer.key)
        if leader is None or leader.closing:
            table[transfer.key] = transfer
            return transfer
        leader.joined_units.append(transfer.unit)
        self._joined += 1
        return leader

    async def _read(self, transfers: list[_UnitTransfer]) -> None:
        if isinstance(self._slots, StagedSlots):
            late = await self._in_chunks(transfers, self._slots, self._read_staged)
            self._settle_all(late, BatchResult([Outcome.TIMEOUT] * len(late)), self._reading)
        elif transfers:
            units = [transfer.unit for transfer in transfers]
            batch = await self._ask(self._guard.get, transfers, units)
            await _released(batch)
            await self._deliver(transfers, batch, [])

    async def _write(self, transfers: list[_UnitTransfer]) -> None:
        if isinstance(self._slots, StagedSlots):
            shed = await self._in_chunks(transfers, self._slots, self._write_staged)
            self._settle_all(shed, BatchResult([Outcome.REJECTED] * len(shed)), self._writing)
        elif transfers:
            units = [transfer.unit for transfer in transfers]
            batch = await self._ask(self._guard.put, transfers, units)
            await _released(batch)
            self._settle_all(transfers, batch, self._writing)

    async def _ask(
        self, call: _PoolCall, transfers: list[_UnitTransfer], slots: Sequence[int]
    ) -> BatchResult:
        try:
            return await call([transfer.key for transfer in transfers], slots)
        except ClosedError:  # the pool was closed meanwhile
            return BatchResult([Outcome.FAILED] * len(transfers))

    async def _in_chunks(
        self, transfers: list[_UnitTransfer], staging: StagedSlots, move: _Chunk
    ) -> list[_UnitTransfer]:
        """Transfer units through free staging slots; return those that got none in time."""
        step = max(1, _CHUNK_BYTES // self._binding.slot_bytes)
        chunks: list[asyncio.Task[None]] = []
        while transfers:
            slots = await staging.take(min(step, len(transfers)))
            if not slots:
                break
            chunk, transfers = transfers[: len(slots)], transfers[len(slots) :]
            chunks.append(asyncio.ensure_future(move(chunk, slots, staging)))
        if chunks:
            await asyncio.wait(chunks)
        for chunk_ended in chunks:
            chunk_ended.result()
        return transfers

    async def _read_staged(
        self, transfers: list[_UnitTransfer], slots: list[int], staging: StagedSlots
    ) -> None:
        batch = await self._ask(self._guard.get, transfers, slots)
        await self._deliver(transfers, batch, [self._slot(slot) for slot in slots])
        _give_back(slots, batch, staging)

    async def _write_staged(
        self, transfers: list[_UnitTransfer], slots: list[int], staging: StagedSlots
    ) -> None:
        copies = [
            _PageCopy(self.memory.unit(transfer.unit), [self._slot(slot)])
            for transfer, slot in zip(transfers, slots, strict=True)
        ]
        await self._port.run_blocking(partial(_copy_all, copies))
        batch = await self._ask(self._guard.put, transfers, slots)
        self._settle_all(transfers, batch, self._writing)
        _give_back(slots, batch, staging)

    async def _deliver(
        self, transfers: list[_UnitTransfer], batch: BatchResult, slots: list[ByteArray]
    ) -> None:
        """Copy units that were read to all units that need them.

        Args:
            slots: staging slots with the content; empty if it was read in place.
        """
        copies: list[_PageCopy] = []
        for place, (transfer, outcome) in enumerate(zip(transfers, batch.outcomes, strict=True)):
            if outcome is Outcome.HIT:
                transfer.closing = True
                source = [slots[place]] if slots else self.memory.unit(transfer.unit)
                units = [transfer.unit, *transfer.joined_units] if slots else transfer.joined_units
                copies += [_PageCopy(source, self.memory.unit(unit)) for unit in units]
        if copies:
            await self._port.run_blocking(partial(_copy_all, copies))
        self._settle_all(transfers, batch, self._reading)

    def _settle_all(self, transfers: list[_UnitTransfer], batch: BatchResult, table: _Table) -> None:
        for transfer, outcome in zip(transfers, batch.outcomes, strict=True):
            _settle(transfer, outcome, table)

    def _slot(self, slot: int) -> ByteArray:
        return np.frombuffer(self._slots.page(slot), np.uint8)[: self.memory.unit_bytes]

    def __repr__(self) -> str:
        way = "staged" if self.staged else "in place"
        return f"<PagePool {self._binding.pool}: {self.memory!r}, {way}>"


_Table: TypeAlias = dict[ObjectKey, _UnitTransfer]
_Carry: TypeAlias = Callable[[list[_UnitTransfer]], Coroutine[Any, Any, None]]
_PoolCall: TypeAlias = Callable[[Sequence[ObjectKey], Sequence[int]], Coroutine[Any, Any, BatchResult]]
_Chunk: TypeAlias = Callable[[list[_UnitTransfer], list[int], StagedSlots], Coroutine[Any, Any, None]]


def _settle(transfer: _UnitTransfer, outcome: Outcome, table: _Table) -> None:
    """Set the outcome of a transfer; a no-op if it has one."""
    if not transfer.outcome.done():
        transfer.outcome.set_result(outcome)
        if table.get(transfer.key) is transfer:
            del table[transfer.key]


async def _released(batch: BatchResult) -> None:
    """Wait until the backend no longer uses the slots, without a time limit."""
    if batch.lingering is not None:
        await asyncio.wait([batch.lingering])


def _give_back(slots: list[int], batch: BatchResult, staging: StagedSlots) -> None:
    """Give staging slots back once the backend no longer uses them."""

    def free(call: asyncio.Future[None]) -> None:
        if not call.cancelled():  # if cancelled, the backend may still use the slots
            staging.give(slots)

    if batch.lingering is None:
        staging.give(slots)
    else:
        batch.lingering.add_done_callback(free)


def _copy_all(copies: Iterable[_PageCopy]) -> None:
    for copy in copies:
        copy_pieces(copy.sources, copy.destinations)
