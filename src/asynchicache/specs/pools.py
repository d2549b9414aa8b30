"""Pools as data: tensors, coverage, and shared slots. No code depends on the name of a pool."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from asynchicache.errors import ConfigError
from asynchicache.options import check_fields
from asynchicache.types import ALL_PAGES, Coverage

DTYPE_BYTES: Mapping[str, int] = {
    "float64": 8,
    "float32": 4,
    "bfloat16": 2,
    "float16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
    "int64": 8,
    "int32": 4,
    "int8": 1,
    "uint8": 1,
}
"""Bytes per element; keys are torch's names without `torch.`."""

_SHARD = re.compile(r"([a-z]+\d+/\d+(-[a-z]+\d+/\d+)*)?")
SHARD_BYTES = 32
"""A page's header has room for so much of the shard's name."""

_NAME = re.compile(r"[a-z0-9_]{1,64}")
"""Names that storage accepts: a page's header has 64 bytes for the name."""


class CutSection(NamedTuple):
    """Rows along the first dimension of a tensor that tensor-parallel ranks divide among them, in order.

    Attributes:
        units: indivisible parts of them, such as heads, of equal size.
        repeats: whether several ranks may hold the same unit, if there are more ranks than units.
    """

    rows: int
    units: int
    repeats: bool = False


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """One tensor of a pool, in each of `layers`.

    Attributes:
        name: unique within the pool, e.g. `keys`, `values`, `conv`, `recurrent`.
        layers: global numbers of the layers that have this tensor, ascending.
        shape: shape for one entry, e.g. of a token (`[kv_heads, head_dim]`), or for one whole state
            (`[heads, k, v]`).
        dtype: a key of `DTYPE_BYTES`.
        sections: widths along the last dimension that model code keeps separate, such as latent and RoPE key
            of MLA; they sum up to that dimension, and one may be 0. Empty: a single section.
        tokens_per_entry: tokens that share one entry of `shape`, for models that compress runs of tokens
            (DeepSeek-V4), or of which this rank holds one (`ModelSpec.shard`); it must divide the page size.
            A state has no entries: 1.
        cut: how ranks divide the first dimension, see `ModelSpec.shard`; empty: unknown, or not at all.
    """

    name: str
    layers: tuple[int, ...]
    shape: tuple[int, ...]
    dtype: str
    sections: tuple[int, ...] = ()
    tokens_per_entry: int = 1
    cut: tuple[CutSection, ...] = ()

    def __post_init__(self) -> None:
        if not isinstance(self.dtype, str) or self.dtype not in DTYPE_BYTES:
            raise ConfigError(f"tensor {self.name!r}: dtype {self.dtype!r} is none of {sorted(DTYPE_BYTES)}")
        check_fields(self, f"tensor {self.name!r}: ")
        if not self.name:
            raise ConfigError(f"tensor name {self.name!r} must have a letter, such as 'keys'")
        if not self.layers or list(self.layers) != sorted(set(self.layers)) or self.layers[0] < 0:
            raise ConfigError(f"tensor {self.name!r}: layers {self.layers} must be ascending, from 0")
        if min(self.shape, default=1) < 0:
            raise ConfigError(f"tensor {self.name!r}: shape {self.shape} has a negative dimension")
        if self.sections and (min(self.sections) < 0 or self.shape[-1:] != (sum(self.sections),)):
            raise ConfigError(f"tensor {self.name!r}: sections {self.sections} must add up to {self.shape}")
        if self.tokens_per_entry < 1:
            raise ConfigError(f"tensor {self.name!r}: {self.tokens_per_entry} tokens_per_entry; 1 at least")
        if self.cut and self.shape[:1] != (sum(section.rows for section in self.cut),):
            raise ConfigError(f"tensor {self.name!r}: cut {self.cut} must add up to rows of {self.shape}")
        for section in self.cut:
            if section.units < 1 or section.rows % section.units:
                raise ConfigError(
                    f"tensor {self.name!r}: {section.units} units do not divide {section.rows} rows"
                )

    @property
    def unit_bytes(self) -> int:
        """Bytes per layer of one entry (of one token, unless tokens share it), or of one state."""
        return math.prod(self.shape) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, slots=True)
class PoolSpec:
    """One pool: a kind of cache content.

    Attributes:
        name: name in keys, statistics and messages; 1 to 64 of a-z, 0-9 and `_`.
        tensors: tensors of one page (or state); all are mandatory. Empty tensors of a state are dropped, e.g.
            the convolution's if a model has none; `ModelSpec` drops a pool without tensors.
        coverage: the pages that a prefix needs.
        per_token: True if a slot holds `page_size` tokens, False if it holds one whole state.
        slots_of: the pool whose slots this pool shares (`dsa` shares those of `kv`), or None.
        replicated: True if every rank holds the same bytes, so that one key serves all ranks.
        shard: the part of the model's pool that this is, in storage keys, such as `tp1/4`; empty: all of it.
        writes: False if another rank holds the same bytes and writes them to storage.
    """

    name: str
    tensors: tuple[TensorSpec, ...]
    coverage: Coverage = ALL_PAGES
    per_token: bool = True
    slots_of: str | None = None
    replicated: bool = False
    shard: str = ""
    writes: bool = True

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not _NAME.fullmatch(self.name):
            raise ConfigError(f"pool name {self.name!r} must be 1 to 64 of a-z, 0-9 and _")
        check_fields(self, f"pool {self.name!r}: ")
        if not _SHARD.fullmatch(self.shard) or len(self.shard) > SHARD_BYTES:
            raise ConfigError(
                f"pool {self.name!r}: shard {self.shard!r} must be parts such as tp1/4-cp0/2, of at most "
                f"{SHARD_BYTES} characters"
            )
        names = [tensor.name for tensor in self.tensors]
        if not names or len(set(names)) != len(names):
            raise ConfigError(f"pool {self.name!r}: tensor names {names} must be unique, one at least")
        for tensor in self.tensors:
            if self.per_token and not tensor.unit_bytes:
                raise ConfigError(f"tensor {tensor.name!r}: shape {tensor.shape} has an empty dimension")
        object.__setattr__(self, "tensors", tuple(tensor for tensor in self.tensors if tensor.unit_bytes))
        if self.coverage.pages is not None and self.coverage.pages < 1:
            raise ConfigError(f"pool {self.name!r}: {self.coverage.pages} trailing pages; 1 at least")
        if not self.per_token and self.coverage.pages != 1:
            raise ConfigError(f"pool {self.name!r}: a state covers the end of a prefix only")
        shared = [tensor.name for tensor in self.tensors if tensor.tokens_per_entry != 1]
        if not self.per_token and shared:
            raise ConfigError(f"pool {self.name!r} holds states; tokens_per_entry of {shared} must be 1")

    def entries(self, tensor: TensorSpec, page_size: int) -> int:
        """Return the entries of `tensor` in one slot: one per token, one per run of tokens, or one state.

        Raises:
            ConfigError: a page would end within an entry.
        """
        if not self.per_token:
            return 1
        if page_size % tensor.tokens_per_entry:
            step = math.lcm(*(tensor.tokens_per_entry for tensor in self.tensors))
            raise ConfigError(
                f"pool {self.name!r}: {tensor.tokens_per_entry} tokens share an entry of {tensor.name}, "
                f"which do not divide page_size {page_size}; multiples of {step} fit: {step}, {2 * step}, ..."
            )
        return page_size // tensor.tokens_per_entry

    def item_shape(self, tensor: TensorSpec, page_size: int) -> tuple[int, ...]:
        """Return the shape of one layer in one slot: `[entries, *shape]`, or `shape` of a state."""
        return (self.entries(tensor, page_size), *tensor.shape) if self.per_token else tensor.shape

    def item_bytes(self, tensor: TensorSpec, page_size: int) -> int:
        """Return the bytes of one layer of `tensor` in one slot."""
        return tensor.unit_bytes * self.entries(tensor, page_size)

    def slot_bytes(self, page_size: int) -> int:
        """Return the bytes of one slot, for all tensors and layers, without padding."""
        return sum(self.item_bytes(t, page_size) * len(t.layers) for t in self.tensors)
