"""Several stores as one: where pages are read, written and carried to, and what a stage that fails costs."""

from __future__ import annotations

import asyncio
import gc
import random
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from asynchicache.backends.memory import MemoryBackend, MemoryEngine, MemoryStore
from asynchicache.errors import ClosedError, ConfigError, StorageError
from asynchicache.hashing import ObjectKey
from asynchicache.ports import AsyncioPort, Port
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.breaker import BreakerState
from asynchicache.storage.chain import ChainedPool, ChainStage, StagePolicy, StorageChain, in_each_store
from asynchicache.storage.limits import BatchResult, PoolLimits
from asynchicache.storage.protocol import PoolBinding, PoolEngine, StorageBackend
from asynchicache.testing.backends import PoolUnderTest, fingerprint_of, slab_of
from asynchicache.testing.faults import FaultRates, Faulty, Latency
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.types import Outcome
from engines import module

STORED, EXISTS, HIT, MISS = Outcome.STORED, Outcome.EXISTS, Outcome.HIT, Outcome.MISS
CORRUPT, REJECTED, FAILED, TIMEOUT = Outcome.CORRUPT, Outcome.REJECTED, Outcome.FAILED, Outcome.TIMEOUT
PAGE_BYTES = 5000


@dataclass
class Chained:
    """A chain of memories, and what each of them has."""

    pool: ChainedPool
    bench: PoolUnderTest
    stores: list[MemoryStore]
    faults: list[Faulty]

    def keys(self, *numbers: int) -> list[ObjectKey]:
        return self.bench.keys(*numbers)

    def have(self, *numbers: int) -> list[list[int]]:
        """By stage, which of these pages its store has."""
        return [[number for number in numbers if self.keys(number)[0] in store] for store in self.stores]

    async def put(self, *numbers: int) -> list[Outcome]:
        keys, slots = self.keys(*numbers), range(len(numbers))
        self.bench.fill(keys, slots)
        return (await self.pool.put(keys, slots)).outcomes

    async def get(self, *numbers: int) -> list[Outcome]:
        """Read pages, and compare their bytes."""
        batch = await self.read(*numbers)
        return batch.outcomes

    async def read(self, *numbers: int, first: int = 0) -> Any:
        keys, slots = self.keys(*numbers), range(first, first + len(numbers))
        self.bench.poison(slots)
        batch = await self.pool.get(keys, slots)
        for key, slot, outcome in zip(keys, slots, batch.outcomes, strict=True):
            assert outcome is not HIT or self.bench.holds(key, slot), f"other bytes for {key.text()}"
        return batch

    async def settled(self) -> None:
        """Wait until nothing is carried between stages."""
        while self.pool.carrying:
            await asyncio.wait(self.pool.carrying)


@asynccontextmanager
async def chained(
    *policies: StagePolicy, pages: Sequence[int | None] = (), port: Port | None = None, **limits: Any
) -> AsyncIterator[Chained]:
    """A chain of memories, the nearest first; `pages`: for how many each has room."""
    async with AsyncExitStack() as stack:
        if port is None:
            own = AsyncioPort(threads=2, seed=0)
            stack.push_async_callback(own.aclose)
            port = own
        room = [*pages, *[None] * len(policies)]
        stores = [MemoryStore(None if many is None else many * PAGE_BYTES) for many in room[: len(policies)]]
        faults = [
            Faulty(MemoryBackend(store), FaultRates(), random.Random(1), late_seconds=0.9) for store in stores
        ]
        stages = [
            ChainStage(f"stage{number}", lambda one=one: one, policy)  # type: ignore[misc]
            for number, (one, policy) in enumerate(zip(faults, policies, strict=True))
        ]
        chain = StorageChain(stages, port)
        stack.push_async_callback(chain.aclose)
        binding = SlotBinding(slab_of("kv", PAGE_BYTES, 64), fingerprint_of("w"))
        pool = await chain.open_chained(binding, PoolLimits(**{"retries": 0, **limits}))
        try:
            yield Chained(pool, PoolUnderTest(pool.engine, binding), stores, faults)
        finally:
            for one in faults:
                one.release()


ALL = StagePolicy()


@pytest.mark.asyncio
async def test_a_page_is_read_from_the_nearest_stage_that_has_it_and_promoted() -> None:
    async with chained(ALL, ALL, ALL) as s:
        await s.put(1, 2, 3)
        s.stores[0].drop(s.keys(2)[0])
        s.stores[0].drop(s.keys(3)[0])
        s.stores[1].drop(s.keys(3)[0])

        batch = await s.read(1, 2, 3, 4)
        await s.settled()

        assert (batch.outcomes, list(batch.sources)) == ([HIT, HIT, HIT, MISS], [0, 1, 2, 0])
        assert s.have(1, 2, 3) == [[1, 2, 3]] * 3
        assert list((await s.read(1, 2, 3)).sources) == [0, 0, 0]


@pytest.mark.asyncio
@pytest.mark.parametrize(("promote", "there"), [("all", [1, 1]), ("second_hit", [0, 1]), ("none", [0, 0])])
async def test_promotion_follows_its_policy(promote: Any, there: list[int]) -> None:
    async with chained(StagePolicy(promote=promote), ALL) as s:
        await s.put(1)
        s.stores[0].drop(s.keys(1)[0])
        found = []
        for _ in range(2):
            assert await s.get(1) == [HIT]
            await s.settled()
            found.append(len(s.have(1)[0]))

        assert found == there


@pytest.mark.asyncio
async def test_a_stage_of_second_hits_gets_what_was_read_back() -> None:
    async with chained(ALL, StagePolicy(write="second_hit")) as s:
        assert await s.put(1, 2) == [STORED, STORED]
        assert s.have(1, 2) == [[1, 2], []]

        assert await s.get(2) == [HIT]
        await s.settled()

        assert s.have(1, 2) == [[1, 2], [2]]


@pytest.mark.asyncio
@pytest.mark.parametrize("write", ["all", "leaving"])
async def test_a_stage_gets_what_it_did_not_take_when_that_is_read_from_a_nearer_one(write: Any) -> None:
    policies = (ALL, StagePolicy(durable=False), StagePolicy(write=write))
    async with chained(*policies, cooldown=1000, failures=9) as s:
        s.faults[1].rates = FaultRates(fail=1.0)
        await s.put(1, 2)
        s.faults[1].rates = FaultRates()
        await s.put(3)
        for _ in range(2):  # the second one finds nothing to do
            assert await s.get(2, 3) == [HIT, HIT]
            await s.settled()
            assert s.have(1, 2, 3)[:2] == [[1, 2, 3], [2, 3]]

        await s.pool.clear()
        await s.put(1)
        s.stores[1].drop(s.keys(1)[0])
        assert await s.get(1) == [HIT]
        await s.settled()
        assert s.have(1)[1] == []  # it took that one, and lost it since


@pytest.mark.asyncio
async def test_a_stage_gets_what_leaves_the_nearer_one_and_nothing_else() -> None:
    """Nothing that was stored is lost, whichever stage evicts, as long as the last has room."""
    async with chained(ALL, StagePolicy(write="leaving"), pages=[4]) as s:
        for number in range(10):
            assert await s.put(number) == [STORED]
            near, far = s.have(*range(10))
            assert len(near) == min(number + 1, 4)
            assert sorted(near + far) == list(range(number + 1))
        assert s.have(*range(10)) == [[6, 7, 8, 9], [0, 1, 2, 3, 4, 5]]
        assert (await s.pool.exists(s.keys(*range(10)), fresh=True)).outcomes == [HIT] * 10

        assert await s.get(*range(10)) == [HIT] * 10
        await s.settled()

        near, far = s.have(*range(10))
        assert len(near) == 4
        assert set(near + far) == set(range(10))


@pytest.mark.asyncio
async def test_pages_of_other_pools_leave_too() -> None:
    async with chained(ALL, StagePolicy(write="leaving"), pages=[4]) as s:
        other = SlotBinding(slab_of("mamba", PAGE_BYTES, 8), fingerprint_of("w"))
        chain = s.pool.chain
        pool = await chain.open_chained(other, PoolLimits())
        states = PoolUnderTest(pool.engine, other)
        assert await states.put(states.keys(1, 2), [0, 1]) == [STORED] * 2

        assert await s.put(1, 2, 3, 4) == [STORED] * 4

        assert await states.get(states.keys(1, 2), [3, 4]) == [HIT] * 2


@pytest.mark.asyncio
@pytest.mark.parametrize("stage", [0, 1])
@pytest.mark.parametrize("rates", [FaultRates(raises=1.0), FaultRates(fail=1.0)])
async def test_a_failing_stage_costs_its_pages_and_nothing_else(
    stage: int, rates: FaultRates, caplog: pytest.LogCaptureFixture
) -> None:
    async with chained(ALL, ALL, cooldown=1000, failures=2) as s:
        await s.put(1, 2, 3)
        s.stores[stage].drop(s.keys(2)[0])
        s.stores[1 - stage].drop(s.keys(3)[0])
        s.faults[stage].rates = rates
        for _ in range(5):
            assert await s.get(1, 2, 3, 4) == [HIT, HIT, FAILED, FAILED]
            assert (await s.pool.exists(s.keys(1, 2, 3, 4))).outcomes == [HIT, HIT, FAILED, FAILED]
        await s.settled()

        breakers = [one.breaker for one in s.pool.stages().values()]
        assert breakers[stage] is BreakerState.OPEN
        assert breakers[1 - stage] is BreakerState.CLOSED
        assert s.pool.statistics().breaker is BreakerState.CLOSED
        assert s.pool.statistics().exists.errors > 0
        lines = [record.getMessage() for record in caplog.records]
        assert sum("its breaker is open" in line for line in lines) == 1
        assert all(line.startswith(f"pool kv in stage stage{stage}: ") for line in lines)


@pytest.mark.parametrize("stage", [0, 1])
def test_a_hanging_stage_is_waited_for_until_its_breaker_opens_and_tried_beside_the_calls(stage: int) -> None:
    async def main(world: SeededWorld) -> None:
        async with chained(ALL, ALL, port=world.port, deadline=1.0, failures=2, cooldown=5.0) as s:
            await s.put(1, 2)
            s.faults[stage].rates = FaultRates(hang=1.0)
            s.stores[stage].drop(s.keys(1)[0])
            took = []
            for _ in range(12):
                began = world.port.now()
                assert (await s.get(1, 9))[0] is HIT
                took.append(world.port.now() - began)
                await asyncio.sleep(3.0)
            assert sum(one >= 1.0 for one in took) <= 2  # until its breaker opened, and never again
            assert max(took) < 2.1
            assert sum(one.opened for one in s.pool.stages().values()) > 1  # it was tried again

            s.faults[stage].rates = FaultRates()
            s.faults[stage].release()
            s.stores[1 - stage].drop(s.keys(2)[0])
            while await s.get(2) != [HIT]:  # noqa: ASYNC110  virtual time
                await asyncio.sleep(1.0)
            assert [one.breaker for one in s.pool.stages().values()] == [BreakerState.CLOSED] * 2

    run_seeded(3, main)


def test_a_stage_that_comes_back_is_tried_by_reads_that_a_nearer_one_answers_alone() -> None:
    async def main(world: SeededWorld) -> None:
        async with chained(ALL, StagePolicy(durable=False), port=world.port, failures=2, cooldown=5.0) as s:
            s.faults[1].rates = FaultRates(raises=1.0)
            for number in (1, 2):
                await s.put(number)
            assert s.pool.stages()["stage1"].breaker is BreakerState.OPEN
            for _ in range(11):
                assert await s.get(1, 2) == [HIT, HIT]
                await asyncio.sleep(1.0)
            assert s.pool.stages()["stage1"].exists.errors == 2  # once per cooldown

            s.faults[1].rates = FaultRates()
            await asyncio.sleep(5.0)
            for _ in range(2):  # the first one finds out that it is back
                assert await s.get(1, 2) == [HIT, HIT]
                await s.settled()
            assert s.have(1, 2) == [[1, 2], [1, 2]]

    run_seeded(0, main)


def test_a_farther_stage_that_hangs_holds_back_what_a_nearer_one_answers_for_a_second_and_only_once() -> None:
    async def main(world: SeededWorld) -> None:
        async with chained(ALL, StagePolicy(durable=False), ALL, port=world.port, failures=3) as s:
            other = SlotBinding(slab_of("mamba", PAGE_BYTES, 8), fingerprint_of("w"))
            states = await s.pool.chain.open_chained(other, PoolLimits())
            await s.put(1, 2, 3)
            s.stores[0].drop(s.keys(2)[0])
            s.stores[0].drop(s.keys(3)[0])
            s.stores[2].drop(s.keys(3)[0])
            s.faults[1].rates = FaultRates(hang=1.0)
            began, took = world.port.now(), list[float]()

            async def timed(call: Coroutine[object, object, BatchResult | list[Outcome]]) -> object:
                started = world.port.now()
                answer = await call
                took.append(world.port.now() - started)
                return answer.outcomes if isinstance(answer, BatchResult) else answer

            for _ in range(2):
                assert await timed(s.pool.exists(s.keys(1, 2, 3))) == [HIT, HIT, TIMEOUT]
            assert await timed(states.exists(PoolUnderTest(states.engine, other).keys(1))) == [TIMEOUT]
            assert await timed(s.get(1, 2, 3)) == [HIT, HIT, TIMEOUT]
            assert took[0] == pytest.approx(1.0, abs=0.1)
            assert max(took[1:]) < 0.1
            assert world.port.now() - began < 2.0

            await asyncio.sleep(11.0)
            assert s.pool.stages()["stage1"].breaker is BreakerState.OPEN  # what came late was counted
            s.faults[1].rates = FaultRates()
            s.faults[1].release()
            while (await s.pool.exists(s.keys(3))).outcomes != [HIT]:  # noqa: ASYNC110  virtual time
                await asyncio.sleep(1.0)
            s.faults[1].rates = FaultRates(late=1.0)
            for _ in range(2):
                assert (await s.pool.exists(s.keys(1, 3))).outcomes == [HIT, HIT]  # it is slow, and lives

    run_seeded(0, main)


def test_a_slot_that_a_stage_may_still_write_to_is_not_read_into_from_the_next() -> None:
    async def main(world: SeededWorld) -> None:
        async with chained(ALL, ALL, port=world.port, deadline=1.0) as s:
            await s.put(1, 2)
            s.faults[0].rates = FaultRates(hang=1.0, calls=("get",))
            s.stores[0].drop(s.keys(2)[0])

            batch = await s.read(1, 2)

            assert batch.outcomes == [TIMEOUT, HIT]
            assert batch.lingering is not None
            assert not batch.lingering.done()
            assert s.pool.used(frozenset(range(64))) == {0}
            s.faults[0].release()
            await batch.lingering
            assert s.pool.used(frozenset(range(64))) == frozenset()

    run_seeded(1, main)


@pytest.mark.asyncio
async def test_a_stage_that_lies_or_damages_pages_costs_nothing_that_another_has() -> None:
    async with chained(ALL, ALL) as s:
        await s.put(1, 2, 3)
        s.faults[0].rates = FaultRates(lie=1.0)
        s.stores[0].drop(s.keys(3)[0])
        assert await s.get(1, 2, 3) == [HIT] * 3
        s.faults[0].rates = FaultRates(swap=1.0)

        batch = await s.read(1, 2)
        await s.settled()
        s.faults[0].rates = FaultRates()

        assert (batch.outcomes, list(batch.sources)) == ([HIT, HIT], [1, 1])
        assert list((await s.read(1, 2)).sources) == [0, 0]  # written anew
        s.stores[1].clear(*vars_of(s))
        s.faults[0].rates = FaultRates(swap=1.0)
        assert await s.get(1) == [CORRUPT]


def vars_of(s: Chained) -> tuple[bytes, str, str]:
    return s.bench.binding.fingerprint, "kv", ""


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("durable", "down", "stored", "promised"),
    [
        ((None, None), 1, REJECTED, FAILED),
        ((None, None), 0, REJECTED, FAILED),
        ((True, False), 1, STORED, HIT),
        ((True, False), 0, REJECTED, FAILED),
        ((False, True), 0, STORED, HIT),
    ],
)
async def test_a_promise_is_what_its_stages_have(
    durable: tuple[bool | None, bool | None], down: int, stored: Outcome, promised: Outcome
) -> None:
    near, far = (StagePolicy(durable=one) for one in durable)
    async with chained(near, far, failures=1, cooldown=1000) as s:
        s.faults[down].rates = FaultRates(raises=1.0)
        with_breaker_open = await s.pool.exists(s.keys(9))
        assert with_breaker_open.outcomes == [FAILED]

        assert await s.put(1) == [stored]
        assert (await s.pool.exists(s.keys(1), fresh=True)).outcomes == [promised]
        assert await s.get(1) == [HIT]


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("durable", "lost", "found"),
    [
        ((None, None), None, [HIT, HIT]),
        ((None, None), 1, [MISS, MISS]),
        ((True, False), 0, [MISS, MISS]),
        ((True, False), 1, [HIT, MISS]),  # nothing is read from it that a nearer one has
        ((False, True), 0, [HIT, HIT]),  # reads bring it back
        ((False, True, False), 0, [HIT, HIT]),
        ((False, True, False), 2, [HIT, MISS]),
    ],
)
async def test_who_asks_everywhere_hears_what_a_stage_behind_the_promise_has_lost(
    durable: tuple[bool | None, ...], lost: int | None, found: list[Outcome]
) -> None:
    async with chained(*(StagePolicy(durable=one) for one in durable)) as s:
        await s.put(1, 2)
        if lost is not None:
            s.stores[lost].drop(s.keys(2)[0])
        answers = [
            (await s.pool.exists(s.keys(1, 2), fresh=True)).outcomes,
            (await s.pool.exists(s.keys(1, 2), everywhere=True)).outcomes,
        ]
        assert answers == [[HIT, one] for one in found]
        assert (await s.pool.exists([], everywhere=True)).outcomes == []


@pytest.mark.parametrize("rates", [FaultRates(hang=1.0), FaultRates(raises=1.0), FaultRates(fail=1.0)])
def test_a_stage_without_a_promise_that_does_not_answer_counts_as_having_all(rates: FaultRates) -> None:
    async def main(world: SeededWorld) -> None:
        far = StagePolicy(durable=False, limits=PoolLimits(deadline=0.5, retries=0, failures=2))
        async with chained(ALL, far, port=world.port) as s:
            await s.put(1)
            s.stores[1].drop(s.keys(1)[0])
            s.faults[1].rates = rates
            waits = []
            for _ in range(4):
                started = world.port.now()
                assert (await s.pool.exists(s.keys(1, 9), everywhere=True)).outcomes == [HIT, MISS]
                waits.append(world.port.now() - started)
            assert waits[0] <= 0.6
            assert waits[-1] < 0.01, "it is down"
            s.faults[1].rates = FaultRates()
            s.faults[1].release()
            await s.pool.chain.detach("stage1")
            assert (await s.pool.exists(s.keys(1), everywhere=True)).outcomes == [HIT]
            s.faults[0].rates = FaultRates(raises=1.0)
            assert (await s.pool.exists(s.keys(1), everywhere=True)).outcomes == [FAILED]

    run_seeded(0, main)


@pytest.mark.asyncio
async def test_what_has_left_a_stage_without_a_promise_for_the_next_is_there() -> None:
    async with chained(ALL, StagePolicy(durable=False), StagePolicy(write="leaving")) as s:
        await s.put(1)
        s.stores[1].drop(s.keys(1)[0])
        key = s.keys(1)[0]
        page = s.stores[0].read(key)
        assert page is not None
        s.stores[2].write(key, *page)
        assert (await s.pool.exists([key], everywhere=True)).outcomes == [HIT]
        s.stores[2].drop(key)
        assert (await s.pool.exists([key], everywhere=True)).outcomes == [MISS]


@pytest.mark.asyncio
async def test_a_stage_without_a_promise_that_is_behind_is_left_out() -> None:
    async with chained(ALL, StagePolicy(durable=False)) as s:
        s.faults[1].rates = FaultRates(hang=1.0, calls=("put",))
        writes = [asyncio.create_task(s.put(*range(start, start + 64))) for start in range(0, 6400, 64)]
        while not s.pool.stages()["stage1"].shed:  # noqa: ASYNC110  the chain needs no event elsewhere
            await asyncio.sleep(0)
        s.faults[1].release()
        s.faults[1].rates = FaultRates()
        await asyncio.gather(*writes)

        assert s.pool.stages()["stage0"].shed == 0
        assert len(s.stores[0]) == 6400
        assert len(s.stores[1]) + s.pool.stages()["stage1"].shed == 6400


class Absent:
    """A store that is not there at first."""

    name = "absent"

    def __init__(self, inner: StorageBackend, failures: int) -> None:
        self._inner = inner
        self.failures = failures
        self.aclose = inner.aclose

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:
        self.failures -= 1
        if self.failures >= 0:
            raise StorageError("not there")
        return await self._inner.open_pool(binding)


@pytest.mark.parametrize("late", [0, 1])
def test_a_stage_that_is_not_there_at_first_is_opened_later(late: int) -> None:
    async def main(world: SeededWorld) -> None:
        stores: list[StorageBackend] = [MemoryBackend(MemoryStore()), MemoryBackend(MemoryStore())]
        stores[late] = Absent(stores[late], failures=2)
        chain = StorageChain([ChainStage(f"s{n}", lambda n=n: stores[n]) for n in range(2)], world.port)  # type: ignore[misc]
        binding = SlotBinding(slab_of("kv", PAGE_BYTES, 8), fingerprint_of("w"))
        pool = await chain.open_chained(binding, PoolLimits(cooldown=5.0))
        bench = PoolUnderTest(pool.engine, binding)
        assert await bench.put(bench.keys(1), [0]) == [REJECTED]  # a promise needs both
        assert await bench.get(bench.keys(1), [1]) == [HIT]
        assert pool.stages()[f"s{late}"].breaker is BreakerState.OPEN
        for _ in range(4):
            await asyncio.sleep(6.0)
            await bench.engine.exists(bench.keys(9))
        await asyncio.sleep(1.0)

        assert await bench.put(bench.keys(2), [0]) == [STORED]
        assert pool.stages()[f"s{late}"].breaker is BreakerState.CLOSED
        await chain.aclose()

    run_seeded(0, main)


@pytest.mark.parametrize("attached_again", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_stage_that_is_detached_while_it_is_opened_is_not_used(
    attached_again: bool, fails: bool, caplog: pytest.LogCaptureFixture
) -> None:
    async def main(world: SeededWorld) -> None:
        stores = [MemoryStore(), MemoryStore()]
        backends = list[Gated]()

        def far() -> StorageBackend:
            backends.append(Gated(stores[1], fails=fails))
            if len(backends) < 3:
                raise StorageError("not there")
            if len(backends) > 3:
                backends[-1].gate.set()
            return backends[-1]

        stages = [ChainStage("s0", lambda: MemoryBackend(stores[0])), ChainStage("s1", far)]
        chain = StorageChain(stages, world.port)
        binding = SlotBinding(slab_of("kv", PAGE_BYTES, 8), fingerprint_of("w"))
        pool = await chain.open_chained(binding, PoolLimits(cooldown=5.0))
        bench = PoolUnderTest(pool.engine, binding)
        await asyncio.sleep(6.0)
        await bench.engine.exists(bench.keys(9))
        await backends[2].asked.wait()
        await chain.detach("s1")
        if attached_again:
            await chain.attach("s1")
        backends[2].gate.set()
        await asyncio.sleep(1.0)

        await bench.put(bench.keys(2), [0])
        assert len(stores[0]) == 1
        assert len(stores[1]) == attached_again
        await chain.attach("s1")
        await bench.put(bench.keys(3), [0])
        assert len(stores[1]) == 1 + attached_again
        await chain.aclose()
        assert [one.open for one in backends] == [0] * len(backends)
        assert "a chain of stores failed" not in caplog.text

    run_seeded(0, main)


class Gated(MemoryBackend):
    """A store whose pools are open when a gate is. `fails`: not if the store was closed before."""

    def __init__(self, store: MemoryStore, *, fails: bool) -> None:
        super().__init__(store)
        self._fails = fails
        self.gate, self.asked = asyncio.Event(), asyncio.Event()
        self.engines = list[MemoryEngine]()

    async def open_pool(self, binding: PoolBinding) -> MemoryEngine:
        if self._fails:
            self.asked.set()
            await self.gate.wait()
        self.engines.append(await super().open_pool(binding))
        self.asked.set()
        await self.gate.wait()
        return self.engines[-1]

    @property
    def open(self) -> int:
        return sum(not engine.closed for engine in self.engines)


@pytest.mark.asyncio
async def test_a_chain_without_any_store_cannot_be_opened() -> None:
    def absent() -> StorageBackend:
        raise StorageError("no disk")

    port = AsyncioPort(threads=1)
    with pytest.raises(StorageError, match="no disk"):
        StorageChain([ChainStage("a", absent), ChainStage("b", absent)], port)
    stores = [Absent(MemoryBackend(MemoryStore()), failures=9) for _ in range(2)]
    chain = StorageChain([ChainStage("a", lambda: stores[0]), ChainStage("b", lambda: stores[1])], port)
    with pytest.raises(StorageError, match="not there"):
        await chain.open_pool(SlotBinding(slab_of("kv", PAGE_BYTES, 8), fingerprint_of("w")))
    await port.aclose()


@pytest.mark.asyncio
async def test_clearing_clears_every_stage_and_nothing_comes_back() -> None:
    async with chained(ALL, ALL) as s:
        await s.put(*range(8))
        for number in range(4):
            s.stores[0].drop(s.keys(number)[0])
        reading = asyncio.create_task(s.get(*range(8)))
        await reading  # promotions run now

        assert await s.pool.clear() == 8
        await s.settled()

        assert s.have(*range(8)) == [[], []]
        s.faults[1].rates = FaultRates(raises=1.0)
        await s.put(1)
        with pytest.raises(StorageError, match="could not be cleared"):
            await s.pool.clear()
        assert s.have(1)[0] == []


@pytest.mark.asyncio
async def test_a_closed_chain_refuses_calls_and_leaves_no_task() -> None:
    async with chained(ALL, ALL) as s:
        await s.put(*range(8))
        s.stores[0].clear(*vars_of(s))
        s.faults[0].rates = FaultRates(hang=1.0, calls=("put",))
        assert await s.get(*range(8)) == [HIT] * 8
        closing = asyncio.create_task(s.pool.aclose())
        await asyncio.sleep(0)
        s.faults[0].release()
        await closing

        assert not s.pool.carrying
        for call in (s.pool.exists(s.keys(1)), s.pool.touch(s.keys(1)), s.pool.delete(s.keys(1))):
            with pytest.raises(ClosedError):
                await call


@pytest.mark.asyncio
async def test_a_touch_that_is_cancelled_before_it_begins_leaves_nothing_to_await(
    recwarn: pytest.WarningsRecorder,
) -> None:
    async with chained(ALL, ALL) as s:
        touch = asyncio.create_task(s.pool.touch(s.keys(1)))
        await asyncio.sleep(0)
        touch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await touch
    gc.collect()
    assert [str(warning.message) for warning in recwarn] == []


def test_a_late_store_does_not_hold_back_a_promotion_for_ever() -> None:
    """Staging slots come back when the late call has ended."""

    async def main(world: SeededWorld) -> None:
        async with chained(ALL, ALL, port=world.port, deadline=1.0, failures=1000) as s:
            free = s.pool.staged.free
            for turn in range(4):
                await s.put(*range(60))
                s.stores[0].clear(*vars_of(s))
                s.faults[0].rates = FaultRates(hang=1.0, calls=("put",))
                assert await s.get(*range(60)) == [HIT] * 60
                await asyncio.sleep(2.0 + turn)
                s.faults[0].rates = FaultRates()
                s.faults[0].release()
                await s.settled()
            assert s.pool.staged.free == free

    run_seeded(5, main)


@pytest.mark.asyncio
async def test_each_stage_may_be_wrapped_and_has_its_own_limits() -> None:
    async with chained(ALL, StagePolicy(limits=PoolLimits(deadline=0.01, retries=0))) as s:
        chain = in_each_store(s.pool.chain, lambda one: Latency(one, 0.0), s.pool.port)
        assert isinstance(chain, StorageChain)
        assert chain.name == "stage0+stage1"
        s.faults[1].rates = FaultRates(hang=1.0)
        assert await s.put(1) == [TIMEOUT]
        assert await s.get(1) == [HIT]


@pytest.mark.parametrize(
    ("stages", "message"),
    [
        ([("a", ALL)], "two stages or more"),
        ([("a", ALL), ("a", ALL)], "'a' is there twice"),
        ([("a", StagePolicy(write="leaving")), ("b", ALL)], "the nearest"),
        ([("a", StagePolicy(durable=False)), ("b", StagePolicy(write="leaving"))], "durable"),
    ],
)
def test_a_chain_that_cannot_work_is_refused(stages: list[tuple[str, StagePolicy]], message: str) -> None:
    opened: list[str] = []

    def never() -> StorageBackend:
        opened.append("opened")
        return MemoryBackend(MemoryStore())

    with pytest.raises(ConfigError, match=message):
        StorageChain([ChainStage(name, never, policy) for name, policy in stages], None)  # type: ignore[arg-type]
    assert not opened


def test_a_promise_needs_a_stage_that_gets_all_pages() -> None:
    with pytest.raises(ConfigError, match="durable needs write 'all'"):
        StagePolicy(write="second_hit", durable=True)


@pytest.mark.engine("object")
@pytest.mark.asyncio
@pytest.mark.parametrize("policy", [StagePolicy(write="leaving"), ALL])
async def test_what_leaves_a_stage_is_stored_page_by_page(policy: StagePolicy) -> None:
    engines = module("asynchicache.backends.object")
    port = AsyncioPort(threads=1, seed=0)

    async def outcomes(pages: int) -> list[Outcome]:
        async with AsyncExitStack() as stack:
            far = engines.open_backend({"url": "memory:///", "object_pages": pages}, port)
            stages = [
                ChainStage("near", lambda: MemoryBackend(MemoryStore()), ALL),
                ChainStage("far", lambda: far, policy),
            ]
            chain = StorageChain(stages, port)
            stack.push_async_callback(chain.aclose)
            binding = SlotBinding(slab_of("kv", PAGE_BYTES, 8), fingerprint_of("w"))
            pool = await chain.open_chained(binding, PoolLimits())
            keys = PoolUnderTest(pool.engine, binding).keys(0, 1)
            return (await pool.put(keys, [0, 1])).outcomes

    try:
        assert await outcomes(1) == [STORED] * 2
        if policy is ALL:
            assert await outcomes(32) == [STORED] * 2
        else:
            with pytest.raises(ConfigError, match=r"'far': write='leaving' .* set its option object_pages"):
                await outcomes(32)
    finally:
        await port.aclose()


@pytest.mark.asyncio
async def test_a_stage_is_detached_and_attached_again() -> None:
    async with chained(ALL, ALL) as s:
        await s.put(1, 2)
        s.stores[1].drop(s.keys(2)[0])
        s.stores[0].drop(s.keys(1)[0])
        assert await s.pool.chain.detach("stage0")
        assert not await s.pool.chain.detach("stage0")

        assert await s.get(1, 2) == [HIT, MISS]
        assert (await s.pool.exists(s.keys(1, 2))).outcomes == [HIT, MISS]
        assert await s.put(3) == [STORED]
        assert (await s.pool.exists(s.keys(3), fresh=True)).outcomes == [HIT]
        assert (await s.pool.delete(s.keys(3))).outcomes == [HIT]
        assert s.have(1, 2, 3) == [[2], [1]]

        s.faults[0] = Faulty(MemoryBackend(s.stores[0]), FaultRates(), random.Random(1))
        s.pool.chain.stage("stage0").open = lambda: s.faults[0]
        await s.pool.chain.attach("stage0")
        assert await s.get(1, 2) == [HIT, HIT]
        await s.settled()
        assert s.have(1, 2) == [[1, 2], [1]]
        with pytest.raises(ConfigError, match="no storage stage 'x'"):
            await s.pool.chain.detach("x")


def test_a_detached_stage_keeps_the_slots_that_it_may_write_to() -> None:
    async def main(world: SeededWorld) -> None:
        async with chained(ALL, ALL, port=world.port, deadline=1.0, closing=1.0) as s:
            await s.put(1)
            s.faults[0].rates = FaultRates(hang=1.0, calls=("get",))
            reading = asyncio.create_task(s.read(1))
            await asyncio.sleep(0.5)
            assert await s.pool.chain.detach("stage0")
            assert (await reading).outcomes == [TIMEOUT]
            late = s.pool.lingering([0])
            assert late is not None
            assert s.pool.used(frozenset({0})) == {0}
            s.faults[0].release()
            await late
            assert s.pool.lingering([0]) is None

    run_seeded(2, main)
