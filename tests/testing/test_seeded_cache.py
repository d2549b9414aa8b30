"""The whole cache in virtual time: many clients, broken storage, cancellations; one seed replays it."""

from __future__ import annotations

import asyncio
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from asynchicache import CacheConfig, CapacityError, HybridCache, PrefetchOptions, PrefetchPolicy
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.hashing import namespace_seed, page_digests
from asynchicache.storage.limits import PoolLimits
from asynchicache.storage.protocol import StorageBackend
from asynchicache.testing.faults import FaultRates, Faulty, Latency
from asynchicache.testing.oracle import ByteOracle
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.testing.specs import synthetic_spec
from asynchicache.types import token_array

PAGE = 4
SPEC = synthetic_spec(PAGE)
SLOTS = {"kv": 24, "mamba": 8}
CLIENTS, TURNS = 5, 4
PROMPTS = [[family * 100 + n for n in range(24)] for family in range(4)]


class Client:
    """Serves prompts, writes the bytes that belong in their pages, and checks those it is given."""

    def __init__(self, world: SeededWorld, cache: HybridCache) -> None:
        self._world = world
        self._cache = cache
        self._oracle = ByteOracle(SPEC, cache.device_tensor)
        self.restored = 0

    async def run(self) -> None:
        for _ in range(TURNS):
            await self._world.sleep(1e-3)
            prompt = self._world.random.choice(PROMPTS)
            tail = [self._world.random.randrange(1000, 1003) for _ in range(self._world.random.randrange(12))]
            try:
                await self.serve([*prompt, *tail])
            except CapacityError:  # everyone waited for everyone, and this one gave way
                await self._world.sleep(1e-3)

    async def serve(self, tokens: Sequence[int]) -> None:
        digests = page_digests(token_array(tokens), PAGE, namespace_seed(None))
        async with self._cache.request(tokens) as request:
            await request.prefetch()
            await request.admit()
            await request.load()
            self._check(request, digests)
            for cut in sorted({*request.cuts, len(tokens) // PAGE * PAGE}):
                done = request.reserved
                await request.reserve(max(cut - done, 0))
                await self._world.sleep(1e-4)  # others have their turns while this one computes
                first, last = done // PAGE, cut // PAGE
                self._oracle.write("kv", request.pages("kv")[first:last], digests[first:last])
                self._oracle.write("mamba", [request.state("mamba")], [digests[last - 1]])
                await request.checkpoint(cut)

    def _check(self, request, digests: list[bytes]) -> None:
        pages = request.hit.tokens // PAGE
        if pages:
            self.restored += pages
            assert self._oracle.count_wrong("kv", request.pages("kv")[:pages], digests[:pages]) == 0
            assert self._oracle.count_wrong("mamba", [request.state("mamba")], [digests[pages - 1]]) == 0


def broken_storage(world: SeededWorld) -> StorageBackend:
    rates = FaultRates(fail=0.05, raises=0.05, late=0.05, partial=0.05, lie=0.05, swap=0.05)
    faulty = Faulty(MemoryBackend(MemoryStore()), rates, world.random, late_seconds=0.02)
    return Latency(faulty, 1e-3, sleep=world.sleep)


async def crowd(world: SeededWorld) -> tuple[int, ...]:
    """Clients side by side, one of them cancelled somewhere; what came of it, and how it went."""
    config = CacheConfig(
        device_slots=SLOTS,
        prefetch=PrefetchOptions(policy=PrefetchPolicy.TIMEOUT, base_seconds=0.003),
        storage_limits=PoolLimits(deadline=0.01, cooldown=0.01),
        weight_version="test",
    )
    async with world.open_cache(SPEC, config, storage=broken_storage(world)) as cache:
        clients = [Client(world, cache) for _ in range(CLIENTS)]
        tasks = [asyncio.create_task(client.run(), name=f"client-{i}") for i, client in enumerate(clients)]
        await world.sleep(5e-3)
        tasks[0].cancel()
        await asyncio.gather(*tasks[1:])
        await asyncio.wait(tasks[:1])
        await cache.drain()
        assert cache.verify() == []
    assert len(asyncio.all_tasks()) == 1, "closing leaves no task behind"
    return sum(client.restored for client in clients), world.loop.steps, world.loop.fingerprint


def test_a_crowd_gets_the_right_bytes_under_every_seed() -> None:
    restored = [run_seeded(seed, crowd)[0] for seed in range(25)]

    assert all(restored)


def test_a_seed_replays_the_whole_cache() -> None:
    runs = [run_seeded(seed, crowd) for seed in range(3)]

    assert [run_seeded(seed, crowd) for seed in range(3)] == runs
    assert len(set(runs)) == 3


async def restart(world: SeededWorld, folder: Path) -> int:
    """Restored pages of a prompt that a cache before this one has stored in files."""
    config = CacheConfig(
        device_slots=SLOTS,
        prefetch=PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE),
        storage="file",
        storage_options={"path": str(folder)},
        weight_version="test",
    )
    for _ in range(2):
        async with world.open_cache(SPEC, config) as cache:
            client = Client(world, cache)
            await client.serve([*PROMPTS[0], 7])
            await cache.drain()
    return client.restored


def test_files_are_read_and_written_in_virtual_time(tmp_path: Path) -> None:
    for seed in range(5):
        assert run_seeded(seed, lambda world, seed=seed: restart(world, tmp_path / str(seed))) == 6


REPLAY = """
import sys; sys.path.insert(0, {tests!r})
from testing.test_seeded_cache import crowd
from asynchicache.testing.seeded import run_seeded
print([run_seeded(seed, crowd) for seed in range(5)])
"""


@pytest.mark.soak
def test_a_seed_replays_in_other_processes_whatever_their_hash_seed() -> None:
    script = REPLAY.format(tests=str(Path(__file__).parents[1]))
    found = [
        subprocess.run(
            [sys.executable, "-c", script],
            env={**os.environ, "PYTHONHASHSEED": str(hash_seed)},
            capture_output=True,
            text=True,
            check=True,
        ).stdout
        for hash_seed in range(3)
    ]

    assert found[0]
    assert len(set(found)) == 1
