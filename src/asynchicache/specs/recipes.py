"""Types for recipes: a layer of a model, and the tensors that it keeps in the cache."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from asynchicache.errors import ConfigError, UnsupportedModelError
from asynchicache.specs.pools import CutSection

WRITE_POOLS = "write its pools yourself: ModelSpec(...), see docs/examples/sizes.py"
"""What to do about a model that keeps what no recipe and no forward describes."""


class PoolKind(NamedTuple):
    """The pool that a tensor belongs to; `PoolSpec` without its tensors and its coverage."""

    name: str
    per_token: bool = True
    slots_of: str | None = None


KV = PoolKind("kv")
WINDOW = PoolKind("swa")
INDEX = PoolKind("dsa", slots_of="kv")
STATE = PoolKind("mamba", per_token=False)
TAIL = PoolKind("tail", per_token=False)
"""What a prefix of a compressing model needs at its end only, so it is stored like a state."""


class LayerTensor(NamedTuple):
    """One tensor that one layer keeps in the cache.

    Attributes:
        tensor: name of the tensor in the pool.
        shape: shape for one token, or for one whole state.
        dtype: a key of `DTYPE_BYTES`.
        sections: widths along the last dimension that model code keeps separate; empty: a single section.
        replicated: whether every tensor-parallel rank holds the same bytes.
        window: tokens that the layer attends to, including the current one; None: all.
        tokens_per_entry, cut: as in `TensorSpec`.
    """

    pool: PoolKind
    tensor: str
    shape: tuple[int, ...]
    dtype: str
    sections: tuple[int, ...] = ()
    replicated: bool = False
    window: int | None = None
    tokens_per_entry: int = 1
    cut: tuple[CutSection, ...] = ()


@dataclass(frozen=True, slots=True)
class Layer:
    """One layer of a model, and the configuration with its sizes."""

    model_type: str
    index: int
    kind: str
    config: object
    dtype: str

    def has(self, name: str) -> bool:
        return getattr(self.config, name, None) is not None

    def size(self, name: str, *, least: int = 1) -> int:
        """Return the size `name` of the configuration.

        Raises:
            ConfigError: the size is missing, not an integer, or below `least`.
        """
        value = getattr(self.config, name, None)
        if not isinstance(value, int) or isinstance(value, bool) or value < least:
            rule = "a positive integer" if least == 1 else f"an integer of at least {least}"
            raise ConfigError(
                f"{self.model_type} layer {self.index} is {self.kind!r}, "
                f"but {name} is {value!r}; it must be {rule}"
            )
        return value

    def unsupported(self, why: str) -> UnsupportedModelError:
        return UnsupportedModelError(
            f"{self.model_type} layer {self.index} is {self.kind!r}: {why}; "
            "asynchicache.spec_from_model(model) asks the model itself"
        )


Recipe = Callable[[Layer], tuple[LayerTensor, ...]]
"""Returns the tensors that a kind of layer keeps in the cache."""
