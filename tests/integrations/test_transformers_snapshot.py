"""Caches of real models through pool memory and back: the same bits, the same answers."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch

from asynchicache.integrations.transformers.batches import stack
from asynchicache.integrations.transformers.forward import decode, prefill
from asynchicache.integrations.transformers.snapshot import (
    new_cache,
    restore,
    write_pages,
    write_states,
)
from asynchicache.specs import PoolSpec, TensorSpec
from integrations.snapshots import BOUNDARIES, LENGTH, SLOTS, filled, load, save
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

_NOT_A_PAGE = ("gemma3_narrow", "deepseek_v4")
"""What their layers keep of a page has other sizes: a narrow window, and a window as wide as it ever gets."""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", [name for name in ALL if name not in _NOT_A_PAGE])
def test_spec_predicts_every_tensor(name: str, dtype: str) -> None:
    cache = filled(name, dtype, random_tokens(PAGE), PAGE)
    predicted = {}
    for pool in tiny_spec(name, dtype).pools:
        for tensor in pool.tensors:
            for index in tensor.layers:
                found = _in_transformers(pool, tensor)
                predicted |= {(index, field): (shape, tensor.dtype) for field, shape in found.items()}
    held = {
        key: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."))
        for key, tensor in layer_tensors(cache).items()
        if tensor.ndim
    }
    assert predicted == held


_NAMES = {"ngram_conv": "conv_1", "ngram_tokens": "conv_2"}


def _in_transformers(pool: PoolSpec, tensor: TensorSpec) -> dict[str, tuple[int, ...]]:
    """What transformers makes of a tensor of the spec: names and shapes, of one page and one sequence."""
    shape = tensor.shape
    if not pool.per_token:
        return {_NAMES.get(tensor.name, tensor.name): (1, *shape)}
    if tensor.sections:
        latent, rope = tensor.sections
        return {"keys": (1, 1, PAGE, latent), "values": (1, 1, PAGE, rope)}
    if tensor.name == "index_positions":
        return {tensor.name: (3, 1, PAGE)}
    if tensor.name == "index_keys":
        return {tensor.name: (1, PAGE, *shape)}
    return {tensor.name: (1, shape[0], PAGE, shape[1])}


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3", "deepseek_v32", "deepseek_v4"])
def test_restored_cache_is_the_original(name: str) -> None:
    """In bfloat16, at every page: equal bits at once, after the rest of the prompt, and while decoding.

    In float32 the same is checked through three tiers; and, in `make soak`, all models in both.
    """
    model, tokens = tiny_model(name, "bfloat16"), random_tokens(LENGTH)
    pools = pool_map(tiny_spec(name, "bfloat16"), 8)
    for boundary in BOUNDARIES:
        original = filled(name, "bfloat16", tokens, boundary)
        save(original, pools, boundary)
        restored = load(name, pools, boundary)
        assert differences(restored, original) == []
        expected = prefill(model, original, tokens, boundary, LENGTH)
        assert torch.equal(prefill(model, restored, tokens, boundary, LENGTH), expected)
        for length in (LENGTH, LENGTH + 1):
            token = [int(expected.argmax())]
            expected, logits = (decode(model, c, token, length)[0] for c in (original, restored))
            assert torch.equal(logits, expected)
        assert differences(restored, original) == []


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "float8_e5m2"])
def test_eight_bits_go_through_as_they_are(dtype: str) -> None:
    cache, pools = (
        filled("llama", "float32", random_tokens(LENGTH), LENGTH),
        pool_map(tiny_spec("llama", dtype), 8),
    )
    for layer in cache.layers:
        layer.keys, layer.values = (held.to(getattr(torch, dtype)) for held in (layer.keys, layer.values))
    save(cache, pools, BOUNDARIES[-1])
    for layer, restored in zip(cache.layers, load("llama", pools, BOUNDARIES[-1]).layers, strict=True):
        for kept, found in ((layer.keys, restored.keys), (layer.values, restored.values)):
            assert found.dtype == kept.dtype
            assert torch.equal(found.view(torch.uint8), kept[:, :, : BOUNDARIES[-1]].view(torch.uint8))


def test_slot_numbers_go_to_the_device_once_for_all_layers_of_a_pool(monkeypatch: pytest.MonkeyPatch) -> None:
    made, make = [], torch.tensor
    pools, cache = (
        pool_map(tiny_spec("gemma3"), 8),
        filled("gemma3", "float32", random_tokens(LENGTH), LENGTH),
    )

    def counted(given: object, **named: object) -> torch.Tensor:
        made.extend([given] if isinstance(given, Sequence) and given else ())  # others are transformers'
        return make(given, **named)

    monkeypatch.setattr(torch, "tensor", counted)
    save(cache, pools, BOUNDARIES[-1])
    assert len(made) == len(pools.pages) == 2
    load("gemma3", pools, BOUNDARIES[-1])
    assert len(made) == 4


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
    for pool in pools.pages:
        write_pages(cache, pools, 2, SLOTS[2:3], pool=pool)
        write_pages(cache, pools, 0, SLOTS[:2], pool=pool)
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


def test_nothing_restored_is_an_empty_cache() -> None:
    pools = pool_map(tiny_spec("qwen3_5"), 8)
    assert layer_tensors(restore(tiny_config("qwen3_5"), pools, SLOTS, 0, None)) == {}
