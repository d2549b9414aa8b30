"""Recipes of attention layers: keys and values, latents, windows, and index keys."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asynchicache.errors import ConfigError
from asynchicache.specs.pools import CutSection
from asynchicache.specs.recipes import INDEX, KV, WINDOW, Layer, LayerTensor, PoolKind, Recipe

_LATENT_MODELS = frozenset(
    {"deepseek_v2", "deepseek_v3", "deepseek_v32", "glm5_next_text", "glm_moe_dsa", "kimi_linear"}
)
"""Models that cache the latent; other models with a `kv_lora_rank` cache keys and values."""

LEAST_WINDOW = 2
"""Smallest window: a window of one token needs nothing from the cache."""


def full_attention(layer: Layer) -> tuple[LayerTensor, ...]:
    """Return keys (after RoPE) and values of every token, or their latent."""
    if layer.has("kv_lora_rank"):
        return _latent_attention(layer)
    return _keys_and_values(layer, KV)


def sliding_attention(layer: Layer) -> tuple[LayerTensor, ...]:
    """Return keys and values of the last `sliding_window` tokens."""
    return _windowed(layer, layer.size("sliding_window", least=LEAST_WINDOW))


def chunked_attention(layer: Layer) -> tuple[LayerTensor, ...]:
    """Return keys and values of the current chunk (Llama 4).

    As in transformers, these are always the last `attention_chunk_size - 1` tokens. Early in a chunk, that is
    more than the model reads, and never less.
    """
    return _windowed(layer, layer.size("attention_chunk_size", least=LEAST_WINDOW))


def indexed_attention(layer: Layer) -> tuple[LayerTensor, ...]:
    """Return the content of attention with an indexer (DSA, DeepSeek-V3.2), and the indexer's keys."""
    return full_attention(layer) + _index_keys(layer)


def _windowed(layer: Layer, window: int) -> tuple[LayerTensor, ...]:
    if layer.has("kv_lora_rank"):
        raise layer.unsupported("windows over latents have no pool")
    return tuple(part._replace(window=window) for part in _keys_and_values(layer, WINDOW))


def _keys_and_values(layer: Layer, pool: PoolKind) -> tuple[LayerTensor, ...]:
    """Return keys and values (MHA and GQA)."""
    if layer.has("multi_query") and not layer.has("num_key_value_heads"):
        raise layer.unsupported("its head counts are not named num_key_value_heads")
    if not layer.has("num_key_value_heads") and not hasattr(layer.config, "num_attention_heads"):
        raise layer.unsupported("its configuration counts no attention heads")  # RWKV, xLSTM: they have none
    if layer.has("v_head_dim") and layer.size("v_head_dim") != _head_dim(layer):
        raise layer.unsupported("its values are not as wide as its keys")  # MiMo-V2, whose windows differ too
    heads = layer.size("num_key_value_heads" if layer.has("num_key_value_heads") else "num_attention_heads")
    width = _head_dim(layer)
    queries = layer.size("num_attention_heads") if layer.has("num_attention_heads") else heads
    if queries % heads:
        raise ConfigError(
            f"{layer.model_type} layer {layer.index}: num_attention_heads {queries} is no multiple of "
            f"num_key_value_heads {heads}"
        )
    keys = LayerTensor(
        pool,
        "keys",
        (heads, width),
        layer.dtype,
        cut=(CutSection(heads, heads, repeats=True),),
    )
    return keys, keys._replace(tensor="values")


def _head_dim(layer: Layer) -> int:
    if layer.has("head_dim"):
        return layer.size("head_dim")
    hidden, heads = layer.size("hidden_size"), layer.size("num_attention_heads")
    if hidden % heads:
        raise ConfigError(
            f"{layer.model_type}: {heads} heads do not divide hidden_size {hidden}: set head_dim"
        )
    return hidden // heads


def _latent_attention(layer: Layer) -> tuple[LayerTensor, ...]:
    """Return the compressed latent of every token, followed by the RoPE key (MLA, DeepSeek-V2).

    They are one tensor, as in serving engines. All heads read the same latent, so every tensor-parallel rank
    holds all of it. GLM-5 has no RoPE key: its width is 0.
    """
    if layer.model_type not in _LATENT_MODELS:
        raise layer.unsupported("whether this model caches its latent, or keys and values, is not known here")
    sections = (layer.size("kv_lora_rank"), layer.size("qk_rope_head_dim", least=0))
    return (LayerTensor(KV, "latent", (1, sum(sections)), layer.dtype, sections=sections, replicated=True),)


# Indexers. The configuration lists the layers with an indexer; other layers reuse the previous selection.


def _index_keys(layer: Layer) -> tuple[LayerTensor, ...]:
    indexer = _INDEXERS.get(layer.model_type)
    if indexer is None:
        raise layer.unsupported("no recipe for this model's index keys")
    return indexer(layer)


def _keys_of_own_indexer(layer: Layer) -> tuple[LayerTensor, ...]:
    return _index_part(layer, layer.size("index_head_dim")) if _has_indexer(layer) else ()


def _pooled_keys(layer: Layer) -> tuple[LayerTensor, ...]:
    """Return a key, the gate's score for each channel, and a flag whether the token counts."""
    return _index_part(layer, 2 * layer.size("index_head_dim") + 1) if _has_indexer(layer) else ()


def _has_indexer(layer: Layer) -> bool:
    """
    Raises:
        ConfigError: `indexer_types` has no entry for the layer.
        UnsupportedModelError: the entry is unknown.
    """
    kinds: Sequence[str] | None = getattr(layer.config, "indexer_types", None)
    if kinds is None:
        return True
    if len(kinds) <= layer.index:
        raise ConfigError(f"{layer.model_type}: {len(kinds)} indexer_types, but there is layer {layer.index}")
    if kinds[layer.index] not in ("full", "shared"):
        raise layer.unsupported(f"indexer type {kinds[layer.index]!r} is neither 'full' nor 'shared'")
    return kinds[layer.index] == "full"


def _keys_and_positions(layer: Layer) -> tuple[LayerTensor, ...]:
    """Return index keys (Qwen4-Exp), and for the first layer of this kind also the positions of all tokens.

    A position has three numbers: time, height and width of multimodal RoPE.
    """
    keys = _index_part(layer, layer.size("indexer_head_dim")) if layer.has("indexer_n_heads") else ()
    kinds: Sequence[str] = getattr(layer.config, "layer_types", ())
    if list(kinds).index(layer.kind) != layer.index:
        return keys
    return (*keys, LayerTensor(INDEX, "index_positions", (3,), "int64", replicated=True))


def _index_part(layer: Layer, width: int) -> tuple[LayerTensor, ...]:
    return (LayerTensor(INDEX, "index_keys", (width,), layer.dtype, replicated=True),)


_INDEXERS: Mapping[str, Recipe] = {
    "deepseek_v32": _keys_of_own_indexer,
    "glm_moe_dsa": _keys_of_own_indexer,
    "glm5_next_text": _pooled_keys,
    "qwen4_exp_text": _keys_and_positions,
}
"""Recipes by model type, because all of them use the layer type `indexed_attention`."""
