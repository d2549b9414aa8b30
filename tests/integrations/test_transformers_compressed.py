"""DeepSeek-V4: every part of its pools matters, and the states of a prefix exist where an entry ends."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch
import transformers
from transformers import DynamicCache

from asynchicache import UsageError
from asynchicache.errors import ConfigError
from asynchicache.integrations.transformers.batches import select, stack
from asynchicache.integrations.transformers.decoding import DecodeBatch, Row
from asynchicache.integrations.transformers.forward import decode, pads, prefill
from asynchicache.integrations.transformers.generate import prefix_cached
from asynchicache.integrations.transformers.generation import GenerationJob
from asynchicache.integrations.transformers.layers import PoolMap
from asynchicache.integrations.transformers.snapshot import new_cache, restore, write_pages, write_states
from asynchicache.integrations.transformers.stopping import StopRule
from asynchicache.specs import ModelSpec
from asynchicache.types import token_array
from integrations.served import DRAWN, read, serving
from integrations.snapshots import BOUNDARIES, LENGTH, SLOTS, filled, load, save
from integrations.zoo import PAGE, differences, pool_map, random_tokens, tiny_config, tiny_model, tiny_spec
from integrations.zoo_configs import WINDOW

NAME = "deepseek_v4"
BOUNDARY = 4 * PAGE


def parts() -> list[tuple[str, str, int]]:
    """Every tensor of every layer: `(pool, tensor, layer)`."""
    spec = tiny_spec(NAME)
    return [(pool.name, t.name, layer) for pool in spec.pools for t in pool.tensors for layer in t.layers]


def memory_of(pools: PoolMap, name: str, layer: int) -> torch.Tensor:
    """One layer of a tensor, `[slots, ...]`."""
    fields = {
        "csa": ("pages", "compressed_kv.compressor"),
        "hca": ("pages", "compressed_kv.compressor"),
        "csa_index": ("pages", "compressed_kv.indexer"),
        "window": ("states", "window"),
        "overlap_kv": ("states", "overlap_kv.compressor"),
        "overlap_gate": ("states", "overlap_gate.compressor"),
        "overlap_index_kv": ("states", "overlap_kv.indexer"),
        "overlap_index_gate": ("states", "overlap_gate.indexer"),
    }
    kind, field = fields[name]
    return pools.pages["kv"][layer][field] if kind == "pages" else pools.states[layer].tail[field]


def logits_of_all(cache: DynamicCache, tokens: list[int]) -> torch.Tensor:
    """After every token behind the boundary: a window of the last layer is soon out of sight."""
    with torch.no_grad():
        return tiny_model(NAME)(
            input_ids=torch.tensor([tokens[BOUNDARY:]]),
            position_ids=torch.arange(BOUNDARY, LENGTH)[None],
            attention_mask=torch.ones(1, LENGTH, dtype=torch.int64),
            past_key_values=cache,
        ).logits


@pytest.mark.parametrize(("pool", "name", "layer"), parts())
def test_each_part_left_out_is_seen(pool: str, name: str, layer: int) -> None:
    """In the bits, and in the answers."""
    tokens, pools = random_tokens(LENGTH), pool_map(tiny_spec(NAME), 8)
    original = filled(NAME, "float32", tokens, BOUNDARY)
    save(original, pools, BOUNDARY)
    memory = memory_of(pools, name, layer)
    lost = memory[list(SLOTS[: BOUNDARY // PAGE])] if pool == "kv" else memory[3]
    assert lost.abs().sum() > 0
    memory.zero_()
    broken = load(NAME, pools, BOUNDARY)
    assert {index for index, _ in differences(broken, original)} == {layer}
    assert (logits_of_all(broken, tokens) - logits_of_all(original, tokens)).abs().max() > 1e-3


def test_a_tail_of_another_boundary_is_seen() -> None:
    tokens, pools = random_tokens(LENGTH), pool_map(tiny_spec(NAME), 8)
    original = filled(NAME, "float32", tokens, BOUNDARY)
    save(original, pools, BOUNDARY)
    write_states(filled(NAME, "float32", tokens, BOUNDARY - PAGE), pools, 3)
    broken = load(NAME, pools, BOUNDARY)
    assert differences(broken, original)
    assert (logits_of_all(broken, tokens) - logits_of_all(original, tokens)).abs().max() > 1e-3


@pytest.mark.parametrize("boundary", [PAGE, 2 * PAGE, 3 * PAGE])
def test_a_prefix_shorter_than_the_window_has_no_more_rows_than_tokens(boundary: int) -> None:
    pools = pool_map(tiny_spec(NAME), 8)
    save(filled(NAME, "float32", random_tokens(LENGTH), boundary), pools, boundary)
    restored = load(NAME, pools, boundary)
    assert {layer.keys.shape[2] for layer in restored.layers} == {min(boundary, WINDOW - 1)}
    assert {layer.cumulative_length for layer in restored.layers} == {boundary}


@pytest.mark.parametrize("length", [PAGE + 1, PAGE + 4, 2 * PAGE - 1])
def test_the_tail_is_saved_only_where_all_entries_end(length: int) -> None:
    """After 4 tokens only HCA's run is open; nothing keeps its inputs, so a prefix cannot end there."""
    cache, pools = filled(NAME, "float32", random_tokens(LENGTH), length), pool_map(tiny_spec(NAME), 8)
    with pytest.raises(UsageError, match=f"{length - PAGE} tokens after the last entry of 'compressor'"):
        write_states(cache, pools, 3)


def test_there_is_no_tail_before_the_first_forward() -> None:
    with pytest.raises(UsageError, match=r"row 0|no state yet"):
        write_states(new_cache(tiny_config(NAME)), pool_map(tiny_spec(NAME), 8), 3)


def test_pages_of_entries_are_written_whenever_they_are_complete() -> None:
    """Entries stay in the model's memory, so their pages need not be copied at once."""
    cache, pools = filled(NAME, "float32", random_tokens(LENGTH), LENGTH), pool_map(tiny_spec(NAME), 8)
    write_pages(cache, pools, 1, SLOTS[1:3])
    held = cache.layers[2].compressed_kv["compressor"][0]
    for page in (1, 2):
        rows = held[page * PAGE // 4 : (page + 1) * PAGE // 4]
        assert torch.equal(memory_of(pools, "csa", 2)[SLOTS[page]], rows)
    with pytest.raises(UsageError, match="are not all among the cache's 104"):
        write_pages(cache, pools, 6, SLOTS[:1])


def test_windows_keep_no_rows_that_no_page_needs() -> None:
    cache = filled(NAME, "float32", random_tokens(LENGTH), LENGTH)
    assert {layer.keys.shape[2] for layer in cache.layers} == {WINDOW - 1}


def test_another_page_size_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"page_size 8; multiples of 16 fit: 16, 32"):
        ModelSpec.from_config(tiny_config(NAME), page_size=8)


@pytest.mark.parametrize("kept", [True, False], ids=["as loaded", "all cast"])
def test_gates_come_back_whatever_the_dtype_of_their_bias(kept: bool, tmp_path: Path) -> None:
    """`from_pretrained` keeps the bias in float32, so the gates are float32 in a bfloat16 model."""
    model = transformers.DeepseekV4ForCausalLM(tiny_config(NAME)).eval()
    model.load_state_dict(tiny_model(NAME).state_dict())
    if kept:
        model.save_pretrained(tmp_path)
        model = transformers.DeepseekV4ForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).eval()
    else:
        model.to(torch.bfloat16)
    tokens, pools = random_tokens(LENGTH), pool_map(tiny_spec(NAME, "bfloat16"), 8)
    for boundary in BOUNDARIES:
        original = new_cache(model.config)
        for start in range(0, boundary, PAGE):
            prefill(model, original, tokens, start, start + PAGE)
        gate = original.layers[2].overlap_gate["compressor"]
        assert gate.dtype == (torch.float32 if kept else torch.bfloat16)
        save(original, pools, boundary)
        restored = restore(model.config, pools, SLOTS[: boundary // PAGE], boundary, 3)
        assert torch.equal(restored.layers[2].overlap_gate["compressor"], gate.float())
        expected = prefill(model, original, tokens, boundary, LENGTH)
        assert torch.equal(prefill(model, restored, tokens, boundary, LENGTH), expected)
        assert differences(restored, original) == []


# Batches


def at(length: int, seed: int) -> DynamicCache:
    cache = new_cache(tiny_config(NAME))
    prefill(tiny_model(NAME), cache, random_tokens(length, seed=seed), 0, length)
    return cache


def test_sequences_of_one_length_decode_together_and_part_again() -> None:
    """Across the ends of entries of both kinds."""
    model, length = tiny_model(NAME), 43
    alone = [at(length, seed) for seed in range(3)]
    batch = stack([at(length, seed) for seed in range(3)], padded=True)
    for step in range(9):
        logits = decode(model, batch, [5, 6, 7], length + step)
        single = [decode(model, cache, [5 + n], length + step) for n, cache in enumerate(alone)]
        torch.testing.assert_close(logits, torch.cat(single), rtol=0, atol=1e-4)
    batch = select(batch, [2, 0])
    logits = decode(model, batch, [8, 9], length + 9)
    single = [decode(model, alone[row], [token], length + 9) for row, token in ((2, 8), (0, 9))]
    torch.testing.assert_close(logits, torch.cat(single), rtol=0, atol=1e-4)


def test_sequences_of_other_lengths_are_no_batch() -> None:
    with pytest.raises(UsageError, match="DeepseekV4HCACache layers must have equal lengths"):
        stack([at(37, 0), at(38, 1)], padded=True)


@pytest.mark.asyncio
async def test_only_rows_of_one_length_share_a_batch() -> None:
    batch = DecodeBatch(0, padded=pads(tiny_model(NAME)))
    one, same, longer = (row_of(number, length) for number, length in enumerate((30, 30, 31)))
    batch.joining.append(one)
    assert batch.step().joining == [one.sequence]
    assert batch.fits(same)
    assert not batch.fits(longer)


def row_of(number: int, length: int) -> Row:
    """A sequence whose first token is known."""
    tokens = token_array(random_tokens(length))
    job = GenerationJob(tokens, DRAWN, StopRule(1000, ()), namespace=None, salt=None)
    job.take(7)
    return Row(job, number)


@pytest.mark.asyncio
async def test_many_conversations_at_once_say_what_each_says_alone() -> None:
    """Two turns each, of unequal lengths; the second resumes at the last page of the first's answer."""
    lengths = (37, 50, 37)

    async def talk(served: object, number: int) -> tuple[list[int], int]:
        tokens = random_tokens(lengths[number], seed=number)
        tokens += await read(served.generate(tokens, max_new_tokens=30, sampling=DRAWN, stop_token_ids=()))
        said = len(tokens)
        tokens += random_tokens(5, seed=9)
        answer = served.generate(tokens, max_new_tokens=10, sampling=DRAWN, stop_token_ids=())
        tokens += await read(answer)
        assert answer.cached_tokens == (said - 1) // PAGE * PAGE
        return tokens

    async with serving(NAME) as served:
        together = await asyncio.gather(*(talk(served, number) for number in range(3)))
    for number in range(3):
        async with serving(NAME) as served:
            assert await talk(served, number) == together[number]


def test_two_turns_of_generate() -> None:
    model, options = tiny_model(NAME), {"max_new_tokens": 40, "do_sample": False, "no_repeat_ngram_size": 1}
    first = torch.tensor([random_tokens(54)])
    with prefix_cached(model, page_size=PAGE) as cached:
        text = cached.generate(first, **options)
        assert torch.equal(text, model.generate(first, attention_mask=torch.ones_like(first), **options))
        second = torch.cat([text, torch.tensor([random_tokens(11, seed=1)])], dim=1)
        answer = cached.generate(second, **options)
        assert torch.equal(answer, model.generate(second, attention_mask=torch.ones_like(second), **options))
        assert cached.hit.tokens == (text.shape[1] - 1) // PAGE * PAGE
