"""Sequences of different lengths in one batch: what each would compute by itself."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from transformers import DynamicCache

from asynchicache import UsageError
from asynchicache.integrations.transformers.batches import select, stack
from asynchicache.integrations.transformers.bridge import PrefixCopies
from asynchicache.integrations.transformers.calls import Decode, Drop, ModelRank, SequenceMemory
from asynchicache.integrations.transformers.forward import decode, prefill
from asynchicache.integrations.transformers.snapshot import new_cache, trim_windows
from integrations.served import serving
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


@pytest.mark.asyncio
async def test_rows_come_and_go_as_if_alone() -> None:
    """Their tokens, and the states at the last page boundary of each, are those of a batch of one."""
    name, lengths = "lfm3", (30, 21, 44)
    async with serving(name) as served:
        copies = served._runner.context.bridge.copies
        together, rows = Sequences(name, copies, lengths), [0, 1, 2]
        for count, coming in ((5, rows[:1]), (4, rows[1:]), (12, [])):
            for number in range(count):
                together.step([] if number else coming, [])
        together.step([], rows[:1])
        for number, length in enumerate(lengths):
            alone, held = Sequences(name, copies, lengths), together.rank.sequences[number]
            for turn in range(held.length - length):
                alone.step([] if turn else [number], [])
            single = alone.rank.sequences[number]
            assert together.said[number] == alone.said[number]
            assert held.kept.tokens == single.kept.tokens == single.length // PAGE * PAGE
            torch.testing.assert_close(held.kept.layers, single.kept.layers, atol=1e-4, rtol=1e-4)
        first = together.rank.sequences[0]
        assert first.cache.get_seq_length() == first.length == 30 + 21


@pytest.mark.asyncio
async def test_a_dropped_row_leaves_its_batch() -> None:
    """Its waiter was cancelled: the other rows go on, and its memory is gone."""
    name, lengths = "lfm3", (30, 21)
    async with serving(name) as served:
        copies = served._runner.context.bridge.copies
        together, alone = (Sequences(name, copies, lengths) for _ in range(2))
        together.step([0, 1], [])
        together.rank.run(Drop(0))
        together.step([], [0])
        together.step([], [])
        for turn in range(3):
            alone.step([] if turn else [1], [])
        assert together.said[1] == alone.said[1]
        assert list(together.rank.sequences) == [1]


class Sequences:
    """Prompts in a model's memory, and what it says to them in one batch."""

    def __init__(self, name: str, copies: PrefixCopies, lengths: Sequence[int]) -> None:
        self.rank = ModelRank(tiny_model(name), copies)
        for number, length in enumerate(lengths):
            self.rank.sequences[number] = SequenceMemory(filled(name, length, number), length)
        self.said = {number: [7] for number in range(len(lengths))}
        self._rows: list[int] = []

    def step(self, coming: list[int], going: list[int]) -> None:
        self._rows = [row for row in self._rows if row not in going] + coming
        logits = self.rank.run(Decode(0, going, coming, [self.said[row][-1] for row in self._rows]))
        for row, one in zip(self._rows, logits, strict=True):
            self.said[row].append(int(one.argmax()))
