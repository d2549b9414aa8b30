"""A full store keeps what can be restored: the newest paths, their beginnings before their ends, and no state
whose pages are gone. The same tests for every engine of ours that evicts by itself and can be bounded."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Protocol

import pytest

from asynchicache.backends import file, memory
from asynchicache.ports import AsyncioPort
from asynchicache.storage.protocol import StorageBackend
from asynchicache.testing.backends import PoolUnderTest, TearingBinding, fingerprint_of, slab_of
from asynchicache.types import Outcome
from storage.file_stores import PAGE_BYTES, capacity_for, pool_bytes
from storage.paths import converse, path, prefix, touch

HIT, MISS, STORED, EXISTS, REJECTED = (
    Outcome.HIT,
    Outcome.MISS,
    Outcome.STORED,
    Outcome.EXISTS,
    Outcome.REJECTED,
)


class Place(Protocol):
    """A store with a bound, which may be opened again and again."""

    def open(self, pages: int, states: int = 0) -> AbstractAsyncContextManager[StorageBackend]:
        """A store for so many pages, and states beside them."""
        ...


class MemoryPlace:
    def __init__(self, folder: Path) -> None:
        self._store = memory.MemoryStore()

    @asynccontextmanager
    async def open(self, pages: int, states: int = 0) -> AsyncIterator[StorageBackend]:
        self._store.capacity_bytes = (pages + states) * PAGE_BYTES
        backend = memory.MemoryBackend(self._store)
        yield backend
        await backend.aclose()


class FilePlace:
    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @asynccontextmanager
    async def open(self, pages: int, states: int = 0) -> AsyncIterator[StorageBackend]:
        bound: object = capacity_for(pages)
        if states:
            bound = {"kv": pool_bytes(pages), "mamba": pool_bytes(states)}
        async with AsyncExitStack() as stack:
            port = AsyncioPort(threads=4, seed=0)
            stack.push_async_callback(port.aclose)
            backend = file.open_backend({"path": self._folder, "capacity_bytes": bound}, port)
            stack.push_async_callback(backend.aclose)
            yield backend


@pytest.fixture(params=[MemoryPlace, FilePlace], ids=["memory", "file"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    make: Callable[[Path], Place] = request.param
    return make(tmp_path)


async def open_bench(backend: StorageBackend, pool: str = "kv", *, weights: str = "w1") -> PoolUnderTest:
    slab, depends_on = slab_of(pool, PAGE_BYTES, 200), None if pool == "kv" else "kv"
    binding = TearingBinding(slab, fingerprint_of(f"{weights} {pool}"), depends_on=depends_on)
    return PoolUnderTest(await backend.open_pool(binding), binding)


@pytest.mark.asyncio
async def test_the_newest_conversations_that_fit_are_whole_after_a_restart(place: Place) -> None:
    async with place.open(64) as backend:
        bench = await open_bench(backend)
        for conversation in range(20):
            await converse([bench], conversation)
    async with place.open(64) as backend:
        bench = await open_bench(backend)
        kept = [await prefix(bench, path(conversation)) for conversation in range(20)]

        assert kept[13:] == [16] * 7
        assert kept[:13] == [8] * 13  # what all of them begin with


@pytest.mark.asyncio
async def test_the_newest_conversations_keep_their_states_too(place: Place) -> None:
    """The eight shared pages have a state at their end, and each conversation's own have another."""
    async with place.open(64, states=8) as backend:
        benches = [await open_bench(backend), await open_bench(backend, "mamba")]
        for conversation in range(20):
            await converse(benches, conversation, lengths=[8, 16])
    async with place.open(64, states=8) as backend:
        pages, states = await open_bench(backend), await open_bench(backend, "mamba")
        for conversation in range(13, 20):
            numbers = path(conversation)
            assert await prefix(pages, numbers) == 16
            assert await states.engine.exists(states.keys(numbers[7], numbers[15])) == b"\1\1"


@pytest.mark.asyncio
async def test_a_path_loses_its_end_first(place: Place) -> None:
    async with place.open(8) as backend:
        bench = await open_bench(backend)
        await bench.put(bench.keys(*range(8)), range(8))
        for kept, new in ((7, 100), (6, 101), (5, 102)):
            assert await bench.put(bench.keys(new), [0]) == [STORED]
            assert await prefix(bench, range(8)) == kept


@pytest.mark.asyncio
async def test_a_read_counts_as_a_use_of_the_whole_path(place: Place) -> None:
    async with place.open(8) as backend:
        bench = await open_bench(backend)
        await bench.put(bench.keys(*range(4)), range(4))
        await bench.put(bench.keys(*range(10, 14)), range(4))
        assert await bench.get(bench.keys(*range(4)), range(4)) == [HIT] * 4

        await bench.put(bench.keys(20, 21, 22, 23, 24), range(5))

        assert await prefix(bench, range(10, 14)) == 0
        assert await prefix(bench, range(4)) == 3


@pytest.mark.asyncio
async def test_what_is_touched_last_goes_last(place: Place) -> None:
    async with place.open(4) as backend:
        bench = await open_bench(backend)
        for number in range(4):
            await bench.put(bench.keys(number), [0])
        await touch(bench, [0, 77, 2])  # 2 first, then one that is not there, then 0

        await bench.put(bench.keys(10), [0])
        await bench.put(bench.keys(11), [0])
        await bench.put(bench.keys(12), [0])

        assert await bench.engine.exists(bench.keys(0, 1, 2, 3)) == bytes([1, 0, 0, 0])


@pytest.mark.asyncio
async def test_the_beginning_of_a_path_that_is_too_long_stays(place: Place) -> None:
    async with place.open(64) as backend:
        bench = await open_bench(backend)
        await bench.put(bench.keys(*range(1000, 1064)), range(64))

        outcomes = await bench.put(bench.keys(*range(100)), range(100))

        assert outcomes == [STORED] * 64 + [REJECTED] * 36
        assert await prefix(bench, range(100)) == 64
        assert await prefix(bench, range(1000, 1064)) == 0


@pytest.mark.asyncio
async def test_pages_that_are_there_make_no_room_for_others_of_their_path(place: Place) -> None:
    async with place.open(8) as backend:
        bench = await open_bench(backend)
        await bench.put(bench.keys(*range(6)), range(6))
        await bench.put(bench.keys(100, 101), range(2))

        outcomes = await bench.put(bench.keys(*range(10)), range(10))

        assert outcomes == [EXISTS] * 6 + [STORED] * 2 + [REJECTED] * 2
        assert await prefix(bench, range(10)) == 8


@pytest.mark.asyncio
@pytest.mark.parametrize("how", ["evicted", "deleted", "damaged", "cleared"])
async def test_a_state_that_lost_its_page_goes_first(place: Place, how: str) -> None:
    async with place.open(4, states=3) as backend:
        pages, states = await open_bench(backend), await open_bench(backend, "mamba")
        if how == "damaged":
            pages.tear(pages.keys(1))
        for number in (1,) if how == "cleared" else (1, 2, 3):
            await pages.put(pages.keys(number), [0])
        for number in (3, 2, 1):  # in the order of their use
            await states.put(states.keys(number), [0])
        await lose(pages, how)
        assert await pages.engine.exists(pages.keys(1)) == b"\0"

        assert await first_to_go(states, [1, 2, 3]) == [1]


@pytest.mark.asyncio
async def test_a_state_without_its_page_is_not_saved_by_a_touch(place: Place) -> None:
    async with place.open(4, states=3) as backend:
        pages, states = await open_bench(backend), await open_bench(backend, "mamba")
        for number in (1, 2, 3):
            await pages.put(pages.keys(number), [0])
            await states.put(states.keys(number), [0])
        await pages.engine.delete(pages.keys(2))
        await touch(states, [2])
        assert await first_to_go(states, [1, 2, 3]) == [2]


@pytest.mark.asyncio
@pytest.mark.parametrize("order", [("kv", "mamba"), ("mamba", "kv")])
async def test_a_state_whose_page_was_lost_before_goes_first_after_a_restart(
    tmp_path: Path, order: Sequence[str]
) -> None:
    place = FilePlace(tmp_path)
    async with place.open(4, states=3) as backend:
        pages, states = await open_bench(backend), await open_bench(backend, "mamba")
        for number in (2, 3):
            await pages.put(pages.keys(number), [0])
        for number in (3, 2, 1):
            await states.put(states.keys(number), [0])
    async with place.open(4, states=3) as backend:
        benches = {pool: await open_bench(backend, pool) for pool in order}
        assert await first_to_go(benches["mamba"], [1, 2, 3]) == [1]


@pytest.mark.asyncio
async def test_of_two_models_one_page_is_enough_for_a_state_to_stand_on(place: Place) -> None:
    """Pools are known to each other by name: no state goes first that may still be restored from."""
    async with place.open(8, states=3) as backend:
        models = [await open_bench(backend, weights=weights) for weights in ("w1", "w2")]
        states = await open_bench(backend, "mamba")
        for number in (1, 2, 3):
            for pages in models:
                await pages.put(pages.keys(number), [0])
        for number in (3, 2, 1):
            await states.put(states.keys(number), [0])
        await models[0].engine.delete(models[0].keys(1))
        await touch(models[1], [1, 2, 3])
        await touch(states, [1])
        assert 1 not in await first_to_go(states, [1, 2, 3])


@pytest.mark.asyncio
async def test_after_a_kill_a_path_that_was_stored_at_once_loses_its_end_first(tmp_path: Path) -> None:
    """The order of use is written down at the end; without it that of the last writes counts."""
    left = tmp_path / "left"
    async with FilePlace(tmp_path / "store").open(8) as backend:
        bench = await open_bench(backend)
        await bench.put(bench.keys(*range(8)), range(8))
        shutil.copytree(tmp_path / "store", left)
    async with FilePlace(left).open(8) as backend:
        bench = await open_bench(backend)
        await bench.put(bench.keys(100, 101, 102), range(3))
        assert await prefix(bench, range(8)) == 5


async def lose(pages: PoolUnderTest, how: str) -> None:
    """Let page 1, one of three in a store of four and the oldest, leave it."""
    if how == "evicted":
        await touch(pages, [3, 2])
        await pages.put(pages.keys(20, 21), [0, 1])
    elif how == "deleted":
        await pages.engine.delete(pages.keys(1))
    elif how == "cleared":
        await pages.engine.clear()
    else:
        assert await pages.get(pages.keys(1), [0]) == [Outcome.CORRUPT]


async def first_to_go(bench: PoolUnderTest, numbers: Sequence[int]) -> list[int]:
    """Put new pages, one by one, until some of these are gone; which."""
    for new in range(500, 600):
        found = await bench.engine.exists(bench.keys(*numbers))
        if not all(found):
            return [number for number, there in zip(numbers, found, strict=True) if not there]
        await bench.put(bench.keys(new), [0])
    raise AssertionError("nothing makes room")
