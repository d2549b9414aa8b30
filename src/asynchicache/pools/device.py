"""Device memory of one pool, `layer_first`, which model code reads and writes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Protocol

import torch

from asynchicache.errors import CapacityError, ConfigError
from asynchicache.layouts import POISON
from asynchicache.pools.slabs import Slab
from asynchicache.specs import DTYPE_BYTES, PoolSpec
from asynchicache.types import check_number

TORCH_DTYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPE_BYTES}
"""Torch's dtypes by the names that specs use."""


class DevicePages(Protocol):
    """The device memory of one pool as copies see it: the cache's, or an engine's (`EnginePages`)."""

    @property
    def spec(self) -> PoolSpec: ...

    @property
    def copy_spec(self) -> PoolSpec:
        """The tensors that are copied: those of `spec`, or parts of them."""
        ...

    @property
    def host_parts(self) -> Mapping[str, tuple[str, slice]]:
        """By tensor of `copy_spec`, the tensor of `spec` that it is part of, and which layers."""
        ...

    @property
    def page_size(self) -> int: ...

    @property
    def slots(self) -> int: ...

    @property
    def device(self) -> torch.device: ...

    def items(self, name: str) -> torch.Tensor:
        """One tensor of `copy_spec` as bytes, uint8 `[layers, slots, item_bytes]`."""
        ...


class DevicePool:
    """The slots of one pool on one device: one `[layers, slots, ...]` tensor for each tensor of the pool.

    A pool that shares another's slots (`PoolSpec.slots_of`) shares only the slot numbers; it has its own
    memory.

    Attributes:
        page_size: tokens per slot; not used if a slot holds a state.
    """

    def __init__(
        self,
        spec: PoolSpec,
        page_size: int,
        slots: int,
        device: torch.device | str = "cpu",
        *,
        poison: bool = False,
    ) -> None:
        """
        Args:
            page_size: tokens per slot.
            device: the device of the memory.
            poison: fill with `POISON` instead of zeros. Default: False.

        Raises:
            ConfigError: no slots, a page size below 1, or an unknown kind of device.
            CapacityError: the device does not exist, or has no room.
        """
        check_size(spec, page_size, slots)
        self.spec = spec
        self.page_size = page_size
        self.slots = slots
        self.device = torch_device(device)
        self._items = {name: self._allocate(name, shape, poison) for name, shape in self._shapes().items()}
        if self.device.type == "cuda":  # copies on other streams are not ordered after the filling
            torch.cuda.synchronize(self.device)
        self._tensors = {tensor.name: self._typed(tensor.name) for tensor in spec.tensors}

    @property
    def nbytes(self) -> int:
        return self.slots * self.spec.slot_bytes(self.page_size)

    @property
    def copy_spec(self) -> PoolSpec:
        """The same as `spec`: all layers of a tensor lie at equal distances."""
        return self.spec

    @property
    def host_parts(self) -> dict[str, tuple[str, slice]]:
        """See `DevicePages`."""
        return {tensor.name: (tensor.name, slice(None)) for tensor in self.spec.tensors}

    def tensor(self, name: str) -> torch.Tensor:
        """`[layers, slots, entries, *shape]` for pages, `[layers, slots, *shape]` for states.

        A page has one entry per token, or one per `tokens_per_entry` of them.

        Layers are local: index `i` is layer `spec.layers[i]` of the model.
        """
        return self._tensors[name]

    def items(self, name: str) -> torch.Tensor:
        """The same memory as bytes, uint8 `[layers, slots, item_bytes]`."""
        return self._items[name]

    def _shapes(self) -> dict[str, tuple[int, int, int]]:
        return {
            tensor.name: (len(tensor.layers), self.slots, self.spec.item_bytes(tensor, self.page_size))
            for tensor in self.spec.tensors
        }

    def _allocate(self, name: str, shape: tuple[int, int, int], poison: bool) -> torch.Tensor:
        try:
            if self.device.type == "cpu":  # the system provides zeroed pages on first touch
                items = Slab(math.prod(shape)).tensor.view(shape)
            else:
                items = torch.zeros(shape, dtype=torch.uint8, device=self.device)
            return items.fill_(POISON) if poison else items
        except CapacityError as error:
            raise self._no_room(name, shape, error) from error
        # OutOfMemoryError is a RuntimeError, as is the CPU's; torch without CUDA raises AssertionError.
        except (RuntimeError, AssertionError) as error:
            raise self._no_room(name, shape, error) from error

    def _no_room(self, name: str, shape: tuple[int, ...], error: Exception) -> CapacityError:
        return CapacityError(
            f"pool {self.spec.name!r}: no room on {self.device} for {name!r} of {shape} bytes: {error}"
        )

    def _typed(self, name: str) -> torch.Tensor:
        tensor = next(tensor for tensor in self.spec.tensors if tensor.name == name)
        items = self._items[name].view(TORCH_DTYPES[tensor.dtype])
        return items.view(len(tensor.layers), self.slots, *self.spec.item_shape(tensor, self.page_size))

    def __repr__(self) -> str:
        return f"<DevicePool {self.spec.name}: {self.slots} slots, {self.nbytes} bytes on {self.device}>"


def torch_device(device: torch.device | str) -> torch.device:
    """Parse a device. `cuda` means the first GPU, so that a pool and its streams agree."""
    try:
        found = torch.device(device)
    except RuntimeError as error:
        raise ConfigError(f"device {device!r} must be cpu, cuda or cuda:N") from error
    if found.type not in ("cpu", "cuda"):
        raise ConfigError(f"device {device!r} must be cpu, cuda or cuda:N")
    return torch.device("cuda", found.index or 0) if found.type == "cuda" else found


def check_size(spec: PoolSpec, page_size: int, slots: int, *, least: int = 1) -> None:
    """
    Raises:
        ConfigError: fewer than `least` slots, or a page size below 1.
    """
    check_number(f"pool {spec.name!r}: slots", slots)
    check_number(f"pool {spec.name!r}: page_size", page_size)
    if slots < least:
        raise ConfigError(f"pool {spec.name!r} with {slots} slots; it must have {least} at least")
    if page_size < 1:
        raise ConfigError(f"pool {spec.name!r} with pages of {page_size} tokens; 1 at least")
