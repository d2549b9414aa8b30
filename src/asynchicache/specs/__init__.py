"""Pool specs, and the pools of a model."""

from asynchicache.specs.model import ModelSpec
from asynchicache.specs.pools import DTYPE_BYTES, PoolSpec, TensorSpec

__all__ = ["DTYPE_BYTES", "ModelSpec", "PoolSpec", "TensorSpec"]
