"""Turns of conversations through the whole cache, with synthetic pools and every byte checked; and the
choice between that and `bench.virtual`.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from typing import Protocol

from asynchicache.bench.synthetic import ByteOracle, Transcript, synthetic_spec
from asynchicache.bench.tally import Turn
from asynchicache.bench.virtual import VirtualCache, VirtualRunner
from asynchicache.cache import HybridCache
from asynchicache.config import CacheConfig, PrefetchOptions
from asynchicache.controller.request import Request
from asynchicache.types import PrefetchPolicy


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much the tiers of a bench hold.

    Attributes:
        pages, states: slots on the device.
        host_ratio: host slots for each device slot.
        offload_states: whether states leave the device at all.
    """

    pages: int
    states: int
    host_ratio: float = 1.0
    offload_states: bool = True

    def slots(self) -> dict[str, tuple[int, int]]:
        """Device and host slots by pool."""
        pages, states = (math.ceil(slots * self.host_ratio) for slots in (self.pages, self.states))
        return {"kv": (self.pages, pages), "mamba": (self.states, states if self.offload_states else 0)}

    def config(self) -> CacheConfig:
        """In-loop copies and storage in memory: every run of the same turns is the same."""
        return CacheConfig(
            inline=True,
            device_slots={name: device for name, (device, _) in self.slots().items()},
            host_slots={name: host for name, (_, host) in self.slots().items()},
            prefetch=PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE),
            storage="memory",
            weight_version="synthetic",
            seed=0,
        )


class TurnRunner:
    """A serving engine without a model: it "computes" the bytes that the oracle says."""

    def __init__(self, cache: HybridCache, oracle: ByteOracle, page_size: int, interval: int) -> None:
        """`interval`: tokens between positions at which a state can be kept; whole pages."""
        self._cache = cache
        self._oracle = oracle
        self._page_size = page_size
        self._interval = interval

    def problems(self) -> Sequence[str]:
        """What the cache's own check finds."""
        return self._cache.verify()

    async def run(
        self, history: Transcript, prompt: array[int], output: array[int], *, marks: Iterable[int] = ()
    ) -> Turn:
        """Serve one turn; `history` grows by the new prompt tokens and the output.

        As in a serving engine, the last token of the output is never computed, and the state kept at
        the end is the one at the last multiple of the interval.

        Args:
            history: the conversation so far.
            prompt, output: what this turn adds to it.
            marks: lengths at which a state is wanted besides those that the cache asks for.
        """
        history.extend(prompt)
        length = len(history.tokens)
        async with self._cache.request(array("q", history.tokens)) as request:
            await request.prefetch()
            await request.load()
            hit = request.hit
            wrong = self._count_wrong(request, hit.tokens, history.digests)
            cuts = self._on_grid([*request.cuts, *marks, length])
            await self._compute(request, history.digests, hit.tokens, cuts, length)
            history.extend(output)
            request.append(output)
            computed = len(history.tokens) - 1
            await self._compute(request, history.digests, length, self._on_grid([computed]), computed)
        await self._cache.drain()  # the next turn meets the same cache on every machine
        verified = hit.tokens // self._page_size + (hit.tokens > 0)
        return Turn(length, hit.tokens, hit.by_tier, verified, wrong)

    def _count_wrong(self, request: Request, tokens: int, digests: list[bytes]) -> int:
        """How many of the restored pages, and of the states, are not what was computed."""
        pages = tokens // self._page_size
        if not pages:
            return 0
        wrong = self._oracle.count_wrong("kv", request.pages("kv")[:pages], digests[:pages])
        return wrong + self._oracle.count_wrong("mamba", [request.state("mamba")], [digests[pages - 1]])

    def _on_grid(self, lengths: Iterable[int]) -> list[int]:
        """`lengths` down to multiples of the interval, ascending."""
        return sorted({length // self._interval * self._interval for length in lengths})

    async def _compute(
        self, request: Request, digests: list[bytes], start: int, cuts: Iterable[int], end: int
    ) -> None:
        """Fill pages from token `start` to `end`, with a checkpoint at each cut in between."""
        for cut in cuts:
            if start < cut <= end:
                self._fill(request, digests, start, cut)
                self._oracle.write("mamba", [request.state("mamba")], [digests[cut // self._page_size - 1]])
                await request.checkpoint(cut)  # the working state may be overwritten after that
                start = cut
        self._fill(request, digests, start, end)

    def _fill(self, request: Request, digests: list[bytes], start: int, end: int) -> None:
        request.extend(end - start)
        first, last = start // self._page_size, end // self._page_size
        self._oracle.write("kv", request.pages("kv")[first:last], digests[first:last])


class Runner(Protocol):
    """Serves turns: on the whole cache, or on the planner alone."""

    def problems(self) -> Sequence[str]:
        """What the cache's own check finds."""
        ...

    async def run(
        self, history: Transcript, prompt: array[int], output: array[int], *, marks: Iterable[int] = ()
    ) -> Turn:
        """Serve one turn; see `TurnRunner.run`."""
        ...


@asynccontextmanager
async def open_runner(page_size: int, sizes: Sizes, interval: int, *, real: bool) -> AsyncIterator[Runner]:
    """A runner on a fresh cache.

    Args:
        page_size: tokens of a page.
        sizes: what the tiers hold.
        interval: tokens between positions at which a state can be kept.
        real: move bytes through the whole cache; else stamps through the planner, ten times faster.

    Raises:
        CacheError: the sizes do not fit into memory.
    """
    spec = synthetic_spec(page_size)
    if not real:
        yield VirtualRunner(VirtualCache(spec, sizes.slots()), page_size, interval)
        return
    async with HybridCache.open(spec, sizes.config()) as cache:
        yield TurnRunner(cache, ByteOracle(spec, cache.device_tensor), page_size, interval)
