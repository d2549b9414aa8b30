"""A rank of a tiny real model, cut by hand: its weights, its pools, and its forwards.

Sums over ranks are all-reduces of gloo, which belong to the model. The cache uses none.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec
import torch
from torch import distributed
from transformers import PreTrainedConfig, PreTrainedModel

from asynchicache import CacheConfig, ModelSpec
from asynchicache.integrations.transformers.forward import decode, prefill
from asynchicache.integrations.transformers.layers import PoolMap
from asynchicache.integrations.transformers.snapshot import new_cache, restore, write_pages, write_states
from asynchicache.ranks.options import RankLimits
from integrations.zoo import PAGE, tiny_config, tiny_model, tiny_spec
from ranks import staged_model

RANKS = 2
STAGED = "qwen3_5 in stages"
"""The model that is cut into pipeline stages; others are cut by tensor parallelism."""
TOKEN = "of this test"
LIMITS = RankLimits(joining=300, silence=120)
"""On a machine that others use, a model computes for longer than ranks may usually be silent."""
DIVIDED = (
    "num_attention_heads",
    "num_key_value_heads",
    "linear_num_key_heads",
    "linear_num_value_heads",
    "intermediate_size",
)
"""What a rank has a part of. Experts and what is not named here is whole on every rank."""

Tensors = Callable[[str, str], torch.Tensor]


def options(name: str, folder: Path) -> CacheConfig:
    """Device memory for one conversation, and storage that all ranks reach."""
    slots = {pool.name: 16 for pool in rank_spec(name, 0).owners}
    return CacheConfig(
        device_slots=slots,
        host_slots=slots,
        storage="object",
        storage_options={"url": f"file://{folder}", "object_pages": 1},  # a file is a page
        weight_version="test",
    )


def rank_spec(name: str, rank: int) -> ModelSpec:
    if name == STAGED:
        return staged_model.whole_spec().shard(pp=(rank, RANKS))
    return tiny_spec(name).shard(tp=(rank, RANKS))


def join_model(folder: Path, rank: int) -> None:
    """Connect the ranks of the model, not of the cache."""
    distributed.init_process_group(
        "gloo", init_method=f"file://{folder / 'model'}", rank=rank, world_size=RANKS
    )


def rank_config(name: str) -> PreTrainedConfig:
    config = tiny_config(name)
    for field in DIVIDED:
        if getattr(config, field, None) is not None:
            setattr(config, field, getattr(config, field) // RANKS)
    return config


def rank_model(name: str, rank: int) -> PreTrainedModel:
    """The rank's part of the model; what tensor parallelism computes from a part of its inputs is summed."""
    if name == STAGED:
        return staged_model.stage_model(rank)
    whole = tiny_model(name)
    model = type(whole)(rank_config(name)).eval()
    with torch.no_grad():
        for path, weight in model.named_parameters():
            full = whole.get_parameter(path)
            if path.endswith(("in_proj_qkv.weight", "conv1d.weight")):
                weight.copy_(_cut_qkv(whole.config, full, rank))
                continue
            for dim, (part, size) in enumerate(zip(weight.shape, full.shape, strict=True)):
                if part != size:
                    full = full.chunk(RANKS, dim)[rank]
                    if dim == 1 and weight.ndim == 2:
                        model.get_submodule(path.rpartition(".")[0]).register_forward_hook(_sum)
            weight.copy_(full)
    return model


def _cut_qkv(config: PreTrainedConfig, full: torch.Tensor, rank: int) -> torch.Tensor:
    """Queries, keys and values lie one behind the other; a rank has some heads of each."""
    keys = config.linear_num_key_heads * config.linear_key_head_dim
    parts = full.split([keys, keys, len(full) - 2 * keys])
    return torch.cat([part.chunk(RANKS)[rank] for part in parts])


def _sum(module: torch.nn.Module, inputs: object, output: torch.Tensor) -> torch.Tensor:
    distributed.all_reduce(output)
    return output


class Job(msgspec.Struct):
    """One request as the leader's engine sends it to every rank.

    Attributes:
        step: of the group.
        tokens: the prompt.
        hit: tokens that the cache has.
        pages: slots of all whole pages of the prompt.
        state: slot of its states; None if the model has none.
        new: tokens to generate.
    """

    step: int
    tokens: list[int]
    hit: int
    pages: list[int]
    state: int | None
    new: int


class ModelRank:
    """Runs jobs with one rank's part of a model, on that rank's device memory."""

    def __init__(self, name: str, rank: int, tensors: Tensors) -> None:
        self._model = rank_model(name, rank)
        spec = rank_spec(name, rank)
        memory = {
            pool.name: {one.name: tensors(pool.name, one.name) for one in pool.tensors} for pool in spec.pools
        }
        self._pools = PoolMap(spec, memory)

    def run(self, job: Job) -> list[int]:
        """Restore, compute the rest of the prompt, save its whole pages, and generate greedily."""
        cut = len(job.tokens) // PAGE * PAGE
        state = job.state if job.hit else None
        cache = restore(self._model.config, self._pools, job.pages, job.hit, state)
        logits = prefill(self._model, cache, job.tokens, job.hit, cut)
        first = job.hit // PAGE
        write_pages(cache, self._pools, first, job.pages[first:])
        if job.state is not None:
            write_states(cache, self._pools, job.state)
        if cut < len(job.tokens):
            logits = prefill(self._model, cache, job.tokens, cut, len(job.tokens))
        return _generate(self._model, cache, logits, len(job.tokens), job.new)


def generate_whole(name: str, tokens: Sequence[int], new: int) -> list[int]:
    """The same tokens by the whole model in one process, without a cache of anything before."""
    model = staged_model.whole_model() if name == STAGED else tiny_model(name)
    cache = new_cache(model.config)
    return _generate(model, cache, prefill(model, cache, tokens, 0, len(tokens)), len(tokens), new)


def _generate(
    model: PreTrainedModel, cache: object, logits: torch.Tensor, length: int, new: int
) -> list[int]:
    found = [int(logits.argmax())]
    while len(found) < new:
        step = decode(model, cache, found[-1:], length + len(found) - 1)  # type: ignore[arg-type]
        found.append(int(step[0].argmax()))
    return found
