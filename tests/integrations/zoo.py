"""Tiny real models of transformers, whose caches are what the library has to describe and to keep."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import torch
import transformers
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.cache_utils import DynamicLayer, LinearAttentionLayer

from asynchicache.integrations.transformers.demo_model import randomize_weights
from asynchicache.integrations.transformers.layers import PoolMap
from asynchicache.specs import ModelSpec

PAGE = 16
VOCABULARY = 256

_BASE = {
    "vocab_size": VOCABULARY,
    "hidden_size": 64,
    "num_attention_heads": 4,
    "max_position_embeddings": 4096,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_GROUPED = {**_BASE, "num_key_value_heads": 2, "num_hidden_layers": 4, "intermediate_size": 128}
_HEADS = {**_GROUPED, "head_dim": 16}
_DELTA_NET = {
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 8,  # unlike the key's, so that a swap of the two shows
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
}
_MAMBA = {"mamba_n_heads": 8, "mamba_d_state": 24, "mamba_d_conv": 4, "mamba_chunk_size": 16}
_LATENT = {
    **_BASE,
    "num_key_value_heads": 4,
    "num_hidden_layers": 3,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
_ROUTED = {"q_lora_rank": 32, "n_routed_experts": 8, "first_k_dense_replace": 1}
_EXPERTS = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 32,
}
_LINEAR, _FULL = "linear_attention", "full_attention"

_MODELS: Mapping[str, tuple[str, Mapping[str, object]]] = {
    "llama": ("Llama", _HEADS),
    "qwen3": ("Qwen3", _HEADS),
    "qwen3_next": ("Qwen3Next", {**_HEADS, **_DELTA_NET, **_EXPERTS}),
    "qwen3_5": ("Qwen3_5", {**_HEADS, **_DELTA_NET}),
    "bamba": ("Bamba", {**_GROUPED, **_MAMBA, "attn_layer_indices": [2], "mamba_n_groups": 2}),
    "nemotron_h": (
        "NemotronH",
        {
            **_HEADS,
            "layers_block_type": [_LINEAR, "mlp", _LINEAR, _FULL, "moe"],
            "ssm_state_size": 24,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 2,
            "conv_kernel": 4,
            "chunk_size": 16,
            "n_routed_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "qwen2": ("Qwen2", _GROUPED),
    "mistral": ("Mistral", {**_GROUPED, "sliding_window": None}),
    "falcon_h1": ("FalconH1", {**_GROUPED, **_MAMBA, "mamba_d_ssm": 96, "num_hidden_layers": 3}),
    "zamba2": (
        "Zamba2",
        {
            **_BASE,
            "num_hidden_layers": 4,
            "layers_block_type": [_LINEAR, "hybrid", _LINEAR, "hybrid"],
            "mamba_d_state": 24,
            "n_mamba_heads": 8,
            "chunk_size": 16,
            "intermediate_size": 128,
            "adapter_rank": 8,
        },
    ),
    "granitemoehybrid": (
        "GraniteMoeHybrid",
        {
            **_GROUPED,
            **_MAMBA,
            "layer_types": [_LINEAR, _LINEAR, _FULL, _LINEAR],
            "intermediate_size": 64,
            "shared_intermediate_size": 64,
            "num_local_experts": 4,
        },
    ),
    "olmo_hybrid": ("OlmoHybrid", {**_GROUPED, **_DELTA_NET, "linear_num_key_heads": 4}),
    "lfm2": (
        "Lfm2",
        {**_GROUPED, "block_auto_adjust_ff_dim": False, "layer_types": ["conv", "conv", _FULL, "conv"]},
    ),
    "deepseek_v2": ("DeepseekV2", {**_LATENT, **_ROUTED}),
    "deepseek_v3": ("DeepseekV3", {**_LATENT, **_ROUTED}),
    "kimi_linear": (
        "KimiLinear",
        {
            **_LATENT,
            "num_hidden_layers": 4,
            "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL],
            "num_local_experts": 4,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "linear_conv_kernel_dim": 4,
        },
    ),
}

ALL = tuple(_MODELS)
MAIN = ("llama", "qwen3", "qwen3_next", "qwen3_5", "bamba", "nemotron_h")
"""The models that every property is checked on; the others are checked for their shapes."""


def tiny_config(name: str) -> PreTrainedConfig:
    prefix, sizes = _MODELS[name]
    suffix = "TextConfig" if name == "qwen3_5" else "Config"
    return getattr(transformers, prefix + suffix)(**sizes)


@functools.cache
def tiny_model(name: str, dtype: str = "float32") -> PreTrainedModel:
    """A model with weights under which its whole cache matters; shared, so leave it unchanged."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(1)  # some classes draw their vectors (dt_bias) when they are built
        model = getattr(transformers, _MODELS[name][0] + "ForCausalLM")(tiny_config(name))
    randomize_weights(model, seed=1)
    return model.to(getattr(torch, dtype)).eval()


def tiny_spec(name: str, dtype: str = "float32") -> ModelSpec:
    return ModelSpec.from_config(tiny_config(name), page_size=PAGE, dtype=dtype)


def random_tokens(count: int, seed: int = 0) -> list[int]:
    """Token ids, the padding token's among them: it must be a token like any other."""
    generator = torch.Generator().manual_seed(seed)
    tokens = torch.randint(VOCABULARY, (count,), generator=generator).tolist()
    tokens[count // 2] = 0
    return tokens


def pool_map(spec: ModelSpec, slots: int) -> PoolMap:
    """Pool memory that holds NaN until it is written."""
    pools = {}
    for pool in spec.pools:
        unit = (spec.page_size,) if pool.per_token else ()
        pools[pool.name] = {
            tensor.name: torch.full(
                (len(tensor.layers), slots, *unit, *tensor.shape),
                torch.nan,
                dtype=getattr(torch, tensor.dtype),
            )
            for tensor in pool.tensors
        }
    return PoolMap(spec, pools)


def layer_tensors(cache: DynamicCache) -> dict[tuple[int, str], torch.Tensor]:
    """Everything that a cache holds, by layer and name."""
    found = {}
    for index, layer in enumerate(cache.layers):
        if isinstance(layer, DynamicLayer) and layer.is_initialized:
            found[index, "keys"], found[index, "values"] = layer.keys, layer.values
        if isinstance(layer, LinearAttentionLayer) and layer.has_previous_state[0]:
            found[index, "conv"] = layer.conv_states[0]
            if layer.is_recurrent_states_initialized[0]:
                found[index, "recurrent"] = layer.recurrent_states[0]
    return found


def differences(ours: DynamicCache, theirs: DynamicCache) -> list[tuple[int, str]]:
    """Where two caches are not equal bit by bit."""
    left, right = layer_tensors(ours), layer_tensors(theirs)
    same = {key for key in left.keys() & right.keys() if torch.equal(left[key], right[key])}
    return sorted((left.keys() | right.keys()) - same)
