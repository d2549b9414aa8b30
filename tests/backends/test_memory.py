"""What is particular to the memory engine: its limit, its named stores, what it trusts."""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping
from contextlib import AsyncExitStack, asynccontextmanager

import pytest

from asynchicache.backends.memory import MemoryBackend, open_backend
from asynchicache.errors import ClosedError, ConfigError, StorageError
from asynchicache.ports import AsyncioPort
from asynchicache.storage.binding import SlotBinding
from asynchicache.testing.backends import PoolUnderTest, fingerprint_of, slab_of
from asynchicache.types import Outcome

HIT, MISS, STORED, EXISTS, REJECTED = (
    Outcome.HIT,
    Outcome.MISS,
    Outcome.STORED,
    Outcome.EXISTS,
    Outcome.REJECTED,
)


async def open_bench(backend: MemoryBackend, pool: str = "kv", page_bytes: int = 1000) -> PoolUnderTest:
    binding = SlotBinding(slab_of(pool, page_bytes, 16), fingerprint_of("w"))
    return PoolUnderTest(await backend.open_pool(binding), binding)


@asynccontextmanager
async def backend_with(options: Mapping[str, object]) -> AsyncIterator[MemoryBackend]:
    async with AsyncExitStack() as stack:
        port = AsyncioPort(threads=1)
        stack.push_async_callback(port.aclose)
        backend = open_backend(options, port)
        stack.push_async_callback(backend.aclose)
        yield backend


@pytest.mark.asyncio
async def test_the_least_recently_used_page_goes_first() -> None:
    async with backend_with({"capacity_bytes": 3000}) as backend:
        bench = await open_bench(backend)
        await bench.put(bench.keys(1, 2, 3), [0, 1, 2])
        assert await bench.get(bench.keys(1), [3]) == [HIT]
        assert await bench.put(bench.keys(2), [4]) == [EXISTS]

        assert await bench.put(bench.keys(4), [5]) == [STORED]

        assert await bench.engine.exists(bench.keys(1, 2, 3, 4)) == bytes([1, 1, 0, 1])
        assert repr(backend) == "<MemoryBackend: 3 pages, 3000 bytes>"


@pytest.mark.asyncio
async def test_the_limit_is_for_all_pools_together() -> None:
    async with backend_with({"capacity_bytes": 3000}) as backend:
        small, large = await open_bench(backend), await open_bench(backend, "mamba", 2500)
        await small.put(small.keys(1, 2, 3), [0, 1, 2])

        assert await large.put(large.keys(1), [0]) == [STORED]

        assert await small.engine.exists(small.keys(1, 2, 3)) == bytes(3)


@pytest.mark.asyncio
async def test_a_page_larger_than_all_there_is_changes_nothing() -> None:
    async with backend_with({"capacity_bytes": 3000}) as backend:
        small, large = await open_bench(backend), await open_bench(backend, "mamba", 3001)
        await small.put(small.keys(1), [0])

        assert await large.put(large.keys(1), [0]) == [REJECTED]

        assert await small.get(small.keys(1), [1]) == [HIT]


@pytest.mark.asyncio
async def test_a_named_store_outlives_its_backend() -> None:
    async with backend_with({"name": "kept"}) as backend:
        bench = await open_bench(backend)
        await bench.put(bench.keys(1), [0])
    async with backend_with({"name": "kept"}) as backend:
        bench = await open_bench(backend)
        assert await bench.get(bench.keys(1), [1]) == [HIT]
    async with backend_with({"name": "other"}) as backend:
        bench = await open_bench(backend)
        assert await bench.get(bench.keys(1), [1]) == [MISS]
    async with backend_with({}) as backend:
        bench = await open_bench(backend)
        assert await bench.get(bench.keys(1), [1]) == [MISS]


@pytest.mark.asyncio
async def test_pages_put_without_a_seal_are_trusted_later() -> None:
    async with backend_with({"name": "unsealed", "checksum": False}) as backend:
        bench = await open_bench(backend)
        await bench.put(bench.keys(1), [0])
    async with backend_with({"name": "unsealed"}) as backend:
        bench = await open_bench(backend)
        assert await bench.get(bench.keys(1), [1]) == [HIT]


@pytest.mark.asyncio
async def test_a_damaged_page_is_corrupt_once_and_then_gone() -> None:
    async with backend_with({}) as backend:
        bench = await open_bench(backend)
        (key,) = bench.keys(1)
        bench.fill([key], [0])
        bench.binding.seal(0, key)
        header = bytes(bench.binding.header(0))
        backend.store.write(key, header, bytes(1000))

        answers = [await bench.engine.get([key], [1]) for _ in range(2)]

        assert answers == [[Outcome.CORRUPT], [MISS]]


@pytest.mark.asyncio
async def test_misuse_raises() -> None:
    async with backend_with({}) as backend:
        bench = await open_bench(backend)
        with pytest.raises(StorageError, match=r"pool 'kv'.*is open"):
            await open_bench(backend)
        await backend.aclose()
        with pytest.raises(ClosedError):
            await bench.engine.exists(bench.keys(1))
        with pytest.raises(ClosedError):
            await open_bench(backend, "mamba")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"capacity": 1}, r"no option 'capacity'; did you mean 'capacity_bytes'"),
        ({"capacity_bytes": 0}, "capacity_bytes=0 must be a whole number above 0"),
        ({"capacity_bytes": "1G"}, "capacity_bytes='1G' must be a whole number above 0"),
        ({"capacity_bytes": True}, "capacity_bytes=True must be a whole number above 0"),
        ({"checksum": 1}, "checksum=1 must be true or false"),
        ({"name": 3}, "name=3 must be text"),
    ],
)
async def test_options_are_checked(options: Mapping[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        async with backend_with(options):
            pass
