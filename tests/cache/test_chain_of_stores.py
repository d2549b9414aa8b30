"""A cache over several stores: where hits come from, what it promises, and what a killed process keeps."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from asynchicache import HybridCache, PrefetchOptions, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.config import CacheConfig, StageOptions, open_storage, stages_of
from asynchicache.errors import ConfigError
from asynchicache.ports import AsyncioPort
from asynchicache.storage.chain import ChainStage, StagePolicy, StorageChain
from asynchicache.storage.limits import PoolLimits
from asynchicache.testing.faults import FaultRates, Faulty
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.types import Outcome
from cache.engine import SPEC, Engine, config
from storage.file_stores import other_process

PROMPT = list(range(100, 120))


def files(path: Path, **near: Any) -> dict[str, Any]:
    """Options of a cache over two files."""
    return {
        "storage": [{"backend": "file", "name": "near", **near}, {"backend": "file", "name": "far"}],
        "storage_options": [{"path": str(path / "near")}, {"path": str(path / "far")}],
    }


@pytest.mark.asyncio
async def test_hits_say_which_stage_they_came_from(tmp_path: Path) -> None:
    options = files(tmp_path)
    async with HybridCache.open(SPEC, config(**options)) as cache:
        await Engine(cache).serve(PROMPT)
        assert await cache.sync()
    async with HybridCache.open(SPEC, config(**options)) as cache:
        hit = await Engine(cache).serve([*PROMPT, 1])
        assert (hit.by_tier, hit.by_stage) == ({Tier.STORAGE: 20}, {"near": 20})
    _remove(tmp_path / "near")
    async with HybridCache.open(SPEC, config(**options)) as cache:
        engine = Engine(cache)
        hit = await engine.serve([*PROMPT, 2])
        assert (hit.by_tier, hit.by_stage) == ({Tier.STORAGE: 20}, {"far": 20})
        hit = await engine.serve([*PROMPT, 3])
        assert Tier.STORAGE not in hit.by_tier
        assert hit.by_stage == {}
        statistics = cache.statistics()
        assert statistics.served.hit_tokens[Tier.STORAGE] == 20
        assert statistics.served.stage_tokens == {"far": 20}
        assert list(statistics.stages) == ["near", "far"]
        assert statistics.stages["far"]["kv"].get.outcomes[Outcome.HIT] == 5
        assert statistics.storage["kv"].get.pages == 5
    async with HybridCache.open(SPEC, config(**options)) as cache:  # promoted
        assert (await Engine(cache).serve([*PROMPT, 4])).by_stage == {"near": 20}


def _remove(folder: Path) -> None:
    for path in sorted(folder.rglob("*"), reverse=True):
        path.rmdir() if path.is_dir() else path.unlink()


@pytest.mark.parametrize("down", [0, 1])
@pytest.mark.parametrize("rates", [FaultRates(hang=1.0), FaultRates(raises=1.0), FaultRates(lie=1.0)])
def test_a_stage_that_is_down_costs_its_hits_and_nothing_else(down: int, rates: FaultRates) -> None:
    async def main(world: SeededWorld) -> None:
        stores = [MemoryStore(), MemoryStore()]
        faults = [Faulty(MemoryBackend(store), FaultRates(), random.Random(1)) for store in stores]
        limits = PoolLimits(deadline=0.5, failures=2, cooldown=10.0, closing=0.5)
        policies = [StagePolicy(durable=number != down) for number in range(2)]
        stages = [ChainStage(f"s{n}", lambda n=n: faults[n], policies[n]) for n in range(2)]  # type: ignore[misc]
        for turn in range(3):
            chain = StorageChain([ChainStage(one.name, one.open, one.policy) for one in stages], world.port)
            faults[down].rates = FaultRates() if turn < 1 else rates
            async with world.open_cache(SPEC, config(storage_limits=limits), storage=chain) as cache:
                engine = Engine(cache)
                for prompt in range(4):
                    tokens = [prompt, *PROMPT]
                    hit = await engine.serve([*tokens, turn])
                    assert hit.tokens == (20 if turn else 0)
                    async with cache.request(tokens) as request:
                        await request.load()
                        await engine.compute(request, len(tokens))
                        assert await request.durable()
            for one in faults:
                one.release()

    run_seeded(4, main)


def test_a_far_stage_that_hangs_costs_no_hit_of_a_near_one() -> None:
    """A hybrid asks the far stage for states of other lengths, and a request waits for 2 seconds."""

    async def main(world: SeededWorld) -> None:
        stores = [MemoryStore(), MemoryStore()]
        far = Faulty(MemoryBackend(stores[1]), FaultRates(), random.Random(1))
        options = config(prefetch=PrefetchOptions(), host_slots={"kv": 8, "mamba": 2})
        for turn in range(2):
            if turn:
                far.rates = FaultRates(hang=1.0)
            stages = [
                ChainStage("near", lambda: MemoryBackend(stores[0])),
                ChainStage("far", lambda: far, StagePolicy(durable=False, limits=PoolLimits(closing=0.1))),
            ]
            async with world.open_cache(SPEC, options, storage=StorageChain(stages, world.port)) as cache:
                engine = Engine(cache)
                for prompt in range(4):
                    hit = await engine.serve([prompt, *PROMPT, turn])
                    assert (hit.tokens, hit.by_stage) == ((20, {"near": 20}) if turn else (0, {}))
            far.release()

    run_seeded(4, main)


@pytest.mark.asyncio
async def test_storage_is_a_chain_for_attaching_too(tmp_path: Path) -> None:
    options = files(tmp_path)
    async with HybridCache.open(SPEC, config()) as cache:
        await cache.attach_storage(options["storage"], options["storage_options"])
        await Engine(cache).serve(PROMPT)
        assert await cache.sync()
        assert await cache.detach_storage("near")
        assert not await cache.detach_storage("near")
        assert list(cache.statistics().stages) == ["far"]  # what is left out on purpose alarms nobody
        assert (await Engine(cache).serve([7, *PROMPT])).tokens == 0
        async with cache.request([7, *PROMPT]) as request:
            await request.load()
            assert await request.durable()
        await cache.attach_stage("near")
        with pytest.raises(ConfigError, match="no storage stage"):
            await cache.attach_stage("nowhere")
        await cache.update_weights("others")
        assert list(cache.statistics().stages) == ["near", "far"]
        assert await cache.detach_storage()
        assert cache.statistics().stages == {}


@pytest.mark.asyncio
@pytest.mark.parametrize("detached", [["near"], ["far"], ["near", "far"]])
async def test_a_detached_stage_stays_so_when_the_weights_change(tmp_path: Path, detached: list[str]) -> None:
    options = files(tmp_path)
    async with HybridCache.open(SPEC, config(**options)) as cache:
        for stage in detached:
            assert await cache.detach_storage(stage)
            _remove(tmp_path / stage)
        for weights in ("others", "test"):
            await cache.update_weights(weights)
            assert list(cache.statistics().stages) == [one for one in ("near", "far") if one not in detached]
            await Engine(cache).serve(PROMPT)
            assert await cache.sync() is (len(detached) == 1)
        assert not any(list((tmp_path / stage).iterdir()) for stage in detached)  # not even opened
        for stage in detached:
            assert not await cache.detach_storage(stage)
            await cache.attach_stage(stage)
        assert list(cache.statistics().stages) == ["near", "far"]
        assert (await cache.sync(), await cache.detach_storage()) == (True, True)
        await cache.attach_storage(options["storage"], options["storage_options"])
        await cache.detach_storage(detached[0])
        assert await cache.detach_storage()
        await cache.attach_storage(options["storage"], options["storage_options"])  # said anew: all are used
        assert list(cache.statistics().stages) == ["near", "far"]


KILLED = """
import asyncio, sys
sys.path.insert(0, "tests")
from asynchicache import HybridCache
from cache.engine import SPEC, Engine, config

async def main():
    async with HybridCache.open(SPEC, config(**eval(sys.argv[1]))) as cache:
        engine = Engine(cache)
        for number in range(int(sys.argv[2]), 100_000):
            tokens = [number, *range(100, 119)]
            async with cache.request(tokens) as request:
                await request.load()
                await engine.compute(request, len(tokens))
                if await request.durable():
                    print(number, flush=True)

asyncio.run(main())
"""


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("far", "capacity"), [({}, None), ({"write": "leaving"}, 1_250_000)], ids=["all", "leaving"]
)
async def test_what_was_acknowledged_survives_a_kill(
    tmp_path: Path, far: dict[str, Any], capacity: int | None
) -> None:
    options = files(tmp_path)
    options["storage"][1] |= far
    if capacity:
        options["storage_options"][0]["capacity_bytes"] = capacity
    first = 0
    for lines in (3, 40):
        with other_process(KILLED, repr(options), first) as writer:
            assert writer.stdout is not None
            told = [writer.stdout.readline() for _ in range(lines)]
            writer.kill()
            told += writer.stdout.read().splitlines(keepends=True)
        stored = [int(line) for line in told if line.endswith("\n")]
        async with HybridCache.open(SPEC, config(**options)) as cache:
            engine = Engine(cache)
            for number in stored:
                assert (await engine.serve([number, *range(100, 119), 7])).tokens == 20
        first = max(stored) + 1


@pytest.mark.parametrize(
    ("storage", "options", "message"),
    [
        ([], {}, "storage is an empty chain"),
        (["memory"], {}, "two stages or more"),
        (["memory", "memory"], {}, "'memory' is there twice"),
        (
            ["file", {"backend": "file", "name": "b"}],
            [{"path": "/a/b"}, {"path": "/a/./c/../b"}],
            "same store",
        ),
        (
            ["redis", {"backend": "redis", "name": "b"}],
            [{"url": "redis://h"}, {"url": "valkey://me:secret@H:6379/0", "namespace": "asynchicache"}],
            "same store",
        ),
        (
            ["object", {"backend": "object", "name": "b"}],
            [{"url": "s3://b/p"}, {"url": "s3://b/p/"}],
            "same store",
        ),
        (
            ["redis", {"backend": "redis", "name": "b"}],
            [{"url": "redis://localhost:6379"}, {"url": "redis://127.0.0.1"}],
            "same store",
        ),
        (
            ["object", {"backend": "object", "name": "b"}],
            [
                {"url": "s3://b", "config": {"endpoint": "http://localhost:9000"}},
                {"url": "s3://b", "config": {"endpoint": "http://127.0.0.1:9000/"}},
            ],
            "same store",
        ),
        (
            ["mooncake", {"backend": "mooncake", "name": "b"}],
            [{"master": "localhost:50051"}, {"master": "127.0.0.1:50051", "namespace": "asynchicache"}],
            "same store",
        ),
        (["redis", "memory"], [{"url": "redis://[h"}, {}], "url='redis://.h'"),
        (["object", "memory"], [{"url": "s3://b", "config": "x"}, {}], "config"),
        (
            [{"backend": "memory", "options": {"name": "x"}}, {"backend": "memory", "name": "b"}],
            [{}, {"name": "x"}],
            "same store",
        ),
        (["memory", ["file", "redis"]], {}, "a chain in a chain"),
        (["memory", 7], {}, "name of a backend, or a table"),
        (["memory", {"backend": "memory", "name": "b", "write": "sometimes"}], {}, "write 'sometimes'"),
        (["memory", {"backend": "memory", "naem": "b"}], {}, "did you mean 'name'"),
        (["memory", "file"], [{}], "one table for each"),
        (["memory", {"backend": "file", "options": {"path": "/a"}}], [{}, {"path": "/b"}], "has options"),
        (["memory", "nowhere"], {}, "'nowhere' is none of the backends"),
        ("memory", [{}], "takes one table"),
    ],
)
@pytest.mark.asyncio
async def test_a_chain_that_makes_no_sense_is_refused(storage: Any, options: Any, message: str) -> None:
    port = AsyncioPort(threads=1)
    with pytest.raises(ConfigError, match=message):
        open_chosen(CacheConfig(storage=storage, storage_options=options, weight_version="w"), port)
    await port.aclose()


def open_chosen(chosen: CacheConfig, port: AsyncioPort) -> None:
    open_storage(chosen.storage or "", chosen.storage_options, port)


def test_a_chain_in_a_file_and_in_the_environment(tmp_path: Path) -> None:
    file = tmp_path / "cache.toml"
    file.write_text(
        """
        weight_version = "w"
        storage = ["memory", { backend = "file", name = "disk", limits = { deadline = 2 } }]
        storage_options = [{ capacity_bytes = 4096 }, { path = "/tmp/nowhere" }]
        """
    )
    assert CacheConfig.load(file, environ={}).storage_name == "memory+disk"
    environ = {"ASYNCHICACHE_STORAGE": '["memory", "file"]', "ASYNCHICACHE_WEIGHT_VERSION": "w"}
    assert CacheConfig.load(environ=environ).storage_name == "memory+file"
    environ["ASYNCHICACHE_STORAGE"] = "memory"
    assert CacheConfig.load(environ=environ).storage == "memory"
    stage = StageOptions(backend="file", limits={"deadline": 2})  # type: ignore[arg-type]
    assert stage.limits is not None
    assert (stage.name, stage.limits.deadline) == ("file", 2.0)


@pytest.mark.parametrize(
    ("backend", "one", "other"),
    [
        ("redis", {"url": "redis://h"}, {"url": "redis://h/1"}),
        ("redis", {"url": "redis://h"}, {"url": "redis://h", "namespace": "b"}),
        (
            "object",
            {"url": "s3://b/p", "config": {"endpoint": "http://near"}},
            {"url": "s3://b/p", "config": {"endpoint": "http://far"}},
        ),
    ],
)
def test_stages_that_are_two_stores_are_taken_for_two(
    backend: str, one: dict[str, object], other: dict[str, object]
) -> None:
    assert len(stages_of([backend, {"backend": backend, "name": "b"}], [one, other])) == 2
