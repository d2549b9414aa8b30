"""Faults by a seed, behind the core's guard: each ends as an outcome, and no HIT has other bytes."""

from __future__ import annotations

from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random
from typing import Any

import pytest

from asynchicache.backends import memory
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.errors import ConfigError, StorageError
from asynchicache.hashing import ObjectKey
from asynchicache.ports import AsyncioPort
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.guard import GuardedPool
from asynchicache.storage.limits import BatchResult, PoolLimits
from asynchicache.storage.protocol import OPTIONAL_VERBS
from asynchicache.testing.backends import PoolUnderTest, fingerprint_of, slab_of
from asynchicache.testing.faults import CALLS, FaultRates, Faulty, Latency, Persistent
from asynchicache.types import Outcome

HIT, MISS, STORED, FAILED = Outcome.HIT, Outcome.MISS, Outcome.STORED, Outcome.FAILED


class Scene:
    """A faulty memory backend, its bare engine and the core's guard around it."""

    def __init__(self, faults: Faulty, bench: PoolUnderTest, guard: GuardedPool) -> None:
        self.faults = faults
        self.bench = bench
        self.guard = guard

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> BatchResult:
        self.bench.fill(keys, slots)
        return await self.guard.put(keys, slots)

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> BatchResult:
        """As `PoolUnderTest.get`, but through the guard, which waits for what lingers."""
        self.bench.poison(slots)
        batch = await self.guard.get(keys, slots)
        for key, slot, outcome in zip(keys, slots, batch.outcomes, strict=True):
            assert outcome is not HIT or self.bench.holds(key, slot)
        return batch


@asynccontextmanager
async def scene(*, seed: int = 0, deadline: float = 60.0, **options: Any) -> AsyncIterator[Scene]:
    async with AsyncExitStack() as stack:
        port = AsyncioPort(threads=2)
        stack.push_async_callback(port.aclose)
        bounded = memory.open_backend({"capacity_bytes": 1 << 20}, port)  # so it wants to be told of uses
        faults = Faulty(bounded, FaultRates(), Random(seed), **options)
        stack.push_async_callback(faults.aclose)
        binding = SlotBinding(slab_of("kv", 300, 64), fingerprint_of("w"))
        engine = await faults.open_pool(binding)
        guard = GuardedPool(engine, binding, port, PoolLimits(deadline=deadline, failures=10**6, retries=0))
        stack.push_async_callback(guard.aclose)
        stack.callback(faults.release)
        yield Scene(faults, PoolUnderTest(engine, binding), guard)


@pytest.mark.asyncio
async def test_a_call_fails_or_raises() -> None:
    async with scene() as s:
        keys = s.bench.keys(1, 2)
        for rates in (FaultRates(fail=1), FaultRates(raises=1)):
            s.faults.rates = rates
            assert (await s.put(keys, [0, 1])).outcomes == [FAILED] * 2
            assert (await s.get(keys, [0, 1])).outcomes == [FAILED] * 2
            assert (await s.guard.exists(keys)).outcomes == [FAILED] * 2
            assert (await s.guard.delete(keys)).outcomes == [FAILED] * 2
        assert s.faults.injected == {"fail": 4, "raises": 4}
        s.faults.rates = FaultRates()
        assert (await s.put(keys, [0, 1])).outcomes == [STORED] * 2


@pytest.mark.asyncio
async def test_some_pages_fail() -> None:
    async with scene(seed=3) as s:
        keys = s.bench.keys(*range(20))
        s.faults.rates = FaultRates(partial=0.5)
        put = await s.put(keys, range(20))
        s.faults.rates = FaultRates()
        got = await s.get(keys, range(20, 40))

        assert set(put.outcomes) == {STORED, FAILED}
        assert [outcome is HIT for outcome in got.outcomes] == [outcome is STORED for outcome in put.outcomes]
        assert s.faults.injected["partial"] == put.outcomes.count(FAILED)


@pytest.mark.asyncio
async def test_exists_lies() -> None:
    async with scene() as s:
        keys = s.bench.keys(1, 2)
        await s.put(keys[:1], [0])
        s.faults.rates = FaultRates(lie=1)

        assert (await s.guard.exists(keys)).outcomes == [MISS, HIT]
        assert (await s.get(keys, [1, 2])).outcomes == [HIT, MISS]


@pytest.mark.asyncio
async def test_a_page_that_is_said_to_be_stored_is_not_there() -> None:
    async with scene() as s:
        keys = s.bench.keys(1, 2, 3)
        s.faults.rates = FaultRates(drop=1)

        assert (await s.put(keys, [0, 1, 2])).outcomes == [STORED] * 3
        s.faults.rates = FaultRates()
        assert (await s.guard.exists(keys)).outcomes == [MISS] * 3
        assert s.faults.injected == {"drop": 3}


@pytest.mark.asyncio
@pytest.mark.parametrize("pages", [1, 2, 7])
async def test_other_bytes_are_caught_by_the_core(pages: int) -> None:
    async with scene() as s:
        keys = s.bench.keys(*range(pages))
        await s.put(keys, range(pages))
        s.faults.rates = FaultRates(swap=1)

        with pytest.raises(AssertionError, match="other bytes"):
            await s.bench.get(keys, range(20, 20 + pages))
        assert (await s.get(keys, range(20, 20 + pages))).outcomes == [Outcome.CORRUPT] * pages


@pytest.mark.asyncio
async def test_a_call_hangs_until_it_is_released() -> None:
    async with scene(deadline=0.02) as s:
        keys = s.bench.keys(1)
        await s.put(keys, [0])
        s.faults.rates = FaultRates(hang=1)
        batch = await s.get(keys, [1])
        assert (batch.outcomes, s.faults.hanging) == ([Outcome.TIMEOUT], 1)
        assert batch.lingering is not None

        s.faults.release()
        await batch.lingering

        assert s.bench.holds(keys[0], 1)


@pytest.mark.asyncio
async def test_the_same_seed_brings_the_same_faults() -> None:
    async def run(seed: int) -> list[list[Outcome]]:
        async with scene(seed=seed) as s:
            keys = s.bench.keys(*range(8))
            await s.put(keys, range(8))
            s.faults.rates = FaultRates(fail=0.2, raises=0.2, partial=0.2, swap=0.2)
            return [(await s.get(keys, range(8, 16))).outcomes for _ in range(20)]

    assert await run(1) == await run(1) != await run(2)


@pytest.mark.asyncio
async def test_all_faults_together_never_give_other_bytes() -> None:
    injected: Counter[str] = Counter()
    for seed in range(5):
        async with scene(seed=seed, deadline=0.01) as s:
            s.faults.rates = FaultRates(fail=0.1, raises=0.1, hang=0.05, partial=0.1, lie=0.2, swap=0.3)
            for first in range(0, 40, 4):
                keys = s.bench.keys(*range(first, first + 4))
                for batch in (await s.put(keys, range(4)), await s.get(keys, range(8, 12))):
                    s.faults.release()
                    if batch.lingering is not None:
                        await batch.lingering
            injected += s.faults.injected
    assert set(injected) >= {"fail", "raises", "hang", "partial", "swap"}


@pytest.mark.asyncio
async def test_latency_is_by_call_and_page() -> None:
    waited = []

    async def sleep(seconds: float) -> None:
        waited.append(seconds)

    async with AsyncExitStack() as stack:
        port = AsyncioPort(threads=1)
        stack.push_async_callback(port.aclose)
        slow = Latency(memory.open_backend({}, port), 1.0, page=0.25, sleep=sleep)
        stack.push_async_callback(slow.aclose)
        binding = SlotBinding(slab_of("kv", 300, 4), fingerprint_of("w"))
        bench = PoolUnderTest(await slow.open_pool(binding), binding)

        assert (slow.name, bench.engine.capabilities.immediate) == ("slow-memory", False)
        assert await bench.put(bench.keys(1, 2), [0, 1]) == [STORED] * 2
        assert await bench.get(bench.keys(1, 2, 3, 4), [0, 1, 2, 3]) == [HIT, HIT, MISS, MISS]

    assert waited == [1.5, 2.0]


@pytest.mark.asyncio
async def test_a_late_answer_is_to_work_that_was_done() -> None:
    naps: list[float] = []

    async def sleep(seconds: float) -> None:
        naps.append(seconds)

    async with scene(late_seconds=7.0, sleep=sleep) as s:
        s.faults.rates = FaultRates(late=1)
        keys = s.bench.keys(1)

        assert (await s.put(keys, [0])).outcomes == [STORED]
        assert (await s.guard.exists(keys)).outcomes == [HIT]
        assert (await s.get(keys, [1])).outcomes == [HIT]
        assert (await s.guard.delete(keys)).outcomes == [HIT]
        assert await s.guard.clear() == 0
        assert naps == [7.0] * 5


@pytest.mark.asyncio
async def test_only_the_calls_that_are_named_go_wrong() -> None:
    async with scene() as s:
        keys = s.bench.keys(1)
        for call in CALLS:
            s.faults.rates = FaultRates(raises=1, calls=(call,))
            answers = [
                (await s.put(keys, [0])).outcomes,
                (await s.get(keys, [1])).outcomes,
                (await s.guard.exists(keys)).outcomes,
                (await s.guard.delete(keys)).outcomes,
            ]
            await s.guard.touch(keys)
            assert answers.count([FAILED]) == (call not in ("clear", *OPTIONAL_VERBS))
        assert s.faults.injected["raises"] == 5
        assert s.guard.statistics().touch.outcomes == {HIT: len(CALLS) - 1, FAILED: 1}


@pytest.mark.asyncio
async def test_only_the_pools_that_are_named_go_wrong() -> None:
    async with scene() as s:
        keys = s.bench.keys(1)
        s.faults.rates = FaultRates(fail=1, pools=("mamba",))
        assert (await s.put(keys, [0])).outcomes == [STORED]
        s.faults.rates = FaultRates(fail=1, pools=("mamba", "kv"))
        assert (await s.get(keys, [0])).outcomes == [FAILED]


@pytest.mark.asyncio
async def test_one_page_is_swapped_with_one_that_was_stored_before() -> None:
    async with scene() as s:
        keys = s.bench.keys(1, 2)
        await s.put(keys, [0, 1])
        s.faults.rates = FaultRates(swap=1)

        assert await s.bench.engine.get(keys[1:], [5]) == [HIT]
        assert s.bench.holds(keys[0], 5)
        assert s.bench.binding.identify(s.bench.binding.header(5)) == keys[0]
        assert (await s.get(keys[1:], [5])).outcomes == [Outcome.CORRUPT]


@pytest.mark.asyncio
async def test_persistence_makes_up_for_partial_results() -> None:
    async with scene() as s:
        keys = s.bench.keys(*range(20))
        s.faults.rates = FaultRates(partial=0.5)
        bench = PoolUnderTest(await Persistent(s.faults).open_pool(s.bench.binding), s.bench.binding)

        assert await bench.put(keys, range(20)) == [STORED] * 20
        assert await bench.get(keys, range(20, 40)) == [HIT] * 20
        assert s.faults.injected["partial"] > 20

        s.faults.rates = FaultRates(partial=1)
        assert await bench.get(keys, range(20)) == [FAILED] * 20  # and comes to an end


def test_rates_are_shares() -> None:
    with pytest.raises(ConfigError, match=r"lie=1\.5 must be 0 to 1"):
        FaultRates(lie=1.5)
    for value in ("x", None, float("nan")):
        with pytest.raises(ConfigError, match=f"fail={value!r} must be 0 to 1"):
            FaultRates(fail=value)  # type: ignore[arg-type]


@pytest.mark.parametrize("attempts", [0, -1, 1.5, "a"])
def test_attempts_that_would_never_be_made_are_refused(attempts: object) -> None:
    with pytest.raises(ConfigError, match=f"attempts {attempts!r} must be"):
        Persistent(MemoryBackend(MemoryStore()), attempts)  # type: ignore[arg-type]


def test_calls_and_pools_are_names() -> None:
    with pytest.raises(ConfigError, match=r"calls=\('read',\) must be some of"):
        FaultRates(calls=("read",))
    with pytest.raises(ConfigError, match="pools='kv' must be several names"):
        FaultRates(pools="kv")
    with pytest.raises(ConfigError, match="pools=5 must be several names"):
        FaultRates(pools=5)  # type: ignore[arg-type]


@pytest.mark.asyncio
async def test_a_call_that_raises_says_so() -> None:
    async with scene() as s:
        s.faults.rates = FaultRates(raises=1)
        with pytest.raises(StorageError, match="made to raise"):
            await s.bench.engine.get([], [])
