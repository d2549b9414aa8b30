"""Chunks of all KV cache groups in storage: one pool per group, over the rows of vLLM's primary tier.

Confined to the event loop of the tier's bridge.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Self, TypeVar

from asynchicache.errors import CacheError
from asynchicache.integrations.page_memory import PageMemory, PagePart
from asynchicache.integrations.page_pool import PagePool, PagePoolStatistics
from asynchicache.integrations.page_store import PageStore
from asynchicache.integrations.vllm.hints import GROUP_BYTES
from asynchicache.integrations.vllm.options import TierOptions, group_identity, group_pool
from asynchicache.integrations.vllm.rows import GroupRuns, MemoryRun, chunk_runs, merged
from asynchicache.types import Outcome

T = TypeVar("T")

logger = logging.getLogger(__name__)

_THERE = frozenset({Outcome.STORED, Outcome.EXISTS})


class Moved(NamedTuple):
    """The result of a load or save.

    Attributes:
        outcomes: one per key, in order.
        seconds: duration.
    """

    outcomes: list[Outcome]
    seconds: float


def group_of(key: bytes) -> int:
    """Return the number of a chunk's KV cache group."""
    return int.from_bytes(key[-GROUP_BYTES:], "big")


class ChunkStore:
    """Stores and loads chunks; created by `open`.

    Attributes:
        statistics: by pool, as of the last call; any thread may read it.
    """

    def __init__(self, store: PageStore, pools: Mapping[int, PagePool]) -> None:
        self._store: PageStore | None = store
        self._pools = pools
        self._chunk_bytes = {group: pool.memory.page_bytes for group, pool in pools.items()}
        self.statistics: dict[str, PagePoolStatistics] = store.statistics()

    @classmethod
    async def open(
        cls, options: TierOptions, config: Any, rows: memoryview, known: GroupRuns | None = None
    ) -> Self:
        """
        Args:
            config: vLLM's `OffloadingConfig`.
            rows: the primary tier, `[chunks, bytes]`.
            known: byte ranges of a row that belong to a chunk, by group; None if unknown.

        Raises:
            ConfigError: the backend is unknown, its options are invalid, or bytes of other chunks would be
                stored.
            StorageError: the storage cannot be used.
        """
        stored = chunk_runs(config, known, whole_rows=options.whole_rows)
        store = await PageStore.open(options)
        try:
            pools = {}
            for group in config.groups:
                runs = stored[group.group_id]
                identity = group_identity(config, group, options, runs)
                memory = _memory(rows, runs)
                pools[group.group_id] = await store.open_pool(group_pool(group.group_id), memory, identity)
        except BaseException:
            await store.aclose()
            raise
        return cls(store, pools)

    def nbytes(self, keys: Iterable[bytes]) -> int:
        """Return the total size of these chunks in storage."""
        return sum(self._chunk_bytes.get(group_of(key), 0) for key in keys)

    async def exists(self, keys: Sequence[bytes]) -> list[bool]:
        """Return whether storage has each chunk; False where the lookup failed."""
        return await self._by_group(
            keys, lambda pool, places: pool.exists(_pick(keys, places)), default=False
        )

    async def load(self, keys: Sequence[bytes], rows: Sequence[int]) -> Moved:
        """Read chunk `i` into row `rows[i]`."""
        return await self._move(keys, lambda pool, places: pool.get(_pick(keys, places), _pick(rows, places)))

    async def save(self, keys: Sequence[bytes], rows: Sequence[int]) -> Moved:
        """Store row `rows[i]` as chunk `i`, unless storage has it."""

        async def put(pool: PagePool, places: list[int]) -> list[Outcome]:
            there = await pool.exists(_pick(keys, places))
            outcomes = dict(zip(places, [Outcome.EXISTS] * len(places), strict=True))
            new = [place for place, known in zip(places, there, strict=True) if not known]
            stored = await pool.put(_pick(keys, new), _pick(rows, new)) if new else []
            outcomes.update(zip(new, stored, strict=True))
            return list(outcomes.values())

        return await self._move(keys, put)

    async def aclose(self) -> bool:
        """Wait for running calls, up to a time limit, close the storage and release the rows. Idempotent.

        Returns:
            False if a call did not end and may still use the rows.
        """
        store, self._store, self._pools = self._store, None, {}
        if store is None:
            return True
        await store.aclose()
        self.statistics = store.statistics()
        return not any(pool.storage.running for pool in self.statistics.values() if not pool.staged)

    async def _move(
        self, keys: Sequence[bytes], call: Callable[[PagePool, list[int]], Awaitable[list[Outcome]]]
    ) -> Moved:
        clock = asyncio.get_running_loop().time
        started = clock()
        outcomes = await self._by_group(keys, call, default=Outcome.FAILED)
        return Moved(outcomes, clock() - started)

    async def _by_group(
        self, keys: Sequence[bytes], call: Callable[[PagePool, list[int]], Awaitable[list[T]]], *, default: T
    ) -> list[T]:
        """Call each group's pool with its keys; `default` for a group without a pool and for a failed call.

        Returns only after all calls have ended, because they use vLLM's rows.
        """
        places: dict[int, list[int]] = {}
        for place, key in enumerate(keys):
            places.setdefault(group_of(key), []).append(place)
        asked = {group: found for group, found in places.items() if group in self._pools}
        calls = [call(self._pools[group], found) for group, found in asked.items()]
        answers = await asyncio.gather(*calls, return_exceptions=True)
        if self._store is not None:
            self.statistics = self._store.statistics()
        result = [default] * len(keys)
        for found, answer in zip(asked.values(), answers, strict=True):
            if isinstance(answer, CacheError):
                logger.warning("%d chunks: %s", len(found), answer)
            elif isinstance(answer, BaseException):
                raise answer
            else:
                for place, value in zip(found, answer, strict=True):
                    result[place] = value
        return result


def _memory(rows: memoryview, runs: Sequence[MemoryRun] | None) -> PageMemory:
    """Return the bytes of a group's chunks in the rows."""
    if runs is None:
        return PageMemory.of_view(rows)
    stride = rows.nbytes // len(rows)
    parts = [PagePart(rows.cast("B"), run.offset, stride, run.nbytes) for run in merged(runs)]
    return PageMemory(parts, len(rows))


def is_there(outcome: Outcome) -> bool:
    """Return whether storage has a chunk after a `save` with this outcome."""
    return outcome in _THERE


def _pick(items: Sequence[T], places: Sequence[int]) -> list[T]:
    return [items[place] for place in places]
