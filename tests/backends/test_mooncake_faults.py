"""Masters and nodes of Mooncake that are killed, paused and brought back, under the engine and the core."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from random import Random

import pytest

from asynchicache.backends.mooncake.codes import MooncakeCode, get_outcome, put_outcome
from asynchicache.backends.mooncake.joining import join
from asynchicache.backends.mooncake.options import MooncakeOptions
from asynchicache.backends.mooncake.store import MooncakeStore
from asynchicache.errors import StorageError
from asynchicache.ports import AsyncioPort
from asynchicache.storage.guard import GuardedPool, PoolLimits
from asynchicache.testing.backends import PoolUnderTest
from asynchicache.testing.faults import FaultRates, Faulty
from asynchicache.types import Outcome
from storage.mooncake_cluster import (
    Cluster,
    Watched,
    backend_of,
    binding_of,
    cluster,
    open_bench,
    own_network,
)

HIT, MISS, STORED, FAILED = Outcome.HIT, Outcome.MISS, Outcome.STORED, Outcome.FAILED

pytestmark = [pytest.mark.asyncio, pytest.mark.engine("mooncake")]


@pytest.fixture
def mortal() -> Iterator[Cluster]:
    """A cluster of the test's own, whose master never forgets a node that is silent."""
    with own_network(), cluster(master_flags=("--client_ttl=3600",)) as made:
        yield made


@pytest.fixture
def forgetful() -> Iterator[Cluster]:
    """As `mortal`, but the master forgets a node that was silent for 2 seconds."""
    with own_network(), cluster(master_flags=("--client_ttl=2",)) as made:
        yield made


@asynccontextmanager
async def watched_bench(made: Cluster) -> AsyncIterator[tuple[PoolUnderTest, Watched]]:
    """A pool with two pages in it, and its store."""
    store = join(MooncakeOptions.of(made.options()))
    watched = Watched(store)
    try:
        async with backend_of(made, watched) as backend:
            bench = await open_bench(backend)
            while not set(await bench.put(bench.keys(1, 2), [0, 1])) <= {STORED, Outcome.EXISTS}:
                pass  # the master may have forgotten a node that was slow
            yield bench, watched
    finally:
        store.close()


async def test_a_killed_master_costs_misses_and_comes_back_without_a_restart_of_ours(mortal: Cluster) -> None:
    async with watched_bench(mortal) as (bench, store):
        keys = bench.keys(1, 2)
        mortal.master.kill()

        with pytest.raises(StorageError, match="RPC_FAIL"):  # Mooncake notices
            await bench.engine.exists(keys)
        asked = len(store.log)
        assert await bench.get(keys, [2, 3]) == [FAILED] * 2
        assert await bench.put(keys, [0, 1]) == [FAILED] * 2
        assert await bench.engine.delete(keys) == [FAILED] * 2
        with pytest.raises(StorageError, match="RPC_FAIL"):
            await bench.engine.exists(keys)
        assert len(store.log) == asked, "each of these would have blocked for 4 seconds"

        mortal.master.start()  # all that it knew is lost
        assert await bench.get(keys, [2, 3]) == [MISS] * 2
        while await bench.put(keys, [0, 1]) != [STORED] * 2:  # until the node has lent its memory again
            pass
        assert await bench.get(keys, [2, 3]) == [HIT] * 2


async def test_a_killed_node_makes_exists_stale(mortal: Cluster) -> None:
    async with watched_bench(mortal) as (bench, _):
        keys = bench.keys(1, 2)
        mortal.node.kill()

        assert await bench.engine.exists(keys) == bytes([1, 1])
        assert await bench.get(keys, [2, 3]) == [FAILED] * 2


async def test_a_killed_node_costs_misses_once_the_master_notices(forgetful: Cluster) -> None:
    async with watched_bench(forgetful) as (bench, _):
        keys = bench.keys(1, 2)
        forgetful.node.kill()

        while await bench.engine.exists(keys) != bytes(2):
            assert set(await bench.get(keys, [2, 3])) <= {FAILED, MISS}

        assert await bench.get(keys, [2, 3]) == [MISS] * 2
        assert await bench.put(keys, [0, 1]) == [Outcome.REJECTED] * 2  # nobody lends memory now
        forgetful.node.start()
        assert await bench.put(keys, [0, 1]) == [STORED] * 2
        assert await bench.get(keys, [2, 3]) == [HIT] * 2


async def test_a_second_copy_outlives_the_node_of_the_first(forgetful: Cluster) -> None:
    with forgetful.another_node():
        async with backend_of(forgetful, replicas=2) as backend:
            bench = await open_bench(backend)
            keys = bench.keys(*range(8))
            assert await bench.put(keys, range(8)) == [STORED] * 8
            forgetful.node.kill()
            while await bench.get(keys, range(8, 16)) != [HIT] * 8:
                pass  # the master may not have noticed


async def test_pages_are_refused_without_memory_and_end_with_the_process_that_lends_it() -> None:
    with own_network(), cluster(nodes=False) as empty:
        async with backend_of(empty) as backend:
            bench = await open_bench(backend)
            keys = bench.keys(1)
            assert await bench.put(keys, [0]) == [Outcome.REJECTED]
            assert await bench.get(keys, [0]) == [MISS]

            async with backend_of(empty, segment_bytes=16 << 20) as lender:
                other = await open_bench(lender)
                assert await other.put(keys, [0]) == [STORED]
                assert await bench.get(keys, [5]) == [HIT]

            assert await bench.get(keys, [6]) == [MISS]


async def test_a_read_that_hangs_keeps_its_slots_until_it_ends(mortal: Cluster) -> None:
    """Bytes arrive after the deadline, so the slots are not free before."""
    async with AsyncExitStack() as stack:
        port = AsyncioPort(threads=2)
        stack.push_async_callback(port.aclose)
        bench, _ = await stack.enter_async_context(watched_bench(mortal))
        guard = GuardedPool(bench.engine, bench.binding, port, PoolLimits(deadline=0.2))
        stack.push_async_callback(guard.aclose)
        keys = bench.keys(1, 2)
        bench.poison([5, 6])
        mortal.node.pause()

        batch = await guard.get(keys, [5, 6])

        assert batch.outcomes == [Outcome.TIMEOUT] * 2
        assert batch.lingering is not None
        assert not batch.lingering.done()
        mortal.node.resume()
        await batch.lingering
        assert bench.holds(keys[0], 5)
        assert bench.holds(keys[1], 6)


async def test_a_second_put_of_a_page_waits_until_it_can_be_read(mortal: Cluster) -> None:
    """Mooncake would say at once that all is well."""
    async with watched_bench(mortal) as (bench, store):
        keys = bench.keys(3)
        bench.fill(keys * 2, [3, 4])
        mortal.node.pause()
        first = asyncio.create_task(bench.engine.put(keys, [3]))
        await asyncio.to_thread(store.wait_for, "batch_put_from_multi_buffers", 2)
        second = asyncio.create_task(bench.engine.put(keys * 2, [4, 4]))
        assert await bench.engine.exists(keys) == bytes(1)
        assert await bench.get(keys, [5]) == [MISS]
        assert not second.done()

        mortal.node.resume()
        assert await second == [Outcome.EXISTS] * 2
        assert await first == [STORED]
        assert await bench.get(keys, [5]) == [HIT]


async def test_closing_waits_for_a_running_call_even_if_its_caller_does_not(mortal: Cluster) -> None:
    async with watched_bench(mortal) as (bench, store):
        mortal.node.pause()
        getting = asyncio.create_task(bench.engine.get(bench.keys(1), [5]))
        await asyncio.to_thread(store.wait_for, "batch_get_into_multi_buffers")
        getting.cancel()
        closing = asyncio.create_task(bench.engine.aclose())
        await asyncio.wait([getting])
        impatient = asyncio.create_task(bench.engine.aclose())
        await asyncio.sleep(0)
        impatient.cancel()
        assert not closing.done()
        assert store.count("unregister_buffer") == 0

        mortal.node.resume()
        await closing

    ended = store.log.index(("batch_get_into_multi_buffers", "ends"))
    assert ended < store.log.index(("unregister_buffer", "begins"))
    assert store.count("unregister_buffer") == 2


async def test_faults_above_a_real_cluster_never_give_other_bytes(
    mooncake: Cluster, mooncake_store: MooncakeStore
) -> None:
    async with AsyncExitStack() as stack:
        port = AsyncioPort(threads=4, seed=0)
        stack.push_async_callback(port.aclose)
        backend = await stack.enter_async_context(backend_of(mooncake, mooncake_store))
        faults = Faulty(backend, FaultRates(), Random(7))
        binding = binding_of()
        bench = PoolUnderTest(await faults.open_pool(binding), binding)
        guard = GuardedPool(bench.engine, binding, port, PoolLimits(failures=1000))
        stack.push_async_callback(guard.aclose)
        faults.rates = FaultRates(fail=0.1, raises=0.1, partial=0.2, lie=0.2, swap=0.3)
        seen = set()
        for first in range(0, 200, 8):
            keys = bench.keys(*range(first, first + 8))
            bench.fill(keys, range(8))
            await guard.put(keys, range(8))
            await guard.exists(keys)
            bench.poison(range(8, 16))
            for key, slot, outcome in zip(
                keys, range(8, 16), (await guard.get(keys, range(8, 16))).outcomes, strict=True
            ):
                seen.add(outcome)
                assert outcome is not HIT or bench.holds(key, slot)

    assert seen == {HIT, MISS, FAILED, Outcome.CORRUPT}
    assert set(faults.injected) == {"fail", "raises", "partial", "lie", "swap"}


@pytest.mark.parametrize("code", [code for code in MooncakeCode if code < 0])
async def test_no_code_is_a_success(code: MooncakeCode) -> None:
    assert get_outcome(code, 100) in (MISS, FAILED, Outcome.CORRUPT)
    assert put_outcome(code) in (Outcome.EXISTS, FAILED, Outcome.REJECTED)


async def test_a_code_that_nobody_knows_is_a_failure() -> None:
    assert (get_outcome(-12345, 100), put_outcome(-12345)) == (FAILED, FAILED)
    assert (get_outcome(99, 100), put_outcome(7)) == (Outcome.CORRUPT, FAILED)
