"""Ask a model what its cache keeps: one forward of a page on torch's meta device, which takes no memory.

A specification made from a configuration is compared with the model before anything is cached. For classes
that no recipe of `asynchicache.specs` knows, the same forward makes the specification.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import (
    DynamicIndexedLayer,
    DynamicLayer,
    DynamicSlidingWindowLayer,
    LinearAttentionLayer,
)

from asynchicache.errors import CacheError, ConfigError, UnsupportedModelError, UsageError
from asynchicache.integrations.transformers.layers import PoolMap
from asynchicache.integrations.transformers.rows import has_tails, held_fields, rows_of, states_of
from asynchicache.integrations.transformers.snapshot import new_cache, write_pages, write_states
from asynchicache.specs import ModelSpec, TensorSpec
from asynchicache.specs.huggingface import check_decoder, pools_of_layers
from asynchicache.specs.identity import identity
from asynchicache.specs.recipes import INDEX, KV, STATE, WINDOW, WRITE_POOLS, LayerTensor, PoolKind

_log = logging.getLogger(__name__)

_META = torch.device("meta")


def spec_from_model(
    model: PreTrainedModel | PreTrainedConfig, *, page_size: int = 64, dtype: str | None = None
) -> ModelSpec:
    """Return the spec of a model: that of its configuration, compared with the model; or if no recipe knows
    the class, the one that a forward of the class gives. Such a spec cannot be divided over ranks.

    Args:
        model: a causal language model, or its configuration, of which the class is built without weights.
        page_size: tokens per page.
        dtype: dtype that the model computes in. Default: the model's, or the configuration's.

    Raises:
        UnsupportedModelError: what a layer keeps has no pool, or the model cannot be asked.
        ConfigError: the configuration contradicts itself or the model, or has no dtype.
    """
    config = model.config if isinstance(model, PreTrainedModel) else model
    if dtype is None and isinstance(model, PreTrainedModel):
        dtype = str(model.dtype).removeprefix("torch.")
    try:
        spec = ModelSpec.from_config(config, page_size=page_size, dtype=dtype)
    except UnsupportedModelError as error:
        check_decoder(config)
        return _asked_spec(model, config, page_size, dtype, error)
    try:
        check_spec(model, spec)
    except ConfigError as error:
        return _asked_spec(model, config, page_size, dtype, error)
    return spec


def _asked_spec(
    model: PreTrainedModel | PreTrainedConfig,
    config: PreTrainedConfig,
    page_size: int,
    dtype: str | None,
    why: CacheError,
) -> ModelSpec:
    """Make the spec of a class that the recipes do not know, or describe wrongly, as `why` says."""
    try:
        cache = _forward(model, page_size, dtype)
        if has_tails(cache):
            raise UnsupportedModelError("it keeps entries of several tokens")
    except ConfigError:
        raise
    except (*_NOT_ASKED, UnsupportedModelError) as error:
        raise UnsupportedModelError(
            f"{why}; nor does the model say ({_line(error)}): {WRITE_POOLS}"
        ) from error
    parts = [(index, part) for index, layer in enumerate(cache.layers) for part in _parts(index, layer)]
    pools = pools_of_layers(config.model_type, parts, page_size)
    return ModelSpec(config.model_type, page_size, len(cache), pools, identity(config))


def check_spec(model: PreTrainedModel | PreTrainedConfig, spec: ModelSpec) -> None:
    """Compare a spec with one forward of a page of its model, layer by layer. Of a model that cannot run
    without its weights, a warning says so, and the first page is compared instead.

    Raises:
        ConfigError: a layer keeps other tensors than its pool; names layer, tensor, shapes and dtypes. Or the
            model's configuration was changed after the model was built.
    """
    dtype = None if isinstance(model, PreTrainedModel) else spec.pools[0].tensors[0].dtype
    try:
        cache = _forward(model, spec.page_size, dtype)
    except ConfigError:
        raise
    except _NOT_ASKED as error:
        _log.warning("%s: its spec is compared with its first page only: %s", spec.model, _line(error))
        return
    whole = spec.on_one_rank()
    try:
        _compare(cache, spec)
    except UsageError as error:
        # A rank's configuration is that of its part, or of the whole model, as with transformers' tp_plan.
        if whole == spec:
            raise ConfigError(f"model {spec.model!r}: {error}") from None
        try:
            _compare(cache, whole)
        except UsageError as other:
            raise ConfigError(f"model {spec.model!r}: {other}") from None


def _compare(cache: DynamicCache, spec: ModelSpec) -> None:
    """Write a page of the cache to pools of the spec, on the meta device.

    Raises:
        UsageError: a layer keeps other tensors than its pool.
    """
    pools = PoolMap(
        spec,
        {
            pool.name: {
                part.name: _memory(part, pool.item_shape(part, spec.page_size)) for part in pool.tensors
            }
            for pool in spec.pools
        },
    )
    try:
        for name in pools.pages:
            write_pages(cache, pools, 0, [0], pool=name)
        if pools.states:
            write_states(cache, pools, 0)
    except IndexError:
        most = max(layer for pool in spec.pools for part in pool.tensors for layer in part.layers)
        raise UsageError(
            f"a pool has layer {most}, and the model layers 0 to {len(cache.layers) - 1}: "
            "spec_from_model(model) makes the spec that fits"
        ) from None
    known = {layer for layers in pools.pages.values() for layer in layers} | set(pools.states)
    for index, layer in enumerate(cache.layers):
        kept = _kept(layer)
        if kept and index not in known:
            raise UsageError(f"layer {index} keeps {kept}, and no pool of the spec has that layer")


def _memory(tensor: TensorSpec, item: Sequence[int]) -> torch.Tensor:
    """One slot of a tensor, in all its layers."""
    return torch.empty((len(tensor.layers), 1, *item), dtype=getattr(torch, tensor.dtype), device=_META)


def _kept(layer: object) -> list[str]:
    """Names of what a cache layer keeps."""
    names = sorted(held_fields(layer)) if isinstance(layer, DynamicLayer) else []
    states = states_of(layer, 0) if isinstance(layer, LinearAttentionLayer) else None
    return names + ([] if states is None else [*map(str, states.conv), *map(str, states.recurrent)])


# What a layer keeps, as a recipe would say


def _parts(index: int, layer: Any) -> Iterator[LayerTensor]:
    """
    Raises:
        UnsupportedModelError: no pool describes what the layer keeps.
    """
    if isinstance(layer, DynamicLayer) and layer.is_initialized:
        window = layer.sliding_window if isinstance(layer, DynamicSlidingWindowLayer) else None
        pool = KV if window is None else WINDOW
        keys, values = (_part(pool, name, rows_of(layer, name, 0), window) for name in ("keys", "values"))
        if keys.shape != values.shape and keys.shape[0] == values.shape[0] == 1:  # MLA: latent and RoPE key
            widths = (keys.shape[1], values.shape[1])
            latents = keys._replace(tensor="latent", shape=(1, sum(widths)), sections=widths, replicated=True)
            yield latents
        else:
            yield from (keys, values)
    for name, field in (("index_keys", "indexer_keys"), ("index_positions", "indexer_position_ids")):
        if isinstance(layer, DynamicIndexedLayer) and getattr(layer, field) is not None:
            yield _part(INDEX, name, rows_of(layer, field, 0), None)._replace(replicated=True)
    if isinstance(layer, LinearAttentionLayer):
        states = states_of(layer, 0)
        for name, held in (("conv", states.conv), ("recurrent", states.recurrent)):
            if set(held) - {0}:
                raise UnsupportedModelError(f"layer {index} keeps several {name} states: {WRITE_POOLS}")
            yield from (_part(STATE, name, state, None) for state in held.values())


def _part(pool: PoolKind, name: str, held: torch.Tensor, window: int | None) -> LayerTensor:
    dtype = str(held.dtype).removeprefix("torch.")
    return LayerTensor(pool, name, tuple(held.shape[1:]), dtype, window=window)


# A forward without memory


_UNKNOWN: Mapping[str, Callable[..., Any]] = {
    "aten::equal": lambda left, right: True,
    "aten::nonzero": lambda held: held.new_empty((0, held.dim()), dtype=torch.int64),
    "aten::repeat_interleave": lambda repeats, output_size=0: repeats.new_empty((output_size or 0,)),
    "aten::bincount": lambda held, weights=None, minlength=0: held.new_empty((minlength,)),
    # On the meta device torch takes bfloat16 alone.
    "aten::_grouped_mm": lambda rows, experts, *_: rows.new_empty((len(rows), experts.shape[-1])),
}
"""Answers to what a forward asks of values that do not exist, by operator: nothing is selected, no token is
routed to an expert. What a layer keeps does not depend on it."""

_VALUE = "aten::_local_scalar_dense"
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")


class _UnknownValues(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Runs operators on the meta device, and answers those that need values. A single value is `value`."""

    def __init__(self, value: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._value = value

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().partition(".")[0]
        if name == _VALUE:
            return torch.tensor(self._value, dtype=args[0].dtype, device="cpu").item()
        if name in _UNKNOWN:
            return _UNKNOWN[name](*args, **(kwargs or {}))
        if name in _INDEXING:
            args = (args[0], _without_masks(args[1]), *args[2:])
        return func(*args, **(kwargs or {}))


def _without_masks(indices: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
    """Return indices that select nothing where a mask stood."""
    found: list[torch.Tensor | None] = []
    for index in indices:
        if index is not None and index.dtype in (torch.bool, torch.uint8):
            found += [index.new_empty((0,), dtype=torch.int64) for _ in range(index.dim())]
        else:
            found.append(index)
    return found


_NOT_ASKED = (RuntimeError, TypeError, ValueError, AttributeError, LookupError, ImportError)
"""What a class raises that cannot be built from its configuration alone, or run without its weights."""


def _forward(model: PreTrainedModel | PreTrainedConfig, tokens: int, dtype: str | None) -> DynamicCache:
    """Return the cache after a forward of so many tokens, on the meta device.

    A forward that checks its values may reject 0 (`valid.all()`), and then takes 1.

    Raises:
        ConfigError: the model's configuration was changed after the model was built.
    """
    with torch.device(_META), torch.no_grad():
        twin = _twin(model, dtype).eval()
        if isinstance(model, PreTrainedModel):
            _check_twin(model, twin)
        try:
            return _run(twin, tokens, 0)
        except _NOT_ASKED:
            return _run(twin, tokens, 1)


def _run(twin: PreTrainedModel, tokens: int, value: int) -> DynamicCache:
    cache = new_cache(twin.config)
    with _UnknownValues(value):
        twin(input_ids=torch.zeros(1, tokens, dtype=torch.int64), past_key_values=cache, use_cache=True)
    return cache


def _twin(model: PreTrainedModel | PreTrainedConfig, dtype: str | None) -> PreTrainedModel:
    """Return the same class without weights."""
    config = copy.deepcopy(model.config if isinstance(model, PreTrainedModel) else model)
    if hasattr(config, "quantization_config"):
        del config.quantization_config  # weights are none of the cache's business
    if isinstance(model, PreTrainedModel):
        return type(model)(config).to(model.dtype)
    try:
        twin = AutoModelForCausalLM.from_config(config.get_text_config(decoder=True))
    except ValueError:  # a class for text and images alone
        twin = AutoModelForImageTextToText.from_config(config)
    return twin if dtype is None else twin.to(getattr(torch, dtype))


def _check_twin(model: PreTrainedModel, twin: PreTrainedModel) -> None:
    """Ensure that a model's configuration still describes its modules: `twin` was built from it just now.

    Raises:
        ConfigError: a layer or a number of a module differs; names it, and both values.
    """
    changed = "was changed after the model was loaded: load it with the configuration that it is to have"
    others = dict(twin.named_modules())
    vocabulary = (model.get_input_embeddings(), model.get_output_embeddings())
    modules = dict(model.named_modules())
    for name in modules.keys() ^ others.keys():
        if hasattr(modules.get(name, others.get(name)), "layer_idx"):
            places = ("model", "configuration") if name in modules else ("configuration", "model")
            raise ConfigError(
                f"{name} is in the {places[0]}, not in the {places[1]}: the configuration {changed}"
            )
    for name, module in modules.items():
        other = others.get(name)
        if other is None or type(other) is not type(module) or module in vocabulary:
            continue
        built, described = _settings(module), _settings(other)
        for field in sorted(built.keys() & described.keys()):
            if built[field] != described[field]:
                raise ConfigError(
                    f"{name}: {field} is {built[field]!r} in the model, {described[field]!r} by its "
                    f"configuration: it {changed}"
                )


_UNRELATED = frozenset({"vocab_size", "padding_idx", "max_seq_len_cached"})


def _settings(module: torch.nn.Module) -> dict[str, int | str | None]:
    """Sizes and kinds that a module was built with; not those of the vocabulary, nor what a forward moves."""
    return {
        name: value
        for name, value in vars(module).items()
        if type(value) in (int, str, type(None)) and name not in _UNRELATED
    }


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {str(error).splitlines()[0][:200] if str(error) else ''}"
