"""Recipes of attention over compressed entries (DeepSeek-V4).

Every layer has a window of one shared row per token, which is key and value at once. Two kinds of layers also
keep entries, each pooled from a run of tokens: one for 4 tokens with an index key beside it (CSA), or one for
128 tokens (HCA). All heads read the same rows and entries, so every tensor-parallel rank holds all of them.

A page boundary is a boundary of every run, so no open run is cached. A prefix needs its last window rows, and
the inputs of CSA's last run, which also take part in the next entry, only at its end. They are the pool
`tail`, which is stored like a state, where a prefix may end: the rows of every page would take several times
the bytes of its entries.

Sources: https://huggingface.co/deepseek-ai/DeepSeek-V4-Flash-Base, `DeepseekV4CSACache` and
`DeepseekV4HCACache` of transformers 5.23.
"""

from __future__ import annotations

from collections.abc import Mapping

from asynchicache.errors import ConfigError
from asynchicache.specs.attention import LEAST_WINDOW
from asynchicache.specs.recipes import KV, TAIL, Layer, LayerTensor, PoolKind

MODEL = "deepseek_v4"

GATE_DTYPE = "float32"
"""Gates are stored in float32: checkpoints keep the bias in them in float32, other models cast it down."""


def window_only(layer: Layer) -> tuple[LayerTensor, ...]:
    """Return the last `sliding_window` - 1 rows."""
    rows = layer.size("sliding_window", least=LEAST_WINDOW) - 1
    return (_shared(layer, TAIL, "window", (rows, layer.size("head_dim"))),)


def compressed_sparse(layer: Layer) -> tuple[LayerTensor, ...]:
    """Return entries with their index keys, the window, and the inputs that the next entry shares (CSA)."""
    run = _tokens_per_entry(layer)
    entry, index = layer.size("head_dim"), layer.size("index_head_dim")
    return (
        _shared(layer, KV, "csa", (entry,), run),
        _shared(layer, KV, "csa_index", (index,), run),
        *window_only(layer),
        *_overlap(layer, "overlap", (run, entry)),
        *_overlap(layer, "overlap_index", (run, index)),
    )


def heavily_compressed(layer: Layer) -> tuple[LayerTensor, ...]:
    """Return entries of runs that do not overlap, and the window (HCA)."""
    entries = _shared(layer, KV, "hca", (layer.size("head_dim"),), _tokens_per_entry(layer))
    return (entries, *window_only(layer))


def _overlap(layer: Layer, name: str, shape: tuple[int, ...]) -> tuple[LayerTensor, ...]:
    values = _shared(layer, TAIL, f"{name}_kv", shape)
    return values, values._replace(tensor=f"{name}_gate", dtype=GATE_DTYPE)


def _shared(
    layer: Layer, pool: PoolKind, name: str, shape: tuple[int, ...], tokens_per_entry: int = 1
) -> LayerTensor:
    return LayerTensor(pool, name, shape, layer.dtype, replicated=True, tokens_per_entry=tokens_per_entry)


def _tokens_per_entry(layer: Layer) -> int:
    """
    Raises:
        UnsupportedModelError: another model than DeepSeek-V4.
        ConfigError: the configuration has no such rate, or none of at least one token.
    """
    if layer.model_type != MODEL:
        raise layer.unsupported("no recipe for this model's compressed entries")
    rates: Mapping[str, object] = getattr(layer.config, "compress_rates", None) or {}
    rate = rates.get(layer.kind)
    if not isinstance(rate, int) or isinstance(rate, bool) or rate < 1:
        raise ConfigError(
            f"{layer.model_type} layer {layer.index} is {layer.kind!r}, but its compress_rates are {rates}; "
            "they must have a positive integer for it"
        )
    return rate
