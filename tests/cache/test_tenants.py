"""An order of eviction by tenant, as someone else would write it: with `Policy` and the option `eviction`."""

from __future__ import annotations

from collections import Counter, defaultdict

import pytest

from asynchicache import HybridCache
from asynchicache.hashing import namespace_seed
from asynchicache.testing.specs import synthetic_spec
from asynchicache.tree.node import Node
from asynchicache.tree.policies import Policy, Use
from cache.engine import PAGE, SPEC, Engine, config

ATTENTION = synthetic_spec(PAGE, ("kv",))
PAGES = 32


class TenantShares(Policy):
    """LRU; the pages of a tenant that has more than half of the memory go before those of others."""

    def __init__(self, capacity: int, page_size: int) -> None:
        super().__init__(capacity, page_size)
        self._most = capacity // 2
        self.pages: Counter[bytes] = Counter()
        self._nodes: defaultdict[bytes, list[Node]] = defaultdict(list)

    def worth(self, node: Node, clock: float, use: Use) -> float:
        return clock

    def published(self, node: Node, clock: float, use: Use) -> None:
        self.pages[use.seed] += node.pages
        mine = self._nodes[use.seed] = [one for one in self._nodes[use.seed] if one.parent is not None]
        if self.pages[use.seed] > self._most:
            for one in mine:
                self.lower(one, 0.0)
        mine.append(node)

    def lost(self, seed: bytes, pages: int) -> None:
        self.pages[seed] -= pages


@pytest.mark.asyncio
@pytest.mark.parametrize("spec", [ATTENTION, SPEC], ids=["attention", "hybrid"])
@pytest.mark.parametrize(("eviction", "kept"), [("lru", False), (f"{__name__}:TenantShares", True)])
async def test_a_tenant_that_floods_loses_its_own_pages(spec, eviction: str, kept: bool):
    slots = {pool.name: PAGES for pool in spec.owners}
    options = config(device_slots=slots, host_slots=dict.fromkeys(slots, 0), eviction=eviction)
    async with HybridCache.open(spec, options) as cache:
        engine, quiet = Engine(cache), list(range(8 * PAGE + 1))
        await engine.serve(quiet, namespace="quiet")
        for number in range(1, 9):
            await engine.serve(range(1000 * number, 1000 * number + 7 * PAGE + 1), namespace="loud")
        policy = cache._parts.planner.inventory.tree.policy
        assert cache.verify() == []
        if kept:
            assert policy.pages[namespace_seed("quiet")] == 8
            assert policy.pages[namespace_seed("loud")] <= PAGES - 8
        hit = await engine.serve(quiet, namespace="quiet")
        assert hit.tokens == (8 * PAGE if kept else 0)
