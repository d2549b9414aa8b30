"""Tiny models with random weights, of the classes that engines cache differently; saved as checkpoints.

Weights are wide, those of embeddings most of all: the best token leads by a margin that no rounding closes.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
import transformers
from safetensors.torch import save_file
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

VOCABULARY = 512
SEED = 7
RANK = 8
"""Of adapters."""

RETRAINED = "_retrained"
"""What a name ends with whose model has the same configuration as the one without it, and other weights."""

_COMMON: Mapping[str, Any] = {
    "vocab_size": VOCABULARY,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "tie_word_embeddings": False,
    "max_position_embeddings": 4096,
}
_SMALL: Mapping[str, Any] = {
    **_COMMON,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
_GDN: Mapping[str, Any] = {
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 64,
    "linear_value_head_dim": 64,
    "linear_conv_kernel_dim": 4,
}
_ALTERNATING: Mapping[str, Any] = {
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "full_attention_interval": 2,
}
_MAMBA2: Mapping[str, Any] = {
    "mamba_n_heads": 8,
    "mamba_d_head": 32,
    "mamba_n_groups": 1,
    "mamba_d_state": 64,
    "mamba_d_conv": 4,
    "mamba_expand": 2,
    "mamba_chunk_size": 64,
}

CONFIGS: Mapping[str, Callable[[], Any]] = {
    "qwen3": lambda: transformers.Qwen3Config(**_SMALL, num_hidden_layers=4, head_dim=64),
    # 76 M parameters: what its prompts cost can be measured
    "qwen3_76m": lambda: transformers.Qwen3Config(
        **_COMMON,
        hidden_size=768,
        intermediate_size=2048,
        num_hidden_layers=12,
        num_attention_heads=12,
        num_key_value_heads=4,
        head_dim=64,
    ),
    "gemma3": lambda: transformers.Gemma3TextConfig(
        **_SMALL,
        num_hidden_layers=6,
        head_dim=64,
        sliding_window=128,
        layer_types=["sliding_attention", "sliding_attention", "full_attention"] * 2,
        query_pre_attn_scalar=64,
    ),
    "gpt_oss": lambda: transformers.GptOssConfig(
        **{**_SMALL, "intermediate_size": 128},
        num_hidden_layers=4,
        head_dim=64,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        num_local_experts=4,
        num_experts_per_tok=2,
    ),
    "qwen3_next": lambda: transformers.Qwen3NextConfig(
        **_SMALL,
        **_GDN,
        num_hidden_layers=8,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
    ),
    "qwen3_5": lambda: transformers.Qwen3_5TextConfig(**_SMALL, **_GDN, num_hidden_layers=8, head_dim=64),
    # SGLang asks for `full_attention_interval`, and transformers keeps it beside a list only.
    "qwen3_5_alternating": lambda: transformers.Qwen3_5TextConfig(
        **_SMALL, **_GDN, **_ALTERNATING, num_hidden_layers=4, head_dim=64
    ),
    "qwen3_next_alternating": lambda: transformers.Qwen3NextConfig(
        **_SMALL,
        **_GDN,
        **_ALTERNATING,
        num_hidden_layers=4,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
        shared_expert_intermediate_size=64,
        decoder_sparse_step=1,
    ),
    "llama": lambda: transformers.LlamaConfig(**_SMALL, num_hidden_layers=4, head_dim=64),
    "mellum": lambda: transformers.MellumConfig(
        **_SMALL,
        num_hidden_layers=4,
        head_dim=64,
        sliding_window=128,
        layer_types=["sliding_attention", "full_attention"] * 2,
        mlp_layer_types=["dense"] * 4,
        num_local_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=64,
    ),
    "granite_hybrid": lambda: transformers.GraniteMoeHybridConfig(
        **_SMALL,
        **_MAMBA2,
        num_hidden_layers=4,
        layer_types=["mamba", "attention", "mamba", "attention"],
        num_local_experts=0,
        num_experts_per_tok=0,
        shared_intermediate_size=256,
    ),
    "nemotron_h": lambda: transformers.NemotronHConfig(
        **_SMALL,
        hybrid_override_pattern="M*-M*-",
        num_hidden_layers=6,
        head_dim=32,
        mamba_num_heads=8,
        mamba_head_dim=32,
        ssm_state_size=64,
        n_groups=1,
        conv_kernel=4,
        chunk_size=64,
        expand=2,
    ),
}
"""Configurations by name; what they describe has a few megabytes unless the name says more."""


def checkpoint(folder: Path, name: str) -> Path:
    """Return the folder of a model's checkpoint, which is made if it is not there."""
    target = folder / name
    if not target.exists():
        draft = folder / f"{name}.{os.getpid()}"
        _save(CONFIGS[name.removesuffix(RETRAINED)](), draft, SEED + name.endswith(RETRAINED))
        draft.rename(target)  # all of it or nothing
    return target


def _save(config: Any, folder: Path, seed: int) -> None:
    torch.manual_seed(seed)
    config.dtype = torch.bfloat16
    model = transformers.AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for name, weights in model.named_parameters():
            if weights.ndim >= 2 and "conv" not in name:
                weights.normal_(0, 1.0 if "embed" in name else 0.08)
    model.to(torch.bfloat16).save_pretrained(folder)
    _tokenizer().save_pretrained(folder)


def _tokenizer() -> Any:
    """Return a tokenizer that makes one token of every byte."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    words = ["<unk>", "<s>", "</s>", *alphabet]
    words += [f"<x{number}>" for number in range(len(words), VOCABULARY)]
    vocabulary = {word: number for number, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[], unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return transformers.PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>"
    )


def train_adapter(folder: Path, model: Path, seed: int) -> Path:
    """Write a LoRA of a model's queries and values; another one of the same size for each seed."""
    config = transformers.AutoConfig.from_pretrained(model)
    chance = torch.Generator().manual_seed(seed)
    width = {"q_proj": config.num_attention_heads, "v_proj": config.num_key_value_heads}
    tensors = {}
    for layer in range(config.num_hidden_layers):
        for part, heads in width.items():
            name = f"base_model.model.model.layers.{layer}.self_attn.{part}"
            shapes = {"A": (RANK, config.hidden_size), "B": (heads * config.head_dim, RANK)}
            for half, shape in shapes.items():
                tensors[f"{name}.lora_{half}.weight"] = 0.2 * torch.randn(shape, generator=chance)
    folder.mkdir(exist_ok=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    described = {"peft_type": "LORA", "r": RANK, "lora_alpha": RANK, "target_modules": sorted(width)}
    described |= {"base_model_name_or_path": str(model), "bias": "none", "task_type": "CAUSAL_LM"}
    (folder / "adapter_config.json").write_text(json.dumps(described))
    return folder
