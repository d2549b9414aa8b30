"""What the bridge to transformers refuses, and that it says what and why."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
import torch
from transformers import DynamicCache, InklingTextConfig

from asynchicache import CacheConfig, Request
from asynchicache.errors import ConfigError, RequestStateError, UnsupportedModelError, UsageError
from asynchicache.integrations.transformers.batches import stack
from asynchicache.integrations.transformers.bridge import CacheBridge
from asynchicache.integrations.transformers.forward import decode, prefill
from asynchicache.integrations.transformers.layers import PoolMap
from asynchicache.integrations.transformers.prefill_runner import check_model
from asynchicache.integrations.transformers.snapshot import (
    new_cache,
    restore,
    write_pages,
    write_states,
)
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.types import ALL_PAGES, trailing_pages
from integrations.tiers import open_tiers
from integrations.zoo import PAGE, pool_map, random_tokens, tiny_config, tiny_model, tiny_spec


def filled(name: str, stop: int) -> DynamicCache:
    cache = new_cache(tiny_config(name))
    prefill(tiny_model(name), cache, random_tokens(stop), 0, stop)
    return cache


def test_a_cache_of_another_kind() -> None:
    config = InklingTextConfig(num_hidden_layers=2)
    with pytest.raises(UnsupportedModelError, match="layer 0 is a LinearAttentionAndSlidingWindow"):
        new_cache(config)


@pytest.mark.parametrize(
    ("first", "slots", "row", "words"),
    [
        (0, [0, 1], 0, r"tokens 0 to 32 .* cache's 24"),
        (-1, [0], 0, "tokens -16 to 0"),
        (0, [8], 0, r"kv slots 8 to 8 .* pool's 8"),
        (0, [-1], 0, "kv slots -1"),
        (0, [0], 1, "row 1 .* 1 sequences"),
        (0, [0], -1, "row -1"),
    ],
)
def test_pages_that_are_not_there(first: int, slots: list[int], row: int, words: str) -> None:
    cache, pools = filled("llama", PAGE + 8), pool_map(tiny_spec("llama"), 8)
    with pytest.raises(UsageError, match=words):
        write_pages(cache, pools, first, slots, row=row)


def test_state_slots_that_are_not_there() -> None:
    with pytest.raises(UsageError, match=r"mamba slots 8 to 8 .* pool's 8"):
        write_states(filled("qwen3_5", PAGE), pool_map(tiny_spec("qwen3_5"), 8), 8)
    with pytest.raises(UsageError, match="'llama' has no states"):
        write_states(filled("llama", PAGE), pool_map(tiny_spec("llama"), 8), 0)


def test_a_cache_of_another_dtype_is_not_converted() -> None:
    pools = pool_map(tiny_spec("qwen3_5", "bfloat16"), 8)
    cache = filled("qwen3_5", PAGE)
    with pytest.raises(UsageError, match=r"torch.float32 .* torch.bfloat16"):
        write_pages(cache, pools, 0, [0])
    with pytest.raises(UsageError, match="another model or dtype"):
        write_states(cache, pools, 0)


@pytest.mark.parametrize(
    ("slots", "tokens", "state", "words"),
    [
        ([0], 2 * PAGE, 0, "within 1 slots"),
        ([0], -PAGE, 0, "-16 tokens"),
        ([0], PAGE, None, "no state slot for 16 tokens .* 3 layers that keep states"),
        ([0], 0, 2, "state slot 2 for 0 tokens"),
        ([9], PAGE, 0, "kv slots 9"),
        ([0], PAGE, 9, "mamba slots 9"),
    ],
)
def test_restores_that_cannot_be(slots: list[int], tokens: int, state: int | None, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        restore(tiny_config("qwen3_5"), pool_map(tiny_spec("qwen3_5"), 8), slots, tokens, state)


def test_compressed_entries_end_with_a_page() -> None:
    with pytest.raises(UsageError, match="24 tokens are not whole pages"):
        restore(tiny_config("deepseek_v4"), pool_map(tiny_spec("deepseek_v4"), 8), [0, 1], PAGE + 8, 0)


def test_a_window_inside_a_page_has_one_page_more() -> None:
    with pytest.raises(UsageError, match="3 slots of 'swa' for a prefix of 5 pages, whose last 4 are"):
        restore(
            tiny_config("gemma3"),
            pool_map(tiny_spec("gemma3"), 8),
            [0, 1, 2, 3, 4],
            4 * PAGE + 8,
            None,
            window_slots=[0, 1, 2],
        )


@pytest.mark.parametrize("tokens", [PAGE - 1, 2 * PAGE + 1])
def test_a_page_is_written_up_to_a_token_of_it(tokens: int) -> None:
    with pytest.raises(UsageError, match=f"end at {tokens}"):
        write_pages(filled("qwen3_5", 3 * PAGE), pool_map(tiny_spec("qwen3_5"), 8), 1, [0], tokens=tokens)


def test_restore_for_another_model() -> None:
    with pytest.raises(UsageError, match="5 layers, the spec 4"):
        restore(tiny_config("nemotron_h"), pool_map(tiny_spec("qwen3_5"), 8), [0], PAGE, 0)


def test_batches_of_unequal_caches() -> None:
    with pytest.raises(UsageError, match=r"lengths \[16, 24\]"):
        stack([filled("llama", PAGE), filled("llama", PAGE + 8)])
    with pytest.raises(UsageError, match=r"lengths \[\]"):
        stack([])
    with pytest.raises(UsageError, match="kinds"):
        stack([filled("llama", PAGE), filled("qwen3_5", PAGE)])


@pytest.mark.parametrize(("start", "stop"), [(PAGE, PAGE), (PAGE, 99), (-1, 4)])
def test_prefill_of_no_range(start: int, stop: int) -> None:
    with pytest.raises(UsageError, match="no range within 32 tokens"):
        prefill(tiny_model("llama"), filled("llama", PAGE), random_tokens(32), start, stop)


def test_forward_on_a_cache_of_another_length() -> None:
    cache = filled("llama", PAGE)
    with pytest.raises(UsageError, match="holds 16 tokens, not 8"):
        prefill(tiny_model("llama"), cache, random_tokens(32), 8, 32)
    with pytest.raises(UsageError, match="holds 16 tokens, not 17"):
        decode(tiny_model("llama"), cache, [1], 17)


def memory(*, layers: int = 4, slots: int = 8, heads: int = 2) -> torch.Tensor:
    return torch.zeros(layers, slots, PAGE, heads, 16)


@pytest.mark.parametrize(
    ("pools", "words"),
    [
        ({}, "'kv' has no memory for keys, values"),
        ({"kv": {"keys": memory()}}, "no memory for values"),
        ({"kv": {"keys": memory(heads=3), "values": memory()}}, r"keys is float32 \[4, 8, 16, 3, 16\]"),
        ({"kv": {"keys": memory(layers=3), "values": memory()}}, r"wants float32 \[4, slots, 16, 2, 16\]"),
        ({"kv": {"keys": memory().half(), "values": memory()}}, "keys is float16"),
        ({"kv": {"keys": memory(), "values": memory(slots=9)}}, "different numbers of slots"),
    ],
)
def test_memory_that_is_not_the_spec(pools: dict[str, dict[str, torch.Tensor]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        PoolMap(tiny_spec("llama"), pools)


@pytest.mark.parametrize(
    ("tensor", "words"),
    [
        (TensorSpec("keys_scale", (0,), (2, 16), "float32"), "'other': .* keep no keys_scale"),
        (TensorSpec("latent", (0,), (2, 16), "float32"), "keep no latent of 1 sections"),
        (TensorSpec("keys", (0,), (2, 16), "float32", sections=(8, 8)), "keep no keys of 2 sections"),
    ],
)
def test_pools_that_no_layer_keeps(tensor: TensorSpec, words: str) -> None:
    spec = ModelSpec("other", PAGE, 1, (PoolSpec("other", (tensor,), ALL_PAGES),))
    with pytest.raises(UnsupportedModelError, match=words):
        PoolMap(spec, {"other": {tensor.name: memory(layers=1)}})


def test_states_that_no_layer_keeps() -> None:
    pages = tiny_spec("llama").pools[0]
    state = PoolSpec(
        "other", (TensorSpec("memory", (0,), (4,), "float32"),), trailing_pages(1), per_token=False
    )
    spec = ModelSpec("other", PAGE, 4, (pages, state))
    given = {"kv": {"keys": memory(), "values": memory()}, "other": {"memory": torch.zeros(1, 8, 4)}}
    with pytest.raises(UnsupportedModelError, match=r"'other': .* keep no memory"):
        PoolMap(spec, given)


def test_followers_have_as_many_slots_as_their_owner() -> None:
    spec = tiny_spec("deepseek_v32")
    pools = {p.name: {t.name: _zeros(t, 8 if p.name == "kv" else 9) for t in p.tensors} for p in spec.pools}
    with pytest.raises(ConfigError, match="pool 'dsa' has 9 slots, 'kv' 8"):
        PoolMap(spec, pools)


def _zeros(tensor: TensorSpec, slots: int) -> torch.Tensor:
    return torch.zeros(len(tensor.layers), slots, PAGE, *tensor.shape, dtype=getattr(torch, tensor.dtype))


def test_rows_that_left_their_window() -> None:
    """A cache that was not made here drops rows before their pages can be written."""
    cache, pools = DynamicCache(config=tiny_config("gemma3")), pool_map(tiny_spec("gemma3"), 8)
    prefill(tiny_model("gemma3"), cache, random_tokens(4 * PAGE), 0, 4 * PAGE)
    with pytest.raises(UsageError, match="layer 0 dropped the tokens before 25, so those from 16"):
        write_pages(cache, pools, 1, [0], pool="swa")
    write_pages(cache, pools, 2, [0, 1], pool="swa")


@pytest.mark.parametrize("windows", [(), (0, 1), (0, 1, 2, 3)])
def test_windows_of_another_length(windows: tuple[int, ...]) -> None:
    pools = pool_map(tiny_spec("gemma3"), 8)
    with pytest.raises(UsageError, match=f"{len(windows)} slots of 'swa' .* whose last 3 are needed"):
        restore(tiny_config("gemma3"), pools, range(4), 4 * PAGE, None, window_slots=windows)


def test_pages_of_a_pool_without_pages() -> None:
    cache, pools = filled("qwen3_5", PAGE), pool_map(tiny_spec("qwen3_5"), 8)
    with pytest.raises(UsageError, match=r"'mamba' is none of the pools with pages: \['kv'\]"):
        write_pages(cache, pools, 0, [0], pool="mamba")


def test_index_keys_and_states_that_the_spec_does_not_know() -> None:
    """A spec made for the model's sibling would leave them out in silence."""
    spec = tiny_spec("deepseek_v32")
    pools = pool_map(ModelSpec("other", PAGE, 3, spec.pools[:1]), 8)
    with pytest.raises(UsageError, match=r"layer 0 keeps .*indexer_keys.*another model"):
        write_pages(filled("deepseek_v32", PAGE), pools, 0, [0])
    spec = tiny_spec("qwen4_exp")
    state = spec.pool("mamba")
    known = tuple(tensor for tensor in state.tensors if not tensor.name.startswith("ngram"))
    pools = pool_map(ModelSpec("other", PAGE, 4, (spec.pools[0], replace(state, tensors=known))), 8)
    with pytest.raises(UsageError, match=r"layer 1 keeps states \[0, 1, 2\] and \[0\], its pool \[0\]"):
        write_states(filled("qwen4_exp", PAGE), pools, 0)


@pytest.mark.parametrize(
    ("axes", "words"),
    [
        ({"cp": (0, 2)}, r"cp \(0, 2\): .* keeps every token on each rank"),
        ({"pp": (0, 2)}, "the model has 4 layers, and the spec those from 0 to 1"),
        ({"pp": (1, 2)}, "the model has 4 layers, and the spec those from 2 to 3"),
    ],
)
def test_a_model_that_is_not_the_part_of_its_rank(axes: dict[str, tuple[int, int]], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        check_model(tiny_model("llama"), CacheConfig(), tiny_spec("llama").shard(**axes))
    check_model(tiny_model("llama"), CacheConfig(), tiny_spec("llama").shard(tp=(0, 2)))


# What the cache can see of a write that is too early or elsewhere


PROMPT = random_tokens(4 * PAGE)


@asynccontextmanager
async def computed(name: str, stop: int) -> AsyncIterator[tuple[Request, CacheBridge, DynamicCache]]:
    """A request whose first `stop` tokens are computed; after that, whatever it published serves right."""
    async with open_tiers(name) as (cache, bridge):
        async with cache.request(PROMPT) as request:
            await request.load()
            held = bridge.restore(request)
            prefill(tiny_model(name), held, PROMPT, 0, stop)
            yield request, bridge, held
        await cache.drain()
        async with cache.request(PROMPT) as request:
            await request.load()
            held, done = bridge.restore(request), request.hit.tokens
            logits = prefill(tiny_model(name), held, PROMPT, done, len(PROMPT))
        whole = prefill(tiny_model(name), new_cache(tiny_config(name)), PROMPT, 0, len(PROMPT))
        torch.testing.assert_close(logits, whole, atol=1e-4, rtol=1e-4)


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["llama", "qwen3_5", "gemma3"])
async def test_save_before_extend(name: str) -> None:
    async with computed(name, 3 * PAGE) as (request, bridge, held):
        with pytest.raises(RequestStateError, match=r"tokens 0 to 48 .* room for 0; call extend\(\) first"):
            bridge.save(request, held, 0, 3 * PAGE)
        request.extend(2 * PAGE)
        with pytest.raises(RequestStateError, match="room for 32"):
            bridge.save(request, held, 0, 3 * PAGE)
        request.extend(PAGE)
        bridge.save(request, held, 0, 3 * PAGE)
        await request.checkpoint(3 * PAGE)


@pytest.mark.asyncio
async def test_save_behind_a_gap() -> None:
    async with computed("llama", 3 * PAGE) as (request, bridge, held):
        request.extend(3 * PAGE)
        with pytest.raises(RequestStateError, match="tokens 0 to 32 were neither restored nor written"):
            bridge.save(request, held, 2 * PAGE, 3 * PAGE)


PUBLISH: dict[str, Callable[[Request, int], object]] = {
    "checkpoint": lambda request, length: request.checkpoint(length),
    "final": lambda request, length: request.checkpoint(length, final=True),
    "snapshot": lambda request, length: request.snapshot(length),
    "suspend": lambda request, length: request.suspend(length),
}


@pytest.mark.asyncio
@pytest.mark.parametrize("verb", PUBLISH)
@pytest.mark.parametrize(
    ("name", "length", "words"),
    [
        ("llama", 3 * PAGE, r"\(48\): only 32 tokens were written"),
        ("qwen3_5", 3 * PAGE, r"\(48\): only 32 tokens were written"),
        ("qwen3_5", PAGE, r"\(16\): the states in their slot are those of 32 tokens"),
        ("gemma3", 3 * PAGE, r"\(48\): only 32 tokens were written"),
    ],
)
async def test_publications_where_no_forward_ended(name: str, verb: str, length: int, words: str) -> None:
    async with computed(name, 2 * PAGE) as (request, bridge, held):
        request.extend(4 * PAGE)
        bridge.save(request, held, 0, 2 * PAGE)
        with pytest.raises(RequestStateError, match=words):
            PUBLISH[verb](request, length)
        await request.checkpoint(2 * PAGE)


@pytest.mark.asyncio
async def test_a_snapshot_inside_a_page() -> None:
    async with computed("qwen3_5", PAGE + 2) as (request, bridge, held):
        request.extend(PAGE + 2)
        bridge.save(request, held, 0, PAGE + 2)
        with pytest.raises(RequestStateError, match=r"snapshot\(18\): .* whole pages of 16 .* such as 16"):
            request.snapshot(PAGE + 2)


@pytest.mark.asyncio
async def test_a_restore_after_the_request_was_extended() -> None:
    """The last pages of its window are no longer those of the hit."""
    async with computed("gemma3", PAGE) as (request, bridge, _):
        request.extend(PAGE)
        with pytest.raises(RequestStateError, match="was extended to 16 tokens: restore it before"):
            bridge.restore(request)


@pytest.mark.parametrize(("held", "tokens"), [(PAGE + 2, None), (PAGE, 2 * PAGE), (PAGE + 2, PAGE)])
def test_states_of_another_length(held: int, tokens: int | None) -> None:
    pools = pool_map(tiny_spec("qwen3_5"), 8)
    with pytest.raises(UsageError, match=f"states are those of {held} tokens, not of"):
        write_states(filled("qwen3_5", held), pools, 0, tokens=tokens)
    write_states(filled("qwen3_5", held), pools, 0, tokens=held)
