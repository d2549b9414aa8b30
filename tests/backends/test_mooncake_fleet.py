"""Mooncake as fleets run it: an etcd, and two masters of which one leads; tenants, pins and groups.

The leader is killed while caches work: nothing hangs, no byte is wrong, and what was lost is written again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

import pytest

from asynchicache import HybridCache, PoolLimits, Tier
from asynchicache.backends.mooncake import MooncakeBackend, MooncakeOptions
from asynchicache.backends.mooncake.engine import LABEL
from asynchicache.backends.mooncake.joining import join
from asynchicache.backends.mooncake.store import MooncakeStore
from asynchicache.errors import StorageError
from asynchicache.storage.binding import SlotBinding
from asynchicache.testing.backends import fingerprint_of, slab_of
from asynchicache.types import Outcome
from cache.engine import SPEC, Engine, config
from engines import free_port
from storage.mooncake_cluster import (
    PAGE_BYTES,
    Cluster,
    Fleet,
    Watched,
    backend_of,
    binding_of,
    cluster,
    fleet,
    open_bench,
    own_network,
)

pytestmark = [pytest.mark.asyncio, pytest.mark.engine("mooncake")]

STORED = Outcome.STORED
PROMPTS = [[number, *range(1, 20)] for number in range(100, 106)]


@asynccontextmanager
async def cache_on(made: Fleet, store: MooncakeStore) -> AsyncIterator[HybridCache]:
    backend = MooncakeBackend(MooncakeOptions.of(made.options()), store)
    settings = config(device_slots={"kv": 64, "mamba": 16}, storage_limits=PoolLimits(cooldown=0.1))
    async with HybridCache.open(SPEC, settings, storage=backend) as cache:
        yield cache
    await backend.aclose()


async def stored(cache: HybridCache, prompt: list[int]) -> bool:
    """Serve a prompt; whether storage has it."""
    engine = Engine(cache)
    async with cache.request(prompt) as request:
        await request.prefetch()
        await request.load()
        engine.check(request)
        await engine.compute(request, len(prompt))
        return await request.durable()


async def found(cache: HybridCache, prompt: list[int]) -> int:
    """How many tokens of a prompt storage gives to a cache that has none of it; compares their bytes."""
    async with cache.request([*prompt, 1]) as request:
        await request.prefetch()
        await request.load()
        Engine(cache).check(request)
        return request.hit.by_tier.get(Tier.STORAGE, 0)


async def found_anew(made: Fleet, store: MooncakeStore) -> list[int]:
    """The same of all prompts, by a new cache."""
    async with cache_on(made, store) as other:
        return [await found(other, prompt) for prompt in PROMPTS]


@pytest.mark.parametrize(
    "flags",
    [
        pytest.param((), id="forgets"),
        pytest.param(("--enable_oplog=true",), id="oplog", marks=pytest.mark.soak),  # waits twice as long
    ],
)
async def test_the_leading_master_is_killed_under_load(tmp_path: Path, flags: tuple[str, ...]) -> None:
    with own_network(), fleet(tmp_path, *flags) as made:
        store = join(MooncakeOptions.of(made.options()))
        async with cache_on(made, store) as cache, cache_on(made, store) as reader:
            assert await asyncio.gather(*(stored(cache, prompt) for prompt in PROMPTS)) == [True] * 6
            assert await found_anew(made, store) == [20] * 6
            made.master.kill()

            async def serve(number: int) -> None:
                """New prompts are computed and old ones read, until storage takes new ones again."""
                turn = 0
                while not await stored(cache, [number, turn := turn + 1, *range(18)]):
                    assert await found(reader, PROMPTS[turn % 6]) in (0, 20)

            async with asyncio.timeout(240), asyncio.TaskGroup() as group:
                for number in range(200, 204):
                    group.create_task(serve(number))

            assert "state -> serving" in made.standby.output
            while flags and await found_anew(made, store) != [20] * 6:
                pass  # a node may not have found the new leader
            if not flags:
                assert await found_anew(made, store) == [0] * 6
            while not all([await stored(cache, prompt) for prompt in PROMPTS]):
                pass  # a circuit breaker may still be open
            assert await found_anew(made, store) == [20] * 6
            assert cache.verify() == reader.verify() == []
        made.standby.kill()
        store.close()


async def test_an_etcd_that_is_not_there_is_said() -> None:
    with own_network():
        backend = MooncakeBackend(
            MooncakeOptions.of({"master": f"etcd://127.0.0.1:{free_port()}", "open_seconds": 2})
        )
        with pytest.raises(StorageError, match=r"cannot join the cluster of etcd://127\.0\.0\.1"):
            await open_bench(backend)
        await backend.aclose()


@pytest.fixture(scope="module")
def crowded() -> Iterator[Cluster]:
    """A cluster for 64 MiB in which nothing has a lease."""
    with own_network(), cluster(master_flags=("--default_kv_lease_ttl=0",)) as made:
        yield made


async def crowd(backend: MooncakeBackend, used: Callable[[], Awaitable[object]]) -> None:
    """Push out what nothing keeps, and use something meanwhile."""
    bench = await open_bench(backend, binding_of("swa", page_bytes=1 << 20, slots=8))
    for first in range(0, 320, 8):
        await used()
        await bench.put(bench.keys(*range(first, first + 8)), range(8))


async def test_pinned_pages_stay_and_the_others_go(crowded: Cluster) -> None:
    async with AsyncExitStack() as stack:
        pinning, plain = [
            await stack.enter_async_context(
                backend_of(crowded, namespace=f"pin{seconds}", soft_pin_seconds=seconds)
            )
            for seconds in (600, 0)
        ]
        benches = [await open_bench(backend) for backend in (pinning, plain)]
        for bench in benches:
            assert await bench.put(bench.keys(*range(20)), range(20)) == [STORED] * 20
        await benches[1].engine.label(b"first")
        await benches[1].engine.label(b"second")
        await crowd(plain, lambda: asyncio.sleep(0))
        client = await plain.client()
        folder = benches[1].keys(0)[0].text().rpartition(".")[0]
        assert client.exists([f"pin0:{folder}.{LABEL}"]) == [1]
        there = [await bench.engine.exists(bench.keys(*range(20))) for bench in benches]
    assert there == [b"\1" * 20, bytes(20)]


async def test_pages_of_one_prefix_stay_together_in_all_pools(crowded: Cluster) -> None:
    """A state goes last with its page, not before it. One model's uses keep no page of another."""
    store = join(MooncakeOptions.of(crowded.options()))
    watched = Watched(store)
    async with backend_of(crowded, watched, namespace="groups") as backend:
        pages, other = binding_of(), SlotBinding(slab_of("kv", PAGE_BYTES, 32), fingerprint_of("w2"))
        states = SlotBinding(slab_of("mamba", PAGE_BYTES, 32), pages.fingerprint, depends_on="kv")
        bench, state = [await open_bench(backend, one) for one in (pages, states)]
        keys = range(10)
        assert await bench.put(bench.keys(*keys), keys) == [STORED] * 10
        assert await state.put(state.keys(*keys), keys) == [STORED] * 10
        async with backend_of(crowded, namespace="groups") as others:
            new = await open_bench(others, other)
            await open_bench(others, SlotBinding(slab_of("mamba", PAGE_BYTES, 32), other.fingerprint))
            assert await new.put(new.keys(*keys), keys) == [STORED] * 10
            await crowd(others, lambda: bench.engine.touch(bench.keys(*keys)))
            assert await new.engine.exists(new.keys(*keys)) == bytes(10)
        assert await state.engine.exists(state.keys(*keys)) == b"\1" * 10
        assert await bench.engine.exists(bench.keys(*keys)) == b"\1" * 10
    puts = watched.arguments["batch_put_from_multi_buffers"]
    groups = [config.group_ids for *_, config in puts if config.group_ids]
    assert {len(name) for names in groups for name in names} == {15}, (
        "longer ones cost the master an allocation"
    )
    store.close()


async def test_a_tenant_has_pages_and_a_quota_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    policy = tmp_path / "tenants.yaml"
    policy.write_text(
        '{"version": 1, "tenants": [{"name": "a", "quota": 40000}, {"name": "b", "quota": 40000}]}'
    )
    flags = ("--enable_multi_tenants=true", f"--tenant_quota_connector_uri={policy}")
    with own_network(), cluster(master_flags=flags) as strict:
        async with AsyncExitStack() as stack:
            backends = [
                await stack.enter_async_context(backend_of(strict, tenant=tenant))
                for tenant in ("a", "b", "default")
            ]
            mine, yours, nobodys = [await open_bench(backend) for backend in backends]
            outcomes = await mine.put(mine.keys(*range(10)), range(10))
            assert set(outcomes) == {STORED, Outcome.REJECTED}
            assert await yours.engine.exists(yours.keys(*range(10))) == bytes(10)
            assert await yours.put(yours.keys(1), [0]) == [STORED]
            assert await nobodys.put(nobodys.keys(1), [0]) == [Outcome.FAILED]
            assert "TENANT_NOT_REGISTERED" in caplog.text
            assert await backends[1].clear() == 1
            assert sum(await mine.engine.exists(mine.keys(*range(10)))) == outcomes.count(STORED)
