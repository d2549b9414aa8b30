"""The engine of the documentation, as an engine of one's own would be written after it."""

from __future__ import annotations

import asyncio
import importlib
import random
from pathlib import Path

import pytest

from asynchicache import CacheConfig, HybridCache, PrefetchOptions, PrefetchPolicy
from soaking import first

EXAMPLES = Path(__file__).parents[2] / "docs" / "examples"


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("backend", "share"), first(2, [("file", 4), ("memory", 2), ("file", 2), ("memory", 4)])
)
async def test_many_prompts_at_once_after_a_restart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, backend: str, share: int
) -> None:
    """Sixteen, of which the host holds a half or a quarter: each has what storage has when its turn comes."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    engine, model = importlib.import_module("engine"), importlib.import_module("paged_model")
    page, draws = model.SPEC.page_size, random.Random(0)
    prompts = [[draws.randrange(60) for _ in range(20 * page + 3)] for _ in range(16)]
    config = CacheConfig(
        device_slots={"kv": 100, "mamba": 16},
        host_slots={"kv": 16 * 20 // share, "mamba": 32 // share},
        weight_version="1",
        prefetch=PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE),  # however slow this machine is
        storage=backend,
        storage_options={"path": str(tmp_path)} if backend == "file" else {"name": f"documented {share}"},
    )
    for _ in range(2):
        async with (
            HybridCache.open(model.SPEC, config) as cache,
            engine.Engine(cache, most_rows=2) as running,
        ):

            async def ask(prompt: list[int]) -> list[int]:
                return [token async for token in running.generate(prompt, 4)]

            await asyncio.gather(*map(ask, prompts))
            await cache.drain()
            served = cache.statistics().served
    assert sum(served.hit_tokens.values()) == 16 * 20 * page
