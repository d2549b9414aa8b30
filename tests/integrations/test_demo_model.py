"""The demo's model: the same from the same seed, and right when it is served from pool memory."""

from __future__ import annotations

import torch
from transformers import DynamicCache

from asynchicache.integrations.transformers.demo_model import (
    VOCABULARY,
    build_demo_model,
    encode_text,
)
from asynchicache.integrations.transformers.forward import decode, prefill
from asynchicache.integrations.transformers.snapshot import new_cache, restore, write_pages, write_states
from asynchicache.specs import ModelSpec
from integrations.zoo import pool_map

TEXT = "In the harbour town the lamplighter kept a ledger of every ship that passed, and of every storm."


def greedy(model: torch.nn.Module, cache: DynamicCache, tokens: list[int], hit: int) -> list[int]:
    """Eight tokens after `tokens`, of which `hit` are in the cache."""
    answer = [int(prefill(model, cache, tokens, hit, len(tokens)).argmax())]
    while len(answer) < 8:
        length = len(tokens) + len(answer) - 1
        answer.append(int(decode(model, cache, answer[-1:], length)[0].argmax()))
    return answer


def test_answers_from_pool_memory_are_those_of_an_uncached_run() -> None:
    model, config = build_demo_model(seed=0)
    pools, tokens, hit = pool_map(ModelSpec.from_config(config, page_size=8), 16), encode_text(TEXT), 64
    writer = new_cache(config)
    prefill(model, writer, tokens, 0, hit)
    write_pages(writer, pools, 0, range(hit // 8))
    write_states(writer, pools, 5)
    answer = greedy(model, restore(config, pools, range(hit // 8), hit, 5), tokens, hit)
    assert answer == greedy(model, new_cache(config), tokens, 0)
    assert len(set(answer)) > 4


def test_weights_follow_the_seed_and_nothing_else() -> None:
    torch.manual_seed(7)
    before = torch.get_rng_state()
    first, again, other = (build_demo_model(seed)[0].state_dict() for seed in (3, 3, 4))
    assert torch.equal(torch.get_rng_state(), before)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["lm_head.weight"], other["lm_head.weight"])


def test_text_is_bytes() -> None:
    text = "prefix \u00e9\u4e16 suffix"
    tokens = encode_text(text)
    assert bytes(tokens).decode() == text
    assert 0 <= min(tokens) <= max(tokens) < VOCABULARY
    assert encode_text(text + "more")[: len(tokens)] == tokens
