"""Everything that may go wrong, at once, behind the core's guard: no HIT has other bytes, and it ends."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from uuid import uuid4

import pytest

from asynchicache.backends.hf3fs import open_backend
from asynchicache.ports import AsyncioPort
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.guard import GuardedPool, PoolLimits
from asynchicache.testing.backends import PoolUnderTest, fingerprint_of, slab_of
from asynchicache.testing.faults import FaultRates, Faulty
from asynchicache.types import Outcome
from storage.hf3fs_names import FRAME_BYTES, PAGE_BYTES, Clock, names_here, names_server
from storage.usrbio_standin import Behaviour, Usrbio

HIT, MISS, STORED, EXISTS = Outcome.HIT, Outcome.MISS, Outcome.STORED, Outcome.EXISTS
MANY = FaultRates(fail=0.1, raises=0.1, partial=0.2, lie=0.1, swap=0.2)


class Scene:
    """A faulty backend behind the core's guard."""

    def __init__(self, faults: Faulty, bench: PoolUnderTest, guard: GuardedPool) -> None:
        self.faults = faults
        self.bench = bench
        self.guard = guard

    async def put(self, names: list[int], slots: list[int]) -> list[Outcome]:
        keys = self.bench.keys(*names)
        self.bench.fill(keys, slots)
        return list((await self.guard.put(keys, slots)).outcomes)

    async def get(self, names: list[int], slots: list[int]) -> list[Outcome]:
        keys = self.bench.keys(*names)
        self.bench.poison(slots)
        batch = await self.guard.get(keys, slots)
        for key, slot, outcome in zip(keys, slots, batch.outcomes, strict=True):
            assert outcome is not HIT or self.bench.holds(key, slot)
        return list(batch.outcomes)

    async def random_calls(self, chance: Random, count: int) -> None:
        for _ in range(count):
            names = chance.sample(range(60), 8)
            slots = chance.sample(range(64), 8)
            call = chance.choice(["put", "put", "get", "get", "exists", "delete"])
            if call == "put":
                await self.put(names, slots)
            elif call == "get":
                await self.get(names, slots)
            else:
                await getattr(self.guard, call)(self.bench.keys(*names))

    async def heal(self) -> None:
        """What is stored without faults is there, whatever came before."""
        self.faults.rates = FaultRates()
        names, slots = list(range(8)), list(range(8))
        await self.get(names, slots)  # drops what is damaged
        assert set(await self.put(names, slots)) <= {STORED, EXISTS}
        assert await self.get(names, slots) == [HIT] * 8


@asynccontextmanager
async def scene(url: str, path: Path, seed: int, **options: object) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        port = AsyncioPort(threads=4, seed=seed)
        stack.push_async_callback(port.aclose)
        given = {
            "path": path,
            "metadata": str(url),
            "capacity_bytes": 30 * FRAME_BYTES,
            "metadata_seconds": 60,
            **options,
        }
        faults = Faulty(open_backend(given, port), FaultRates(), Random(seed))
        stack.push_async_callback(faults.aclose)
        binding = SlotBinding(slab_of("kv", PAGE_BYTES, 64), fingerprint_of(uuid4().hex))
        engine = await faults.open_pool(binding)
        guard = GuardedPool(engine, binding, port, PoolLimits(deadline=60, failures=10**6))
        stack.push_async_callback(guard.aclose)
        stack.callback(faults.release)
        yield Scene(faults, PoolUnderTest(engine, binding), guard)


@pytest.fixture(scope="module")
def url(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with names_here(tmp_path_factory.mktemp("metadata"), Clock()) as url:
        yield url


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(3))
async def test_posix_under_every_fault(tmp_path: Path, url: str, seed: int) -> None:
    async with scene(url, tmp_path / "pages", seed) as s:
        s.faults.rates = MANY
        await s.random_calls(Random(seed), 60)
        assert min(s.faults.injected[name] for name in ("fail", "raises", "partial", "lie", "swap")) > 0
        await s.heal()


@pytest.mark.asyncio
@pytest.mark.parametrize("seed", range(3))
async def test_usrbio_under_every_fault(
    tmp_path: Path, url: str, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    usrbio = Usrbio(tmp_path, seed)
    monkeypatch.setitem(sys.modules, "hf3fs_fuse.io", usrbio.module())
    options: dict[str, object] = {"io": "usrbio", "entries": 4}
    async with scene(url, tmp_path / "pages", seed, **options) as s:
        s.faults.rates = FaultRates(partial=0.1, swap=0.1)
        for _ in range(6):
            usrbio.behaviour = Behaviour(stalls=0.1, fails=0.1, short=0.1)
            await s.random_calls(Random(seed), 10)
            usrbio.finish_late()
        usrbio.behaviour = Behaviour()
        usrbio.finish_late()
        await s.heal()
    assert usrbio.faults == []
    assert usrbio.registered == {}


@pytest.mark.asyncio
async def test_a_call_that_hangs_is_late_and_then_done(tmp_path: Path, url: str) -> None:
    async with scene(url, tmp_path / "pages", 0) as s:
        await s.put([1], [0])
        s.faults.rates = FaultRates(hang=1)
        reading = asyncio.create_task(s.get([1], [5]))
        for _ in range(100):
            await asyncio.sleep(0)
        assert s.faults.hanging == 1
        s.faults.rates = FaultRates()
        assert await s.get([1], [6]) == [HIT]
        s.faults.release()
        assert await reading == [HIT]


@pytest.mark.asyncio
@pytest.mark.soak
@pytest.mark.parametrize("seed", range(20))
async def test_a_server_of_names_killed_at_random_instants_under_every_fault(
    tmp_path: Path, seed: int
) -> None:
    chance = Random(seed)
    with names_server(tmp_path / "metadata") as server:
        # Room for what writers leave reserved when they find the service gone: it returns after a minute.
        room = {"capacity_bytes": 1000 * FRAME_BYTES}
        async with scene(server.url, tmp_path / "pages", seed, **room) as s:
            s.faults.rates = FaultRates(partial=0.1, swap=0.1)
            for _ in range(10):
                calls = asyncio.create_task(s.random_calls(chance, 60))
                for _ in range(chance.randrange(400)):
                    await asyncio.sleep(0)
                server.kill()
                await asyncio.to_thread(server.start)
                await calls
            await s.heal()
