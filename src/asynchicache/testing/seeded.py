"""Deterministic runs of the whole cache from one seed: a loop in virtual time, its port, and devices."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from functools import partial
from typing import Any, TypeVar, overload

from asynchicache.cache import EngineCache, HybridCache
from asynchicache.config import CacheConfig
from asynchicache.openings import Opening
from asynchicache.pools.engine import EngineMemory
from asynchicache.specs import ModelSpec
from asynchicache.storage.protocol import StorageBackend
from asynchicache.streams.base import Device
from asynchicache.streams.drivers import SeededDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.testing.seeded_loop import BLOCKING_SECONDS, SeededLoop

T = TypeVar("T")

COPY_SECONDS = 1e-4
"""The mean time that one piece of work of a stream takes."""

SUBMIT_SECONDS = 1e-5
"""The mean time until a worker begins its next call."""


class SeededPort:
    """A `ports.Port` on a seeded loop, with simulated clock, randomness and threads.

    Attributes:
        random: the library's randomness; independent of the draws that order tasks.
        worker_seconds: by worker name, the mean time until it starts its next call. Default:
            `SUBMIT_SECONDS`.
    """

    def __init__(self, loop: SeededLoop, seed: int) -> None:
        self.random = random.Random(f"port {seed}")
        self.worker_seconds: dict[str, float] = {}
        self._loop = loop
        self._running: set[asyncio.Future[Any]] = set()

    def now(self) -> float:
        return self._loop.time()

    async def run_blocking(self, call: Callable[[], T]) -> T:
        """Run `call` after a random delay, and return after another one.

        The call runs even if its caller is cancelled.
        """
        running = self._loop.run_in_executor(None, call)
        self._running.add(running)
        running.add_done_callback(self._forget)
        return await asyncio.shield(running)

    def _forget(self, running: asyncio.Future[Any]) -> None:
        self._running.discard(running)
        if not running.cancelled():
            running.exception()  # marks it as retrieved, so asyncio does not log it; the caller got it

    def worker(self, name: str) -> SeededWorker:
        return SeededWorker(self._loop, self.worker_seconds.get(name, SUBMIT_SECONDS))

    def post(self, call: Callable[[], object]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    async def aclose(self) -> None:
        """Wait for running calls, as joining their threads would."""
        while self._running:
            await asyncio.wait(self._running)


class SeededWorker:
    """A `ports.Worker` that starts each call a random delay after the previous one."""

    def __init__(self, loop: SeededLoop, mean_seconds: float = SUBMIT_SECONDS) -> None:
        self._loop = loop
        self._mean_seconds = mean_seconds
        self._calls: deque[Callable[[], object]] = deque()
        self._armed = False

    def submit(self, call: Callable[[], object]) -> None:
        self._calls.append(call)
        self._arm()

    def _arm(self) -> None:
        if self._calls and not self._armed:
            self._armed = True
            self._loop.call_later(self._loop.random.expovariate(1 / self._mean_seconds), self._run_next)

    def _run_next(self) -> None:
        self._armed = False
        if self._calls:  # empty if `close` came first
            self._calls.popleft()()
        self._arm()

    def close(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def abandon(self) -> None:
        self._calls.clear()


class SeededWorld:
    """The argument of a coroutine under `run_seeded`.

    Attributes:
        port: the library's clock, threads and randomness.
        random: randomness for the scenario itself.
    """

    def __init__(self, seed: int, loop: SeededLoop) -> None:
        self.seed = seed
        self.loop = loop
        self.port = SeededPort(loop, seed)
        self.random = random.Random(f"scenario {seed}")

    def device(self, *, mean_seconds: float = COPY_SECONDS) -> EmulatedDevice:
        """A device whose streams progress in virtual time.

        Args:
            mean_seconds: mean duration of one operation on a stream; each duration is random.
        """
        return EmulatedDevice(SeededDriver(self.loop, self.loop.random, mean_seconds=mean_seconds))

    async def sleep(self, mean_seconds: float) -> None:
        """Sleep for a random time; `testing.faults.Latency(..., sleep=world.sleep)` makes storage slow."""
        await asyncio.sleep(self.random.expovariate(1 / mean_seconds) if mean_seconds > 0 else 0)

    @overload
    def open_cache(
        self,
        spec: ModelSpec,
        config: CacheConfig | None = None,
        *,
        storage: StorageBackend | None = None,
        device: Device | None = None,
        engine: None = None,
    ) -> Opening[HybridCache]: ...

    @overload
    def open_cache(
        self,
        spec: ModelSpec,
        config: CacheConfig | None = None,
        *,
        storage: StorageBackend | None = None,
        device: Device | None = None,
        engine: EngineMemory,
    ) -> Opening[EngineCache]: ...

    def open_cache(
        self,
        spec: ModelSpec,
        config: CacheConfig | None = None,
        *,
        storage: StorageBackend | None = None,
        device: Device | None = None,
        engine: EngineMemory | None = None,
    ) -> Opening[HybridCache] | Opening[EngineCache]:
        """`HybridCache.open` in this world. Default device: `self.device()`.

        Set the pools' sizes explicitly: sizes derived from the machine's memory do not follow from the seed.
        """
        device = device or self.device()
        return HybridCache.open(spec, config, storage=storage, port=self.port, device=device, engine=engine)


def run_seeded(
    seed: int,
    main: Callable[[SeededWorld], Coroutine[Any, Any, T]],
    *,
    blocking_seconds: float = BLOCKING_SECONDS,
    max_steps: int = 10_000_000,
) -> T:
    """Run `main(world)` to its end in virtual time. The same seed gives the same run on any machine.

    An exception gets a note that names the seed.

    Args:
        seed: determines the order of tasks, the speed of streams and the latency of blocking calls.
        main: the coroutine function; it must not use sockets, other threads or the real clock.
        blocking_seconds: mean delay before a blocking call starts, and again before its result arrives.
        max_steps: number of callbacks after which the run counts as endless.

    Raises:
        DeadlockError: no task can proceed, or the run exceeded `max_steps`; lists the waiting tasks.
        ConfigError: `blocking_seconds` or `max_steps` is not above 0.
    """
    loop = SeededLoop(seed, blocking_seconds=blocking_seconds, max_steps=max_steps)
    try:
        with asyncio.Runner(loop_factory=partial(_same, loop)) as runner:
            return runner.run(main(SeededWorld(seed, loop)))
    except BaseException as error:
        error.add_note(f"seed {seed} replays this run")
        raise


def _same(loop: SeededLoop) -> SeededLoop:
    return loop
