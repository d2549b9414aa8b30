"""Sequences of different lengths in one batch: what each would compute by itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import DynamicCache

from asynchicache import UsageError
from asynchicache.integrations.transformers.batches import select, stack
from asynchicache.integrations.transformers.decoding import DecodeBatch, Row
from asynchicache.integrations.transformers.forward import decode, prefill
from asynchicache.integrations.transformers.generation import GenerationJob
from asynchicache.integrations.transformers.snapshot import new_cache, trim_windows
from asynchicache.integrations.transformers.stopping import StopRule
from asynchicache.types import token_array
from integrations.served import DRAWN, serving
from integrations.zoo import ALL, PAGE, differences, random_tokens, tiny_config, tiny_model

LENGTHS = (70, 37, 11, 53)
DEFAULT = ("qwen3_5", "lfm3", "llama4", "glm5_next")
"""States, windows, chunks, an index of pools of tokens."""


def filled(name: str, length: int, seed: int) -> DynamicCache:
    memory = new_cache(tiny_config(name))
    prefill(tiny_model(name), memory, random_tokens(length, seed=seed), 0, length)
    trim_windows(memory, PAGE, pages=3)
    return memory


def check_batch(name: str, steps: int) -> None:
    """Half way the longest sequence leaves, and another comes."""
    model = tiny_model(name)
    single = {number: filled(name, length, number) for number, length in enumerate(LENGTHS)}
    batch, rows = stack([filled(name, n, i) for i, n in enumerate(LENGTHS)], padded=True), [0, 1, 2, 3]
    for step in range(steps):
        if step == steps // 2:
            lengths = [single[row].get_seq_length() for row in rows]
            rows, single[4] = [1, 2, 3, 4], filled(name, 20, 4)
            batch = stack([select(batch, rows[:3], max(lengths) - max(lengths[1:])), single[4]], padded=True)
        lengths = [single[row].get_seq_length() for row in rows]
        tokens = [(17 * step + 5 * row) % 256 for row in rows]
        padding = [max(lengths) - length for length in lengths]
        together = decode(model, batch, tokens, max(lengths), padding=padding)
        alone = [
            decode(model, single[row], [token], length)
            for row, token, length in zip(rows, tokens, lengths, strict=True)
        ]
        torch.testing.assert_close(together, torch.cat(alone), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", DEFAULT)
def test_a_padded_batch(name: str) -> None:
    check_batch(name, 6)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in ALL if name != "deepseek_v4"])
def test_a_padded_batch_of_every_model(name: str) -> None:
    check_batch(name, 32)


@pytest.mark.parametrize("name", ["lfm3", "qwen4_exp"])
def test_a_sequence_taken_out_is_what_went_in(name: str) -> None:
    originals = [filled(name, length, number) for number, length in enumerate(LENGTHS)]
    batch = stack(originals, padded=True)
    for number, (original, length) in enumerate(zip(originals, LENGTHS, strict=True)):
        taken = select(batch, [number], max(LENGTHS) - length)
        assert taken.get_seq_length() == length
        assert differences(taken, original) == []


def test_lengths_differ_only_where_padding_is_meant() -> None:
    with pytest.raises(UsageError, match=r"lengths \[11, 37\]"):
        stack([filled("llama", 37, 0), filled("llama", 11, 1)])


def started(name: str, length: int, seed: int) -> Row:
    """A sequence whose first token is known."""
    tokens = token_array(random_tokens(length, seed=seed))
    job = GenerationJob(tokens, DRAWN, StopRule(1000, ()), namespace=None, salt=None)
    job.take(7)
    return Row(job, filled(name, length, seed))


def run_turn(batch: DecodeBatch, coming: Sequence[Row], going: Sequence[Row]) -> None:
    tokens = batch.step(going, coming)
    for row, token in zip(batch.rows, tokens, strict=True):
        row.job.take(token)


@pytest.mark.asyncio
async def test_rows_come_and_go_as_if_alone() -> None:
    """Their tokens, and the states at the last page boundary of each, are those of a batch of one."""
    name = "lfm3"
    async with serving(name) as served:
        store, model = served._runner.context, tiny_model(name)
        lengths = (30, 21, 44)
        together, rows = DecodeBatch(model, store), [started(name, n, i) for i, n in enumerate(lengths)]
        for count, coming in ((5, rows[:1]), (4, rows[1:]), (12, ())):
            for number in range(count):
                run_turn(together, coming if not number else (), ())
        run_turn(together, (), rows[:1])
        for number, length in enumerate(lengths):
            alone, single = DecodeBatch(model, store), started(name, length, number)
            for turn in range(rows[number].length - length):
                run_turn(alone, () if turn else (single,), ())
            assert rows[number].job.generated == single.job.generated
            assert rows[number].states.tokens == single.states.tokens == single.length // PAGE * PAGE
            torch.testing.assert_close(rows[number].states.layers, single.states.layers, atol=1e-4, rtol=1e-4)
        assert rows[0].memory.get_seq_length() == rows[0].length == 30 + 21
