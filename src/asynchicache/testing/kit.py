"""What the fixtures of `testing.plugin` give: small caches, runs under seeds, storage and devices."""

from __future__ import annotations

import random
from collections.abc import AsyncIterator, Callable, Coroutine, Iterable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any, Protocol, TypeVar

from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.cache import HybridCache
from asynchicache.config import CacheConfig, PrefetchOptions, PrefetchPolicy
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
    **options: Any,
) -> AsyncIterator[HybridCache]:
    """A cache with a few slots, that copies at once, and waits for storage for as long as it takes.

    Where nothing was raised, it is drained in the end, and must be clean.

    Args:
        spec: the model's pools; attention and states, in pages of four tokens, if None.
        storage, port, device: as for `HybridCache.open`.
        options: of `CacheConfig`, instead of the small ones.

    Raises:
        AssertionError: it was not clean; see `assert_clean`.
    """
    spec = spec or synthetic_spec(PAGE_SIZE)
    small: dict[str, Any] = {
        "device_slots": {pool.name: SLOTS for pool in spec.owners},
        "inline": True,
        "prefetch": PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE),
        "weight_version": "test",
    }
    config = CacheConfig(**(small | options))
    async with HybridCache.open(spec, config, storage=storage, port=port, device=device) as cache:
        yield cache
        await cache.drain()
        assert_clean(cache)


def run_seeds(
    main: Callable[[SeededWorld], Coroutine[Any, Any, T]], seeds: int | Iterable[int] = 10
) -> list[T]:
    """Run `main(world)` in virtual time, once for each seed; what it returned.

    Args:
        main: what to run, see `run_seeded`. An exception says which seed replays it.
        seeds: how many, or which.
    """
    return [run_seeded(seed, main) for seed in (range(seeds) if isinstance(seeds, int) else seeds)]


def make_faulty_storage() -> Faulty:
    """Storage in memory in which nothing goes wrong yet."""
    return Faulty(MemoryBackend(MemoryStore()), FaultRates(), random.Random(0))


def make_fake_device() -> EmulatedDevice:
    """A device that runs at once what it is given, on the caller's thread."""
    return EmulatedDevice(InlineDriver())
