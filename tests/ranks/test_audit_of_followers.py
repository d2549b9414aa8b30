"""The audit of a follower: a host slot that storage reads into holds no longer what was copied there."""

from __future__ import annotations

from asynchicache import CacheConfig
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.testing.specs import synthetic_spec
from asynchicache.transfer.audit import AuditStatistics
from asynchicache_lab.ranks.group import openings, seeded_group

SPECS = [synthetic_spec(4, ("kv",))] * 2
CONFIG = CacheConfig(device_slots={"kv": 16}, host_slots={"kv": 8}, weight_version="test", audit=1.0)
PROMPT, OTHER = list(range(32)), list(range(100, 132))


def test_a_page_that_storage_read_is_not_compared_with_the_one_before() -> None:
    audits: list[AuditStatistics] = []

    async def main(world: SeededWorld) -> None:
        stores = [MemoryStore() for _ in SPECS]
        for first, second in ((PROMPT, PROMPT), (OTHER, PROMPT)):
            storage = [MemoryBackend(store) for store in stores]
            async with seeded_group(world, openings(world, SPECS, CONFIG, storage)) as mirror:
                await mirror.serve(first, durable=True)
                await mirror.cache.flush()  # the next prompt gets the same host slots
                assert (await mirror.serve([*second, 1], durable=True))[0] == len(PROMPT)
                audit = mirror.workers[0]._follower._copies.audit
                assert audit is not None
                audits.append(audit.statistics)
                assert mirror.violations == []

    run_seeded(0, main)
    assert [one.recorded for one in audits] == [8, 8]
    assert [one.mismatched for one in audits] == [0, 0]
