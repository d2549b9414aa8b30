"""SGLang's device pools as the pools of a model, over SGLang's own memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from asynchicache.errors import ConfigError
from asynchicache.pools.engine import EngineMemory, EnginePages
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.types import ALL_PAGES, Coverage, trailing_pages

FULL, WINDOW, STATES = "kv", "swa", "mamba"
"""SGLang's names of its pools."""

_HINT = "use the HiCacheStorage backend for this model (docs/howto/sglang.md)"

_Tensors = dict[str, tuple[tuple[int, ...], Sequence[torch.Tensor]]]


@dataclass(frozen=True, slots=True)
class DevicePools:
    """
    Attributes:
        spec: the pools; layers are numbered within this pipeline stage, as SGLang waits for them.
        memory: where their pages lie.
        tokens_per_page: by pool, indices of SGLang that are one page; a state is one index.
    """

    spec: ModelSpec
    memory: EngineMemory
    tokens_per_page: Mapping[str, int]


def device_pools(params: Any, components: Sequence[str], *, model: str, identity: str) -> DevicePools:
    """Describe the device memory of a rank.

    Args:
        params: SGLang's `CacheInitParams`.
        components: names of the tree's components: FULL, SWA, MAMBA.
        model: name of the model, for fingerprints.
        identity: what else makes pages differ: pipeline stage and context part.

    Raises:
        ConfigError: memory of a kind that is not supported.
    """
    unknown = set(components) - {"FULL", "SWA", "MAMBA"}
    if unknown or params.sidecar_draft_device_pools or params.mtp_draft_device_pools:
        raise ConfigError(
            f"components {sorted(unknown)} or pools of a draft model are not supported; {_HINT}"
        )
    size, kvcache = params.page_size, params.token_to_kv_pool_allocator.get_kvcache()
    first = getattr(kvcache, "start_layer", 0) or 0
    pools: list[tuple[PoolSpec, EnginePages]] = []
    for name, pool, layers, coverage in _token_pools(params, kvcache, components, first):
        pools.append(_pool(name, _token_tensors(name, pool, layers, size), size, coverage))
    if "MAMBA" in components:
        pools.append(_pool(STATES, _state_tensors(params.req_to_token_pool, first), size, trailing_pages(1)))
    count = 1 + max(layer for spec, _ in pools for tensor in spec.tensors for layer in tensor.layers)
    return DevicePools(
        ModelSpec(model, size, count, tuple(spec for spec, _ in pools), identity),
        EngineMemory({spec.name: pages for spec, pages in pools}),
        {spec.name: size if spec.per_token else 1 for spec, _ in pools},
    )


def _token_pools(
    params: Any, kvcache: Any, components: Sequence[str], first: int
) -> list[tuple[str, Any, Sequence[int], Coverage]]:
    """Name, pool, layers and coverage of each pool that has pages of tokens."""
    if "SWA" in components:
        window = params.swa_retain_window or params.sliding_window_size
        pages = -(-window // params.page_size)
        of_pool: dict[bool, list[tuple[int, int]]] = {False: [], True: []}
        for layer, (place, windowed) in kvcache.layers_mapping.items():
            of_pool[bool(windowed)].append((place, layer - first))
        full, windows = ([layer for _, layer in sorted(of_pool[kind])] for kind in (False, True))
        return [
            (FULL, kvcache.full_kv_pool, full, ALL_PAGES),
            (WINDOW, kvcache.swa_kv_pool, windows, trailing_pages(pages)),
        ]
    if "MAMBA" in components:
        mapping: Mapping[int, int] = kvcache.full_attention_layer_id_mapping
        return [(FULL, kvcache.full_kv_pool, [layer - first for layer in mapping], ALL_PAGES)]
    return [(FULL, kvcache, range(kvcache.layer_num), ALL_PAGES)]


def _token_tensors(name: str, pool: Any, layers: Sequence[int], page_size: int) -> _Tensors:
    scales = [
        each for each in ("k_scale_buffer", "native_k_scale_buffer") if getattr(pool, each, None) is not None
    ]
    buffers = {"keys": pool.k_buffer, "values": pool.v_buffer} if hasattr(pool, "k_buffer") else {}
    if not buffers and hasattr(pool, "kv_buffer") and not hasattr(pool, "index_k_with_scale_buffer"):
        buffers = {"latent": pool.kv_buffer}
    if scales or not buffers or any(tensor.dim() != 3 for each in buffers.values() for tensor in each):
        raise ConfigError(
            f"pool {name!r} is a {type(pool).__name__}: only keys and values, or latents, of "
            f"[tokens, heads, width] and without scales are supported; {_HINT}"
        )
    return {
        tensor: (tuple(layers), [_paged(layer, page_size) for layer in each])
        for tensor, each in buffers.items()
    }


def _paged(tokens: torch.Tensor, page_size: int) -> torch.Tensor:
    """Return `[pages, page, heads, width]` of `[tokens, heads, width]`."""
    pages = tokens.shape[0] // page_size
    return tokens[: pages * page_size].view(pages, page_size, *tokens.shape[1:])


def _state_tensors(requests: Any, first: int) -> _Tensors:
    side = [
        name
        for name in ("short_conv_pool", "ngram_pool")
        if getattr(getattr(requests, name, None), "enabled", False)
    ]
    if side or getattr(requests, "mamba_ckpt_pool", None) is not None:
        raise ConfigError(f"states with side buffers or int8 checkpoints are not supported; {_HINT}")
    layers = tuple(layer - first for layer in requests.mamba_map)
    cache = requests.mamba_pool.mamba_cache
    tensors: _Tensors = {f"conv{number}": (layers, list(each)) for number, each in enumerate(cache.conv)}
    tensors["temporal"] = layers, list(cache.temporal)
    return {name: (layers, each) for name, (layers, each) in tensors.items() if each[0].numel()}


def _pool(name: str, tensors: _Tensors, page_size: int, coverage: Coverage) -> tuple[PoolSpec, EnginePages]:
    per_token = name != STATES
    skipped = 2 if per_token else 1  # dimensions of pages and tokens, or of states
    specs = tuple(
        TensorSpec(
            tensor, tuple(layers), tuple(each[0].shape[skipped:]), str(each[0].dtype).removeprefix("torch.")
        )
        for tensor, (layers, each) in tensors.items()
    )
    spec = PoolSpec(name, specs, coverage, per_token)
    return spec, EnginePages.of_tensors(
        spec, page_size, {tensor: each for tensor, (_, each) in tensors.items()}
    )
