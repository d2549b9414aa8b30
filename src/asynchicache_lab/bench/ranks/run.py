"""Measure what a group of ranks costs its leader: processes over Unix sockets, in turns with one rank.

Each turn of a conversation is served twice, by the leader of a group and by a cache of one rank, with the
same pools and sizes. Between conversations all processes run the collective that the group replaces.
"""

from __future__ import annotations

import asyncio
import random
import sys
import tempfile
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from asynchicache.cache import HybridCache
from asynchicache.controller.request import Request
from asynchicache.ranks.group import RankGroup
from asynchicache_lab.bench.ranks.options import ROUNDS, RanksOptions
from asynchicache_lab.bench.ranks.report import PAIRS, Pair, RanksReport, Spread
from asynchicache_lab.bench.ranks.setup import LIMITS, TOKEN, Collective, config, model

_BETWEEN_STEPS = 1e-3
"""Seconds between two decode steps: followers have carried out the one before."""

_STOP_SECONDS = 60.0


@contextmanager
def _clocks(wall: list[float], cpu: list[float]) -> Iterator[None]:
    """Append the time of the block by the clock, and the processor time of this thread."""
    started, worked = time.perf_counter(), time.thread_time()
    yield
    cpu.append(time.thread_time() - worked)
    wall.append(time.perf_counter() - started)


@dataclass(slots=True, eq=False)
class _Times:
    """What was measured of a cache, in seconds; `_cpu`: of processor time of the loop's thread."""

    decode: list[float] = field(default_factory=list)
    decode_cpu: list[float] = field(default_factory=list)
    prefill: list[float] = field(default_factory=list)
    prefill_cpu: list[float] = field(default_factory=list)
    landed: list[float] = field(default_factory=list)
    request_cpu: list[float] = field(default_factory=list)
    question: list[float] = field(default_factory=list)
    load: list[float] = field(default_factory=list)
    publish: list[float] = field(default_factory=list)
    hit_tokens: int = 0


class _Leader:
    """An engine over one cache, with a group or without."""

    def __init__(self, cache: HybridCache, options: RanksOptions, group: RankGroup | None = None) -> None:
        self.times = _Times()
        self._cache = cache
        self._group = group
        self._decode_steps = options.decode_steps

    async def serve(self, tokens: Sequence[int]) -> None:
        """Serve one turn; every part ends before the next begins, so that its answers are its own."""
        started = time.thread_time()
        async with self._cache.request(tokens) as request:
            await request.prefetch()
            self._answered(self.times.question)
            loading = time.perf_counter()
            await self._prefill(request)
            await self._cache.drain()
            self.times.landed.append(time.perf_counter() - loading)
            self._answered(self.times.load)
            self.times.hit_tokens += request.hit.tokens
            await request.reserve(len(tokens) - request.hit.tokens)
            for _ in range(self._decode_steps):
                await self._decode()
            await request.checkpoint(len(tokens))
            await self._cache.drain()
            self._answered(self.times.publish)
        self.times.request_cpu.append(time.thread_time() - started)

    async def _prefill(self, request: Request) -> None:
        with _clocks(self.times.prefill, self.times.prefill_cpu):
            request.load()
            await self._step()

    async def _decode(self) -> None:
        with _clocks(self.times.decode, self.times.decode_cpu):
            await self._step()
        await asyncio.sleep(_BETWEEN_STEPS)

    async def _step(self) -> None:
        if self._group is not None:
            self._group.mark()
        await asyncio.sleep(0)  # the log is sent at the end of this iteration of the loop

    def _answered(self, lags: list[float]) -> None:
        if self._group is not None and any(slowest := self._group.lag_seconds().values()):
            lags.append(max(slowest))


async def run_ranks(
    options: RanksOptions, advance: Callable[[int, int], object] = lambda done, of: None
) -> RanksReport:
    """Play all conversations, and measure.

    Args:
        options: flags.
        advance: called with finished requests and their total.

    Raises:
        RankError: a follower does not start.
    """
    async with AsyncExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="asynchicache-ranks-")))
        address = f"unix:{folder / 'group'}"
        followers = [
            await stack.enter_async_context(_follower(address, rank, options))
            for rank in range(1, options.ranks)
        ]
        group = await stack.enter_async_context(RankGroup.listen(address, TOKEN, LIMITS))
        opening = HybridCache.open(model(options), config(options, 0, options.ranks), group=group)
        cache = await stack.enter_async_context(opening)
        single = await stack.enter_async_context(HybridCache.open(model(options), config(options, 0, 1)))
        collective = await asyncio.to_thread(Collective, folder, 0, options.ranks)
        stack.callback(collective.close)
        leaders = _Leader(cache, options, group), _Leader(single, options)
        seconds = await _play(options, leaders, collective, followers, advance)
        return _report(options, leaders, group, seconds)


async def _play(
    options: RanksOptions,
    leaders: Sequence[_Leader],
    collective: Collective,
    followers: Sequence[Process],
    advance: Callable[[int, int], object],
) -> list[float]:
    """Serve all turns; returns the seconds of the all-reduces between them."""
    chance = random.Random(options.seed)
    count, total = options.conversations, options.conversations * ROUNDS
    histories: list[list[int]] = [[] for _ in range(count)]
    seconds: list[float] = []
    for turn in range(total):
        history = histories[turn % count]
        history += (chance.randrange(50_000) for _ in range(options.request_length))
        for leader in leaders if turn % 2 else reversed(leaders):
            await leader.serve(history)
        some = options.collectives * (turn + 1) // total - len(seconds)
        for follower in followers if some else ():
            assert follower.stdin is not None
            follower.stdin.write(b"%d\n" % some)
        seconds += await asyncio.to_thread(collective.run, some) if some else []
        advance(turn + 1, total)
    return seconds


def _report(
    options: RanksOptions, leaders: tuple[_Leader, _Leader], group: RankGroup, seconds: Sequence[float]
) -> RanksReport:
    ours, alone = (leader.times for leader in leaders)
    requests = options.conversations * ROUNDS
    return RanksReport(
        ranks=options.ranks,
        requests=requests,
        failure=str(group.failure or ""),
        hit_tokens=ours.hit_tokens,
        alone_hit_tokens=alone.hit_tokens,
        **{part: Pair(Spread.of(getattr(ours, part)), Spread.of(getattr(alone, part))) for part in PAIRS},
        question=Spread.of(ours.question),
        load=Spread.of(ours.load),
        publish=Spread.of(ours.publish),
        log_bytes=group.leader.log_bytes / requests,
        collective=Spread.of(seconds),
    )


@asynccontextmanager
async def _follower(address: str, rank: int, options: RanksOptions) -> AsyncIterator[Process]:
    """Run a follower for the duration of the block; the end of its standard input ends it."""
    given = msgspec.json.encode(options).decode()
    words = ["-m", "asynchicache_lab.bench.ranks.follower", address, str(rank), given]
    process = await asyncio.create_subprocess_exec(sys.executable, *words, stdin=PIPE)
    try:
        yield process
    finally:
        assert process.stdin is not None
        process.stdin.close()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
