"""The demo's second act: many clients on one event loop, while things go wrong.

Storage fails every call for a while and comes back, clients hang up in the middle of an answer, and the
server restarts. Nobody may get an error for it.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from statistics import fmean

from transformers import PreTrainedModel

from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.config import CacheConfig, PrefetchOptions
from asynchicache.integrations.transformers.model import PrefixCachedModel
from asynchicache.storage.limits import PoolLimits
from asynchicache.testing.faults import FaultRates, Faulty
from asynchicache.types import Tier
from asynchicache_lab.bench.demo.options import DemoOptions
from asynchicache_lab.bench.demo.results import CrowdResult, Sample
from asynchicache_lab.bench.ticker import TICK_SECONDS

_PAGE = 16
_RULES, _QUESTION, _ANSWER = 96, 24, 16
_TURNS = 3
_WORDS = 200
_SAMPLE_SECONDS = 0.25
_HANGING_UP = 4  # one of so many clients
_ASKING = 4
"""Clients that ask at a time; some read and type. With all, first tokens would show the queue for a core."""


class Crowd:
    """Clients of one model, some of whom ask at a time."""

    def __init__(
        self, model: PreTrainedModel, options: DemoOptions, on_sample: Callable[[Sample], object]
    ) -> None:
        self.result = CrowdResult(options.num_visitors)
        self._model = model
        self._on_sample = on_sample
        self._seed = options.seed
        self._chance = random.Random(options.seed)
        self._rules = self._words(_RULES)
        self._histories = [list(self._rules) for _ in range(options.num_visitors)]
        self._store = MemoryStore()
        self._began = time.perf_counter()
        self._seen: list[tuple[int, dict[Tier, int], float]] = []  # prompt tokens, hits and milliseconds
        self._gap = 0.0
        self._asking = asyncio.Semaphore(_ASKING)

    async def play(self) -> CrowdResult:
        """Two lives of a server; the second one finds what the first has left in storage."""
        async with self._open() as (served, storage):
            self._happened(f"{self.result.clients} clients")
            async with self._watched(served):
                await asyncio.gather(self._talk_all(served, _TURNS - 1), self._break_storage(served, storage))
        async with self._open() as (served, _):
            self._happened("restart")
            first = len(self._seen)
            async with self._watched(served):
                await self._talk_all(served, 1)
        self.result.warm_hit_rate = _hit_rate(self._seen[first:])
        if self.result.warm_hit_rate < 0.5:
            self.result.problems.append(f"after the restart only {self.result.warm_hit_rate:.0%} were hits")
        return self.result

    @asynccontextmanager
    async def _open(self) -> AsyncIterator[tuple[PrefixCachedModel, Faulty]]:
        storage = Faulty(MemoryBackend(self._store), FaultRates(), random.Random(0))
        visitors = self.result.clients
        config = CacheConfig(
            device_slots={"kv": 12 * visitors, "mamba": 3 * visitors},
            host_slots={"kv": 16 * visitors, "mamba": 4 * visitors},
            prefetch=PrefetchOptions(max_seconds=2.0),
            storage_limits=PoolLimits(failures=3, cooldown=0.5),
            weight_version=f"demo-{self._seed}",
            seed=self._seed,
        )
        opening = PrefixCachedModel.open(
            self._model, config=config, page_size=_PAGE, storage=storage, max_running=16
        )
        async with opening as served:
            yield served, storage
            await served.drain()
            self.result.problems += served.cache.verify()
        await storage.aclose()

    async def _talk_all(self, served: PrefixCachedModel, turns: int) -> None:
        """All clients, each for some turns. One of some hangs up in its last answer."""
        talks = (self._talk(served, number, turns) for number in range(self.result.clients))
        for one in await asyncio.gather(*talks, return_exceptions=True):
            if isinstance(one, Exception):
                self.result.problems.append(f"a client got {one!r}")

    async def _talk(self, served: PrefixCachedModel, number: int, turns: int) -> None:
        chance = random.Random(f"{self._seed} {number} {len(self._histories[number])}")
        for turn in range(turns):
            await asyncio.sleep(chance.expovariate(4))
            history = self._histories[number]
            history += [chance.randrange(_WORDS) for _ in range(_QUESTION)]
            leaves = turn == turns - 1 and turns > 1 and number % _HANGING_UP == 0
            async with self._asking, served.generate(history, max_new_tokens=_ANSWER) as answer:
                async for token in answer:
                    history.append(token)
                    if leaves and len(answer.token_ids) == _ANSWER // 2:
                        break
            self._seen.append(
                (answer.prompt_tokens, dict(answer.tokens_by_tier), 1000 * (answer.ttft_s or 0))
            )
            self.result.answers += not leaves
            self.result.hung_up += leaves

    async def _break_storage(self, served: PrefixCachedModel, storage: Faulty) -> None:
        """Let every call of storage fail, from when a third of the answers is there until two thirds are."""
        total = self.result.clients * (_TURNS - 1)
        await self._answered(total // 3)
        storage.rates = FaultRates(raises=1.0)
        self._happened("storage fails")
        await self._answered(2 * total // 3)
        storage.rates = FaultRates()
        self._happened("storage is back")

    async def _answered(self, count: int) -> None:
        while len(self._seen) < count:  # noqa: ASYNC110  a demo looks at the clock all the time
            await asyncio.sleep(TICK_SECONDS * 10)

    @asynccontextmanager
    async def _watched(self, served: PrefixCachedModel) -> AsyncIterator[None]:
        watching = [asyncio.create_task(self._sample(served)), asyncio.create_task(self._tick())]
        try:
            yield
        finally:
            for task in watching:
                task.cancel()
                with suppress(asyncio.CancelledError):
                    await task

    async def _tick(self) -> None:
        last = time.perf_counter()
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now = time.perf_counter()
            self._gap, last = max(self._gap, now - last - TICK_SECONDS), now

    async def _sample(self, served: PrefixCachedModel) -> None:
        while True:
            begin = len(self._seen)
            await asyncio.sleep(_SAMPLE_SECONDS)
            new, gap, self._gap = self._seen[begin:], self._gap, 0.0
            sample = Sample(
                time.perf_counter() - self._began,
                served.running,
                served.waiting,
                {tier.name.lower(): sum(hits.get(tier, 0) for _, hits, _ in new) for tier in Tier},
                sum(prompt for prompt, _, _ in new),
                fmean(ttft for _, _, ttft in new) if new else None,
                1000 * max(gap, 0.0),
            )
            self.result.samples.append(sample)
            self._on_sample(sample)

    def _happened(self, what: str) -> None:
        self.result.moments.append((time.perf_counter() - self._began, what))

    def _words(self, count: int) -> list[int]:
        return [self._chance.randrange(_WORDS) for _ in range(count)]


def _hit_rate(seen: Sequence[tuple[int, dict[Tier, int], float]]) -> float:
    prompts = sum(prompt for prompt, _, _ in seen)
    return sum(sum(hits.values()) for _, hits, _ in seen) / prompts if prompts else 0.0
