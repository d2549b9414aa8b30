"""Weights that change under a group of ranks: every rank goes on with the new ones."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Coroutine
from pathlib import Path

import pytest

from asynchicache import CacheConfig
from asynchicache.backends.memory import MemoryBackend, MemoryEngine, MemoryStore
from asynchicache.errors import StorageError
from asynchicache.storage.protocol import PoolBinding
from asynchicache.testing.faults import FaultRates, Faulty
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.testing.specs import synthetic_spec
from asynchicache_lab.ranks.group import openings, seeded_group
from asynchicache_lab.ranks.mirror import RankMirror
from ranks.processes import processes

SPECS = [synthetic_spec(4, ("kv",))] * 3
CONFIG = CacheConfig(device_slots={"kv": 32}, host_slots={"kv": 32}, weight_version="a")
PROMPT = list(range(24))
PAGES = len(PROMPT) // 4

Part = Callable[[RankMirror], Coroutine[object, object, None]]


def in_a_group(part: Part, stores: list[MemoryStore]) -> None:
    async def main(world: SeededWorld) -> None:
        storage = [MemoryBackend(store) for store in stores]
        async with seeded_group(world, openings(world, SPECS, CONFIG, storage)) as mirror:
            await part(mirror)
            assert mirror.violations == []
            assert mirror.group.failure is None

    run_seeded(3, main)


def test_every_rank_goes_on_under_the_new_weights() -> None:
    async def part(mirror: RankMirror) -> None:
        assert await mirror.serve(PROMPT, durable=True) == (0, len(PROMPT))
        await mirror.cache.update_weights("b")
        old = [set(store) for store in stores]
        assert await mirror.serve([*PROMPT, 1], durable=True) == (0, len(PROMPT)), (
            "nothing of the old ones is matched"
        )
        for store, before in zip(stores, old, strict=True):
            assert len(set(store) - before) == PAGES, "each rank stores the new pages under their own keys"
        await mirror.cache.update_weights("a")
        assert (await mirror.serve([*PROMPT, 2]))[0] == 24, "the pages of the first are in storage still"

    stores = [MemoryStore() for _ in SPECS]
    in_a_group(part, stores)


def test_a_rank_that_cannot_open_its_storage_again_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    async def part(mirror: RankMirror) -> None:
        await mirror.serve(PROMPT, durable=True)
        monkeypatch.setattr(MemoryBackend, "open_pool", refuse)
        with pytest.raises(StorageError, match="could not be opened again: rank 2: the disk is gone"):
            await mirror.cache.update_weights("b")
        assert await mirror.serve(PROMPT, durable=True) == (0, False), "the group goes on, without storage"
        assert (await mirror.serve([*PROMPT, 1]))[0] == 24

    stores = [MemoryStore() for _ in SPECS]
    open_pool = MemoryBackend.open_pool

    async def refuse(backend: MemoryBackend, binding: PoolBinding) -> MemoryEngine:
        if backend.store is stores[2]:
            raise StorageError("the disk is gone")
        return await open_pool(backend, binding)

    in_a_group(part, stores)


@pytest.mark.parametrize("rank", [0, 1])
def test_no_host_slot_is_held_for_a_read_that_outlived_the_weights(rank: int) -> None:
    async def main(world: SeededWorld) -> None:
        storage = [
            Faulty(MemoryBackend(MemoryStore()), FaultRates(), random.Random(number))
            for number in range(len(SPECS))
        ]
        async with seeded_group(world, openings(world, SPECS, CONFIG, storage)) as mirror:
            await mirror.serve(PROMPT, durable=True)
            await mirror.cache.update_weights("b")
            await mirror.cache.update_weights("a")  # now storage alone has its pages
            storage[rank].rates = FaultRates(hang=1, calls=("get",))
            await mirror.serve([*PROMPT, 1])
            await mirror.cache.update_weights("b")
            storage[rank].rates = FaultRates()
            storage[rank].release()
            await asyncio.sleep(10)
            await mirror.cache.drain()
            host = mirror.cache.statistics().occupancy["kv"][1]
            assert (host.held, host.quarantined) == (0, 0)
            assert mirror.violations == []

    run_seeded(3, main)


def test_a_group_that_has_lost_a_rank_is_cold_under_any_weights() -> None:
    async def main(world: SeededWorld) -> None:
        storage = [MemoryBackend(MemoryStore()) for _ in SPECS]
        async with seeded_group(world, openings(world, SPECS, CONFIG, storage)) as mirror:
            await mirror.serve(PROMPT)
            mirror.group.leader.lost(1, "on purpose")
            await mirror.cache.update_weights("b")
            assert (await mirror.serve(PROMPT))[0] == 0
            assert mirror.violations == []

    run_seeded(3, main)


@pytest.mark.asyncio
async def test_processes_change_their_weights(tmp_path: Path) -> None:
    async with processes(tmp_path, 3) as group:
        await group.serve(PROMPT)
        assert await group.serve([*PROMPT, 1]) == 24
        await group.cache.update_weights("others")
        assert await group.serve(PROMPT) == 0
        assert await group.serve([*PROMPT, 1]) == 24
        assert group.group.failure is None
