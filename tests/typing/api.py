"""Uses of the public API, read by mypy and pyright in `make check`. Never run."""

from __future__ import annotations

from typing import assert_type

from asynchicache import (
    CacheConfig,
    CapacityError,
    EngineCache,
    EngineMemory,
    EngineRequest,
    Hit,
    HybridCache,
    MissReason,
    ModelSpec,
    Outcome,
    PoolSpec,
    PrefetchOptions,
    PrefixCachedModel,
    Request,
    UsageError,
    WritePolicy,
)
from asynchicache.events import PagesStored
from asynchicache.hashing import ObjectKey
from asynchicache.storage.protocol import PoolBinding, PoolEngine, StorageBackend


async def serve(spec: ModelSpec, tokens: list[int]) -> MissReason:
    async with HybridCache.open(spec, CacheConfig(host_ratio=2.0)) as cache:
        assert_type(cache, HybridCache)
        async with cache.request(tokens) as request:
            reason = await restore(request, spec)
            request.checkpoint(len(tokens))
        await cache.drain()
        assert_type(cache.verify(), list[str])
    return reason


async def restore(request: Request, spec: ModelSpec) -> MissReason:
    hit = await request.prefetch()
    assert_type(hit, Hit)
    ticket = request.load()
    await ticket.submitted()
    for layer in range(spec.layers):
        await ticket.submitted(layer)
        await ticket.layer(layer)
    assert_type(request.extend(1), dict[str, list[int]])
    assert_type(hit.tokens, int)
    return hit.reason


async def serve_engine(spec: ModelSpec, memory: EngineMemory, tokens: list[int]) -> Hit:
    """An engine names its pages; slots are nothing that its requests have."""
    async with HybridCache.open(spec, engine=memory) as cache:
        assert_type(cache, EngineCache)
        request = cache.request(tokens)
        assert_type(request, EngineRequest)
        async with request:
            hit = await request.prefetch()
            await request.load(into={"kv": [1, None]}, after=cache.device.stream("compute"))
            await request.checkpoint(len(tokens), pages={"kv": [1, 2]})
            request.load()  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
            request.checkpoint(4)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
            request.extend(1)  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
            request.pages("kv")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
            await request.admit()  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
        cache.device_tensor("kv", "keys")  # type: ignore[attr-defined]  # pyright: ignore[reportAttributeAccessIssue]
    return hit


async def serve_own(cache: HybridCache, tokens: list[int]) -> None:
    """A request for slots of the cache's own names no pages."""
    async with cache.request(tokens) as request:
        assert_type(request, Request)
        request.load(into={"kv": [1]})  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
        request.checkpoint(4, pages={})  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]


async def serve_either(
    spec: ModelSpec, memory: EngineMemory | None, keys: list[bytes]
) -> tuple[HybridCache | EngineCache, Hit]:
    cache = await HybridCache.open(spec, engine=memory)
    async with cache.request_keys(keys) as request:
        return cache, request.hit


async def by_hand(spec: ModelSpec) -> None:
    cache = await HybridCache.open(spec)
    assert_type(cache, HybridCache)
    await cache.aclose()


def count_running(model: PrefixCachedModel) -> int:
    return model.running


def configure() -> CacheConfig:
    """Words and sizes as a file has them; what is read back has the field's type."""
    config = CacheConfig(
        device_bytes="10GiB",
        host_bytes=1 << 30,
        write_policy="write_back",
        host_layout="page_first",
        copy_path="plain",
        prefetch={"policy": "wait_complete", "max_seconds": 5},
        storage_limits={"deadline": 3},
    )
    assert_type(config.write_policy, WritePolicy)
    assert_type(config.prefetch, PrefetchOptions)
    CacheConfig(write_policy=WritePolicy.WRITE_BACK, prefetch=PrefetchOptions(policy="timeout"))
    CacheConfig(write_policy="write_backwards")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    CacheConfig(device_byte=1)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    return config


async def follow(cache: HybridCache) -> list[str]:
    with cache.events(limit=100) as events:
        assert_type(await cache.snapshot(), list[PagesStored])
        return [event.pool async for event in events if isinstance(event, PagesStored)]


def describe(spec: ModelSpec) -> list[str]:
    assert_type(spec.pools[0], PoolSpec)
    return [pool.name for pool in spec.pools]


def tell_whose_fault(error: UsageError | CapacityError) -> str:
    return "mine" if isinstance(error, UsageError) else "nobody's"


async def store(backend: StorageBackend, binding: PoolBinding, keys: list[ObjectKey]) -> list[Outcome]:
    engine = await backend.open_pool(binding)
    assert_type(engine, PoolEngine)
    outcomes = await engine.put(keys, range(len(keys)))
    assert_type(outcomes, list[Outcome])
    await engine.aclose()
    return outcomes
