"""Run turns of conversations through the whole cache, with synthetic pools and all bytes checked; and the
choice between this and `simulator`.
"""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from typing import Protocol

from asynchicache.cache import HybridCache
from asynchicache.config import CacheConfig, PrefetchOptions
from asynchicache.controller.request import Request
from asynchicache.planner.options import PlannerOptions
from asynchicache.planner.planner import Planner
from asynchicache.testing.oracle import ByteOracle
from asynchicache.testing.specs import synthetic_spec
from asynchicache.types import PrefetchPolicy
from asynchicache_lab.bench.pool_sizes import PoolSizes
from asynchicache_lab.bench.synthetic import Transcript
from asynchicache_lab.simulator import WHOLE, TurnHits, VirtualCache, VirtualRunner


class TurnRunner:
    """A serving engine without a model: its "computation" writes the oracle's bytes."""

    def __init__(self, cache: HybridCache, oracle: ByteOracle, page_size: int, interval: int) -> None:
        """`interval`: tokens between two positions where a prompt can resume; whole pages."""
        self._cache = cache
        self._oracle = oracle
        self._page_size = page_size
        self._interval = interval
        pools = cache.spec.owners
        self._paged = [pool.name for pool in pools if pool.per_token]
        self._states = [pool.name for pool in pools if not pool.per_token]
        windows = [pool.coverage.pages or WHOLE for pool in pools if pool.per_token]
        self._chunk = min(windows) * page_size

    def problems(self) -> Sequence[str]:
        """Findings of the cache's own check."""
        return self._cache.verify()

    async def run(
        self, history: Transcript, prompt: array[int], output: array[int], *, marks: Iterable[int] = ()
    ) -> TurnHits:
        """Serve one turn, and append its new prompt tokens and output to `history`.

        As in a serving engine, the last output token is never computed, and the final state is kept at the
        last multiple of the interval.

        Args:
            history: the conversation so far.
            prompt, output: the tokens that this turn adds.
            marks: lengths at which to keep a state, besides those that the cache demands.
        """
        history.extend(prompt)
        length = len(history.tokens)
        async with self._cache.request(array("q", history.tokens)) as request:
            await request.prefetch()
            await request.load()
            hit = request.hit
            verified, wrong = self._check(request, history.digests[: hit.tokens // self._page_size])
            cuts = self._on_grid([*request.cuts, *marks, length])
            await self._compute(request, history.digests, hit.tokens, cuts, length)
            history.extend(output)
            request.append(output)
            computed = len(history.tokens) - 1
            await self._compute(request, history.digests, length, self._on_grid([computed]), computed)
        await self._cache.drain()  # so that results do not depend on the machine's speed
        return TurnHits(length, hit.tokens, hit.by_tier, verified, wrong)

    def _check(self, request: Request, digests: list[bytes]) -> tuple[int, int]:
        """Compare restored pages and states; return the numbers of compared and of wrong ones."""
        verified = wrong = 0
        for pool in self._paged:
            expected = digests[request.first_page(pool) :]
            verified += len(expected)
            wrong += self._oracle.count_wrong(pool, request.pages(pool)[: len(expected)], expected)
        for pool in self._states if digests else ():
            verified += 1
            wrong += self._oracle.count_wrong(pool, [request.state(pool)], digests[-1:])
        return verified, wrong

    def _on_grid(self, lengths: Iterable[int]) -> list[int]:
        """`lengths` rounded down to multiples of the interval, ascending."""
        return sorted({length // self._interval * self._interval for length in lengths})

    async def _compute(
        self, request: Request, digests: list[bytes], start: int, cuts: Iterable[int], end: int
    ) -> None:
        """Fill pages from token `start` to `end`, with a checkpoint at each cut in between."""
        for cut in cuts:
            if start < cut <= end:
                self._fill(request, digests, start, cut)
                for pool in self._states:
                    self._oracle.write(pool, [request.state(pool)], [digests[cut // self._page_size - 1]])
                await request.checkpoint(cut)  # afterwards the working state may be overwritten
                start = cut
        self._fill(request, digests, start, end)

    def _fill(self, request: Request, digests: list[bytes], start: int, end: int) -> None:
        """Fill pages from token `start` to `end`, in chunks after which windows advance."""
        for begin in range(start, end, self._chunk):
            stop = min(begin + self._chunk, end)
            request.extend(stop - begin)
            first, last = begin // self._page_size, stop // self._page_size
            for pool in self._paged:
                behind = request.first_page(pool)
                slots = request.pages(pool)[first - behind : last - behind]
                self._oracle.write(pool, slots, digests[first:last])
            request.advance(stop)


class ConversationRunner(Protocol):
    """Serves turns, on the whole cache or on the planner alone."""

    def problems(self) -> Sequence[str]:
        """Findings of the cache's own check."""
        ...

    async def run(
        self, history: Transcript, prompt: array[int], output: array[int], *, marks: Iterable[int] = ()
    ) -> TurnHits:
        """Serve one turn; see `TurnRunner.run`."""
        ...


@asynccontextmanager
async def open_runner(
    page_size: int, sizes: PoolSizes, interval: int, *, real: bool, tails: bool = False
) -> AsyncIterator[ConversationRunner]:
    """Open a runner on a fresh cache.

    Args:
        page_size: tokens of a page.
        sizes: sizes of the tiers.
        interval: tokens between two positions where a prompt can resume.
        real: move bytes through the whole cache; else stamps through the planner, ten times faster.
        tails: prefixes may end inside a page; not with `real`.

    Raises:
        CacheError: the sizes do not fit into memory.
    """
    spec = synthetic_spec(page_size, tuple(sizes.slots()), window_pages=sizes.window_pages)
    if not real:
        cache = VirtualCache(Planner(spec, sizes.slots(), PlannerOptions(tails=tails)), sizes.slots())
        yield VirtualRunner(cache, page_size, interval, tails=tails)
        return
    async with HybridCache.open(spec, _config(sizes)) as whole:
        yield TurnRunner(whole, ByteOracle(spec, whole.device_tensor), page_size, interval)


def _config(sizes: PoolSizes) -> CacheConfig:
    """Copies on the loop and storage in memory, which make runs of the same turns identical."""
    slots = sizes.slots()
    return CacheConfig(
        inline=True,
        device_slots={name: device for name, (device, _) in slots.items()},
        host_slots={name: host for name, (_, host) in slots.items()},
        prefetch=PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE),
        storage="memory",
        weight_version="synthetic",
        seed=0,
    )
