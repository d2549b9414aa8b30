"""Pages in storage as several tensor-parallel ranks would store them, whatever the size of the group.

Pages of a rank hold its heads, so a group of another size cannot read them. Here a page is stored as the
pages of `parts` ranks, each under that rank's key. A rank of a smaller group writes and reads several of them
for each page of its own, through slots of staging memory; a group of that many ranks needs no staging.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Protocol, TypeVar

import torch

from asynchicache.hashing import ObjectKey, PlacedPage
from asynchicache.layouts import SlotLayout
from asynchicache.ports import Port
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.protocol import (
    OptionalVerbs,
    PoolBinding,
    PoolEngine,
    StorageBackend,
    check_backend,
)
from asynchicache.types import Outcome

T = TypeVar("T")

_BATCH_PAGES = 16
_CALLS = 4

STAGED_PAGES = _BATCH_PAGES * _CALLS
"""Slots of staging memory for each part of a pool."""

_READ_ORDER = (Outcome.FAILED, Outcome.CORRUPT, Outcome.MISS, Outcome.HIT)
_WRITE_ORDER = (Outcome.FAILED, Outcome.REJECTED, Outcome.STORED, Outcome.EXISTS)
_DELETE_ORDER = (Outcome.FAILED, Outcome.REJECTED, Outcome.HIT, Outcome.MISS)
"""The outcome of a page is the first of these that any of its parts has."""


class ItemMemory(Protocol):
    """Host slots of a pool; `pools.host.HostPool` is one."""

    @property
    def layout(self) -> SlotLayout: ...

    def items(self, name: str) -> torch.Tensor:
        """One tensor of every slot as bytes, uint8 `[layers, slots, units, unit_bytes]`."""
        ...


@dataclass(frozen=True, slots=True)
class StoredPart:
    """A part of a pool's pages, as another rank would hold it.

    Attributes:
        binding: its keys, and its slots of staging memory.
        memory: the same slots.
        rows: by tensor, the rows along the first dimension of the whole tensor that the part has, in order.
    """

    binding: SlotBinding
    memory: ItemMemory
    rows: Mapping[str, Sequence[int]]


@dataclass(frozen=True, slots=True)
class DividedPool:
    """A pool, and the parts that its pages are stored as."""

    memory: ItemMemory
    parts: Sequence[StoredPart]


class DividedStorage:
    """A `StorageBackend` that stores pages of some pools in parts.

    Args:
        pools: by name; other pools are stored as they are.
        port: runs copies to and from staging memory.
    """

    def __init__(self, backend: StorageBackend, pools: Mapping[str, DividedPool], port: Port) -> None:
        self.name = check_backend(f"storage {backend!r}", backend).name
        self._backend = backend
        self._pools = pools
        self._port = port

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:
        divided = self._pools.get(binding.pool)
        if divided is None:
            return await self._backend.open_pool(binding)
        binding.regions()  # says that this uses the pool's memory itself, not through `page`
        engines = [await self._backend.open_pool(part.binding) for part in divided.parts]
        return _DividedEngine(binding, divided, engines, self._port)

    async def aclose(self) -> None:
        await self._backend.aclose()


class _DividedEngine:
    """The engines of the parts as one. It has the optional verbs whose answers can be put together."""

    def __init__(
        self, binding: PoolBinding, pool: DividedPool, engines: Sequence[PoolEngine], port: Port
    ) -> None:
        self._binding = binding
        self._pool = pool
        self._engines = engines
        self._port = port
        self._free = list(range(STAGED_PAGES))
        self._calls = asyncio.Semaphore(_CALLS)
        self.evicts = any(OptionalVerbs(engine).evicts for engine in engines)
        inner = engines[0].capabilities
        self.capabilities = replace(
            inner,
            checks=True,
            immediate=False,
            batch_pages=min(inner.batch_pages, _BATCH_PAGES),
            concurrency=min(inner.concurrency, _CALLS),
        )

    @property
    def full(self) -> bool:
        return any(OptionalVerbs(engine).full for engine in self._engines)

    @property
    def degraded(self) -> bool:
        return any(OptionalVerbs(engine).degraded for engine in self._engines)

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        found = await self._each(lambda engine, keys: engine.exists(keys), keys)
        return bytearray(map(_all_there, zip(*found, strict=True)))

    async def confirm(self, keys: Sequence[ObjectKey]) -> bytearray:
        found = await self._each(lambda engine, keys: OptionalVerbs(engine).confirm(keys), keys)
        return bytearray(map(_all_there, zip(*found, strict=True)))

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for at in range(0, len(keys), _BATCH_PAGES):
            async with self._staging(keys[at : at + _BATCH_PAGES]) as staged:
                part = keys[at : at + len(staged)]
                found = await self._each(partial(_get, staged), part)
                into = slots[at : at + len(staged)]
                outcomes += await self._blocking(partial(self._join, found, part, staged, into))
        return outcomes

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        outcomes: list[Outcome] = []
        for at in range(0, len(keys), _BATCH_PAGES):
            async with self._staging(keys[at : at + _BATCH_PAGES]) as staged:
                part = keys[at : at + len(staged)]
                await self._blocking(partial(self._divide, staged, slots[at : at + len(staged)]))
                found = await self._each(partial(_put, staged), part)
                outcomes += _merged(found, _WRITE_ORDER)
        return outcomes

    async def delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        return _merged(await self._each(lambda engine, keys: engine.delete(keys), keys), _DELETE_ORDER)

    async def clear(self) -> int:
        return max(await _all([engine.clear() for engine in self._engines]))

    async def touch(self, keys: Sequence[ObjectKey]) -> None:
        await self._each(lambda engine, keys: OptionalVerbs(engine).touch(keys), keys)

    async def label(self, label: bytes) -> None:
        await _all([OptionalVerbs(engine).label(label) for engine in self._engines])

    async def aclose(self) -> None:
        await _all([engine.aclose() for engine in self._engines])

    async def _each(
        self, call: Callable[[PoolEngine, list[ObjectKey]], Awaitable[T]], keys: Sequence[ObjectKey]
    ) -> list[T]:
        """Call the engine of each part with its keys."""
        pages = [PlacedPage(key.digest, key.group, key.place) for key in keys]
        return await _all(
            [
                call(engine, list(map(part.binding.placed_key, pages)))
                for part, engine in zip(self._pool.parts, self._engines, strict=True)
            ]
        )

    @asynccontextmanager
    async def _staging(self, keys: Sequence[ObjectKey]) -> AsyncIterator[list[int]]:
        """Slots of staging memory, one a key. Others may use them only when no call does any more."""
        async with self._calls:
            taken, self._free = self._free[: len(keys)], self._free[len(keys) :]
            try:
                yield taken
            finally:
                self._free += taken

    async def _blocking(self, call: Callable[[], T]) -> T:
        """Run `call` off the loop, and wait for its end even if cancelled: it uses slots."""
        (result,) = await _all([self._port.run_blocking(call)], stops=False)
        return result

    # Copies, off the loop

    def _divide(self, staged: Sequence[int], slots: Sequence[int]) -> None:
        for part in self._pool.parts:
            for whole, piece, rows in self._tensors(part):
                piece[:, list(staged)] = whole[:, list(slots)].index_select(3, rows)

    def _join(
        self,
        found: Sequence[Sequence[Outcome]],
        keys: Sequence[ObjectKey],
        staged: Sequence[int],
        slots: Sequence[int],
    ) -> list[Outcome]:
        """Put together the pages that all parts have; returns the outcome of each."""
        checked = [
            [
                self._checked(outcome, part, engine, slot, key)
                for outcome, slot, key in zip(outcomes, staged, keys, strict=True)
            ]
            for outcomes, part, engine in zip(found, self._pool.parts, self._engines, strict=True)
        ]
        merged = _merged(checked, _READ_ORDER)
        hits = [place for place, outcome in enumerate(merged) if outcome is Outcome.HIT]
        sources, into = [staged[place] for place in hits], [slots[place] for place in hits]
        for part in self._pool.parts if hits else ():
            for whole, piece, rows in self._tensors(part):
                for source, slot in zip(sources, into, strict=True):
                    whole[:, slot].index_copy_(2, rows, piece[:, source])
        for place in hits:
            self._binding.seal(slots[place], keys[place])
        return merged

    @staticmethod
    def _checked(
        outcome: Outcome, part: StoredPart, engine: PoolEngine, slot: int, key: ObjectKey
    ) -> Outcome:
        """The outcome of a read, checked as the core would (`Capabilities.checks`)."""
        promises = engine.capabilities
        if outcome is Outcome.HIT and (promises.shared or not promises.checks):
            return part.binding.check(slot, part.binding.key(key.digest))
        return outcome

    def _tensors(self, part: StoredPart) -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        """By tensor: all slots of the pool and of the part, `[layers, slots, entries, rows, bytes]`, and the
        part's rows in the pool."""
        return [
            (_rows_of(self._pool.memory, name), _rows_of(part.memory, name), torch.tensor(rows))
            for name, rows in part.rows.items()
        ]


async def _get(slots: Sequence[int], engine: PoolEngine, keys: list[ObjectKey]) -> list[Outcome]:
    return await engine.get(keys, slots)


async def _put(slots: Sequence[int], engine: PoolEngine, keys: list[ObjectKey]) -> list[Outcome]:
    return await engine.put(keys, slots)


def _all_there(bits: tuple[int, ...]) -> int:
    """What `exists` says of a page, given what it says of each part."""
    return max(bits) if all(bits) else 0


def _rows_of(memory: ItemMemory, name: str) -> torch.Tensor:
    """One tensor as bytes, `[layers, slots, entries, rows, bytes of a row]`."""
    items, tensor = memory.items(name), memory.layout.tensors[name]
    rows = tensor.spec.shape[0]
    entries = tensor.item_bytes // tensor.spec.unit_bytes
    layers, slots, units, size = items.shape
    if units == 1:  # the last dimension has no gaps, so this is a view
        return items.view(layers, slots, entries, rows, size // entries // rows)
    return items.view(layers, slots, entries, rows, size // rows)


def _merged(found: Sequence[Sequence[Outcome]], order: Sequence[Outcome]) -> list[Outcome]:
    """The outcome of each page, of those of its parts."""
    return [min(parts, key=order.index) for parts in zip(*found, strict=True)]


async def _all(calls: Sequence[Awaitable[T]], *, stops: bool = True) -> list[T]:
    """Wait for the end of all calls, which use slots until then; the first error is raised afterwards.

    `stops`: cancelling a call ends it.
    """
    tasks = [asyncio.ensure_future(call) for call in calls]
    cancelled: asyncio.CancelledError | None = None
    while not all(task.done() for task in tasks):
        try:
            await asyncio.wait(tasks)
        except asyncio.CancelledError as error:
            cancelled = error
            for task in tasks if stops else ():
                task.cancel()
    if cancelled is not None:
        for task in tasks:
            if not task.cancelled():
                task.exception()  # mark it as retrieved
        raise cancelled
    return [task.result() for task in tasks]
