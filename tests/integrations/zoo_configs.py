"""Sizes of the tiny models: by name, the prefix of transformers' classes and what the configuration says."""

from __future__ import annotations

from collections.abc import Mapping

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
_KIMI_DELTA = {"linear_head_dim": 16, "linear_num_heads": 4, "linear_conv_kernel_dim": 4}
# With few heads many scores are exactly zero, and the choice among equals depends on the forward's shape.
_INDEXER = {"index_topk": 24, "index_head_dim": 16, "index_n_heads": 32}
_LINEAR, _FULL, _SLIDING, _INDEXED = (
    "linear_attention",
    "full_attention",
    "sliding_attention",
    "indexed_attention",
)
WINDOW = 40
"""Two and a half pages: of the three pages that hold it, the first is read in part."""

MODELS: Mapping[str, tuple[str, Mapping[str, object]]] = {
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
    "gemma3": (
        "Gemma3",
        {
            **_HEADS,
            "sliding_window": WINDOW,
            "query_pre_attn_scalar": 16,
            "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL],
        },
    ),
    "lfm3": (
        "Lfm3",
        {**_HEADS, "layer_types": ["conv", _SLIDING, "conv", _FULL], "sliding_window": WINDOW},
    ),
    "deepseek_v32": ("DeepseekV32", {**_LATENT, **_ROUTED, **_INDEXER}),
    "deepseek_v4": (
        "DeepseekV4",
        {
            **_BASE,
            "num_hidden_layers": 4,
            "num_key_value_heads": 1,
            "head_dim": 32,
            "layer_types": [
                _SLIDING,
                "heavily_compressed_attention",
                "compressed_sparse_attention",
                "compressed_sparse_attention",
            ],
            "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 16},
            "sliding_window": WINDOW,
            "q_lora_rank": 32,
            "partial_rotary_factor": 0.25,
            "o_groups": 2,
            "o_lora_rank": 16,
            "index_n_heads": 32,
            "index_head_dim": 16,
            "index_topk": 8,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 4,
            "mlp_layer_types": ["hash_moe", "moe", "moe", "moe"],
            "moe_intermediate_size": 32,
            "n_routed_experts": 8,
            "num_experts_per_tok": 2,
        },
    ),
    "qwen4_exp": (
        "Qwen4Exp",
        {
            **_HEADS,
            **_DELTA_NET,
            **_EXPERTS,
            "layer_types": [_LINEAR, _LINEAR, _LINEAR, _INDEXED],
            "hc_count": 2,
            "hc_lowrank": 8,
            "ple_layer_ids": [2],
            "ple_embed_dim": 32,
            "ngram_size": 3,
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 101,
            "split_ngram_parts": 1,
            "indexer_n_heads": 32,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 24,
            "indexer_compress_ratio": 4,
        },
    ),
    "qwen2": ("Qwen2", _GROUPED),
    "mistral": ("Mistral", {**_GROUPED, "sliding_window": None}),
    "mistral_windows": ("Mistral", {**_GROUPED, "sliding_window": WINDOW}),
    "jamba": (
        "Jamba",
        {
            **_GROUPED,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "expert_layer_period": 2,
            "expert_layer_offset": 1,
            "attn_layer_period": 4,
            "attn_layer_offset": 2,
            "mamba_d_state": 8,
            "mamba_d_conv": 4,
            "mamba_expand": 2,
        },
    ),
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
            **_KIMI_DELTA,
            "num_hidden_layers": 4,
            "layer_types": [_LINEAR, _LINEAR, _LINEAR, _FULL],
            "num_local_experts": 4,
        },
    ),
    "gemma3_narrow": (
        "Gemma3",
        {
            **_HEADS,
            "sliding_window": 8,  # half a page, so that a page is never in the window as a whole
            "query_pre_attn_scalar": 16,
            "layer_types": [_SLIDING, _SLIDING, _SLIDING, _FULL],
        },
    ),
    "gemma4": (
        "Gemma4",
        {
            **_HEADS,
            "num_hidden_layers": 6,
            "sliding_window": WINDOW,
            "layer_types": [_SLIDING, _SLIDING, _FULL] * 2,
            "vocab_size_per_layer_input": VOCABULARY,
            "hidden_size_per_layer_input": 8,
            "num_kv_shared_layers": 3,
            "global_head_dim": 32,
        },
    ),
    "gpt_oss": (
        "GptOss",
        {
            **_HEADS,
            "intermediate_size": 64,
            "sliding_window": WINDOW,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
        },
    ),
    "llama4": (
        "Llama4",
        {
            **_HEADS,
            "intermediate_size": 64,
            "intermediate_size_mlp": 128,
            "attention_chunk_size": WINDOW,  # a chunk of 32 would begin at a page, and need nothing before
            "num_local_experts": 2,
            "interleave_moe_layer_step": 2,
        },
    ),
    "glm_moe_dsa": (
        "GlmMoeDsa",
        {
            **_LATENT,
            **_ROUTED,
            **_INDEXER,
            "num_hidden_layers": 4,
            "indexer_types": ["full", "shared", "full", "shared"],
        },
    ),
    "glm5_next": (
        "Glm5Next",
        {
            **_LATENT,
            **_KIMI_DELTA,
            **_INDEXER,
            "q_lora_rank": 32,
            "n_routed_experts": 8,
            "qk_rope_head_dim": 0,
            "num_hidden_layers": 4,
            "mlp_layer_types": ["dense", "sparse", "sparse", "sparse"],
            "layer_types": [_LINEAR, _INDEXED, _LINEAR, _INDEXED],
            "indexer_types": ["full"] * 4,
            "index_topk": 32,
            "index_kpool": 8,
            "hc_mult": 2,
            "hc_sinkhorn_iters": 4,
        },
    ),
}

TEXT_CONFIGS = ("qwen3_5", "qwen4_exp", "gemma3", "gemma3_narrow", "gemma4", "llama4", "glm5_next")
"""Models whose decoder has a configuration of its own, beside that of images."""

EAGER = ("gpt_oss",)
"""Models that have no other attention."""
