"""Measure storage as the cache calls it, alternating with its limit; each moves all pages twice per round."""

from __future__ import annotations

import asyncio
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack, aclosing, asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from asynchicache.config import open_backend
from asynchicache.errors import StorageError
from asynchicache.hashing import ObjectKey
from asynchicache.ports import AsyncioPort
from asynchicache.reports import Advance
from asynchicache.storage.guard import GuardedPool
from asynchicache.storage.limits import PoolLimits
from asynchicache.storage.protocol import PoolEngine, StorageBackend
from asynchicache.types import Outcome
from asynchicache_lab.bench.rounds import there_and_back
from asynchicache_lab.bench.storage.controller import POOL, ControllerBench, open_controller_bench
from asynchicache_lab.bench.storage.limits import Peer, PlainClient, Setup, as_given
from asynchicache_lab.bench.storage.options import StorageBenchOptions
from asynchicache_lab.bench.storage.pages import BenchPages
from asynchicache_lab.bench.storage.registry import LIMITS
from asynchicache_lab.bench.storage.report import RoundSample, StorageReport
from asynchicache_lab.bench.ticker import longest_gap

_PATIENCE = PoolLimits(deadline=120.0)
_EXISTS_KEYS = 100_000
_EXISTS_BATCH = 1000

PageCall = Callable[[Sequence[int]], Awaitable[object]]
RoundSamples = defaultdict[str, list[RoundSample]]


@dataclass(slots=True, eq=False)
class StorageBench:
    """All objects open during a run.

    Attributes:
        limits: clients to compare with, by title; the limit itself first.
        turn: number of the engine's turns so far.
        keys: names of the pages in this turn, computed in advance, as a cache also does.
    """

    options: StorageBenchOptions
    setup: Setup
    pages: BenchPages
    backend: StorageBackend
    engine: PoolEngine
    pool: GuardedPool
    limits: Mapping[str, PlainClient]
    report: StorageReport
    turn: int = 0
    keys: Sequence[ObjectKey] = ()
    order: list[int] = field(default_factory=list)

    def begin_turn(self) -> None:
        """Give the pages new names."""
        self.turn += 1
        self.keys = self.pages.keys(self.turn, range(self.options.pages))

    async def put(self, indices: Sequence[int]) -> None:
        """Store pages under this turn's names.

        Raises:
            StorageError: a page was not stored.
        """
        keys = [self.keys[index] for index in indices]
        _expect(Outcome.STORED, (await self.pool.put(keys, indices)).outcomes)

    async def get(self, indices: Sequence[int]) -> None:
        """Read pages of this turn.

        Raises:
            StorageError: a page was not a hit.
        """
        keys = [self.keys[index] for index in indices]
        _expect(Outcome.HIT, (await self.pool.get(keys, indices)).outcomes)

    async def sweep(self, move: PageCall, order: Sequence[int]) -> RoundSample:
        """Move every page once, in batches, with a fixed number in flight."""
        step = self.options.batch_pages
        batches = iter([order[start : start + step] for start in range(0, len(order), step)])
        served = await self.server_seconds()
        started, cpu = time.perf_counter(), time.process_time()
        workers = [_drain(move, batches) for _ in range(self.options.depth)]
        failures = [error for error in await asyncio.gather(*workers, return_exceptions=True) if error]
        if failures:
            raise failures[0]
        seconds, cpu = time.perf_counter() - started, time.process_time() - cpu
        done = await self.server_seconds()
        server = None if served is None or done is None else done - served
        return RoundSample(seconds, cpu, len(order) * self.options.page_bytes, server)

    @property
    def limit(self) -> PlainClient | None:
        return next(iter(self.limits.values()), None)

    async def server_seconds(self) -> float | None:
        """CPU time that the server has used so far; None if unknown or without a server."""
        return await self.limit.server_seconds() if self.limit is not None else None

    async def clear(self) -> None:
        """Delete this turn's pages."""
        await self.pool.delete(self.keys)

    async def forget(self, side: StorageBench | PlainClient) -> None:
        """Delete the pages that a side stored in its turn, unless the medium evicts by itself."""
        if self.limit is None or not self.limit.evicts:
            await side.clear()


async def _drain(move: PageCall, batches: Iterator[Sequence[int]]) -> None:
    for batch in batches:
        await move(batch)


def _expect(wanted: Outcome, outcomes: Sequence[Outcome]) -> None:
    wrong = [outcome for outcome in outcomes if outcome is not wanted]
    if wrong:
        raise StorageError(f"{len(wrong)} of {len(outcomes)} pages were {wrong[0].value}, not {wanted.value}")


async def run_storage(options: StorageBenchOptions, advance: Advance) -> StorageReport:
    """Warm up, then measure the rounds.

    Args:
        options: what to measure.
        advance: called with the number of finished rounds and the total.

    Raises:
        ConfigError: the engine does not exist or refuses its options.
        StorageError: the engine cannot be opened, or loses pages.
    """
    async with _open(options) as bench:
        for number in range(options.rounds + 1):
            await _round(bench, measured=number > 0)
            advance(number + 1, options.rounds + 2)
        bench.begin_turn()
        await _stall(bench)
        await bench.forget(bench)
        if options.through_controller:
            await _through_controller(bench)
        advance(options.rounds + 2, options.rounds + 2)
        return bench.report


async def _round(bench: StorageBench, *, measured: bool) -> None:
    """Run engine and limits in order and in reverse order; each deletes its pages before the next starts."""
    sides: list[tuple[str, StorageBench | PlainClient]] = [("engine", bench), *bench.limits.items()]
    samples: RoundSamples = defaultdict(list)
    for name, side in there_and_back(sides):
        if side is bench:
            bench.begin_turn()
        await _turn(bench, name, side, samples)
        if side is bench and measured:
            await _exists(bench)
        await bench.forget(side)
    if measured:
        bench.report.add(samples)


async def _turn(
    bench: StorageBench, name: str, side: StorageBench | PlainClient, samples: RoundSamples
) -> None:
    """Write and read all pages in order; engine and limit also read them in random order."""
    in_order = range(bench.options.pages)
    samples[f"{name} put"].append(await bench.sweep(side.put, in_order))
    orders: dict[str, Sequence[int]] = {f"{name} get": in_order}
    if name in ("engine", "limit"):
        orders[f"{name} get scattered"] = bench.order
    for what, order in orders.items():
        bench.pages.erase()
        samples[what].append(await bench.sweep(side.get, order))
        bench.report.wrong_pages += bench.pages.wrong()


async def _exists(bench: StorageBench) -> None:
    """Query existing and missing names, in batches of the size of a long prompt."""
    unknown = bench.pages.keys(-1, range(_EXISTS_BATCH))
    keys = [*bench.keys, *unknown][:_EXISTS_BATCH]
    calls = _EXISTS_KEYS // _EXISTS_BATCH
    for name, ask in (("engine", bench.engine.exists), ("pool", bench.pool.exists)):
        started = time.perf_counter()
        for _ in range(calls):
            await ask(keys)
        bench.report.exists[name].append(calls * len(keys) / (time.perf_counter() - started))


async def _stall(bench: StorageBench) -> None:
    """Measure the longest block of the loop while pages move, and in an idle run of equal length."""
    in_order = range(bench.options.pages)
    started = time.perf_counter()
    moving = await longest_gap(partial(_there_and_back, bench, in_order))
    seconds = time.perf_counter() - started
    bench.report.stall_ms = moving * 1e3
    bench.report.idle_stall_ms = await longest_gap(partial(asyncio.sleep, seconds)) * 1e3


async def _through_controller(bench: StorageBench) -> None:
    """Move the same pages through a whole cache, alternating with the limit; one round warms up."""
    options, port = bench.options, bench.setup.port
    opened = open_controller_bench(bench.backend, options.page_bytes, options.pages, options.seed, port)
    async with opened as controller, AsyncExitStack() as stack:
        limits = await _opened(stack, LIMITS.get(options.engine), replace(bench.setup, pool=POOL))
        sides: list[ControllerBench | PlainClient] = [controller]
        sides += [limits["limit"]] if "limit" in limits else []
        for number in range(options.rounds + 1):
            samples: RoundSamples = defaultdict(list)
            for turn, side in enumerate(there_and_back(sides), 2 * len(sides) * number):
                await _controller_turn(bench, side, turn, samples)
            if number:
                bench.report.add(samples)


async def _controller_turn(
    bench: StorageBench, side: ControllerBench | PlainClient, turn: int, samples: RoundSamples
) -> None:
    if isinstance(side, ControllerBench):
        samples["controller put"].append(await side.put(turn))
        sample, wrong = await side.get(turn)
        samples["controller get"].append(sample)
        bench.report.wrong_pages += wrong
    else:
        await _turn(bench, "controller limit", side, samples)
        await bench.forget(side)


async def _there_and_back(bench: StorageBench, order: Sequence[int]) -> None:
    await bench.sweep(bench.put, order)
    await bench.sweep(bench.get, order)


@asynccontextmanager
async def _open(options: StorageBenchOptions) -> AsyncIterator[StorageBench]:
    async with AsyncExitStack() as stack:
        scratch = TemporaryDirectory(prefix="asynchicache-bench-", dir=options.folder or None)
        folder = Path(stack.enter_context(scratch))
        port = AsyncioPort(threads=max(8, 2 * options.depth), seed=options.seed)
        stack.push_async_callback(port.aclose)
        pages = BenchPages(options.page_bytes, options.pages, options.seed, folder.name)
        given, peer = options.engine_options(), LIMITS.get(options.engine)
        setup = Setup(options.page_bytes, options.pages, pages.memory, given, folder, port, pages.pool)
        own = peer.engine_options if peer is not None else as_given
        backend = open_backend(options.engine, own(given, folder), port)
        stack.push_async_callback(backend.aclose)
        engine = await backend.open_pool(pages.binding)
        pool = GuardedPool(engine, pages.binding, port, _PATIENCE)
        stack.push_async_callback(pool.aclose)
        limits = await _opened(stack, peer, setup)
        order = port.random.sample(range(options.pages), options.pages)
        report = StorageReport.of(options, peer)
        yield StorageBench(options, setup, pages, backend, engine, pool, limits, report, order=order)


async def _opened(stack: AsyncExitStack, peer: Peer | None, setup: Setup) -> dict[str, PlainClient]:
    """Open the clients to compare with, by their names in samples; `stack` closes them."""
    peers = [] if peer is None else [("limit", peer), *((one.title, one) for one in peer.beside)]
    return {name: await stack.enter_async_context(aclosing(await one.open(setup))) for name, one in peers}
