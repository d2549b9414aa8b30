"""Objects behind the fixtures of `testing.plugin`: small caches, seeded runs, faulty storage, devices."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeVar

from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.cache import HybridCache
from asynchicache.config import CacheConfig, PrefetchOptions, PrefetchPolicy
from asynchicache.errors import ConfigError
from asynchicache.ports import Port
from asynchicache.specs import ModelSpec
from asynchicache.storage.protocol import StorageBackend
from asynchicache.streams.base import Device
from asynchicache.streams.drivers import InlineDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.testing.checks import assert_clean
from asynchicache.testing.faults import FaultRates, Faulty
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.testing.specs import synthetic_spec
from asynchicache.testing.watch import Watch
from asynchicache.types import check_number

T = TypeVar("T")

PAGE_SIZE = 4
SLOTS = 32
"""Device slots of each pool of a small cache."""


class OpenSmallCache(Protocol):
    """The type of the fixture `small_cache`."""

    def __call__(
        self,
        spec: ModelSpec | None = None,
        *,
        storage: StorageBackend | None = None,
        port: Port | None = None,
        device: Device | None = None,
        watch: bool | None = None,
        **options: Any,
    ) -> AbstractAsyncContextManager[HybridCache]: ...


class RunSeeds(Protocol):
    """The type of the fixture `seeded_loop`."""

    def __call__(
        self, main: Callable[[SeededWorld], Coroutine[Any, Any, T]], seeds: int | Iterable[int] = 10
    ) -> list[T]: ...


@asynccontextmanager
async def open_small_cache(
    spec: ModelSpec | None = None,
    *,
    storage: StorageBackend | None = None,
    port: Port | None = None,
    device: Device | None = None,
    watch: bool | None = None,
    **options: Any,
) -> AsyncIterator[HybridCache]:
    """Open a cache with few slots that copies immediately and waits for storage without a deadline.

    If the block raises nothing, the cache is drained at the end and must be clean.

    Args:
        spec: the model's pools. Default: attention and states, with pages of four tokens.
        storage, port, device: as for `HybridCache.open`.
        watch: see `testing.watch`: a request may not go on without its tickets, and slots that are published
            must have been written (without a `device` or `port` of your own). Default: True, but a test that
            writes nothing at all is one of bookkeeping. False: neither is looked at.
        options: `CacheConfig` options that override the small defaults.

    Raises:
        ConfigError: `spec` is no `ModelSpec`, or an option does not fit.
        AssertionError: the cache was not clean, see `assert_clean`; or slots were published unwritten.
    """
    spec = synthetic_spec(PAGE_SIZE) if spec is None else spec
    if not isinstance(spec, ModelSpec):
        raise ConfigError(f"spec={spec!r:.200} must be a ModelSpec")
    small: dict[str, Any] = {
        "device_slots": {pool.name: SLOTS for pool in spec.owners},
        "inline": True,
        "prefetch": PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE),
        "weight_version": "test",
    }
    config = CacheConfig(**(small | options))
    async with HybridCache.open(spec, config, storage=storage, port=port, device=device) as cache:
        plain = device is None and port is None and config.inline and config.device == "cpu"
        watched = None if watch is False else Watch(cache, writes=plain)
        yield cache
        await cache.drain()
        assert_clean(cache)
        if watched is not None and (watch or watched.anything_written):
            assert not watched.findings, "\n".join(["the engine published:", *watched.findings])


def run_seeds(
    main: Callable[[SeededWorld], Coroutine[Any, Any, T]], seeds: int | Iterable[int] = 10
) -> list[T]:
    """Run `main(world)` in virtual time once per seed, and return the results.

    Args:
        main: the coroutine function, see `run_seeded`. An exception names the seed that replays it.
        seeds: the number of seeds, or the seeds themselves.

    Raises:
        ConfigError: `seeds` are none: a test that runs nothing would pass.
    """
    if isinstance(seeds, str) or not isinstance(seeds, Iterable):
        check_number("seeds", seeds)
        seeds = range(seeds)
    results = [run_seeded(seed, main) for seed in seeds]  # they may be endless: until one fails
    if not results:
        raise ConfigError(f"seeds={seeds!r}: must be a number above 0, or one seed or more")
    return results


def make_faulty_storage() -> Faulty:
    """In-memory storage, initially without faults."""
    return Faulty(MemoryBackend(MemoryStore()), FaultRates(), random.Random(0))


def make_fake_device() -> EmulatedDevice:
    """A device that runs work immediately, on the caller's thread."""
    return EmulatedDevice(InlineDriver())
