"""A pipeline stage of a tiny Qwen3.5, cut by hand: its layers, and what it sends to the other stage.

Each stage is a model of transformers with layers that it numbers from 0. The cache numbers them as the whole
model does, so no stage finds the pages of another.
"""

from __future__ import annotations

import functools

import torch
from torch import distributed
from transformers import PreTrainedConfig, PreTrainedModel, Qwen3_5ForCausalLM

from asynchicache import ModelSpec
from asynchicache.integrations.transformers.demo_model import randomize_weights
from integrations.zoo import PAGE, tiny_config

STAGES = 2
LAYERS = 4
"""Of a stage: three linear ones and one of attention."""


def whole_spec() -> ModelSpec:
    return ModelSpec.from_config(_config(STAGES * LAYERS), page_size=PAGE, dtype="float32")


@functools.cache
def whole_model() -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)
        model = Qwen3_5ForCausalLM(_config(STAGES * LAYERS))
    randomize_weights(model, seed=1)
    return model.eval()


def stage_model(stage: int) -> PreTrainedModel:
    """The first stage has the embedding, the last one the head; both return the logits of the last."""
    whole = whole_model()
    model = Qwen3_5ForCausalLM(_config(LAYERS)).eval()
    layers = whole.model.layers[stage * LAYERS : (stage + 1) * LAYERS]
    for ours, theirs in zip(model.model.layers, layers, strict=True):
        ours.load_state_dict(theirs.state_dict())
    if stage == 0:
        model.model.embed_tokens = whole.model.embed_tokens
        model.model.norm = _Send(to=1)
        model.lm_head = _Receive(whole.lm_head.out_features, sender=1)
    else:
        model.model.embed_tokens = _Receive(whole.config.hidden_size, sender=0)
        model.model.norm = whole.model.norm
        model.lm_head = torch.nn.Sequential(whole.lm_head, _Send(to=0))
    return model


class _Send(torch.nn.Module):
    def __init__(self, to: int) -> None:
        super().__init__()
        self._to = to

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        distributed.send(rows.contiguous(), self._to)
        return rows


class _Receive(torch.nn.Module):
    """Takes rows of `width` from another stage, for as many tokens as it is called with."""

    def __init__(self, width: int, sender: int) -> None:
        super().__init__()
        self._width = width
        self._sender = sender

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        received = torch.empty(*rows.shape[:2], self._width)
        distributed.recv(received, self._sender)
        return received


def _config(layers: int) -> PreTrainedConfig:
    config = tiny_config("qwen3_5")
    return type(config)(**{**config.to_dict(), "num_hidden_layers": layers, "layer_types": None})
