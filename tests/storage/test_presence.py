"""What the core remembers of an engine's pages: asked once, damaged ones never served, never in the way."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest

from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.errors import ConfigError, StorageError
from asynchicache.hashing import ObjectKey
from asynchicache.ports import AsyncioPort
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.guard import GuardedPool
from asynchicache.storage.limits import BatchResult, PoolLimits
from asynchicache.storage.presence import ExpiringKeys, PresenceCache, PresenceStatistics
from asynchicache.storage.protocol import Capabilities, PoolEngine
from asynchicache.testing.backends import PoolUnderTest, fingerprint_of, slab_of
from asynchicache.types import Outcome

HIT, MISS, STORED, EXISTS = Outcome.HIT, Outcome.MISS, Outcome.STORED, Outcome.EXISTS
CORRUPT, REJECTED, FAILED = Outcome.CORRUPT, Outcome.REJECTED, Outcome.FAILED


class ManualPort(AsyncioPort):
    """The real port, but for a clock that stands still until it is moved."""

    seconds = 0.0

    def now(self) -> float:
        return self.seconds


class FarEngine:
    """A memory engine that says it is shared, keeps what it has, and counts what it is asked."""

    def __init__(self, engine: PoolEngine) -> None:
        self._engine = engine
        self.asked: list[tuple[str, int]] = []
        self.failures = 0
        self.deletes = True
        self.may_delete = asyncio.Event()
        self.may_delete.set()

    @property
    def capabilities(self) -> Capabilities:
        return replace(self._engine.capabilities, shared=True, immediate=False)

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        self._note("exists", keys)
        return await self._engine.exists(keys)

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        self._note("get", keys)
        return await self._engine.get(keys, slots)

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        self._note("put", keys)
        return await self._engine.put(keys, slots)

    async def delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        self._note("delete", keys)
        await self.may_delete.wait()
        return await self._engine.delete(keys) if self.deletes else [FAILED] * len(keys)

    async def clear(self) -> int:
        return await self._engine.clear()

    async def aclose(self) -> None:
        await self._engine.aclose()

    def _note(self, verb: str, keys: Sequence[ObjectKey]) -> None:
        self.asked.append((verb, len(keys)))
        if self.failures:
            self.failures -= 1
            raise StorageError("made to fail once")


class Scene:
    def __init__(self, engine: FarEngine, bench: PoolUnderTest, guard: GuardedPool, port: ManualPort) -> None:
        self.engine = engine
        self.bench = bench
        self.guard = guard
        self.port = port

    def damage(self, keys: Sequence[ObjectKey], store: MemoryStore) -> None:
        for key in keys:
            stored = store.read(key)
            assert stored is not None
            store.drop(key)
            store.write(key, stored.header, bytes([stored.page[0] ^ 1]) + stored.page[1:])


@asynccontextmanager
async def scene(store: MemoryStore | None = None, **limits: float) -> AsyncIterator[Scene]:
    port = ManualPort(threads=2)
    backend = MemoryBackend(MemoryStore() if store is None else store)
    binding = SlotBinding(slab_of("kv", 300, 16), fingerprint_of("w"))
    engine = FarEngine(await backend.open_pool(binding))
    guard = GuardedPool(engine, binding, port, PoolLimits(**limits))
    yield Scene(engine, PoolUnderTest(engine, binding), guard, port)
    await guard.aclose()
    await port.aclose()


@pytest.mark.asyncio
async def test_what_was_written_is_known_without_asking() -> None:
    async with scene() as s:
        keys = s.bench.keys(1, 2, 3)
        s.bench.fill(keys, [0, 1, 2])
        await s.guard.put(keys[:2], [0, 1])

        assert (await s.guard.exists(keys)).outcomes == [HIT, HIT, MISS]
        assert s.engine.asked == [("put", 2), ("exists", 1)]


@pytest.mark.asyncio
async def test_what_is_known_is_counted() -> None:
    store = MemoryStore()
    async with scene(store) as s:
        keys = s.bench.keys(1, 2, 3)
        s.bench.fill(keys, [0, 1, 2])
        await s.guard.put(keys, [0, 1, 2])
        s.damage(keys[:1], store)
        await s.guard.get(keys, [3, 4, 5])
        await s.guard.exists(keys)

        assert s.guard.statistics().known == PresenceStatistics(there=2, damaged=1, recalled=3)


@pytest.mark.asyncio
async def test_calls_that_fail_are_counted_apart_from_their_pages() -> None:
    async with scene(retries=1) as s:
        s.engine.failures = 1
        await s.guard.exists(s.bench.keys(1, 2, 3))
        calls = s.guard.statistics().exists

        assert (calls.calls, calls.pages, calls.errors, calls.late) == (1, 3, 1, 0)
        assert calls.latencies.count == 1


@pytest.mark.asyncio
async def test_knowledge_ages() -> None:
    async with scene(known_seconds=30) as s:
        keys = s.bench.keys(1)
        s.bench.fill(keys, [0])
        await s.guard.put(keys, [0])
        s.port.seconds += 31
        await s.guard.exists(keys)

        assert s.engine.asked == [("put", 1), ("exists", 1)]


@pytest.mark.asyncio
async def test_a_page_that_others_deleted_is_forgotten_with_its_miss() -> None:
    store = MemoryStore()
    async with scene(store) as s:
        keys = s.bench.keys(1)
        s.bench.fill(keys, [0])
        await s.guard.put(keys, [0])
        store.drop(keys[0])

        assert (await s.guard.exists(keys)).outcomes == [HIT]  # stale, and allowed to be
        assert (await s.guard.get(keys, [3])).outcomes == [MISS]
        assert (await s.guard.exists(keys)).outcomes == [MISS]


@pytest.mark.asyncio
async def test_a_deleted_page_is_asked_for_again() -> None:
    async with scene() as s:
        keys = s.bench.keys(1)
        s.bench.fill(keys, [0])
        await s.guard.put(keys, [0])
        await s.guard.delete(keys)

        assert (await s.guard.exists(keys)).outcomes == [MISS]


class KeepsDamage(MemoryStore):
    """A store whose engine cannot drop what it found damaged, as most cannot."""

    stubborn = False

    def drop(self, key: ObjectKey) -> bool:
        return False if self.stubborn else super().drop(key)


@pytest.mark.asyncio
async def test_a_damaged_page_is_a_miss_until_it_is_written_anew() -> None:
    store = KeepsDamage()
    async with scene(store) as s:
        keys = s.bench.keys(1)
        s.bench.fill(keys, [0])
        await s.guard.put(keys, [0])
        s.damage(keys, store)
        store.stubborn = True

        assert (await s.guard.get(keys, [3])).outcomes == [CORRUPT]
        asked = len(s.engine.asked)
        assert (await s.guard.exists(keys)).outcomes == [MISS]
        assert len(s.engine.asked) == asked

        store.stubborn = False
        assert (await s.guard.put(keys, [0])).outcomes == [STORED]
        assert s.engine.asked[-2:] == [("delete", 1), ("put", 1)]
        assert (await s.guard.get(keys, [3])).outcomes == [HIT]


@pytest.mark.asyncio
async def test_a_damaged_page_that_another_rank_stores_anew_is_asked_for_again() -> None:
    store = MemoryStore()
    async with scene(store) as s:
        keys = s.bench.keys(1)
        s.bench.fill(keys, [0])
        await s.guard.put(keys, [0])
        s.damage(keys, store)
        assert (await s.guard.get(keys, [3])).outcomes == [CORRUPT]
        await s.engine.put(keys, [0])

        assert (await s.guard.exists(keys)).outcomes == [MISS]
        s.guard.repaired(keys)
        assert (await s.guard.exists(keys)).outcomes == [HIT]


@pytest.mark.asyncio
async def test_a_damaged_page_that_cannot_be_replaced_is_not_called_stored() -> None:
    store = KeepsDamage()
    async with scene(store) as s:
        keys = s.bench.keys(1, 2)
        s.bench.fill(keys, [0, 1])
        await s.guard.put(keys, [0, 1])
        s.damage(keys[:1], store)
        store.stubborn = True
        await s.guard.get(keys, [3, 4])
        s.engine.deletes = False

        assert (await s.guard.put(keys, [0, 1])).outcomes == [REJECTED, EXISTS]


@pytest.mark.asyncio
async def test_nothing_is_stored_before_a_deletion_that_is_late() -> None:
    store = MemoryStore()
    async with scene(store, deadline=0.01) as s:
        keys = s.bench.keys(1, 2)
        s.bench.fill(keys, [0, 1])
        await s.guard.put(keys[:1], [0])
        s.damage(keys[:1], store)
        await s.guard.get(keys[:1], [3])
        s.engine.may_delete.clear()

        assert (await s.guard.put(keys, [0, 1])).outcomes == [REJECTED] * 2

        s.engine.may_delete.set()
        for _ in range(10):
            await asyncio.sleep(0)
        assert (await s.guard.put(keys, [0, 1])).outcomes == [STORED] * 2
        assert (await s.guard.get(keys, [3, 4])).outcomes == [HIT] * 2


@pytest.mark.asyncio
async def test_reads_that_failed_are_asked_for_again_and_writes_are_not() -> None:
    async with scene() as s:
        keys = s.bench.keys(1)
        s.bench.fill(keys, [0])
        s.engine.failures = 1
        assert (await s.guard.put(keys, [0])).outcomes == [FAILED]
        assert (await s.guard.put(keys, [0])).outcomes == [STORED]
        s.engine.failures = 1
        assert (await s.guard.get(keys, [3])).outcomes == [HIT]
        assert [verb for verb, _ in s.engine.asked] == ["put", "put", "get", "get"]


@pytest.mark.asyncio
async def test_a_call_moves_no_more_bytes_than_it_may() -> None:
    async with scene(batch_bytes=3 * 4096) as s:
        keys = s.bench.keys(*range(8))
        s.bench.fill(keys, range(8))
        await s.guard.put(keys, range(8))

        assert s.engine.asked == [("put", 3), ("put", 3), ("put", 2)]


@pytest.mark.asyncio
async def test_clear_forgets_this_pool_and_what_is_known_of_it() -> None:
    store = MemoryStore()
    async with scene(store) as s:
        keys = s.bench.keys(1, 2)
        s.bench.fill(keys, [0, 1])
        await s.guard.put(keys, [0, 1])
        store.write(keys[0]._replace(pool="other"), b"", b"x")

        assert await s.guard.clear() == 2
        assert (await s.guard.exists(keys)).outcomes == [MISS, MISS]
        assert len(store) == 1


@pytest.mark.asyncio
async def test_what_is_learnt_while_a_pool_is_cleared_is_not_believed() -> None:
    async with scene() as s:
        keys = s.bench.keys(1, 2)
        s.bench.fill(keys, [0, 1])
        assert (await s.guard.put(keys[:1], [0])).outcomes == [STORED]
        clear = s.engine.clear

        async def slowly() -> int:
            await s.guard.put(keys[1:], [1])
            assert (await s.guard.exists(keys)).outcomes == [HIT, HIT]
            return await clear()

        s.engine.clear = slowly  # type: ignore[method-assign]
        assert await s.guard.clear() == 2

        assert (await s.guard.exists(keys)).outcomes == [MISS, MISS]


@pytest.mark.asyncio
async def test_a_damaged_page_stays_a_miss_when_its_pool_cannot_be_cleared() -> None:
    store = MemoryStore()
    async with scene(store) as s:
        keys = s.bench.keys(1)
        s.bench.fill(keys, [0])
        await s.guard.put(keys, [0])
        s.damage(keys, store)
        assert (await s.guard.get(keys, [1])).outcomes == [CORRUPT]

        async def refuses() -> int:
            raise StorageError("made to fail")

        s.engine.clear = refuses  # type: ignore[method-assign]
        with pytest.raises(StorageError):
            await s.guard.clear()
        assert (await s.guard.exists(keys)).outcomes == [MISS]

        s.bench.fill(keys, [0])
        assert (await s.guard.put(keys, [0])).outcomes == [STORED], "what is there would be kept"
        assert (await s.guard.get(keys, [1])).outcomes == [HIT]


def test_keys_are_forgotten_the_oldest_first() -> None:
    known = ExpiringKeys(2, 10, lambda: 0.0)
    keys = [ObjectKey(bytes(32), bytes([n]) * 32, "kv", "") for n in range(3)]
    known.add(keys[:2])
    known.add(keys[:1])
    known.add(keys[2:])
    assert [key in known for key in keys] == [True, False, True]


@pytest.mark.parametrize(
    ("limits", "rule"),
    [({"batch_bytes": 0}, "above 0"), ({"retries": -1}, "at least 0"), ({"known_pages": -1}, "at least 0")],
)
def test_limits_out_of_range_are_refused(limits: dict[str, int], rule: str) -> None:
    with pytest.raises(ConfigError, match=rule):
        PoolLimits(**limits)


# By hand: what is learnt from which outcome


class Clock:
    seconds = 100.0

    def __call__(self) -> float:
        return self.seconds


def names(count: int) -> list[ObjectKey]:
    return [ObjectKey(b"f" * 32, bytes([number]) * 32, "kv", "") for number in range(count)]


def known(clock: Clock, *, shared: bool = True, **limits: float) -> PresenceCache:
    return PresenceCache(PoolLimits(**limits), shared=shared, now=clock)


def test_each_outcome_says_what_is_there_and_what_is_damaged() -> None:
    keys, pages = names(8), known(Clock())
    assert not pages
    pages.learn(keys, BatchResult([HIT, MISS, STORED, EXISTS, CORRUPT, REJECTED, FAILED, Outcome.TIMEOUT]))

    assert [pages.recall(key) for key in keys] == [HIT, None, HIT, HIT, MISS, None, None, None]
    assert [pages.recall(key, damaged_only=True) for key in keys] == [None] * 4 + [MISS] + [None] * 3
    assert pages.damaged(keys) == [keys[4]]
    assert pages.statistics() == PresenceStatistics(there=3, damaged=1, recalled=4 + 1)
    assert pages


def test_what_is_learnt_later_counts() -> None:
    keys, pages = names(4), known(Clock())
    pages.learn(keys, BatchResult([HIT, HIT, CORRUPT, CORRUPT]))
    pages.learn(keys, BatchResult([MISS, CORRUPT, STORED, HIT]))

    assert [pages.recall(key) for key in keys] == [None, MISS, HIT, MISS]
    assert pages.damaged(keys) == [keys[1], keys[3]]
    pages.forget(keys[1:3])
    assert [pages.recall(key) for key in keys] == [None, MISS, None, MISS], "a deletion may have failed"
    pages.clear()
    assert not pages
    assert [pages.recall(key) for key in keys] == [None] * 4


def test_doubt_forgets_what_is_there_and_not_what_is_damaged() -> None:
    keys, pages = names(2), known(Clock())
    pages.learn(keys, BatchResult([HIT, CORRUPT]))
    pages.invalidate()

    assert [pages.recall(key) for key in keys] == [None, MISS]
    assert pages


def test_of_an_engine_of_ones_own_only_damage_is_remembered() -> None:
    keys, pages = names(3), known(Clock(), shared=False)
    pages.learn(keys, BatchResult([HIT, STORED, CORRUPT]))
    assert [pages.recall(key) for key in keys] == [None, None, MISS]


def test_a_page_is_remembered_for_so_long_and_a_damaged_one_for_ever() -> None:
    clock = Clock()
    keys, pages = names(2), known(clock, known_seconds=30.0)
    pages.learn(keys, BatchResult([HIT, CORRUPT]))
    clock.seconds += 29.9
    assert [pages.recall(key) for key in keys] == [HIT, MISS]
    clock.seconds += 0.1
    assert [pages.recall(key) for key in keys] == [None, MISS]
    clock.seconds += 1e9
    assert pages.recall(keys[1]) is MISS


def test_the_pages_seen_last_are_remembered() -> None:
    keys, pages = names(4), known(Clock(), known_pages=2)
    pages.learn(keys[:2], BatchResult([HIT, HIT]))
    pages.learn(keys[:1], BatchResult([HIT]))
    pages.learn(keys[2:3], BatchResult([HIT]))

    assert [pages.recall(key) for key in keys] == [HIT, None, HIT, None]
    assert pages.statistics().there == 2
