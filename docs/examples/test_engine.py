"""Tests of an engine with a cache in it. `python -m pytest test_engine.py` runs them."""

import pytest
from toy import SPEC, Toy

from asynchicache.testing.checks import assert_clean
from asynchicache.testing.faults import FaultRates


@pytest.mark.asyncio
async def test_the_second_prompt_begins_where_the_first_ended(small_cache):
    async with small_cache(SPEC) as cache:
        engine = Toy(cache)
        await engine.serve(range(20))
        assert (await engine.serve(range(24))).tokens == 20
        assert_clean(cache)


def test_storage_that_fails_costs_hits_and_no_more(seeded_loop, small_cache, faulty_storage):
    faulty_storage.rates = FaultRates(fail=0.2, raises=0.1, partial=0.2, swap=0.1)

    async def serve_twice(world):  # in virtual time, each seed another order of tasks and copies
        device = world.device()
        async with small_cache(SPEC, storage=faulty_storage, port=world.port, device=device) as cache:
            await Toy(cache).serve(range(20))
            await cache.flush()
            return (await Toy(cache).serve(range(24))).tokens

    assert set(seeded_loop(serve_twice, seeds=20)) <= {0, 4, 8, 12, 16, 20}
    assert faulty_storage.injected
