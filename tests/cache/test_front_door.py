"""The life of a request through three tiers, with threads, real copies and real bytes."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path

import pytest

from asynchicache import (
    CapacityError,
    HybridCache,
    MissReason,
    ModelSpec,
    RequestStateError,
    StorageLockedError,
    Tier,
    WritePolicy,
)
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.planner.options import PrefetchOptions
from asynchicache.testing.faults import FaultRates, Faulty
from asynchicache.types import PrefetchPolicy
from cache.engine import PAGE, SPEC, Engine, config

pytestmark = pytest.mark.asyncio

PROMPT = list(range(100, 120))


@pytest.mark.parametrize("inline", [True, False])
async def test_each_tier_serves_in_turn(inline: bool):
    backend = MemoryBackend(MemoryStore())
    async with HybridCache.open(SPEC, config(inline=inline), storage=backend) as cache:
        engine = Engine(cache)
        assert (await engine.serve(PROMPT)).tokens == 0
        device = await engine.serve([*PROMPT, 1, 2, 3])
        assert device.by_tier == {Tier.DEVICE: 20}
        for client in range(4):  # push it out of device memory
            await engine.serve([client * 1000 + n for n in range(32)], prefetch=False)
        host = await engine.serve([*PROMPT, 4, 5, 6])
        assert host.by_tier == {Tier.HOST: 20}
        await cache.flush()
        storage = await engine.serve([*PROMPT, 7, 8, 9])
        assert storage.by_tier == {Tier.STORAGE: 20}
        statistics = cache.statistics()
    assert statistics.served.requests == 8
    assert statistics.served.hit_tokens == {Tier.DEVICE: 20, Tier.HOST: 20, Tier.STORAGE: 20}


async def test_a_file_survives_a_restart(tmp_path: Path):
    options = config(storage="file", storage_options={"path": str(tmp_path / "pages")})
    async with HybridCache.open(SPEC, options) as cache:
        await Engine(cache).serve(PROMPT)
    async with HybridCache.open(SPEC, options) as cache:
        hit = await Engine(cache).serve([*PROMPT, 1])
    assert hit.by_tier == {Tier.STORAGE: 20}


@pytest.mark.parametrize(
    "other",
    [
        {"weight_version": "another"},
        {"salt": "another"},
    ],
)
async def test_pages_of_other_weights_are_no_hit(tmp_path: Path, other: dict[str, str]):
    options = {"storage": "file", "storage_options": {"path": str(tmp_path / "pages")}}
    async with HybridCache.open(SPEC, config(**options)) as cache:
        await Engine(cache).serve(PROMPT)
    async with HybridCache.open(SPEC, config(**options, **other)) as cache:
        assert (await Engine(cache).serve([*PROMPT, 1])).tokens == 0
    async with HybridCache.open(SPEC, config(**options)) as cache:
        assert (await Engine(cache).serve([*PROMPT, 1])).tokens == 20  # and nothing was lost


async def test_pages_of_another_dtype_are_no_hit(tmp_path: Path):
    from dataclasses import replace

    options = config(storage="file", storage_options={"path": str(tmp_path / "pages")})
    async with HybridCache.open(SPEC, options) as cache:
        await Engine(cache).serve(PROMPT)
    kv, mamba = SPEC.pools
    signed = replace(kv, tensors=tuple(replace(tensor, dtype="int8") for tensor in kv.tensors))
    async with HybridCache.open(ModelSpec("synthetic", PAGE, 4, (signed, mamba)), options) as cache:
        async with cache.request([*PROMPT, 1]) as request:
            assert (await request.prefetch()).tokens == 0


async def test_a_folder_has_one_writer(tmp_path: Path):
    options = config(storage="file", storage_options={"path": str(tmp_path / "pages")})
    async with HybridCache.open(SPEC, options) as cache:
        with pytest.raises(StorageLockedError, match="pages"):
            async with HybridCache.open(SPEC, options):
                raise AssertionError("two writers on one folder")
        assert (await Engine(cache).serve(PROMPT)).tokens == 0  # the first one goes on


async def test_namespaces_never_meet():
    async with HybridCache.open(SPEC, config(storage="memory")) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT, namespace="a")
        assert (await engine.serve([*PROMPT, 1], namespace="b")).tokens == 0
        assert (await engine.serve([*PROMPT, 1])).tokens == 0
        assert (await engine.serve([*PROMPT, 1], namespace="a")).tokens == 20


async def test_a_turn_resumes_inside_the_last_output():
    async with HybridCache.open(SPEC, config()) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT, outputs=[1, 2, 3, 4])
        assert (await engine.serve([*PROMPT, 1, 2, 3, 4, 9])).tokens == 24
        assert (await engine.serve([*PROMPT, 1, 2, 7])).tokens == 20


@pytest.mark.parametrize(
    ("checkpoints", "cuts", "output"),
    [("prompt+output+branch", (20,), True), ("8", (8, 16), False), ("none", (), False)],
)
async def test_checkpoints_say_where_states_are_wanted(checkpoints: str, cuts: tuple[int, ...], output: bool):
    async with HybridCache.open(SPEC, config(checkpoints=checkpoints)) as cache:
        async with cache.request(PROMPT) as request:
            assert request.cuts == cuts
            assert request.keeps_output is output


@pytest.mark.parametrize("length", [20, 18])
async def test_pages_are_published_alone_where_no_state_is_wanted(length: int):
    async with HybridCache.open(SPEC, config(tails=True)) as cache:
        async with cache.request(PROMPT) as request:
            await request.load()
            request.extend(20)
            await request.checkpoint(length, final=True, states=False)
        async with cache.request([*PROMPT[:length], 1]) as request:
            await request.load()
            assert (request.hit.tokens, request.hit.full_tokens) == (0, length // PAGE * PAGE)
        assert cache.verify() == []


async def test_the_state_of_a_snapshot_is_published():
    async with HybridCache.open(SPEC, config()) as cache:
        engine = Engine(cache)
        async with cache.request(PROMPT) as request:
            await request.load()
            request.extend(20)
            digests = engine.digests(request, None)
            engine.oracle.write("kv", request.pages("kv"), digests)
            for length in (8, 16):
                engine.oracle.write("mamba", [request.state("mamba")], [digests[length // PAGE - 1]])
                await request.snapshot(length)
            engine.oracle.write("mamba", [request.state("mamba")], [b"\0" * 32])  # the decode went on
            request.checkpoint(16)
        await cache.drain()
        assert (await engine.serve([*PROMPT, 1])).tokens == 16


async def test_a_final_checkpoint_needs_no_second_state_slot():
    async with HybridCache.open(SPEC, config(device_slots={"kv": 32, "mamba": 2})) as cache:
        engine = Engine(cache)
        async with cache.request([9, 9, 9, 9]) as holder, cache.request(PROMPT) as request:
            await holder.load()
            await request.load()  # both state slots are working states now
            request.extend(20)
            digests = engine.digests(request, None)
            engine.oracle.write("kv", request.pages("kv"), digests)
            engine.oracle.write("mamba", [request.state("mamba")], digests[-1:])
            await request.checkpoint(20, final=True)
            assert cache.verify() == []
            with pytest.raises(RequestStateError, match="finished"):
                request.extend(4)
            with pytest.raises(RequestStateError, match="finished"):
                request.checkpoint(20)
        await cache.drain()
        async with cache.request([*PROMPT, 1]) as request:
            await request.load()
            engine.check(request)
            assert request.hit.tokens == 20
        assert cache.verify() == []


async def test_admit_waits_for_a_state_slot_that_load_would_do_without():
    async with HybridCache.open(SPEC, config(device_slots={"kv": 32, "mamba": 2})) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT)
        async with cache.request([9, 9, 9, 9]) as holder:
            await holder.load()
            async with cache.request([8, 8, 8, 8]) as other:
                await other.load()  # both state slots are working states now
                async with cache.request([*PROMPT, 1]) as request:
                    waiting = asyncio.create_task(request.admit())
                    await asyncio.sleep(0)
                    assert not waiting.done()
                    holder.close()
                    assert (await waiting).tokens == 20
                    await request.load()
                    engine.check(request)
                    assert request.hit.tokens == 20
                    with pytest.raises(RequestStateError, match="before load"):
                        await request.admit()
        assert cache.verify() == []


async def test_many_requests_at_once():
    """Shared and diverging prefixes, aborted requests, tiny pools: every byte is checked."""
    rng = random.Random(7)
    backend = MemoryBackend(MemoryStore())
    options = config(device_slots={"kv": 48, "mamba": 14}, host_ratio=1.5)
    async with HybridCache.open(SPEC, options, storage=backend) as cache:
        engine = Engine(cache)

        async def client(number: int) -> int:
            history = [rng.randint(0, 1) for _ in range(8)]
            hits = 0
            for _ in range(6):
                async with cache.request(history) as request:
                    await request.prefetch()
                    await request.load()
                    engine.check(request)
                    hits += request.hit.tokens
                    if rng.random() < 0.2:
                        continue  # hung up
                    await request.reserve(len(history) - request.hit.tokens)
                    digests = engine.digests(request, None)
                    first, last = request.hit.tokens // PAGE, len(history) // PAGE
                    engine.oracle.write("kv", request.pages("kv")[first:last], digests[first:last])
                    engine.oracle.write("mamba", [request.state("mamba")], [digests[last - 1]])
                    await request.checkpoint(last * PAGE)
                history += [rng.randint(0, 1) for _ in range(PAGE)]
            return hits

        hits = await asyncio.gather(*(client(number) for number in range(4)))
        await cache.drain()
        assert cache.verify() == []
        assert sum(hits)
        held = cache.statistics().occupancy["mamba"][0].held
        assert held <= 14


async def test_one_read_serves_all_who_want_it():
    backend = Faulty(MemoryBackend(MemoryStore()), FaultRates(), random.Random(0))
    async with HybridCache.open(SPEC, config(), storage=backend) as cache:
        await Engine(cache).serve(PROMPT)
        await cache.flush()
        requests = [cache.request([*PROMPT, n]) for n in range(5)]
        for request in requests:
            await request.__aenter__()
        hits = await asyncio.gather(*(request.prefetch() for request in requests))
        assert [hit.tokens for hit in hits] == [20] * 5
        assert cache.statistics().storage["kv"].get.pages == 5
        for request in requests:
            request.close()
        assert cache.verify() == []


@pytest.mark.parametrize("policy", [PrefetchPolicy.TIMEOUT, PrefetchPolicy.WAIT_COMPLETE])
async def test_storage_that_hangs_costs_a_miss_by_its_deadline(policy: PrefetchPolicy):
    store = MemoryStore()
    async with HybridCache.open(SPEC, config(), storage=MemoryBackend(store)) as cache:
        await Engine(cache).serve(PROMPT)
    backend = Faulty(MemoryBackend(store), FaultRates(hang=1.0), random.Random(0))
    patience = PrefetchOptions(policy=policy, base_seconds=0.01, max_seconds=0.02)
    async with HybridCache.open(SPEC, config(prefetch=patience), storage=backend) as cache:
        async with cache.request([*PROMPT, 1]) as request:
            hit = await request.prefetch()
            assert (hit.tokens, hit.reason) == (0, MissReason.DEADLINE)
        assert backend.hanging
        backend.rates = FaultRates()
        backend.release()
        await cache.drain()
        assert cache.verify() == []


async def test_best_effort_serves_the_next_one():
    store = MemoryStore()
    async with HybridCache.open(SPEC, config(), storage=MemoryBackend(store)) as cache:
        await Engine(cache).serve(PROMPT)
    options = config(prefetch=PrefetchOptions(policy=PrefetchPolicy.BEST_EFFORT))
    async with HybridCache.open(SPEC, options, storage=MemoryBackend(store)) as cache:
        engine = Engine(cache)
        assert (await engine.serve([*PROMPT, 1])).tokens == 0
        assert (await engine.serve([*PROMPT, 2])).tokens == 20


@pytest.mark.parametrize(
    ("rates", "reason"),
    [
        ({"swap": 1.0}, MissReason.CORRUPT),
        ({"fail": 1.0}, MissReason.STORAGE_FAILED),
        ({"raises": 1.0}, MissReason.STORAGE_FAILED),
    ],
)
async def test_storage_that_lies_or_fails_is_a_miss_with_a_reason(
    rates: dict[str, float], reason: MissReason
):
    store = MemoryStore()
    async with HybridCache.open(SPEC, config(), storage=MemoryBackend(store)) as cache:
        await Engine(cache).serve(PROMPT)
    backend = Faulty(MemoryBackend(store), FaultRates(**rates), random.Random(0))
    async with HybridCache.open(SPEC, config(), storage=backend) as cache:
        hit = await Engine(cache).serve([*PROMPT, 1])
        assert hit.tokens == 0
        assert hit.reason is reason


@pytest.mark.parametrize("policy", list(WritePolicy))
async def test_what_was_published_is_durable_when_it_says_so(policy: WritePolicy):
    store = MemoryStore()
    async with HybridCache.open(SPEC, config(write_policy=policy), storage=MemoryBackend(store)) as cache:
        engine = Engine(cache)
        async with cache.request(PROMPT) as request:
            await request.load()
            await engine.compute(request, 20)
            assert await request.durable()
            assert len(store) == 6  # five pages and a state
    async with HybridCache.open(SPEC, config(), storage=MemoryBackend(store)) as cache:
        assert (await Engine(cache).serve([*PROMPT, 1])).tokens == 20


async def test_durable_is_false_without_storage():
    async with HybridCache.open(SPEC, config()) as cache:
        async with cache.request(PROMPT) as request:
            await request.load()
            await Engine(cache).compute(request, 20)
            assert not await request.durable()


async def test_a_cancelled_prefetch_leaves_what_it_began_to_read_to_others():
    store = MemoryStore()
    async with HybridCache.open(SPEC, config(), storage=MemoryBackend(store)) as cache:
        await Engine(cache).serve(PROMPT)
    backend = Faulty(MemoryBackend(store), FaultRates(hang=1.0, calls=("get",)), random.Random(0))
    async with HybridCache.open(SPEC, config(), storage=backend) as cache:
        async with cache.request([*PROMPT, 1]) as request:
            waiter = asyncio.create_task(request.prefetch())
            while not backend.hanging:  # noqa: ASYNC110  the wrapper needs no event elsewhere
                await asyncio.sleep(0)
            waiter.cancel()
            with pytest.raises(asyncio.CancelledError):
                await waiter
        backend.rates = FaultRates()
        backend.release()
        await cache.drain()
        assert cache.verify() == []
        assert (await Engine(cache).serve([*PROMPT, 2], prefetch=False)).tokens == 20


async def test_reserve_waits_for_others():
    options = config(device_slots={"kv": 8, "mamba": 4})
    async with HybridCache.open(SPEC, options) as cache:
        async with cache.request(list(range(24))) as first:
            await first.load()
            first.extend(24)
            async with cache.request(list(range(50, 70))) as second:
                await second.load()
                with pytest.raises(CapacityError, match="kv device slots"):
                    second.extend(20)
                waiting = asyncio.create_task(second.reserve(20))
                await asyncio.sleep(0)
                assert not waiting.done()
                first.close()
                assert len((await waiting)["kv"]) == 5
