"""vLLM's KV cache groups as pools: which bytes of a block are a layer's own, and which blocks a prefix needs.

Blocks of all groups come from one memory, and a layer may fill less than its block: the rest belongs to the
block's last owner, perhaps another tenant. Pools name only what a layer fills.

With tensor parallelism every worker has a part of each block, at the same number. The parts are pools that
share slots: one decision for all, and a key of its own for each, so that a damaged part is a missing block.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, NamedTuple

from asynchicache.errors import ConfigError
from asynchicache.pools.engine import EngineMemory, EnginePages, PagePlace
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.types import ALL_PAGES, trailing_pages

_FULL = frozenset({"FullAttentionSpec", "MLAAttentionSpec"})
_WINDOW = "SlidingWindowSpec"
_STATE = "MambaSpec"
_LATENT = "MLAAttentionSpec"
_OF_LAYERS = "UniformTypeKVCacheSpecs"
_USE_TIER = "use vLLM's OffloadingConnector with AsynchicacheTier instead"


class LayerBytes(NamedTuple):
    """One layer of a group.

    Attributes:
        name: vLLM's.
        nbytes: bytes of a block that the layer fills.
    """

    name: str
    nbytes: int


class KvGroup(NamedTuple):
    """One of vLLM's groups.

    Attributes:
        number: vLLM's.
        parts: the group as a pool of each worker, by rank; one, if all workers hold the same bytes. Their
            tensors are the layers, in runs of equal size.
        layers: in the order of the pools' tensors.
        states: whether a block holds a recurrent state.
    """

    number: int
    parts: tuple[PoolSpec, ...]
    layers: tuple[LayerBytes, ...]
    states: bool

    @property
    def pool(self) -> PoolSpec:
        """The pool that owns the slots of all parts."""
        return self.parts[0]

    def part(self, rank: int) -> PoolSpec:
        """The pool of one worker."""
        return self.parts[rank % len(self.parts)]


@dataclass(frozen=True, slots=True)
class KvGroups:
    """All groups that a prefix is made of.

    Attributes:
        spec: their pools; the page is a block of vLLM's.
        groups: those of full attention first.
        keys_per_block: hashes of vLLM's that a block spans; the last one is its key.
        blocks: blocks on the device, shared by all groups.
        workers: that share the model by tensor parallelism.
    """

    spec: ModelSpec
    groups: tuple[KvGroup, ...]
    keys_per_block: int
    blocks: int
    workers: int = 1

    @property
    def block_size(self) -> int:
        """Tokens of a block."""
        return self.spec.page_size

    @property
    def state_pools(self) -> dict[int, str]:
        """By group number, names of pools of states."""
        return {group.number: group.pool.name for group in self.groups if group.states}

    def pages(self) -> dict[str, int]:
        """Blocks by pool."""
        return {group.pool.name: self.blocks for group in self.groups}

    def spec_of(self, rank: int) -> ModelSpec:
        """The pools of one worker."""
        parts = (replace(group.part(rank), slots_of=None) for group in self.groups)
        return replace(self.spec, pools=tuple(parts))

    def written_by(self, rank: int) -> frozenset[str]:
        """Names of the pools that a worker copies to host memory: of equal bytes the first worker's."""
        return frozenset(group.part(rank).name for group in self.groups if rank < len(group.parts))

    def memory(self, caches: Mapping[str, Any], rank: int = 0) -> EngineMemory:
        """Return the blocks of a worker.

        Args:
            caches: a tensor for each layer, as vLLM registers them.

        Raises:
            ConfigError: a block of a layer is not contiguous, or has another size than its group says.
        """
        pools = {}
        for group, pool in zip(self.groups, self.spec_of(rank).pools, strict=True):
            places = [self._place(layer, caches[layer.name]) for layer in group.layers]
            device = caches[group.layers[0].name].device
            pools[pool.name] = EnginePages(
                pool, self.block_size, places, self.blocks, device=device, owner=caches
            )
        return EngineMemory(pools)

    def _place(self, layer: LayerBytes, cache: Any) -> PagePlace:
        """Kernels may divide a block into several of their own, which follow each other."""
        per_block, rest = divmod(cache.shape[0], self.blocks)
        if rest or not per_block:
            raise ConfigError(f"layer {layer.name}: {cache.shape[0]} kernel blocks for {self.blocks} blocks")
        stride = cache.stride(0) * cache.element_size() * per_block
        return PagePlace(cache.data_ptr(), stride, layer.nbytes)


def kv_groups(
    config: Any,
    *,
    model: str,
    dtype: str,
    layout: str | None = None,
    workers: int = 1,
    content: str = "",
) -> KvGroups:
    """Return the groups of a model.

    Args:
        config: vLLM's `KVCacheConfig`.
        dtype: dtype of the KV cache, as the user configured it.
        layout: name of vLLM's memory order within a block; part of the identity.
        workers: that share the model by tensor parallelism; part of the identity.
        content: digest of the model; part of the identity.

    Raises:
        ConfigError: a group whose blocks cannot be restored by their hashes; names it and what to do.
    """
    numbers: Sequence[int] = config.prefix_cacheable_group_ids
    if layout is not None and set(layout[:2]) != {"L", "B"}:
        raise ConfigError(
            f"KV cache layout {layout}: the bytes of a block are not together; set VLLM_KV_CACHE_LAYOUT to "
            "LBHNC or LBNHC"
        )
    _check_all_cacheable(config, numbers)
    size = _block_size(config, numbers)
    groups, first_layer = [], 0
    for number in sorted(numbers, key=lambda one: _rank(config.kv_cache_groups[one].kv_cache_spec)):
        groups.append(_group(number, config.kv_cache_groups[number], size, first_layer, workers))
        first_layer += len(groups[-1].layers)
    if groups[0].pool.coverage.trailing:
        raise ConfigError(f"no KV cache group has full attention, which a prefix is found by: {_USE_TIER}")
    identity: dict[str, Any] = {
        "dtype": dtype,
        "layout": layout,
        "groups": [
            (
                group.number,
                config.kv_cache_groups[group.number].kv_cache_spec.__class__.__name__,
                group.layers,
            )
            for group in groups
        ],
    }
    if workers > 1:
        identity["workers"] = workers
    if content:
        identity["content"] = content
    pools = tuple(part for group in groups for part in group.parts)
    spec = ModelSpec(model, size, first_layer, pools, f"vllm {sorted(identity.items())!r}")
    keys = size // (config.hash_block_size or size)
    return KvGroups(spec, tuple(groups), keys, config.num_blocks, workers)


def _check_all_cacheable(config: Any, numbers: Sequence[int]) -> None:
    for number, group in enumerate(config.kv_cache_groups):
        if group.host_resident:
            raise ConfigError(f"KV cache group {number} is in host memory already (HiSparse): {_USE_TIER}")
        if group.is_eagle_group:
            raise ConfigError(
                f"KV cache group {number} belongs to a draft model, whose last block changes: {_USE_TIER}"
            )
        if number not in numbers:
            kind = type(group.kv_cache_spec).__name__
            raise ConfigError(f"KV cache group {number} ({kind}) has no prefix cache: {_USE_TIER}")


def _block_size(config: Any, numbers: Sequence[int]) -> int:
    sizes = {config.kv_cache_groups[number].kv_cache_spec.block_size for number in numbers}
    if len(sizes) != 1:
        raise ConfigError(
            f"KV cache groups have blocks of {sorted(sizes)} tokens; one size is needed: {_USE_TIER}"
        )
    return int(sizes.pop())


def _rank(spec: Any) -> int:
    """Full attention first, then windows, then states."""
    kind = type(_layer_specs(spec, [""])[""]).__name__
    return 0 if kind in _FULL else 1 if kind == _WINDOW else 2


def _layer_specs(spec: Any, names: Sequence[str]) -> dict[str, Any]:
    if type(spec).__name__ == _OF_LAYERS:
        found: dict[str, Any] = spec.kv_cache_specs
        return found if names != [""] else {"": next(iter(found.values()))}
    return dict.fromkeys(names, spec)


def _group(number: int, group: Any, size: int, first_layer: int, workers: int) -> KvGroup:
    specs = _layer_specs(group.kv_cache_spec, group.layer_names)
    kinds = {type(spec).__name__ for spec in specs.values()}
    kind = kinds.pop()
    if kinds or (kind not in _FULL and kind not in (_WINDOW, _STATE)):
        raise ConfigError(
            f"KV cache group {number} has specs {sorted({kind, *kinds})}, which are not known: {_USE_TIER}"
        )
    one = next(iter(specs.values()))
    if kind == _STATE and one.mamba_cache_mode != "align":
        raise ConfigError(
            f"KV cache group {number} has states in mode {one.mamba_cache_mode!r}: set "
            "--mamba-cache-mode align"
        )
    layers = [LayerBytes(name, _filled(spec)) for name, spec in specs.items()]
    layers.sort(key=lambda layer: layer.nbytes)  # stable: within a size, layers stay in their order
    pool = PoolSpec(
        f"group{number}",
        tuple(_tensors(number, layers, first_layer, 1 if kind == _STATE else size)),
        _coverage(kind, one, size),
        per_token=kind != _STATE,
    )
    return KvGroup(number, _parts(pool, workers, same=kind == _LATENT), tuple(layers), kind == _STATE)


def _parts(pool: PoolSpec, workers: int, *, same: bool) -> tuple[PoolSpec, ...]:
    """The pools of all workers; one, if all hold the same bytes."""
    if workers == 1:
        return (pool,)
    if same:
        return (replace(pool, replicated=True),)
    first = replace(pool, shard=f"tp0/{workers}")
    others = (
        replace(pool, name=f"{pool.name}_tp{rank}", slots_of=pool.name, shard=f"tp{rank}/{workers}")
        for rank in range(1, workers)
    )
    return (first, *others)


def _coverage(kind: str, spec: Any, size: int) -> Any:
    if kind == _STATE:
        return trailing_pages(1)
    if kind == _WINDOW:
        tokens = spec.sliding_window - 1 + getattr(spec, "extra_retained_tokens", 0)
        return trailing_pages(max(1, -(-tokens // size)))
    return ALL_PAGES


def _filled(spec: Any) -> int:
    """Bytes of a block that a layer fills."""
    if type(spec).__name__ == _STATE:
        return int(replace(spec, page_size_padded=None).page_size_bytes)
    return int(spec.unpadded_page_size_bytes)


def _tensors(number: int, layers: Sequence[LayerBytes], first: int, items: int) -> list[TensorSpec]:
    """One tensor for each size of layers."""
    tensors: list[TensorSpec] = []
    start = first
    for nbytes, run in groupby(layers, key=lambda layer: layer.nbytes):
        count = len(list(run))
        if nbytes % items:
            raise ConfigError(
                f"KV cache group {number}: {nbytes} bytes of a block are not a whole number for each of its "
                f"{items} tokens: {_USE_TIER}"
            )
        numbers = tuple(range(start, start + count))
        tensors.append(TensorSpec(f"blocks{len(tensors)}", numbers, (nbytes // items,), "uint8"))
        start += count
    return tensors
