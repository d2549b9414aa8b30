"""vLLM's KV cache configuration as far as the connector reads it, for tests without vLLM."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

BLOCK = 32
BLOCKS = 40


@dataclass(frozen=True)
class FullAttentionSpec:
    block_size: int = BLOCK
    unpadded_page_size_bytes: int = 8192


@dataclass(frozen=True)
class SlidingWindowSpec(FullAttentionSpec):
    sliding_window: int = 128
    extra_retained_tokens: int = 0


@dataclass(frozen=True)
class MLAAttentionSpec(FullAttentionSpec):
    pass


@dataclass(frozen=True)
class MambaSpec:
    block_size: int = BLOCK
    state_bytes: int = 5000
    page_size_padded: int | None = 8192
    mamba_cache_mode: str = "align"

    @property
    def page_size_bytes(self) -> int:
        return self.page_size_padded or self.state_bytes


@dataclass(frozen=True)
class ChunkedLocalAttentionSpec(FullAttentionSpec):
    attention_chunk_size: int = 64


@dataclass(frozen=True)
class UniformTypeKVCacheSpecs:
    kv_cache_specs: dict[str, Any]
    block_size: int = BLOCK


def group(spec: Any, *layers: str, **changes: Any) -> SimpleNamespace:
    """One KV cache group."""
    fields = {"is_eagle_group": False, "host_resident": False} | changes
    return SimpleNamespace(kv_cache_spec=spec, layer_names=list(layers), **fields)


def kv_cache_config(groups: Sequence[Any], **changes: Any) -> SimpleNamespace:
    """vLLM's `KVCacheConfig`."""
    fields: dict[str, Any] = {
        "prefix_cacheable_group_ids": tuple(range(len(groups))),
        "hash_block_size": BLOCK,
        "num_blocks": BLOCKS,
        "kv_cache_layout": "LBHNC",
    }
    return SimpleNamespace(kv_cache_groups=list(groups), **(fields | changes))


FULL = group(FullAttentionSpec(), "layers.1", "layers.3")
WINDOW = group(SlidingWindowSpec(), "layers.0", "layers.2")
STATES = group(MambaSpec(), "layers.4", "layers.5")
