"""The audit through the front door: silent while bytes are right, and the end of hits once they are not."""

from __future__ import annotations

import pytest

from asynchicache import HybridCache, Tier, TransferError
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from cache.engine import SPEC, Engine, config

pytestmark = pytest.mark.asyncio

PROMPT = list(range(100, 120))


async def _push_out(engine: Engine) -> None:
    for client in range(4):
        await engine.serve([client * 1000 + n for n in range(32)], prefetch=False)


@pytest.mark.parametrize("inline", [True, False])
async def test_right_bytes_pass_through_every_tier(inline: bool) -> None:
    prompts = [[start + n for n in range(20)] for start in (100, 200, 300)]
    options = config(audit=1.0, inline=inline)
    async with HybridCache.open(SPEC, options, storage=MemoryBackend(MemoryStore())) as cache:
        engine = Engine(cache)
        for turn in range(3):
            # Host slots are given back, and filled from storage with another prompt's pages.
            hits = [await engine.serve([*prompt, turn]) for prompt in prompts[turn:] + prompts[:turn]]
            await cache.flush()
        assert [hit.by_tier for hit in hits] == [{Tier.STORAGE: 20}] * 3
        audit = cache.statistics().transfers.audit

    assert audit.recorded > 0
    assert audit.mismatched == 0


async def test_wrong_bytes_are_the_end_of_hits() -> None:
    async with HybridCache.open(SPEC, config(audit=1.0)) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT)
        await _push_out(engine)
        assert cache.statistics().transfers.audit.compared == 0
        for memory in cache._parts.memories.values():  # the host's memory goes bad
            for tensor in memory.host.spec.tensors:
                memory.host.items(tensor.name).bitwise_xor_(1)

        async with cache.request([*PROMPT, 1]) as request:
            with pytest.raises(TransferError, match="not what they were"):
                await request.load()
        await cache.drain()
        assert (await engine.serve([*PROMPT, 2])).by_tier.get(Tier.HOST, 0) == 0
        statistics = cache.statistics()
        assert cache.verify() == []

    assert statistics.transfers.audit.mismatched > 0
    assert statistics.traffic.copies_failed > 0
    assert statistics.occupancy["kv"][0].quarantined > 0
