"""Parts of the tensors of real models: the rows of a rank are those of its heads."""

from __future__ import annotations

import pytest
import torch

from asynchicache.specs import ModelSpec
from asynchicache.specs.sharding import Axis, tensor_rows
from integrations.snapshots import filled
from integrations.zoo import PAGE, layer_tensors, random_tokens, tiny_config, tiny_spec

SIZE = 2


def cut(spec: ModelSpec, pool: str, name: str, tensor: torch.Tensor, rank: int) -> torch.Tensor:
    """The rank's part of `[rows, ...]`, of the shape that its spec says."""
    whole = next(one for one in spec.pool(pool).tensors if one.name == name)
    part = next(one for one in spec.shard(tp=(rank, SIZE)).pool(pool).tensors if one.name == name)
    rows = [row for run in tensor_rows(whole, Axis(rank, SIZE)) for row in run]
    assert tuple(tensor.shape) == whole.shape
    assert tuple(tensor[rows].shape) == part.shape
    return tensor[rows]


def half(tensor: torch.Tensor, rank: int) -> torch.Tensor:
    return tensor.chunk(SIZE)[rank]


@pytest.mark.parametrize("rank", range(SIZE))
def test_a_delta_net(rank: int) -> None:
    config, spec = tiny_config("qwen3_5"), tiny_spec("qwen3_5")
    held = layer_tensors(filled("qwen3_5", "float32", random_tokens(PAGE), PAGE))
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    query, key, value = held[0, "conv"][0].split([keys, keys, held[0, "conv"].shape[1] - 2 * keys])
    heads = [
        part.unflatten(0, (count, -1))
        for part, count in (
            (query, config.linear_num_key_heads),
            (key, config.linear_num_key_heads),
            (value, config.linear_num_value_heads),
        )
    ]
    expected = torch.cat([half(part, rank).flatten(0, 1) for part in heads])
    assert torch.equal(cut(spec, "mamba", "conv", held[0, "conv"][0], rank), expected)
    recurrent = held[0, "recurrent"][0]
    assert torch.equal(cut(spec, "mamba", "recurrent", recurrent, rank), half(recurrent, rank))
    row = held[3, "keys"][0, :, 0]
    assert torch.equal(cut(spec, "kv", "keys", row, rank), half(row, rank))


@pytest.mark.parametrize("rank", range(SIZE))
def test_mamba_2(rank: int) -> None:
    config, spec = tiny_config("nemotron_h"), tiny_spec("nemotron_h")
    held = layer_tensors(filled("nemotron_h", "float32", random_tokens(PAGE), PAGE))
    inner, shared = config.mamba_num_heads * config.mamba_head_dim, config.n_groups * config.ssm_state_size
    inputs, b, c = held[0, "conv"][0].split([inner, shared, shared])
    expected = torch.cat(
        [
            half(inputs.unflatten(0, (config.mamba_num_heads, -1)), rank).flatten(0, 1),
            *(half(part.unflatten(0, (config.n_groups, -1)), rank).flatten(0, 1) for part in (b, c)),
        ]
    )
    assert torch.equal(cut(spec, "mamba", "conv", held[0, "conv"][0], rank), expected)
