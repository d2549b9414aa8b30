"""Derive the pools of a model from its Hugging Face configuration, without loading transformers.

Each kind of layer has a recipe, which returns the tensors that the layer keeps in a
`transformers.DynamicCache`. A new kind of layer is a new entry of `_RECIPES`.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from os import PathLike
from typing import NamedTuple

from asynchicache.errors import ConfigError, UnsupportedModelError
from asynchicache.specs.attention import (
    chunked_attention,
    full_attention,
    indexed_attention,
    sliding_attention,
)
from asynchicache.specs.causality import check_causal
from asynchicache.specs.compressed import MODEL as COMPRESSING_MODEL
from asynchicache.specs.compressed import compressed_sparse, heavily_compressed, window_only
from asynchicache.specs.identity import HuggingFaceConfig, identity
from asynchicache.specs.pools import PoolSpec, TensorSpec
from asynchicache.specs.recipes import KV, WINDOW, WRITE_POOLS, Layer, LayerTensor, PoolKind, Recipe
from asynchicache.specs.recurrent import linear_attention, short_convolution
from asynchicache.types import ALL_PAGES, Coverage, trailing_pages


class ModelDescription(NamedTuple):
    """The fields of `ModelSpec` that follow from a configuration."""

    model: str
    layers: int
    pools: tuple[PoolSpec, ...]
    identity: str


def check_config(config: object) -> None:
    """
    Raises:
        ConfigError: `config` is not a configuration; says how to get one.
    """
    if isinstance(config, str | PathLike):
        folder = str(config)
        raise ConfigError(
            f"{folder!r} is a path, not a configuration: AutoConfig.from_pretrained({folder!r}) reads one"
        )
    if not hasattr(config, "model_type") or not hasattr(config, "to_diff_dict"):
        kind = type(config).__name__
        cure = (
            "pass its `config`"
            if hasattr(config, "config")
            else "AutoConfig.from_pretrained(folder) reads one"
        )
        raise ConfigError(f"a {kind} is no configuration: {cure}")


def describe(config: HuggingFaceConfig, page_size: int, *, dtype: str | None = None) -> ModelDescription:
    """Return the pools of the model that `config` describes.

    Args:
        config: configuration of a decoder, or a composite one whose `get_text_config` returns it.
        page_size: tokens per page; windows are rounded up to whole pages.
        dtype: dtype that the model computes in. Default: the configuration's, or float32 if it was made by
            hand without one.

    Raises:
        UnsupportedModelError: no pool describes the cache content of a layer, or the content does not follow
            from the tokens alone (encoder-decoders, attention in both directions); names layer and model.
        ConfigError: the configuration contradicts itself, or `config` is not a configuration.
    """
    check_config(config)
    text = check_decoder(config)
    dtype = dtype or _dtype_of(text, config)
    kinds = _layer_kinds(text)
    parts = [(layer.index, part) for layer in _layers(text, kinds, dtype) for part in _recipe(layer)(layer)]
    pools = pools_of_layers(text.model_type, parts, page_size)
    return ModelDescription(config.model_type, len(kinds), pools, identity(config))


# Layers.


def _hybrid(layer: Layer) -> tuple[LayerTensor, ...]:
    """Attention and recurrence side by side in one layer (Falcon-H1, Zamba2)."""
    return full_attention(layer) + linear_attention(layer)


def _window(layer: Layer) -> tuple[LayerTensor, ...]:
    """A window, whose rows DeepSeek-V4 shares between keys and values and stores at the end of a prefix."""
    return window_only(layer) if layer.model_type == COMPRESSING_MODEL else sliding_attention(layer)


def _nothing(layer: Layer) -> tuple[LayerTensor, ...]:
    return ()


_REUSED = "dummy"
"""Transformers' name for a layer that reads another layer's cache."""

_RECIPES: Mapping[str, Recipe] = {
    "full_attention": full_attention,
    "sliding_attention": _window,
    "chunked_attention": chunked_attention,
    "indexed_attention": indexed_attention,
    "compressed_sparse_attention": compressed_sparse,
    "heavily_compressed_attention": heavily_compressed,
    "linear_attention": linear_attention,
    "conv": short_convolution,
    "hybrid": _hybrid,
    "mlp": _nothing,
    "moe": _nothing,
    _REUSED: _nothing,
}


def _recipe(layer: Layer) -> Recipe:
    recipe = _RECIPES.get(layer.kind)
    if recipe is None:
        raise layer.unsupported(f"only {', '.join(_RECIPES)} have pools")
    return recipe


def check_decoder(config: HuggingFaceConfig) -> HuggingFaceConfig:
    """Return the configuration of the decoder.

    Raises:
        UnsupportedModelError: cached bytes of the model depend on more than the tokens before them.
    """
    find = getattr(config, "get_text_config", None)
    text: HuggingFaceConfig = config if find is None else find(decoder=True)
    check_causal(config, text)
    return text


def _dtype_of(text: HuggingFaceConfig, config: HuggingFaceConfig) -> str:
    """Return the dtype that a configuration names; float32 for one that was made by hand, as a model has that
    is built from it.

    Raises:
        ConfigError: a checkpoint's configuration names none. Its weights may be of any dtype; those of
            gpt-oss are bfloat16.
    """
    dtype = _dtype_name(text) or _dtype_name(config)
    if dtype is None and (getattr(config, "name_or_path", None) or getattr(config, "architectures", None)):
        raise ConfigError(
            f"the configuration of this {text.model_type} checkpoint has no dtype: pass dtype=, that of its "
            "weights, such as 'bfloat16'"
        )
    quantised = getattr(config, "quantization_config", None)
    if isinstance(quantised, Mapping) and quantised.get("kv_cache_scheme"):
        warnings.warn(
            f"this {text.model_type} checkpoint asks for a quantised KV cache, which transformers ignores "
            f"and serving engines follow: the spec is for {dtype}; for them, spec.with_quantised_kv()",
            stacklevel=4,
        )
    return dtype or "float32"


def _dtype_name(config: HuggingFaceConfig) -> str | None:
    dtype = getattr(config, "dtype", None)
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _layer_kinds(text: HuggingFaceConfig) -> list[str]:
    """Return the kind of each layer, by the same rule as `transformers.DynamicCache`."""
    count = getattr(text, "num_hidden_layers", None)
    if not isinstance(count, int) or count < 1:
        raise ConfigError(
            f"{text.model_type}: num_hidden_layers is {count!r}, not a positive integer: mend it; of a model "
            f"of several parts, pass the configuration of its decoder, or {WRITE_POOLS}"
        )
    kinds: Sequence[str] | None = getattr(text, "layer_types", None)
    if kinds is None:
        kinds = [_inferred_kind(config) for config in _layer_configs(text, count)]
    if len(kinds) != count:
        raise ConfigError(f"{text.model_type}: {len(kinds)} layer_types for {count} layers")
    return _without_reuse(text, kinds)


def _without_reuse(text: HuggingFaceConfig, kinds: Sequence[str]) -> list[str]:
    """Mark layers that read another layer's keys and values (Gemma 3n, Gemma 4): they have no cache."""
    try:
        modes: Sequence[str | None] | None = getattr(text, "kv_sharing_modes", None)
    except ValueError as error:  # a property, in some classes, that checks the layer types
        raise ConfigError(
            f"{text.model_type}: {error}: mend layer_types or num_kv_shared_layers; a draft that reads its "
            "target's cache has no pools of its own"
        ) from error
    if modes is None:
        return list(kinds)
    for index, mode in enumerate(modes):
        if mode not in (None, "store", "reuse"):
            raise UnsupportedModelError(
                f"{text.model_type} layer {index} has kv_sharing_modes {mode!r}: {WRITE_POOLS}"
            )
    return [_REUSED if mode == "reuse" else kind for kind, mode in zip(kinds, modes, strict=True)]


def _inferred_kind(config: object) -> str:
    if getattr(config, "sliding_window", None) is not None:
        return "sliding_attention"
    if getattr(config, "attention_chunk_size", None) is not None:
        return "chunked_attention"
    return "full_attention"


def _layer_configs(text: HuggingFaceConfig, count: int) -> Sequence[object]:
    """Return the configuration of each layer; they differ only in heterogeneous models."""
    configs: Sequence[object] | None = getattr(text, "per_layer_config", None)
    return [text] * count if configs is None else configs


def _layers(text: HuggingFaceConfig, kinds: Sequence[str], dtype: str) -> Iterable[Layer]:
    configs = _layer_configs(text, len(kinds))
    for index, (kind, config) in enumerate(zip(kinds, configs, strict=True)):
        yield Layer(text.model_type, index, kind, config, dtype)


# From parts to pools.

_Placed = tuple[int, LayerTensor]


def _covered(model_type: str, parts: Sequence[_Placed]) -> Sequence[_Placed]:
    """Ensure that a pool covers every page, because prefixes are matched by that pool.

    If all attention layers have windows, the cache keeps every page of them.
    """
    kinds = {part.pool for _, part in parts}
    if KV in kinds:
        return parts
    if WINDOW not in kinds:
        raise UnsupportedModelError(
            f"{model_type} has 0 attention layers; it needs 1 at least, so that a pool covers every page: "
            f"for an engine of your own, with a pool for the tokens, {WRITE_POOLS}"
        )
    return [
        (index, part._replace(pool=KV, window=None) if part.pool == WINDOW else part) for index, part in parts
    ]


def pools_of_layers(
    model_type: str, parts: Sequence[tuple[int, LayerTensor]], page_size: int
) -> tuple[PoolSpec, ...]:
    """Collect what the layers keep, each with its layer's number, into pools: full coverage first, then
    windows, then states.

    Raises:
        UnsupportedModelError: no layer keeps every token, or tensors of a pool have several shapes.
    """
    found: dict[PoolKind, dict[str, list[_Placed]]] = {}
    for index, part in _covered(model_type, parts):
        same = found.setdefault(part.pool, {}).setdefault(part.tensor, [])
        _check_same(model_type, (index, part), same)
        same.append((index, part))
    pools = [_pool_spec(kind, list(tensors.values()), page_size) for kind, tensors in found.items()]
    return tuple(sorted(pools, key=lambda pool: (pool.coverage.trailing, not pool.per_token)))


def _check_same(model_type: str, placed: _Placed, others: Sequence[_Placed]) -> None:
    for index, part in others[:1]:
        last, new = placed
        if _form(part) != _form(new):
            raise UnsupportedModelError(
                f"{model_type}: {part.tensor} of layer {last} is {new.dtype} {list(new.shape)}, "
                f"of layer {index} {part.dtype} {list(part.shape)}; a pool has one shape: {WRITE_POOLS}"
            )


def _form(part: LayerTensor) -> tuple[object, ...]:
    return part.shape, part.dtype, part.sections, part.tokens_per_entry, part.cut


def _pool_spec(kind: PoolKind, tensors: Sequence[Sequence[_Placed]], page_size: int) -> PoolSpec:
    parts = [part for placed in tensors for _, part in placed]
    return PoolSpec(
        kind.name,
        tuple(_tensor_spec(placed) for placed in tensors),
        coverage=_coverage(kind, parts, page_size),
        per_token=kind.per_token,
        slots_of=kind.slots_of,
        replicated=all(part.replicated for part in parts),
    )


def _tensor_spec(placed: Sequence[_Placed]) -> TensorSpec:
    part = placed[0][1]
    layers = tuple(index for index, _ in placed)
    return TensorSpec(
        part.tensor,
        layers,
        part.shape,
        part.dtype,
        part.sections,
        tokens_per_entry=part.tokens_per_entry,
        cut=part.cut,
    )


def _coverage(kind: PoolKind, parts: Sequence[LayerTensor], page_size: int) -> Coverage:
    """Return the pages of a pool that a prefix needs; with several window sizes, those of the largest."""
    if not kind.per_token:
        return trailing_pages(1)
    windows = [part.window for part in parts if part.window is not None]
    return window_coverage(max(windows), page_size) if windows else ALL_PAGES


def window_coverage(window: int, page_size: int) -> Coverage:
    """Return the trailing pages that hold the `window` - 1 tokens before the next one."""
    return trailing_pages(-(-(window - 1) // page_size))
