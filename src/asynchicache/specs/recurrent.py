"""Recipes of recurrent layers, which keep one state for the whole prefix instead of a row per token."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

from asynchicache.errors import ConfigError
from asynchicache.specs.pools import CutSection
from asynchicache.specs.recipes import STATE, Layer, LayerTensor, Recipe

STATE_DTYPE = "float32"
"""Recurrent states are always float32, because they accumulate over the whole prefix."""


def linear_attention(layer: Layer) -> tuple[LayerTensor, ...]:
    """Return the state of a linear attention or state space layer, by the model's recipe."""
    recipe = _RECIPES.get(layer.model_type)
    if recipe is None:
        raise layer.unsupported("no recipe for this model's recurrent state")
    if getattr(layer.config, "number_of_conv_states", 1) != 1 and recipe is not _delta_net_with_ngrams:
        raise layer.unsupported("it keeps several convolution states")
    return recipe(layer)


def short_convolution(layer: Layer) -> tuple[LayerTensor, ...]:
    """Return the recent inputs of a gated short convolution (LFM2); it has no recurrent state."""
    channels = layer.size("hidden_size")
    cut = (CutSection(channels, channels),)
    return (LayerTensor(STATE, "conv", (channels, layer.size("conv_L_cache")), layer.dtype, cut=cut),)


def _state(
    layer: Layer, channels: Sequence[CutSection], kernel: int, recurrent: tuple[int, ...]
) -> tuple[LayerTensor, ...]:
    """Return the inputs of a convolution over several kinds of channels, and a memory of so many heads."""
    count, heads = sum(section.rows for section in channels), CutSection(recurrent[0], recurrent[0])
    return (
        LayerTensor(STATE, "conv", (count, kernel), layer.dtype, cut=tuple(channels)),
        LayerTensor(STATE, "recurrent", recurrent, STATE_DTYPE, cut=(heads,)),
    )


def _whole(rows: int) -> tuple[CutSection, ...]:
    """Return the cut of a tensor that every rank holds whole, beside parts of others."""
    return (CutSection(rows, 1, repeats=True),)


def _gated_delta_net(layer: Layer) -> tuple[LayerTensor, ...]:
    """One convolution over queries, keys and values; a `[value_heads, key_dim, value_dim]` memory."""
    key_dim, value_dim = layer.size("linear_key_head_dim"), layer.size("linear_value_head_dim")
    key_heads, value_heads = layer.size("linear_num_key_heads"), layer.size("linear_num_value_heads")
    if value_heads % key_heads:
        raise ConfigError(
            f"{layer.model_type}: linear_num_key_heads {key_heads} must divide "
            f"linear_num_value_heads {value_heads}"
        )
    keys = CutSection(key_heads * key_dim, key_heads)
    channels = (keys, keys, CutSection(value_heads * value_dim, value_heads))
    return _state(layer, channels, layer.size("linear_conv_kernel_dim"), (value_heads, key_dim, value_dim))


def _delta_net_with_ngrams(layer: Layer) -> tuple[LayerTensor, ...]:
    """A gated delta net; in layers with per-layer embeddings also the history of their n-grams (Qwen4-Exp).

    The history consists of the input of a dilated convolution and of the last token ids.
    """
    parts = _gated_delta_net(layer)
    numbers: Sequence[int] = getattr(layer.config, "ple_layer_ids", None) or ()
    if layer.index + 1 not in numbers:  # `ple_layer_ids` count from 1
        return parts
    ngram = layer.size("ngram_size", least=2)
    channels = layer.size("hc_count") * layer.size("hidden_size")
    span = (layer.size("ple_conv_kernel_size", least=2) - 1) * ngram
    return (
        *parts,
        LayerTensor(STATE, "ngram_conv", (channels, span), layer.dtype, cut=_whole(channels)),
        LayerTensor(STATE, "ngram_tokens", (ngram - 1,), "int64", cut=_whole(ngram - 1)),
    )


def _kimi_delta_attention(layer: Layer) -> tuple[LayerTensor, ...]:
    heads, dim = layer.size("linear_num_heads"), layer.size("linear_head_dim")
    return _state(
        layer, (CutSection(heads * dim, heads),) * 3, layer.size("linear_conv_kernel_dim"), (heads, dim, dim)
    )


def _mamba1(layer: Layer) -> tuple[LayerTensor, ...]:
    """One state per channel (Mamba-1), with Jamba's names of sizes."""
    inner = _expanded(layer)
    return _state(
        layer, (CutSection(inner, inner),), layer.size("mamba_d_conv"), (inner, layer.size("mamba_d_state"))
    )


@dataclass(frozen=True, slots=True)
class _Mamba2:
    """The attribute names of one family for the sizes of its Mamba-2 layers.

    `inner` derives the layer's width as the family does; None if the width is heads x head_dim.
    """

    heads: str
    head_dim: str
    state: str
    groups: str
    kernel: str
    inner: Callable[[Layer], int] | None

    def __call__(self, layer: Layer) -> tuple[LayerTensor, ...]:
        heads, head_dim, state = (layer.size(n) for n in (self.heads, self.head_dim, self.state))
        width = heads * head_dim
        if self.inner is not None and self.inner(layer) != width:
            raise ConfigError(
                f"{layer.model_type}: {self.heads} {heads} x {self.head_dim} {head_dim} "
                f"must be the layer's width, {self.inner(layer)}"
            )
        groups = layer.size(self.groups)
        shared = CutSection(groups * state, groups, repeats=True)
        channels = (CutSection(width, heads), shared, shared)
        return _state(layer, channels, layer.size(self.kernel), (heads, head_dim, state))


def _expanded(layer: Layer) -> int:
    return layer.size("mamba_expand") * layer.size("hidden_size")


def _chosen_or_expanded(layer: Layer) -> int:
    return layer.size("mamba_d_ssm") if layer.has("mamba_d_ssm") else _expanded(layer)


_BAMBA = _Mamba2(
    "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv", _expanded
)

_RECIPES: Mapping[str, Recipe] = {
    "qwen3_next": _gated_delta_net,
    "qwen3_5_text": _gated_delta_net,
    "qwen3_5_moe_text": _gated_delta_net,
    "qwen4_exp_text": _delta_net_with_ngrams,
    "olmo_hybrid": _gated_delta_net,
    "kimi_linear": _kimi_delta_attention,
    "glm5_next_text": _kimi_delta_attention,
    "jamba": _mamba1,
    "bamba": _BAMBA,
    "granitemoehybrid": _BAMBA,
    "falcon_h1": replace(_BAMBA, inner=_chosen_or_expanded),
    "nemotron_h": _Mamba2(
        "mamba_num_heads", "mamba_head_dim", "ssm_state_size", "n_groups", "conv_kernel", None
    ),
    "zamba2": _Mamba2(
        "n_mamba_heads", "mamba_headdim", "mamba_d_state", "mamba_ngroups", "mamba_d_conv", _expanded
    ),
}
"""Recipes by model type, because all of them use the layer type `linear_attention`."""
