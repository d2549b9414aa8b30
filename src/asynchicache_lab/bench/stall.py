"""Measure how long copies block the event loop: a one-millisecond ticker beside a gigabyte of copies."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict, dataclass

from rich.console import RenderableType

from asynchicache.cache import HybridCache
from asynchicache.config import CacheConfig
from asynchicache.reports import facts
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache_lab.bench.options import StallOptions
from asynchicache_lab.bench.ticker import longest_gap

_PAGE_TOKENS = 16


@dataclass(frozen=True, slots=True)
class StallReport:
    """The ticker's measurements.

    Attributes:
        moved_bytes: bytes copied between device and host, both directions.
        seconds: duration of the copies.
        idle_gap_ms, gap_ms: longest time between two ticks, in an idle run of equal length and during copies.
    """

    moved_bytes: int
    seconds: float
    idle_gap_ms: float
    gap_ms: float

    @property
    def ok(self) -> bool:
        return True  # measures only; nothing to check

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def present(self) -> RenderableType:
        rows = [
            ("moved", f"{self.moved_bytes / 1e6:,.0f} MB in {self.seconds:.2f} s"),
            ("longest gap, idle", f"{self.idle_gap_ms:.1f} ms"),
            ("longest gap, moving", f"{self.gap_ms:.1f} ms"),
        ]
        return facts(rows, "the loop while pages move")


async def run_stall(options: StallOptions) -> StallReport:
    """Back up a prompt to the host while another prompt's pages are already there, then load those.

    Raises:
        CapacityError: memory cannot hold the pages twice.
    """
    spec = _spec(options.page_bytes)
    config = CacheConfig(
        device_slots={"kv": options.pages + 1}, host_slots={"kv": 2 * options.pages}, seed=options.seed
    )
    tokens = list(range(options.pages * _PAGE_TOKENS + 1))
    async with HybridCache.open(spec, config) as cache:
        before = await _publish(cache, tokens)
        started = time.perf_counter()
        gap = await longest_gap(lambda: _there_and_back(cache, tokens))
        seconds = time.perf_counter() - started
        moved = _moved(cache) - before
        idle = await longest_gap(lambda: asyncio.sleep(seconds))
    return StallReport(moved, seconds, idle * 1e3, gap * 1e3)


def _spec(page_bytes: int) -> ModelSpec:
    """Eight layers of keys and values."""
    width = page_bytes // (_PAGE_TOKENS * 8 * 2)
    tensors = tuple(TensorSpec(name, tuple(range(8)), (width,), "uint8") for name in ("keys", "values"))
    return ModelSpec("stall", _PAGE_TOKENS, 8, (PoolSpec("kv", tensors),))


def _moved(cache: HybridCache) -> int:
    return sum(cache.statistics().transfers.nbytes.values())


async def _publish(cache: HybridCache, tokens: list[int]) -> int:
    """Write a prompt through to the host; return the bytes moved so far."""
    async with cache.request(tokens) as request:
        await request.load()
        request.extend(len(tokens) - 1 - request.hit.tokens)
        await request.checkpoint(len(tokens) - 1)
    await cache.drain()
    return _moved(cache)


async def _there_and_back(cache: HybridCache, tokens: list[int]) -> None:
    """Write another prompt through, which evicts the first from the device; then load the first again."""
    await _publish(cache, [token + len(tokens) for token in tokens])
    async with cache.request(tokens) as request:
        await request.load()
