"""Reference answers of plain transformers: no asynchicache, no server, every prompt computed completely."""

from __future__ import annotations

import time
from dataclasses import dataclass

from transformers import DynamicCache, PreTrainedModel

from asynchicache.integrations.transformers.demo_model import build_demo_model
from asynchicache.integrations.transformers.forward import prefill
from asynchicache_lab.bench.cores import one_torch_thread
from asynchicache_lab.bench.serve.clients import questions
from asynchicache_lab.bench.serve.options import ServeBenchOptions


@dataclass(frozen=True, slots=True)
class PlainTurn:
    """One answer.

    Attributes:
        tokens: the tokens, generated greedily.
        prefill_ms: duration of the prefill.
    """

    tokens: list[int]
    prefill_ms: float


def plain_answers(options: ServeBenchOptions) -> list[list[PlainTurn]]:
    """Answers of the first `options.plain_clients` conversations, by client and round."""
    with one_torch_thread():  # like the servers
        model, _ = build_demo_model(options.seed)
        return [_conversation(model, asked, options) for asked in questions(options)[: options.plain_clients]]


def _conversation(
    model: PreTrainedModel, asked: list[list[int]], options: ServeBenchOptions
) -> list[PlainTurn]:
    history: list[int] = []
    turns: list[PlainTurn] = []
    for question in asked:
        history += question
        turns.append(_turn(model, list(history), options.output_length))
        history += turns[-1].tokens
    return turns


def _turn(model: PreTrainedModel, prompt: list[int], count: int) -> PlainTurn:
    memory = DynamicCache(config=model.config)
    began = time.perf_counter()
    tokens = [*prompt, int(prefill(model, memory, prompt, 0, len(prompt)).argmax())]
    prefill_ms = (time.perf_counter() - began) * 1e3
    while len(tokens) < len(prompt) + count:
        logits = prefill(model, memory, tokens, len(tokens) - 1, len(tokens))
        tokens.append(int(logits.argmax()))
    return PlainTurn(tokens[len(prompt) :], prefill_ms)
