"""Tiny real models of transformers, whose caches are what the library has to describe and to keep."""

from __future__ import annotations

import functools

import torch
import transformers
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)
from transformers.models.deepseek_v4.modeling_deepseek_v4 import DeepseekV4HCACache

from asynchicache.integrations.transformers.demo_model import randomize_weights
from asynchicache.integrations.transformers.layers import PoolMap
from asynchicache.specs import ModelSpec
from integrations import text_head
from integrations.zoo_configs import EAGER, MODELS, TEXT_CONFIGS, VOCABULARY

PAGE = 16

ALL = tuple(MODELS)
MAIN = ALL[: ALL.index("qwen2")]
"""The models that every property is checked on; the others are checked for their shapes."""
SLICE = ("qwen3_5", "bamba", "gemma3", "lfm3", "deepseek_v32", "deepseek_v4", "qwen4_exp")
"""One model for each kind of layer; all others take part in what is slow only in `make soak`."""
FEW = ("qwen3_5", "gemma3", "deepseek_v32")
"""States, windows, and latents with index keys: enough for what does not depend on how a layer is kept."""


def tiny_config(name: str) -> PreTrainedConfig:
    prefix, sizes = MODELS[name]
    suffix = "TextConfig" if name in TEXT_CONFIGS else "Config"
    return getattr(transformers, prefix + suffix)(**sizes)


@functools.cache
def tiny_model(name: str, dtype: str = "float32") -> PreTrainedModel:
    """A model with weights under which its whole cache matters; shared, so leave it unchanged."""
    config = tiny_config(name)
    if name in EAGER:
        config._attn_implementation = "eager"
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)  # some classes draw their vectors (dt_bias) when they are built
        model = _model_class(MODELS[name][0] + "ForCausalLM")(config)
    randomize_weights(model, seed=1)
    return _cast(model, getattr(torch, dtype)).eval()


def _cast(model: PreTrainedModel, dtype: torch.dtype) -> PreTrainedModel:
    """As `from_pretrained` does: what a class keeps in float32 stays in float32."""
    kept = {
        name: weight.data
        for name, weight in model.named_parameters()
        if set(name.split(".")) & set(model._keep_in_fp32_modules_strict or ())
    }
    model.to(dtype)
    for name, weight in kept.items():
        model.get_parameter(name).data = weight
    return model


def _model_class(name: str) -> type[PreTrainedModel]:
    return getattr(text_head, name, None) or getattr(transformers, name)


def tiny_spec(name: str, dtype: str = "float32") -> ModelSpec:
    return ModelSpec.from_config(tiny_config(name), page_size=PAGE, dtype=dtype)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    """Token ids, the padding token's among them: it must be a token like any other."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (count,), generator=generator).tolist()
    tokens[count // 2] = 0
    return tokens


def pool_map(spec: ModelSpec, slots: int) -> PoolMap:
    """Pool memory that holds NaN, or a negative number, until it is written."""
    pools = {}
    for pool in spec.pools:
        pools[pool.name] = {
            tensor.name: torch.full(
                (len(tensor.layers), slots, *pool.item_shape(tensor, spec.page_size)),
                torch.nan if getattr(torch, tensor.dtype).is_floating_point else -1,
                dtype=getattr(torch, tensor.dtype),
            )
            for tensor in pool.tensors
        }
    return PoolMap(spec, pools)


def layer_tensors(cache: DynamicCache) -> dict[tuple[int, str], torch.Tensor]:
    """Everything that a cache holds and a later forward sees, by layer and name."""
    found: dict[tuple[int, str], torch.Tensor] = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            found |= {(index, name): tensor for name, tensor in _rows(layer).items()}
        if isinstance(layer, LinearAttentionLayer):
            found |= {(index, name): tensor for name, tensor in _states(layer).items()}
    return found


def _rows(layer: DynamicLayer) -> dict[str, torch.Tensor]:
    found = {"keys": layer.keys, "values": layer.values}
    if isinstance(layer, DynamicSlidingWindowLayer):
        seen = layer.sliding_window - 1  # what was there before is kept until it is written
        found = {name: tensor[:, :, -seen:] for name, tensor in found.items()}
        found["length"] = torch.tensor(layer.cumulative_length)
    if isinstance(layer, DeepseekV4HCACache):
        found |= _entries(layer)
    if isinstance(layer, DynamicIndexedLayer):
        found |= {"index_keys": layer.indexer_keys, "index_positions": layer.indexer_position_ids}
    return {name: tensor for name, tensor in found.items() if tensor is not None}


def _entries(layer: DeepseekV4HCACache) -> dict[str, torch.Tensor]:
    """What is left of runs of tokens; a run that is not open has an empty buffer, or none."""
    found = {f"{name}_count": torch.tensor(count) for name, count in layer.entry_count.items()}
    for field in ("compressed_kv", "buffer_kv", "buffer_gate", "overlap_kv", "overlap_gate"):
        for name, tensor in getattr(layer, field, {}).items():
            if tensor is not None and tensor.shape[1]:
                found[f"{field}.{name}"] = tensor
    return found


def _states(layer: LinearAttentionLayer) -> dict[str, torch.Tensor]:
    held = {"conv": layer.conv_states, "recurrent": layer.recurrent_states}
    return {
        f"{kind}_{number}" if number else kind: tensor
        for kind, states in held.items()
        for number, tensor in states.items()
        if tensor is not None
    }


def differences(ours: DynamicCache, theirs: DynamicCache) -> list[tuple[int, str]]:
    """Where two caches are not equal bit by bit."""
    left, right = layer_tensors(ours), layer_tensors(theirs)
    same = {key for key in left.keys() & right.keys() if torch.equal(left[key], right[key])}
    return sorted((left.keys() | right.keys()) - same)
