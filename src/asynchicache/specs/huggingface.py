"""The pools of a model, read off its Hugging Face configuration without loading transformers.

Every kind of layer has one handler, which says as data what the layer leaves in a
`transformers.DynamicCache`. A new kind of layer is a new entry of `_HANDLERS`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

from asynchicache.errors import ConfigError, UnsupportedModelError
from asynchicache.specs.pools import PoolSpec, TensorSpec
from asynchicache.types import ALL_PAGES, Coverage, trailing_pages

STATE_DTYPE = "float32"
"""Recurrent states are float32 whatever the model's dtype: they accumulate over the whole prefix."""


class HuggingFaceConfig(Protocol):
    """What is asked of a `transformers.PreTrainedConfig`; sizes are read by attribute name."""

    model_type: str

    def to_diff_dict(self) -> dict[str, object]: ...


class ModelDescription(NamedTuple):
    """What a configuration says about a cache; the fields of `ModelSpec` that follow from it."""

    model: str
    layers: int
    pools: tuple[PoolSpec, ...]
    identity: str


def describe(config: HuggingFaceConfig, *, dtype: str | None = None) -> ModelDescription:
    """The pools of the model that `config` describes.

    Args:
        config: of a decoder, or a composite one whose `get_text_config` names the decoder.
        dtype: what the model computes in; by default the configuration's own, and float32 if it
            names none (what a model built from it without a dtype gets).

    Raises:
        UnsupportedModelError: a layer leaves something that no pool describes; names layer and model.
        ConfigError: the configuration contradicts itself.
    """
    text = _text_config(config)
    dtype = dtype or _dtype_name(text) or _dtype_name(config) or "float32"
    kinds = _layer_kinds(text)
    parts = [(layer.index, part) for layer in _layers(text, kinds, dtype) for part in _handler(layer)(layer)]
    pools = _pools(text.model_type, parts)
    return ModelDescription(config.model_type, len(kinds), pools, identity(config))


# Layers, and what each kind leaves in the cache.


class _Pool(NamedTuple):
    name: str
    coverage: Coverage = ALL_PAGES
    per_token: bool = True
    replicated: bool = False


class _Part(NamedTuple):
    """One tensor that one layer leaves in the cache."""

    pool: _Pool
    tensor: str
    shape: tuple[int, ...]
    dtype: str


_KV = _Pool("kv")
_LATENT = _Pool("kv", replicated=True)
_STATE = _Pool("mamba", trailing_pages(1), per_token=False)


@dataclass(frozen=True, slots=True)
class _Layer:
    model_type: str
    index: int
    kind: str
    config: object
    dtype: str

    def has(self, name: str) -> bool:
        return getattr(self.config, name, None) is not None

    def size(self, name: str) -> int:
        """The configuration's size `name`.

        Raises:
            ConfigError: it is not there, or no positive integer.
        """
        value = getattr(self.config, name, None)
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise ConfigError(
                f"{self.model_type} layer {self.index} is {self.kind!r}, "
                f"but {name} is {value!r}; it must be a positive integer"
            )
        return value

    def unsupported(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(f"{self.model_type} layer {self.index} is {self.kind!r}: {why}")


_Handler = Callable[[_Layer], tuple[_Part, ...]]


def _attention(layer: _Layer) -> tuple[_Part, ...]:
    """Keys (after RoPE) and values of every token; MHA and GQA."""
    if layer.has("kv_lora_rank"):
        return _latent_attention(layer)
    if layer.has("multi_query") and not layer.has("num_key_value_heads"):
        raise layer.unsupported("its head counts are not named num_key_value_heads")
    heads = layer.size("num_key_value_heads" if layer.has("num_key_value_heads") else "num_attention_heads")
    shape = (heads, _head_dim(layer))
    return _Part(_KV, "keys", shape, layer.dtype), _Part(_KV, "values", shape, layer.dtype)


def _head_dim(layer: _Layer) -> int:
    if layer.has("head_dim"):
        return layer.size("head_dim")
    hidden, heads = layer.size("hidden_size"), layer.size("num_attention_heads")
    if hidden % heads:
        raise ConfigError(f"{layer.model_type}: {heads} heads do not divide hidden_size {hidden}")
    return hidden // heads


def _latent_attention(layer: _Layer) -> tuple[_Part, ...]:
    """The compressed latent and the shared RoPE key of every token (MLA, DeepSeek-V2).

    All heads read the same latent, so every tensor-parallel rank holds all of it.
    """
    if layer.model_type not in _LATENT_MODELS:
        raise layer.unsupported("whether this model caches its latent, or keys and values, is not known here")
    return (
        _Part(_LATENT, "latent", (1, layer.size("kv_lora_rank")), layer.dtype),
        _Part(_LATENT, "rope_keys", (1, layer.size("qk_rope_head_dim")), layer.dtype),
    )


def _linear_attention(layer: _Layer) -> tuple[_Part, ...]:
    recipe = _STATE_RECIPES.get(layer.model_type)
    if recipe is None:
        raise layer.unsupported("no recipe for this model's recurrent state")
    if getattr(layer.config, "number_of_conv_states", 1) != 1:
        raise layer.unsupported("it keeps several convolution states")
    return recipe(layer)


def _state(layer: _Layer, channels: int, kernel: int, recurrent: tuple[int, ...]) -> tuple[_Part, ...]:
    return (
        _Part(_STATE, "conv", (channels, kernel), layer.dtype),
        _Part(_STATE, "recurrent", recurrent, STATE_DTYPE),
    )


def _gated_delta_net(layer: _Layer) -> tuple[_Part, ...]:
    """One convolution over queries, keys and values; a `[value_heads, key_dim, value_dim]` memory."""
    key_dim, value_dim = layer.size("linear_key_head_dim"), layer.size("linear_value_head_dim")
    key_heads, value_heads = layer.size("linear_num_key_heads"), layer.size("linear_num_value_heads")
    if value_heads % key_heads:
        raise ConfigError(
            f"{layer.model_type}: linear_num_key_heads {key_heads} must divide "
            f"linear_num_value_heads {value_heads}"
        )
    channels = 2 * key_heads * key_dim + value_heads * value_dim
    return _state(layer, channels, layer.size("linear_conv_kernel_dim"), (value_heads, key_dim, value_dim))


def _kimi_delta_attention(layer: _Layer) -> tuple[_Part, ...]:
    heads, dim = layer.size("linear_num_heads"), layer.size("linear_head_dim")
    return _state(layer, 3 * heads * dim, layer.size("linear_conv_kernel_dim"), (heads, dim, dim))


@dataclass(frozen=True, slots=True)
class _Mamba2:
    """How one family names the sizes of its Mamba-2 layers.

    `inner` is the width of the layer as the family derives it, or None where it is heads x head_dim.
    """

    heads: str
    head_dim: str
    state: str
    groups: str
    kernel: str
    inner: Callable[[_Layer], int] | None

    def __call__(self, layer: _Layer) -> tuple[_Part, ...]:
        heads, head_dim, state = (layer.size(n) for n in (self.heads, self.head_dim, self.state))
        width = heads * head_dim
        if self.inner is not None and self.inner(layer) != width:
            raise ConfigError(
                f"{layer.model_type}: {self.heads} {heads} x {self.head_dim} {head_dim} "
                f"must be the layer's width, {self.inner(layer)}"
            )
        channels = width + 2 * layer.size(self.groups) * state
        return _state(layer, channels, layer.size(self.kernel), (heads, head_dim, state))


def _expanded(layer: _Layer) -> int:
    return layer.size("mamba_expand") * layer.size("hidden_size")


def _chosen_or_expanded(layer: _Layer) -> int:
    return layer.size("mamba_d_ssm") if layer.has("mamba_d_ssm") else _expanded(layer)


def _short_convolution(layer: _Layer) -> tuple[_Part, ...]:
    """The inputs that a gated short convolution still sees (LFM2); no recurrent state."""
    shape = (layer.size("hidden_size"), layer.size("conv_L_cache"))
    return (_Part(_STATE, "conv", shape, layer.dtype),)


def _hybrid(layer: _Layer) -> tuple[_Part, ...]:
    """Attention and recurrence side by side in one layer (Falcon-H1, Zamba2)."""
    return _attention(layer) + _linear_attention(layer)


def _nothing(layer: _Layer) -> tuple[_Part, ...]:
    return ()


_LATENT_MODELS = frozenset({"deepseek_v2", "deepseek_v3", "kimi_linear"})

_BAMBA = _Mamba2(
    "mamba_n_heads", "mamba_d_head", "mamba_d_state", "mamba_n_groups", "mamba_d_conv", _expanded
)

_STATE_RECIPES: Mapping[str, _Handler] = {
    "qwen3_next": _gated_delta_net,
    "qwen3_5_text": _gated_delta_net,
    "qwen3_5_moe_text": _gated_delta_net,
    "olmo_hybrid": _gated_delta_net,
    "kimi_linear": _kimi_delta_attention,
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
"""By model, because the layer type `linear_attention` stands for all of them. Mamba-1 is missing on
purpose: Jamba's forward drops the state it is given when it is fed more than one token."""

_HANDLERS: Mapping[str, _Handler] = {
    "full_attention": _attention,
    "linear_attention": _linear_attention,
    "conv": _short_convolution,
    "hybrid": _hybrid,
    "mlp": _nothing,
    "moe": _nothing,
}


def _handler(layer: _Layer) -> _Handler:
    handler = _HANDLERS.get(layer.kind)
    if handler is None:
        raise layer.unsupported(f"only {', '.join(_HANDLERS)} have pools")
    return handler


# From the configuration to layers, and from parts to pools.


_REFUSED: Mapping[str, str] = {
    "is_encoder_decoder": "only decoders have pools",
    "cross_attention_layers": "their keys follow an image, not the tokens",
    "kv_sharing_modes": "layers that read another layer's cache have no pools",
}
"""What a configuration may not set, whatever its layers are."""


def _text_config(config: HuggingFaceConfig) -> HuggingFaceConfig:
    find = getattr(config, "get_text_config", None)
    text: HuggingFaceConfig = config if find is None else find(decoder=True)
    for attribute, why in _REFUSED.items():
        if getattr(text, attribute, None):
            raise UnsupportedModelError(f"{text.model_type} sets {attribute}: {why}")
    return text


def _dtype_name(config: HuggingFaceConfig) -> str | None:
    dtype = getattr(config, "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _layer_kinds(text: HuggingFaceConfig) -> list[str]:
    """The kind of each layer, by the rule that `transformers.DynamicCache` goes by."""
    count = getattr(text, "num_hidden_layers", None)
    if not isinstance(count, int) or count < 1:
        raise ConfigError(f"{text.model_type}: num_hidden_layers is {count!r}, not a positive integer")
    kinds: Sequence[str] | None = getattr(text, "layer_types", None)
    if kinds is None:
        return [_inferred_kind(config) for config in _layer_configs(text, count)]
    if len(kinds) != count:
        raise ConfigError(f"{text.model_type}: {len(kinds)} layer_types for {count} layers")
    return list(kinds)


def _inferred_kind(config: object) -> str:
    if getattr(config, "sliding_window", None) is not None:
        return "sliding_attention"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "chunked_attention"
    return "full_attention"


def _layer_configs(text: HuggingFaceConfig, count: int) -> Sequence[object]:
    """Each layer's own configuration; they differ in heterogeneous models only."""
    configs: Sequence[object] | None = getattr(text, "per_layer_config", None)
    return [text] * count if configs is None else configs


def _layers(text: HuggingFaceConfig, kinds: Sequence[str], dtype: str) -> Iterable[_Layer]:
    configs = _layer_configs(text, len(kinds))
    for index, (kind, config) in enumerate(zip(kinds, configs, strict=True)):
        yield _Layer(text.model_type, index, kind, config, dtype)


def _pools(model_type: str, parts: Iterable[tuple[int, _Part]]) -> tuple[PoolSpec, ...]:
    """Parts of all layers gathered into pools; those that cover every page first."""
    found: dict[_Pool, dict[str, tuple[_Part, list[int]]]] = {}
    for index, part in parts:
        first, layers = found.setdefault(part.pool, {}).setdefault(part.tensor, (part, []))
        if part != first:
            raise UnsupportedModelError(
                f"{model_type}: {part.tensor} of layer {index} is {part.dtype} {list(part.shape)}, "
                f"of layer {layers[0]} {first.dtype} {list(first.shape)}; a pool has one shape"
            )
        layers.append(index)
    if not any(pool.coverage == ALL_PAGES for pool in found):
        raise UnsupportedModelError(f"{model_type} has no attention layer, so no pool covers every page")
    order = sorted(found, key=lambda pool: pool.coverage.trailing)
    return tuple(_pool_spec(pool, found[pool].values()) for pool in order)


def _pool_spec(pool: _Pool, tensors: Iterable[tuple[_Part, list[int]]]) -> PoolSpec:
    specs = tuple(TensorSpec(p.tensor, tuple(layers), p.shape, p.dtype) for p, layers in tensors)
    return PoolSpec(
        pool.name, specs, coverage=pool.coverage, per_token=pool.per_token, replicated=pool.replicated
    )


# Identity.

_VOLATILE = frozenset(
    {
        "_name_or_path",
        "architectures",
        "chunk_size_feed_forward",
        "dtype",
        "id2label",
        "label2id",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "problem_type",
        "return_dict",
        "torch_dtype",
        "transformers_version",
        "use_cache",
    }
)


def identity(config: HuggingFaceConfig) -> str:
    """The model type and a digest of everything in `config` that may change cached bytes.

    The digest is the SHA-256 of `config.to_diff_dict()` as sorted, compact JSON, without the fields
    that say where a model came from, what it returns, or its dtype (which the layout names). What
    is unknown stays in: a field too many costs a miss, a field too few gives wrong bytes.
    """
    text = json.dumps(_canonical(config.to_diff_dict()), sort_keys=True, separators=(",", ":"))
    return f"{config.model_type}:{hashlib.sha256(text.encode()).hexdigest()}"


def _canonical(value: object) -> object:
    if isinstance(value, Mapping):
        return {str(key): _canonical(item) for key, item in value.items() if key not in _VOLATILE}
    if isinstance(value, list | tuple):
        return [_canonical(item) for item in value]
    if value is None or isinstance(value, str | int | float):
        return value
    raise ConfigError(f"configuration value {value!r} is not plain data; its identity is unknown")
