"""Layers with a window: their rows are kept until their pages are written, and no longer."""

from __future__ import annotations

import pytest
import torch
from transformers import DynamicCache
from transformers.cache_utils import DynamicSlidingWindowLayer

from asynchicache import CacheConfig, CapacityError, HybridCache
from asynchicache.integrations.transformers.batches import stack
from asynchicache.integrations.transformers.forward import decode, prefill
from asynchicache.integrations.transformers.layers import PoolMap
from asynchicache.integrations.transformers.snapshot import new_cache, restore, trim_windows, write_pages
from asynchicache.specs import ModelSpec
from integrations.snapshots import LENGTH
from integrations.tiers import loaded, open_tiers
from integrations.zoo import (
    PAGE,
    differences,
    pool_map,
    random_tokens,
    tiny_config,
    tiny_model,
    tiny_spec,
)

WINDOWED = ("gemma3", "gemma3_narrow", "gpt_oss", "llama4", "gemma4", "mistral_windows")


def windows(cache: DynamicCache) -> list[DynamicSlidingWindowLayer]:
    return [layer for layer in cache.layers if isinstance(layer, DynamicSlidingWindowLayer)]


def window_pool(spec: ModelSpec) -> str:
    return spec.owners[-1].name


def restored(name: str, pools: PoolMap, tokens: int) -> DynamicCache:
    """From pools in which page p has slot p."""
    pages = tokens // PAGE
    needed = pools.spec.owners[-1].coverage.pages or 0
    last = range(max(pages - needed, 0), pages) if needed else ()
    return restore(tiny_config(name), pools, range(pages), tokens, None, window_slots=last)


def write_all(cache: DynamicCache, pools: PoolMap, first: int, last: int) -> None:
    for pool in pools.pages:
        write_pages(cache, pools, first, range(first, last), pool=pool)


@pytest.mark.parametrize("name", WINDOWED)
def test_keeping_rows_does_not_change_what_is_computed(name: str) -> None:
    model, tokens = tiny_model(name), random_tokens(LENGTH)
    ours, theirs = new_cache(tiny_config(name)), DynamicCache(config=tiny_config(name))
    for start, stop in ((0, 24), (24, 88), (88, 89), (89, LENGTH)):
        kept, plain = (prefill(model, cache, tokens, start, stop) for cache in (ours, theirs))
        assert torch.equal(kept, plain)
        assert differences(ours, theirs) == []
    assert all(layer.keys.shape[-2] == LENGTH for layer in windows(ours))


@pytest.mark.parametrize("name", WINDOWED)
def test_every_page_of_one_long_forward_can_be_restored(name: str) -> None:
    model, tokens, pools = tiny_model(name), random_tokens(LENGTH), pool_map(tiny_spec(name), 8)
    cache = new_cache(tiny_config(name))
    prefill(model, cache, tokens, 0, LENGTH)
    write_all(cache, pools, 0, LENGTH // PAGE)
    for boundary in range(PAGE, LENGTH, PAGE):
        ours = restored(name, pools, boundary)
        for layer, full in zip(windows(ours), windows(cache), strict=True):
            seen = layer.sliding_window - 1
            assert torch.equal(layer.keys, full.keys[:, :, :boundary][:, :, -seen:])
            assert torch.equal(layer.values, full.values[:, :, :boundary][:, :, -seen:])
            assert layer.cumulative_length == boundary


@pytest.mark.parametrize("name", WINDOWED)
def test_pages_completed_while_decoding_can_be_written_though_rows_are_trimmed(name: str) -> None:
    model, tokens, pools = tiny_model(name), random_tokens(LENGTH), pool_map(tiny_spec(name), 8)
    cache, whole = new_cache(tiny_config(name)), new_cache(tiny_config(name))
    for layers in (cache, whole):
        prefill(model, layers, tokens, 0, 2 * PAGE)
    write_all(cache, pools, 0, 2)
    for length in range(2 * PAGE, 5 * PAGE):
        trim_windows(cache, PAGE)
        for layers in (cache, whole):
            decode(model, layers, [tokens[length]], length)
        if (length + 1) % PAGE == 0:
            write_all(cache, pools, length // PAGE, length // PAGE + 1)
    assert differences(cache, whole) == []
    assert differences(restored(name, pools, 5 * PAGE), whole) == []


@pytest.mark.parametrize("name", WINDOWED)
def test_trimmed_layers_keep_their_window_and_the_page_that_is_not_whole(name: str) -> None:
    cache = new_cache(tiny_config(name))
    prefill(tiny_model(name), cache, random_tokens(LENGTH), 0, LENGTH)
    trim_windows(cache, PAGE)
    for layer in windows(cache):
        assert layer.keys.shape[-2] == layer.values.shape[-2] == max(layer.sliding_window - 1, LENGTH % PAGE)
        assert layer.get_seq_length() == LENGTH


def test_an_empty_cache_can_be_trimmed() -> None:
    cache = new_cache(tiny_config("gemma3"))
    trim_windows(cache, PAGE)
    assert cache.get_seq_length() == 0


@pytest.mark.parametrize("name", ["gemma3", "lfm3"])
def test_a_batch_of_caches_trimmed_differently(name: str) -> None:
    """One was restored and holds its window only, the other holds everything."""
    model, length = tiny_model(name), 4 * PAGE
    one, two = new_cache(tiny_config(name)), new_cache(tiny_config(name))
    for seed, cache in enumerate((one, two)):
        prefill(model, cache, random_tokens(length, seed), 0, length)
    trim_windows(one, PAGE)
    batch = stack([one, two])
    logits = decode(model, batch, [3, 4], length)
    alone = torch.cat([decode(model, c, [t], length) for c, t in ((one, 3), (two, 4))])
    torch.testing.assert_close(logits, alone, rtol=0, atol=1e-4)
    assert {layer.keys.shape[-2] for layer in windows(batch)} == {40}


def test_a_window_pool_of_one_page_is_not_a_state() -> None:
    """Its coverage is that of a state, but it has a slot for each page."""
    spec = tiny_spec("gemma3_narrow")
    pool = spec.pool(window_pool(spec))
    assert (pool.coverage.pages, pool.per_token) == (1, True)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["gemma3", "gemma3_narrow", "lfm3", "llama4"])
async def test_a_long_prompt_goes_through_a_short_pool_in_chunks(name: str) -> None:
    """The pool has room for what is kept of one window and a page; the rest is given back on the way."""
    model, tokens, stop = tiny_model(name), random_tokens(LENGTH), 6 * PAGE
    options = {"kv": 8, "swa": tiny_spec(name).pool("swa").coverage.kept + 1, "mamba": 2}
    async with open_tiers(name, device_slots=options) as (cache, bridge):
        held = new_cache(tiny_config(name))
        async with cache.request(tokens) as request:
            await request.load()
            for end in range(PAGE, stop + 1, PAGE):
                prefill(model, held, tokens, end - PAGE, end)
                request.extend(PAGE)
                bridge.save(request, held, end - PAGE, end)
                request.advance(end)
                trim_windows(held, PAGE)
            await request.checkpoint(stop)
        await cache.drain()
        await cache.flush()
        async with loaded(cache, tokens[: stop + 1]) as request:
            assert request.hit.tokens == stop
            assert differences(bridge.restore(request), held) == []


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["gemma3", "gemma3_narrow", "lfm3"])
async def test_the_least_bytes_that_are_not_refused_serve_one_request(name: str) -> None:
    """One page, and of a window one page more than is kept; a byte less is refused with the number."""
    spec = tiny_spec(name)
    kept = spec.pool("swa").coverage.kept
    slots = {pool.name: kept + 1 if pool.name == "swa" else 1 for pool in spec.owners}
    least = sum(pool.slot_bytes(PAGE) * slots[pool.name] for pool in spec.owners)
    with pytest.raises(CapacityError, match=f"one request needs {least}.* raise device_bytes"):
        async with HybridCache.open(spec, CacheConfig(device_bytes=least - 1)):
            raise AssertionError("opened")
    async with HybridCache.open(spec, CacheConfig(device_bytes=least)) as cache:
        async with cache.request(random_tokens(PAGE)) as request:
            await request.load()
            request.extend(PAGE)
