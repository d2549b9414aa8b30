"""A target and its draft on the same slots: both come back from storage, bit for bit."""

from __future__ import annotations

import copy

import pytest
from transformers import DynamicCache

from asynchicache import CacheConfig, HybridCache, PrefetchOptions, PrefetchPolicy, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.errors import UnsupportedModelError, UsageError
from asynchicache.integrations.transformers.bridge import CacheBridge
from asynchicache.integrations.transformers.forward import prefill
from asynchicache.integrations.transformers.snapshot import new_cache, restore
from integrations.snapshots import BOUNDARIES
from integrations.tiers import loaded
from integrations.zoo import (
    PAGE,
    differences,
    pool_map,
    random_tokens,
    tiny_config,
    tiny_model,
    tiny_spec,
)

OPTIONS = CacheConfig(
    device_slots={"kv": 16},
    prefetch=PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE),
    weight_version="test",
    inline=True,
)
PAIRS = [
    ("qwen3_5", "llama"),
    ("qwen3_5", "bamba"),  # two recurrences, one state slot
    ("llama", "gemma3"),  # the draft's windows are on the target's pages, and all of them are kept
    ("gemma3", "gemma3_narrow"),  # windows of three pages and of one
    ("deepseek_v32", "deepseek_v32"),
]


@pytest.mark.asyncio
@pytest.mark.parametrize(("target", "draft"), PAIRS)
async def test_a_draft_comes_back_with_its_target(target: str, draft: str) -> None:
    spec, tokens = tiny_spec(target).with_draft(tiny_spec(draft)), random_tokens(BOUNDARIES[-1] + 1)
    originals: dict[int, list[DynamicCache]] = {}
    async with HybridCache.open(spec, OPTIONS, storage=MemoryBackend(MemoryStore())) as cache:
        bridges = [
            CacheBridge(tiny_config(target), cache, spec=tiny_spec(target)),
            CacheBridge(tiny_config(draft), cache, spec=tiny_spec(draft), prefix="draft"),
        ]
        held = [new_cache(tiny_config(name)) for name in (target, draft)]
        async with cache.request(tokens) as request:
            await request.load()
            for end in BOUNDARIES:
                request.extend(PAGE)
                for name, memory, bridge in zip((target, draft), held, bridges, strict=True):
                    prefill(tiny_model(name), memory, tokens, end - PAGE, end)
                    bridge.save(request, memory, end - PAGE, end)
                await request.checkpoint(end)
                originals[end] = copy.deepcopy(held)
        await cache.drain()
        for end in BOUNDARIES:
            await cache.flush()
            async with loaded(cache, tokens[: end + 1]) as request:
                assert request.hit.by_tier == {Tier.STORAGE: end}
                for bridge, original in zip(bridges, originals[end], strict=True):
                    assert differences(bridge.restore(request), original) == []
        await cache.drain()
        assert cache.verify() == []


def test_a_target_is_not_restored_with_its_drafts_layers() -> None:
    pools = pool_map(tiny_spec("llama").with_draft(tiny_spec("qwen3")), 8)
    with pytest.raises(UsageError, match="the config has 4 layers, the spec 8"):
        restore(tiny_config("llama"), pools, [0], PAGE, None)


def test_quantised_pages_are_not_those_of_a_dynamic_cache() -> None:
    with pytest.raises(UnsupportedModelError, match=r"pool 'kv': .* keep no keys_scale"):
        pool_map(tiny_spec("llama").with_quantised_kv(), 8)
