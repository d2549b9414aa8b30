"""Replicas that meet the same new prefix store it once; if one dies, or a clock jumps, nothing is lost."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from math import inf
from pathlib import Path

import pytest

import forking
from asynchicache import HybridCache
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.hashing import ObjectKey, namespace_seed, page_digests
from asynchicache.openings import Opening
from asynchicache.storage.limits import PoolLimits
from asynchicache.storage.protocol import EngineWrapper, PoolBinding, PoolEngine
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.types import Outcome, token_array
from cache.engine import PAGE, SPEC, Engine, config
from engines import module
from soaking import first
from storage.listening import counting
from storage.object_servers import AzureServer, ObjectServer, S3Server
from storage.redis_servers import RedisServer

PROMPT = list(range(100, 120))
OTHER = list(range(200, 220))
SECONDS = 5.0
LOOK = 0.5
"""More than passes until somebody who waits looks again."""
PEER = Path(__file__).parents[1] / "storage" / "herd_peer.py"


class SharedStore:
    """A store of several replicas, which know each other's claims.

    Attributes:
        sent: how often each page was sent.
    """

    def __init__(self, world: SeededWorld) -> None:
        self.world = world
        self.pages = MemoryStore()
        self.sent: Counter[ObjectKey] = Counter()
        self.claims: dict[tuple[str, bytes], tuple[object, float]] = {}

    def open(self, **options: object) -> Opening[HybridCache]:
        limits = PoolLimits(claim_seconds=SECONDS)
        return self.world.open_cache(SPEC, config(storage_limits=limits, **options), storage=Replica(self))

    def claim_as_another(self, tokens: Sequence[int], until: float) -> None:
        digests = page_digests(token_array(tokens), PAGE, namespace_seed(None))
        self.claims |= {(pool.name, one): (None, until) for pool in SPEC.pools for one in digests}


class Replica(MemoryBackend):
    """The store, as one replica has it."""

    def __init__(self, shared: SharedStore) -> None:
        super().__init__(shared.pages)
        self.shared = shared

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:  # type: ignore[override]
        return _Engine(await super().open_pool(binding), self.shared)


class _Engine(EngineWrapper):
    def __init__(self, engine: PoolEngine, shared: SharedStore) -> None:
        super().__init__(engine)
        self.capabilities = replace(engine.capabilities, shared=True, immediate=False, batch_pages=2)
        self._shared = shared
        self.claim = self._claim

    async def _claim(self, keys: Sequence[ObjectKey], seconds: float) -> list[Outcome]:
        await asyncio.sleep(0.001)
        claims, now = self._shared.claims, self._shared.world.port.now()
        answers = [Outcome.EXISTS] * len(keys)
        for place, key in enumerate(keys):
            owner, until = claims.get((key.pool, key.digest), (self, 0.0))
            if key not in self._shared.pages:
                answers[place] = Outcome.MISS if owner is self or until <= now else Outcome.CLAIMED
            if answers[place] is Outcome.MISS:
                claims[key.pool, key.digest] = (self, now + seconds)
        return answers

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        self._shared.sent.update(keys)
        await asyncio.sleep(0.1)
        return await super().put(keys, slots)


async def store(cache: HybridCache, tokens: Sequence[int]) -> bool:
    engine = Engine(cache)
    async with cache.request(tokens) as request:
        await request.load()
        for cut in [*request.cuts, len(tokens)]:
            await engine.compute(request, cut)
        return await request.durable()


@pytest.mark.parametrize("seed", range(5))
def test_four_replicas_send_each_page_once_and_all_may_promise_it(seed: int) -> None:
    async def main(world: SeededWorld) -> None:
        shared = SharedStore(world)
        async with shared.open() as a, shared.open() as b, shared.open() as c, shared.open() as d:
            replicas = [a, b, c, d]
            assert await asyncio.gather(*(store(cache, PROMPT) for cache in replicas)) == [True] * 4
            assert set(shared.sent) == set(shared.pages)
            assert set(shared.sent.values()) == {1}
            assert world.port.now() < SECONDS
            for cache in replicas:
                await cache.flush()
                assert (await Engine(cache).serve([*PROMPT, 1])).tokens == len(PROMPT)

    run_seeded(seed, main)


@pytest.mark.parametrize("until", [SECONDS, inf], ids=["as said", "for ever, since a clock was set back"])
def test_one_that_dies_delays_others_for_its_lease(until: float) -> None:
    async def main(world: SeededWorld) -> None:
        shared = SharedStore(world)
        shared.claim_as_another(PROMPT, until)
        async with shared.open() as cache:
            assert await store(cache, PROMPT)
            assert SECONDS <= world.port.now() < SECONDS + LOOK
            assert set(shared.sent.values()) == {1}

    run_seeded(0, main)


def test_a_claim_that_was_lost_costs_bytes_and_no_page() -> None:
    async def main(world: SeededWorld) -> None:
        shared = SharedStore(world)
        async with shared.open() as first, shared.open() as second:
            stored = asyncio.create_task(store(first, PROMPT))
            while not shared.sent:  # noqa: ASYNC110 - nothing tells
                await asyncio.sleep(0.01)
            shared.claims.clear()  # the clock of the store jumped ahead
            assert await store(second, PROMPT)
            assert await stored
            assert max(shared.sent.values()) == 2

    run_seeded(0, main)


def test_pages_that_another_sends_keep_no_host_memory_meanwhile() -> None:
    async def main(world: SeededWorld) -> None:
        shared = SharedStore(world)
        shared.claim_as_another(PROMPT, inf)
        async with shared.open(host_slots={"kv": 5, "mamba": 2}) as cache:
            async with cache.request(PROMPT) as request:
                await request.load()
                await Engine(cache).compute(request, len(PROMPT))
            assert await store(cache, OTHER)
            assert world.port.now() < SECONDS
            await cache.drain()
            assert cache.verify() == []

    run_seeded(0, main)


def made(folder: Path) -> Path:
    folder.mkdir()
    return folder


async def replicate(
    folder: Path, replicas: int, pages: int, storage: str, options: dict[str, object]
) -> None:
    """So many processes meet one new prompt at once, and store it."""
    peer = [PEER, storage, json.dumps(options), folder, str(replicas), str(pages)]
    ended = await asyncio.gather(*(asyncio.to_thread(forking.run, peer) for _ in range(replicas)))
    assert [(one.stdout, one.stderr) for one in ended] == [("True\n", "")] * replicas


@pytest.mark.asyncio
@pytest.mark.engine("redis")
@pytest.mark.parametrize("pages", first(1, [48, 12]))
async def test_four_processes_send_redis_the_bytes_of_one(tmp_path: Path, pages: int) -> None:
    async def received(replicas: int) -> int:
        """Bytes that a new server got from so many."""
        with RedisServer(tmp_path) as server, module("redis").Redis.from_url(server.url) as client:
            options = {"url": server.url, "timeout_seconds": 60}
            await replicate(made(tmp_path / str(replicas)), replicas, pages, "redis", options)
            received: int = client.info("stats")["total_net_input_bytes"]
            return received

    assert await received(4) <= 1.2 * await received(1)


@pytest.mark.asyncio
@pytest.mark.engine("object")
@pytest.mark.parametrize("kind", first(1, [S3Server, AzureServer]))
async def test_four_processes_send_an_object_store_the_bytes_of_one(
    tmp_path: Path, kind: type[ObjectServer]
) -> None:
    with kind() as server:

        async def received(replicas: int) -> int:
            """Bytes that the server got from so many."""
            async with counting(server.port) as (port, received):
                options = server.options(str(replicas))
                told = json.loads(json.dumps(options).replace(f":{server.port}", f":{port}"))
                await replicate(made(tmp_path / str(replicas)), replicas, 12, "object", told)
            assert not [name for name in server.names(str(replicas)) if ".claim" in name]
            return sum(received)

        assert await received(4) <= 1.2 * await received(1)
