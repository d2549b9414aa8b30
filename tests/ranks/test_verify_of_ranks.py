"""`verify_ranks`: what a rank does agrees with what the leader takes for open and free."""

from __future__ import annotations

import asyncio

import pytest

from asynchicache import CacheConfig
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.ranks.messages import (
    CopyEntry,
    FreeSlots,
    PoolPages,
    ReadEntry,
    TransferRuns,
    VerifyEntry,
    pack_slots,
)
from asynchicache.ranks.running import RunningOperations
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.testing.specs import synthetic_spec
from asynchicache.types import Direction, Tier
from asynchicache_lab.ranks.group import openings, seeded_group

READ = ReadEntry(7, [PoolPages("kv", b"", pack_slots([1, 2, 5])), PoolPages("swa", b"", pack_slots([0]))])
SPECS = [synthetic_spec(4, ("kv",))] * 2
CONFIG = CacheConfig(device_slots={"kv": 16}, host_slots={"kv": 16}, weight_version="test")


def problems(
    *entries: CopyEntry | ReadEntry, open_operations: list[int], free: list[FreeSlots], idle: bool = False
) -> list[str]:
    running = RunningOperations()
    for entry in entries:
        running.begin(entry)
    return list(running.problems(VerifyEntry(99, open_operations, free, idle)))


def free(pool: str, tier: Tier, *slots: int) -> FreeSlots:
    return FreeSlots(pool, tier, pack_slots(slots))


def test_what_is_open_and_not_free_is_no_problem() -> None:
    view = [free("kv", Tier.HOST, 0, 3, 4), free("kv", Tier.DEVICE, 1, 2, 5), free("swa", Tier.HOST, 1)]
    assert problems(READ, open_operations=[6, 7], free=view) == []


def test_an_operation_that_the_leader_takes_for_ended_is_named() -> None:
    assert problems(READ, open_operations=[6], free=[]) == [
        "operation 7 runs, and the leader takes it for ended"
    ]


def test_slots_that_the_leader_takes_for_free_are_named() -> None:
    view = [free("kv", Tier.HOST, 2, 3, 4, 5), free("swa", Tier.HOST, 0)]
    assert problems(READ, open_operations=[7], free=view) == [
        "kv host slots: operation 7 uses [2, 5], which the leader takes for free",
        "swa host slots: operation 7 uses [0], which the leader takes for free",
    ]


@pytest.mark.parametrize(
    ("direction", "wrong"),
    [
        (Direction.LOAD, ["kv host slots: operation 3 uses [1]", "kv device slots: operation 3 uses [9]"]),
        (Direction.BACKUP, ["kv host slots: operation 3 uses [9]"]),  # rule R2: the device may be written
        (Direction.FORK, ["kv device slots: operation 3 uses [9]"]),
    ],
)
def test_a_copy_uses_its_host_slots_and_the_device_slots_that_it_writes(
    direction: Direction, wrong: list[str]
) -> None:
    copy = CopyEntry(3, direction, [TransferRuns("kv", pack_slots([1]), pack_slots([9]))])
    view = [free("kv", tier, 1, 9) for tier in (Tier.DEVICE, Tier.HOST)]
    found = problems(copy, open_operations=[3], free=view)
    assert [one.partition(",")[0] for one in found] == wrong


def test_nothing_runs_in_an_idle_cache() -> None:
    assert problems(READ, open_operations=[7], free=[], idle=True) == ["operation 7 runs in an idle cache"]
    running = RunningOperations()
    running.begin(READ)
    running.end(7)
    assert list(running.problems(VerifyEntry(99, [7], [], idle=True))) == []


def test_a_group_is_asked_and_a_group_that_has_failed_says_so() -> None:
    async def main(world: SeededWorld) -> None:
        storage = [MemoryBackend(MemoryStore()) for _ in SPECS]
        async with seeded_group(world, openings(world, SPECS, CONFIG, storage)) as mirror:
            serving = asyncio.create_task(mirror.serve(list(range(33)), durable=True))
            while not serving.done():
                assert await mirror.cache.verify_ranks() == []
            await serving
            await mirror.cache.drain()
            assert await mirror.cache.verify_ranks(idle=True) == []
            mirror.workers[0]._follower._running.begin(
                ReadEntry(7, [PoolPages("kv", b"", pack_slots([0, 12]))])
            )
            assert await mirror.cache.verify_ranks(idle=True) == [
                "rank 1: operation 7 runs, and the leader takes it for ended",
                "rank 1: kv host slots: operation 7 uses [12], which the leader takes for free",
            ]
            mirror.group.leader.lost(1, "planted")
            (found,) = await mirror.cache.verify_ranks()
            assert found == "other ranks cannot be asked: rank 1 is lost: planted"

    run_seeded(0, main)
