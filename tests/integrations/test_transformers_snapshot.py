"""Caches of real models through pool memory and back: the same bits, the same answers."""

from __future__ import annotations

import copy

import pytest
import torch
from transformers import DynamicCache

from asynchicache.integrations.transformers.forward import decode, prefill
from asynchicache.integrations.transformers.layers import PoolMap
from asynchicache.integrations.transformers.snapshot import (
    new_cache,
    restore,
    stack,
    write_pages,
    write_states,
)
from integrations.zoo import (
    ALL,
    MAIN,
    PAGE,
    differences,
    layer_tensors,
    pool_map,
    random_tokens,
    tiny_config,
    tiny_model,
    tiny_spec,
)

LENGTH = 104  # six whole pages and half of one; crosses the chunks of 64 in which states are computed
BOUNDARIES = range(PAGE, LENGTH, PAGE)
HYBRIDS = ("qwen3_5", "bamba")
SLOTS = (5, 2, 7, 1, 4, 0)  # of pages, in no order


def filled(name: str, dtype: str, tokens: list[int], stop: int) -> DynamicCache:
    """A cache of `tokens[:stop]`, its forward cut at every page."""
    cache = new_cache(tiny_config(name))
    for start in range(0, stop, PAGE):
        prefill(tiny_model(name, dtype), cache, tokens, start, min(start + PAGE, stop))
    return cache


def save(cache: DynamicCache, pools: PoolMap, boundary: int, *, row: int = 0) -> None:
    write_pages(cache, pools, 0, SLOTS[: boundary // PAGE], row=row)
    if pools.states:
        write_states(cache, pools, 3, row=row)


def load(name: str, pools: PoolMap, boundary: int) -> DynamicCache:
    state = 3 if pools.states else None
    return restore(tiny_config(name), pools, SLOTS[: boundary // PAGE], boundary, state)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ALL)
def test_spec_predicts_every_tensor(name: str, dtype: str) -> None:
    cache = filled(name, dtype, random_tokens(PAGE), PAGE)
    sides = {"latent": "keys", "rope_keys": "values"}
    predicted = {}
    for pool in tiny_spec(name, dtype).pools:
        for tensor in pool.tensors:
            shape = tensor.shape if not pool.per_token else (tensor.shape[0], PAGE, tensor.shape[1])
            for layer in tensor.layers:
                predicted[layer, sides.get(tensor.name, tensor.name)] = ((1, *shape), tensor.dtype)
    held = {
        key: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for key, tensor in layer_tensors(cache).items()
    }
    assert predicted == held


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", MAIN)
def test_restored_cache_is_the_original(name: str, dtype: str) -> None:
    """At every page: equal bits at once, after the rest of the prompt, and while decoding."""
    model, tokens, pools = tiny_model(name, dtype), random_tokens(LENGTH), pool_map(tiny_spec(name, dtype), 8)
    uncached = prefill(model, new_cache(model.config), tokens, 0, LENGTH)
    for boundary in BOUNDARIES:
        original = filled(name, dtype, tokens, boundary)
        save(original, pools, boundary)
        restored = load(name, pools, boundary)
        assert differences(restored, original) == []

        expected = prefill(model, original, tokens, boundary, LENGTH)
        logits = prefill(model, restored, tokens, boundary, LENGTH)
        assert torch.equal(logits, expected)
        if dtype == "float32":
            torch.testing.assert_close(logits, uncached, rtol=0, atol=1e-4)
            assert logits.argmax() == uncached.argmax()
        for length in (LENGTH, LENGTH + 1):
            token = [int(expected.argmax())]
            expected, logits = (decode(model, c, token, length)[0] for c in (original, restored))
            assert torch.equal(logits, expected)
        assert differences(restored, original) == []


@pytest.mark.parametrize("name", [name for name in ALL if name not in MAIN])
def test_other_models_restore_too(name: str) -> None:
    model, tokens, pools = tiny_model(name), random_tokens(LENGTH), pool_map(tiny_spec(name), 8)
    original = filled(name, "float32", tokens, 2 * PAGE)
    save(original, pools, 2 * PAGE)
    restored = load(name, pools, 2 * PAGE)
    logits = prefill(model, restored, tokens, 2 * PAGE, LENGTH)
    assert torch.equal(logits, prefill(model, original, tokens, 2 * PAGE, LENGTH))
    assert differences(restored, original) == []
    uncached = prefill(model, new_cache(model.config), tokens, 0, LENGTH)
    torch.testing.assert_close(logits, uncached, rtol=0, atol=1e-4)


@pytest.mark.parametrize("name", MAIN)
def test_pages_may_be_written_later_and_a_few_at_a_time(name: str) -> None:
    tokens, pools = random_tokens(3 * PAGE), pool_map(tiny_spec(name), 8)
    cache = filled(name, "float32", tokens, 3 * PAGE)
    write_pages(cache, pools, 2, SLOTS[2:3])
    write_pages(cache, pools, 0, SLOTS[:2])
    if pools.states:
        write_states(cache, pools, 3)
    assert differences(load(name, pools, 3 * PAGE), cache) == []


@pytest.mark.parametrize("name", MAIN)
def test_rows_of_a_batch_are_the_caches_it_was_made_of(name: str) -> None:
    caches = [filled(name, "float32", random_tokens(2 * PAGE, seed), 2 * PAGE) for seed in range(3)]
    batch, pools = stack(caches), pool_map(tiny_spec(name), 8)
    for row, cache in enumerate(caches):
        save(batch, pools, 2 * PAGE, row=row)
        assert differences(load(name, pools, 2 * PAGE), cache) == []


@pytest.mark.parametrize("name", MAIN)
def test_a_batch_decodes_like_its_rows(name: str) -> None:
    model, length = tiny_model(name), 2 * PAGE
    caches = [filled(name, "float32", random_tokens(length, seed), length) for seed in range(3)]
    batch, before, tokens = stack(caches), [copy.deepcopy(cache) for cache in caches], [11, 0, 97]
    for step in range(3):
        logits = decode(model, batch, tokens, length + step)
        alone = torch.cat([decode(model, c, [t], length + step) for c, t in zip(before, tokens, strict=True)])
        torch.testing.assert_close(logits, alone, rtol=0, atol=1e-4)
        tokens = logits.argmax(-1).tolist()
    assert all(c.get_seq_length() == length for c in caches)  # nothing is shared with the batch


@pytest.mark.parametrize("name", MAIN)
def test_decoding_leaves_pool_memory_alone(name: str) -> None:
    model, tokens, pools = tiny_model(name), random_tokens(LENGTH), pool_map(tiny_spec(name), 8)
    original = filled(name, "float32", tokens, PAGE)
    save(original, pools, PAGE)
    restored = load(name, pools, PAGE)
    for length in range(PAGE, PAGE + 3):
        decode(model, restored, [tokens[length]], length)
    assert differences(load(name, pools, PAGE), original) == []


def zero_conv(pools: PoolMap, pages: list[int]) -> None:
    first = min(pools.states)
    pools.states[first].conv[3].zero_()


def zero_recurrent(pools: PoolMap, pages: list[int]) -> None:
    recurrent = pools.states[min(pools.states)].recurrent
    assert recurrent is not None
    recurrent[3].zero_()


def swap_state_layers(pools: PoolMap, pages: list[int]) -> None:
    one, two = list(pools.states.values())[:2]
    assert one.recurrent is not None
    assert two.recurrent is not None
    one.recurrent[3], two.recurrent[3] = two.recurrent[3].clone(), one.recurrent[3].clone()


def zero_page(pools: PoolMap, pages: list[int]) -> None:
    pools.tokens[min(pools.tokens)].keys[pages[0]].zero_()


@pytest.mark.parametrize("fault", [zero_conv, zero_recurrent, swap_state_layers, zero_page])
@pytest.mark.parametrize("name", HYBRIDS)
def test_lost_bytes_change_bits_and_answers(name: str, fault) -> None:
    """The tests above could fail: each fault shows in the tensors and in the logits."""
    model, tokens, pools = tiny_model(name), random_tokens(LENGTH), pool_map(tiny_spec(name), 8)
    original = filled(name, "float32", tokens, 2 * PAGE)
    save(original, pools, 2 * PAGE)
    fault(pools, list(SLOTS))
    broken = load(name, pools, 2 * PAGE)
    assert len(differences(broken, original)) >= 1
    expected = prefill(model, original, tokens, 2 * PAGE, 2 * PAGE + 2)
    logits = prefill(model, broken, tokens, 2 * PAGE, 2 * PAGE + 2)
    assert (logits - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_stale_state_changes_bits_and_answers(name: str) -> None:
    model, tokens, pools = tiny_model(name), random_tokens(LENGTH), pool_map(tiny_spec(name), 8)
    original = filled(name, "float32", tokens, 2 * PAGE)
    save(original, pools, 2 * PAGE)
    write_states(filled(name, "float32", tokens, PAGE), pools, 3)
    broken = load(name, pools, 2 * PAGE)
    assert differences(broken, original) == sorted(k for k in layer_tensors(original) if k[0] in pools.states)
    expected = prefill(model, original, tokens, 2 * PAGE, LENGTH)
    assert (prefill(model, broken, tokens, 2 * PAGE, LENGTH) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", MAIN)
def test_swapped_pages_change_bits(name: str) -> None:
    """Attention hardly sees the order of its pages, so logits would not tell."""
    pools, tokens = pool_map(tiny_spec(name), 8), random_tokens(2 * PAGE)
    original = filled(name, "float32", tokens, 2 * PAGE)
    save(original, pools, 2 * PAGE)
    swapped = restore(tiny_config(name), pools, SLOTS[1::-1], 2 * PAGE, 3 if pools.states else None)
    assert differences(swapped, original) == [(i, s) for i in pools.tokens for s in ("keys", "values")]


def test_nothing_restored_is_an_empty_cache() -> None:
    pools = pool_map(tiny_spec("qwen3_5"), 8)
    assert layer_tensors(restore(tiny_config("qwen3_5"), pools, SLOTS, 0, None)) == {}
