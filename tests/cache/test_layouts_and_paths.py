"""Every host layout and copy path serves the same bytes, through the front door."""

from __future__ import annotations

import pytest

from asynchicache import ConfigError, HybridCache, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.layouts import HostLayout
from asynchicache.transfer.paths import CopyPath
from asynchicache.transfer.plan import Direction
from cache.engine import SPEC, Engine, config

pytestmark = pytest.mark.asyncio

PROMPT = list(range(100, 120))


@pytest.mark.parametrize("path", list(CopyPath))
@pytest.mark.parametrize("layout", list(HostLayout))
async def test_the_host_serves_in_every_layout_by_every_path(layout: HostLayout, path: CopyPath) -> None:
    async with HybridCache.open(SPEC, config(host_layout=layout, copy_path=path)) as cache:
        engine = Engine(cache)
        await engine.serve(PROMPT)
        for client in range(4):  # push it out of device memory
            await engine.serve([client * 1000 + n for n in range(32)])
        assert (await engine.serve([*PROMPT, 1, 2, 3])).by_tier == {Tier.HOST: 20}
        transfers = cache.statistics().transfers

    assert transfers.choice == {Direction.LOAD: path.value, Direction.BACKUP: path.value}
    moved = {way: nbytes for ways in transfers.paths.values() for way, nbytes in ways.items() if nbytes}
    assert set(moved) == {path}


async def test_pages_of_another_layout_are_no_hit() -> None:
    backend = MemoryBackend(MemoryStore())
    hits = []
    for layout in (HostLayout.PAGE_FIRST, HostLayout.PAGE_FIRST, HostLayout.PAGE_FIRST_DIRECT):
        async with HybridCache.open(SPEC, config(host_layout=layout), storage=backend) as cache:
            hits.append((await Engine(cache).serve([*PROMPT, 1])).tokens)

    assert hits == [0, 20, 0]


async def test_storage_of_ones_own_and_a_layout_that_cuts_pages_are_refused_together() -> None:
    options = config(host_layout=HostLayout.LAYER_FIRST)

    with pytest.raises(ConfigError, match="storage cannot use host_layout 'layer_first'"):
        async with HybridCache.open(SPEC, options, storage=MemoryBackend(MemoryStore())):
            pass
