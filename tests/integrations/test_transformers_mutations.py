"""The tests of restored caches could fail: every fault shows, in the tensors and in the logits."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from asynchicache.integrations.transformers.forward import prefill
from asynchicache.integrations.transformers.layers import PoolMap
from asynchicache.integrations.transformers.snapshot import restore, write_states
from integrations.snapshots import LENGTH, SLOTS, filled, load, save
from integrations.zoo import (
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

HYBRIDS = ("qwen3_5", "bamba", "qwen4_exp")
BOUNDARY = 4 * PAGE
PAGES = SLOTS[: BOUNDARY // PAGE]

Fault = Callable[[PoolMap], None]


def zero_conv(pools: PoolMap) -> None:
    pools.states[min(pools.states)].conv[0][3].zero_()


def zero_recurrent(pools: PoolMap) -> None:
    pools.states[min(pools.states)].recurrent[0][3].zero_()


def swap_state_layers(pools: PoolMap) -> None:
    one, two = (memory.recurrent[0] for memory in list(pools.states.values())[:2])
    one[3], two[3] = two[3].clone(), one[3].clone()


def zero_page(pools: PoolMap) -> None:
    first = min(pools.pages["kv"])
    pools.pages["kv"][first]["keys"][PAGES[0]].zero_()


def swap_layers(pools: PoolMap) -> None:
    """Of the pool that has more than one."""
    layers = max(pools.pages.values(), key=len)
    one, two = (memory["keys"] for memory in list(layers.values())[:2])
    held = one.clone()
    one.copy_(two)
    two.copy_(held)


def zero_index_keys(pools: PoolMap) -> None:
    for memory in pools.pages["kv"].values():
        memory["indexer_keys"].zero_()


def zero_ngram_tokens(pools: PoolMap) -> None:
    pools.states[1].conv[2][3].zero_()


def shift_window(pools: PoolMap) -> None:
    """The last page is lost, and the one before stands in its place."""
    for memory in pools.pages["swa"].values():
        for tensor in memory.values():
            tensor[PAGES[3]] = tensor[PAGES[2]]


CASES = [
    *((name, fault) for name in HYBRIDS for fault in (zero_conv, zero_recurrent, swap_state_layers)),
    *((name, zero_page) for name in ("llama", "qwen3_5", "bamba")),
    *((name, swap_layers) for name in ("llama", "gemma3", "deepseek_v32")),
    ("deepseek_v32", zero_index_keys),
    ("qwen4_exp", zero_index_keys),
    ("qwen4_exp", zero_ngram_tokens),
    ("gemma3", shift_window),
    ("llama4", shift_window),
]


@pytest.mark.parametrize(("name", "fault"), CASES)
def test_lost_bytes_change_bits_and_answers(name: str, fault: Fault) -> None:
    model, tokens, pools = tiny_model(name), random_tokens(LENGTH), pool_map(tiny_spec(name), 8)
    original = filled(name, "float32", tokens, BOUNDARY)
    save(original, pools, BOUNDARY)
    fault(pools)
    broken = load(name, pools, BOUNDARY)
    assert len(differences(broken, original)) >= 1
    expected = prefill(model, original, tokens, BOUNDARY, LENGTH - PAGE)
    logits = prefill(model, broken, tokens, BOUNDARY, LENGTH - PAGE)
    assert (logits - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_stale_state_changes_bits_and_answers(name: str) -> None:
    model, tokens, pools = tiny_model(name), random_tokens(LENGTH), pool_map(tiny_spec(name), 8)
    original = filled(name, "float32", tokens, BOUNDARY)
    save(original, pools, BOUNDARY)
    write_states(filled(name, "float32", tokens, BOUNDARY - PAGE), pools, 3)
    broken = load(name, pools, BOUNDARY)
    states = [key for key in layer_tensors(original) if key[1].startswith(("conv", "recurrent"))]
    assert differences(broken, original) == sorted(states)
    expected = prefill(model, original, tokens, BOUNDARY, LENGTH)
    assert (prefill(model, broken, tokens, BOUNDARY, LENGTH) - expected).abs().max() > 1e-3


@pytest.mark.parametrize("name", ["gemma3", "gpt_oss", "llama4"])
def test_a_short_window_is_missed(name: str) -> None:
    """A page less than the coverage asks: the rows are not there, and the model would not say so."""
    model, tokens, pools = tiny_model(name), random_tokens(LENGTH), pool_map(tiny_spec(name), 8)
    original = filled(name, "float32", tokens, BOUNDARY)
    save(original, pools, BOUNDARY)
    broken = load(name, pools, BOUNDARY)
    for index in pools.pages["swa"]:
        layer = broken.layers[index]
        layer.keys, layer.values = layer.keys[:, :, -PAGE:], layer.values[:, :, -PAGE:]
    windows = set(pools.pages["swa"])
    assert {index for index, _ in differences(broken, original)} == windows
    with pytest.raises(RuntimeError, match="size"):
        prefill(model, broken, tokens, BOUNDARY, LENGTH)


@pytest.mark.parametrize("name", MAIN)
def test_swapped_pages_change_bits(name: str) -> None:
    """Attention hardly sees the order of its pages, so logits would not tell."""
    pools, tokens = pool_map(tiny_spec(name), 8), random_tokens(2 * PAGE)
    original = filled(name, "float32", tokens, 2 * PAGE)
    save(original, pools, 2 * PAGE)
    state, swapped = 3 if pools.states else None, SLOTS[1::-1]
    windows = swapped if "swa" in pools.pages else ()
    broken = restore(tiny_config(name), pools, swapped, 2 * PAGE, state, window_slots=windows)
    wrong = {index for index, _ in differences(broken, original)}
    assert wrong == {index for layers in pools.pages.values() for index in layers}
