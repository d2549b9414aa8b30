"""Cost of the bridge between event loop and device: submitting, waking the loop, resuming a task."""

from __future__ import annotations

import asyncio
import random
import statistics
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import asdict, dataclass
from typing import NamedTuple, Self

from rich.console import RenderableType

from asynchicache.pools.device import DevicePool
from asynchicache.pools.host import HostPool
from asynchicache.ports import AsyncioPort
from asynchicache.reports import Advance, facts
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.streams.drivers import ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice, EmulatedStream
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.testing.specs import synthetic_spec
from asynchicache.transfer.copies import PoolMemory
from asynchicache.transfer.local import GROUP_BYTES, LocalTransfers
from asynchicache.transfer.plan import CacheOperation, Direction, PoolShape, merge
from asynchicache.types import PoolTransfer
from asynchicache_lab.bench.options import BridgeOptions
from asynchicache_lab.bench.rounds import no_garbage_collection

OPERATIONS = 64
_PAGE_SIZE = 16
_CLOSE_SECONDS = 30.0
_PLAN_PAGES, _PLAN_LAYERS = 8_192, 80
_KEYS = TensorSpec("keys", tuple(range(_PLAN_LAYERS)), (8, 128), "bfloat16")
_LARGE = PoolShape(PoolSpec("kv", (_KEYS,)), 64, 4 * _PLAN_PAGES, 4 * _PLAN_PAGES)


@dataclass(frozen=True, slots=True)
class BridgeReport:
    """Medians, in microseconds.

    Attributes:
        build_us: CPU time of the loop thread to build 64 operations from lists of slots, checks included.
        submit_us: CPU time of the loop thread from the first of 64 submissions until all are handed over at
            the end of the tick.
        submit_wall_us: the same in wall time, which includes other processes and threads.
        wake_us: from the end of work on a stream's thread until the loop runs its callback.
        resume_us: from that callback until the awaiting task resumes.
        plan_us: CPU time to plan 8,192 scattered pages of 80 layers; outside the loop thread.
        wakes_per_64: number of loop wake-ups for 64 completions of one stream.
    """

    build_us: float
    submit_us: float
    submit_wall_us: float
    wake_us: float
    resume_us: float
    plan_us: float
    wakes_per_64: float

    @property
    def ok(self) -> bool:
        return True  # measures only; nothing to check

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def present(self) -> RenderableType:
        submit = f"{self.submit_us:.0f} us of CPU, {self.submit_wall_us:.0f} us by the clock"
        rows = [
            (f"make {OPERATIONS} operations", f"{self.build_us:.0f} us"),
            (f"submit {OPERATIONS} operations", submit),
            ("completion to loop", f"{self.wake_us:.0f} us"),
            ("completion to task", f"{self.resume_us:.0f} us"),
            (f"plan {_PLAN_PAGES:,} pages", f"{self.plan_us:.0f} us"),
            (f"wakes for {OPERATIONS} completions", f"{self.wakes_per_64:g}"),
        ]
        return facts(rows, "loop and device")


async def run_bridge(options: BridgeOptions, advance: Advance = lambda done, of: None) -> BridgeReport:
    """Measure all parts in each round, on emulated streams with one thread each."""
    async with _open_bridge(options) as bridge:
        with no_garbage_collection():
            rounds = []
            for number in range(options.rounds):
                advance(number, options.rounds)
                rounds.append(await bridge.measure())
    return BridgeReport(*(statistics.median(values) for values in zip(*rounds, strict=True)))


class _Clocks(NamedTuple):
    """CPU time of this thread and wall time, in seconds."""

    thread: float
    wall: float

    @classmethod
    def now(cls) -> Self:
        return cls(time.thread_time(), time.perf_counter())


class _Bridge:
    """Transfers on an emulated threaded device, and a separate stream."""

    def __init__(
        self,
        transfers: LocalTransfers,
        reactor: CompletionReactor,
        device: EmulatedDevice,
        port: AsyncioPort,
        pages: int,
    ) -> None:
        self._transfers = transfers
        self._port = port
        self._reactor = reactor
        self._device = device
        self._stream: EmulatedStream = device.stream("bridge")
        self._pages = pages
        slots = random.Random(0).sample(range(4 * _PLAN_PAGES), 2 * _PLAN_PAGES)
        transfer = PoolTransfer("kv", slots[:_PLAN_PAGES], slots[_PLAN_PAGES:])
        self._scattered = CacheOperation(Direction.LOAD, (transfer,))

    async def measure(self) -> list[float]:
        """Measure one round; values in the order of `BridgeReport`."""
        plan = await self._port.run_blocking(self._plan)  # off the loop thread, to keep its CPU caches warm
        seconds = [*await self._submit(), *await self._wake(), plan]
        return [*(1e6 * value for value in seconds), await self._count_wakes()]

    async def _submit(self) -> tuple[float, float, float]:
        handed_over: asyncio.Future[_Clocks] = asyncio.get_running_loop().create_future()
        started = _Clocks.now()
        operations = [self._operation(number) for number in range(OPERATIONS)]
        built = _Clocks.now()
        tickets = [self._transfers.submit(operation, done=_ignore) for operation in operations]
        # They are handed over at the end of the tick; a later callback runs after that.
        asyncio.get_running_loop().call_soon(lambda: handed_over.set_result(_Clocks.now()))
        end = await handed_over
        for ticket in tickets:
            await ticket
        return built.thread - started.thread, end.thread - built.thread, end.wall - built.wall

    def _operation(self, number: int) -> CacheOperation:
        pages = list(range(number * self._pages, (number + 1) * self._pages))
        transfers = PoolTransfer("kv", pages, pages), PoolTransfer("mamba", [number], [number])
        return CacheOperation(Direction.LOAD, transfers)

    def _plan(self) -> float:
        started = time.thread_time()
        merge([self._scattered], {"kv": _LARGE}, _PLAN_LAYERS, GROUP_BYTES)
        return time.thread_time() - started

    async def _wake(self) -> tuple[float, float]:
        """Measure from the end of one piece of work to its release, and to the resumption of the task."""
        released: asyncio.Future[float] = asyncio.get_running_loop().create_future()
        ended: list[float] = []
        gate = self._behind_gate()
        self._stream.launch(lambda: ended.append(time.perf_counter()))
        self._reactor.track(
            self._device, self._stream, lambda error: released.set_result(time.perf_counter())
        )
        gate.set()
        woken = await released
        return woken - ended[0], time.perf_counter() - ended[0]

    async def _count_wakes(self) -> float:
        before = self._reactor.statistics().wakes
        all_done, left = asyncio.Event(), [OPERATIONS]

        def release(error: BaseException | None) -> None:
            left[0] -= 1
            if not left[0]:
                all_done.set()

        gate = self._behind_gate()
        for _ in range(OPERATIONS):
            self._stream.launch(_nothing)
            self._reactor.track(self._device, self._stream, release)
        gate.set()
        await all_done.wait()
        return self._reactor.statistics().wakes - before

    def _behind_gate(self) -> threading.Event:
        """Return an event that blocks the stream until it is set."""
        gate = threading.Event()
        self._stream.launch(gate.wait)
        return gate


@asynccontextmanager
async def _open_bridge(options: BridgeOptions) -> AsyncIterator[_Bridge]:
    spec, port, device = synthetic_spec(_PAGE_SIZE), AsyncioPort(threads=1), EmulatedDevice(ThreadDriver())
    memories = _memories(spec, OPERATIONS * options.pages)
    reactor = CompletionReactor(port)
    transfers = LocalTransfers(device, memories, spec.layers, port, reactor)
    try:
        yield _Bridge(transfers, reactor, device, port, options.pages)
    finally:
        await transfers.aclose(_CLOSE_SECONDS)
        await reactor.aclose(_CLOSE_SECONDS)
        device.close()
        for memory in memories.values():
            memory.host.close()
        await port.aclose()


def _memories(spec: ModelSpec, slots: int) -> dict[str, PoolMemory]:
    return {
        pool.name: PoolMemory(
            DevicePool(pool, spec.page_size, slots), HostPool(pool, spec.page_size, slots, pin=False)
        )
        for pool in spec.pools
    }


def _ignore(error: BaseException | None) -> None:
    """Ignore a completion."""


def _nothing() -> None:
    """Stream work that takes no time."""
