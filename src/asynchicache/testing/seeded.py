"""The whole cache under one seed: a loop in virtual time, its port, devices, and a way to run it all."""

from __future__ import annotations

import asyncio
import random
from collections import deque
from collections.abc import Callable, Coroutine
from contextlib import AbstractAsyncContextManager
from functools import partial
from typing import Any, TypeVar

from asynchicache.cache import HybridCache
from asynchicache.config import CacheConfig
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
    """A `ports.Port` on a seeded loop: its clock, its randomness, and threads that are none.

    Attributes:
        random: what the library draws, apart from what decides the order of tasks.
        worker_seconds: by name of a worker, the mean time until it begins its next call, where that is not
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
        """Run `call` a drawn time from now, and return a drawn time later.

        The call runs also if its waiter is cancelled, at once or while it waits.
        """
        running = self._loop.run_in_executor(None, call)
        self._running.add(running)
        running.add_done_callback(self._forget)
        return await asyncio.shield(running)

    def _forget(self, running: asyncio.Future[Any]) -> None:
        self._running.discard(running)
        if not running.cancelled():
            running.exception()  # whoever waited knows; nobody else is to be told

    def worker(self, name: str) -> SeededWorker:
        return SeededWorker(self._loop, self.worker_seconds.get(name, SUBMIT_SECONDS))

    def post(self, call: Callable[[], object]) -> None:
        if not self._loop.is_closed():
            self._loop.call_soon_threadsafe(call)

    async def aclose(self) -> None:
        """Wait for calls that still run, as joining their threads would."""
        while self._running:
            await asyncio.wait(self._running)


class SeededWorker:
    """A `ports.Worker` that begins each call a drawn time after the one before."""

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
        if self._calls:  # else `close` was quicker
            self._calls.popleft()()
        self._arm()

    def close(self) -> None:
        while self._calls:
            self._calls.popleft()()

    def abandon(self) -> None:
        self._calls.clear()


class SeededWorld:
    """What a coroutine under `run_seeded` is given.

    Attributes:
        seed: of all that follows.
        loop: where it runs.
        port: the library's clock, threads and randomness.
        random: for what the scenario draws itself.
    """

    def __init__(self, seed: int, loop: SeededLoop) -> None:
        self.seed = seed
        self.loop = loop
        self.port = SeededPort(loop, seed)
        self.random = random.Random(f"scenario {seed}")

    def device(self, *, mean_seconds: float = COPY_SECONDS) -> EmulatedDevice:
        """A device whose streams progress in virtual time.

        Args:
            mean_seconds: the mean time that one piece of work takes; each is drawn.
        """
        return EmulatedDevice(SeededDriver(self.loop, self.loop.random, mean_seconds=mean_seconds))

    async def sleep(self, mean_seconds: float) -> None:
        """Sleep for a drawn time; `testing.faults.Latency(..., sleep=world.sleep)` makes storage slow."""
        await asyncio.sleep(self.random.expovariate(1 / mean_seconds) if mean_seconds > 0 else 0)

    def open_cache(
        self,
        spec: ModelSpec,
        config: CacheConfig | None = None,
        *,
        storage: StorageBackend | None = None,
        device: Device | None = None,
    ) -> AbstractAsyncContextManager[HybridCache]:
        """`HybridCache.open` in this world; on a device of `self.device()` unless told otherwise.

        Give the pools their sizes: what is derived from the memory of the machine is in no seed.
        """
        device = device or self.device()
        return HybridCache.open(spec, config, storage=storage, port=self.port, device=device)


def run_seeded(
    seed: int,
    main: Callable[[SeededWorld], Coroutine[Any, Any, T]],
    *,
    blocking_seconds: float = BLOCKING_SECONDS,
    max_steps: int = 10_000_000,
) -> T:
    """Run `main(world)` to its end in virtual time. The same seed makes the same run, anywhere.

    An exception is given a note that names the seed.

    Args:
        seed: of the order of tasks, the speed of streams, the latency of blocking calls.
        main: what to run; it must not touch sockets, other threads, or the real clock.
        blocking_seconds: the mean time until a blocking call begins, and again until it is told of.
        max_steps: callbacks after which the run counts as one that never ends.

    Raises:
        DeadlockError: nothing can happen any more, or the run never ends; lists the tasks that wait.
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
