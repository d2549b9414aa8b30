"""Device memory that an engine owns, as pages of pools: where each layer of each page lies."""

from __future__ import annotations

import ctypes
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from asynchicache.errors import ConfigError
from asynchicache.pools.device import check_size, torch_device
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec


class PagePlace(NamedTuple):
    """Where one layer of one tensor lies in each page: page `i` at `address + i * stride`.

    Attributes:
        address: in page 0, of this process or of the device.
        stride: bytes from page to page.
        nbytes: bytes of each page, contiguous.
    """

    address: int
    stride: int
    nbytes: int


class EnginePages:
    """The device pages of one pool of an engine. Nothing is allocated, and nothing is copied to make it.

    Attributes:
        copy_spec: the same tensors as copies see them: one whose layers are not at equal distances becomes a
            tensor for each layer.
        host_parts: by tensor of `copy_spec`, the tensor of `spec` that it is part of, and which layers.
        page_size: tokens of a page; not used if a page holds a state.
        order: of the axes of a page, as far as shapes say it: which axis the tokens are, if it cannot be the
            first.
    """

    order = ""

    def __init__(
        self,
        spec: PoolSpec,
        page_size: int,
        places: Sequence[PagePlace],
        pages: int,
        *,
        device: torch.device | str = "cpu",
        owner: object = None,
    ) -> None:
        """
        Args:
            page_size: tokens of a page.
            places: of every layer of every tensor, in the order of the spec: tensor by tensor.
            device: the device of the memory.
            owner: kept alive for as long as the pages are.

        Raises:
            ConfigError: places that the spec does not have, of another size, that
                overlap themselves or each other, or at no address.
        """
        check_size(spec, page_size, pages)
        self.spec = spec
        self.page_size = page_size
        self.slots = pages
        self.device = torch_device(device)
        self._owner = owner
        self.host_parts: dict[str, tuple[str, slice]] = {}
        self._items: dict[str, torch.Tensor] = {}
        _check_places(spec, page_size, places, pages)
        tensors: list[TensorSpec] = []
        rest = list(places)
        for tensor in spec.tensors:
            layers, rest = rest[: len(tensor.layers)], rest[len(tensor.layers) :]
            tensors += self._parts_of(tensor, layers)
        self.copy_spec = replace(spec, tensors=tuple(tensors))

    @classmethod
    def of_tensors(
        cls, spec: PoolSpec, page_size: int, tensors: Mapping[str, torch.Tensor | Sequence[torch.Tensor]]
    ) -> EnginePages:
        """Pages in torch tensors, on any device.

        Args:
            page_size: tokens of a page.
            tensors: by tensor of the spec, one for each layer, `[pages, ...]`, or one for all,
                `[layers, pages, ...]`. What follows `pages` is contiguous; its dtype does not matter.

        Raises:
            ConfigError: tensors are missing or unknown, or differ from the spec in layers or bytes, from each
                other in pages or device; or a page of one is not contiguous.
        """
        names = [tensor.name for tensor in spec.tensors]
        if sorted(tensors) != sorted(names):
            raise ConfigError(f"pool {spec.name!r} has the tensors {names}, not {sorted(tensors)}")
        given = {tensor.name: _layers(spec, tensor, tensors[tensor.name]) for tensor in spec.tensors}
        layers = [layer for some in given.values() for layer in some]
        places = [_place_of(spec, layer) for layer in layers]
        pages, devices = {layer.shape[0] for layer in layers}, {layer.device for layer in layers}
        if len(pages) != 1 or len(devices) != 1:
            raise ConfigError(
                f"pool {spec.name!r}: tensors of {sorted(pages)} pages on {sorted(map(str, devices))}; all "
                "need the same number of pages, on one device"
            )
        made = cls(spec, page_size, places, pages.pop(), device=devices.pop(), owner=layers)
        if spec.per_token:
            made.order = _order(page_size, given)
        return made

    def items(self, name: str) -> torch.Tensor:
        """One tensor of `copy_spec` as bytes, uint8 `[layers, pages, item_bytes]`, strided."""
        return self._items[name]

    def _parts_of(self, tensor: TensorSpec, places: Sequence[PagePlace]) -> list[TensorSpec]:
        """The tensor, if its layers are at equal distances; else one for each layer."""
        distances = {after.address - before.address for before, after in pairwise(places)}
        if len(distances) < 2 and min(distances, default=0) >= 0 and len({one.stride for one in places}) == 1:
            self._add(tensor.name, tensor.name, slice(None), places)
            return [tensor]
        parts = []
        for index, (layer, place) in enumerate(zip(tensor.layers, places, strict=True)):
            part = replace(tensor, name=f"{tensor.name}.{layer}", layers=(layer,))
            self._add(part.name, tensor.name, slice(index, index + 1), [place])
            parts.append(part)
        return parts

    def _add(self, name: str, tensor: str, layers: slice, places: Sequence[PagePlace]) -> None:
        self.host_parts[name] = tensor, layers
        first, last = places[0], places[-1]
        distance = places[1].address - first.address if len(places) > 1 else first.stride
        shape = len(places), self.slots, first.nbytes
        span = last.address - first.address + (self.slots - 1) * last.stride + last.nbytes
        self._items[name] = _bytes_at(first.address, span, shape, (distance, first.stride, 1), self.device)

    def __repr__(self) -> str:
        return f"<EnginePages {self.spec.name}: {self.slots} pages on {self.device}>"


@dataclass(frozen=True, slots=True)
class EngineMemory:
    """The device memory of an engine: the pages of every pool of a model.

    Attributes:
        pools: by name; pools that share slots have the same number of pages.
        order: names the order of the axes of a page, such as `NHD` or `HND`: engines share stored pages only
            if it is the same. Default: what the shapes of `EnginePages.of_tensors` say, which is nothing for
            pages of as many tokens as heads.
    """

    pools: Mapping[str, EnginePages]
    order: str = ""

    @property
    def identity(self) -> str:
        """What pages must have in common beside their spec; empty if tokens are the first axis."""
        if self.order:
            return self.order
        return ", ".join(
            f"{name}: {pages.order}" for name, pages in sorted(self.pools.items()) if pages.order
        )

    @property
    def device(self) -> str:
        """Torch's name of the device of all pools."""
        return str(next(iter(self.pools.values())).device)

    def pages(self, spec: ModelSpec) -> dict[str, int]:
        """The number of pages of each pool that owns slots.

        Raises:
            ConfigError: the pools are not those of `spec`, or not all on one device.
        """
        names = [pool.name for pool in spec.pools]
        if not isinstance(self.pools, Mapping) or sorted(self.pools) != sorted(names):
            raise ConfigError(f"engine memory of pools {list(self.pools)}; the model has {names}")
        for pool in spec.pools:
            ours, owner = self.pools[pool.name], self.pools[pool.slots_of or pool.name]
            if ours.spec != pool or ours.page_size != spec.page_size:
                raise ConfigError(f"engine memory of pool {pool.name!r} is not of the model's pool: {ours!r}")
            if ours.slots != owner.slots or ours.device != owner.device:
                raise ConfigError(f"pools that share slots need the same pages: {ours!r} and {owner!r}")
        if len({pool.device for pool in self.pools.values()}) > 1:
            raise ConfigError(f"engine memory is on several devices: {list(self.pools.values())}")
        return {pool.name: self.pools[pool.name].slots for pool in spec.owners}


def _order(page_size: int, tensors: Mapping[str, Sequence[torch.Tensor]]) -> str:
    """Which axis of a page the tokens are; empty if the first one, or if it may be."""
    axes = {name: {_token_axes(page_size, layer) for layer in layers} for name, layers in tensors.items()}
    words = {name: ", ".join(sorted(found - {""})) for name, found in axes.items()}
    alike = set(words.values())
    if len(alike) == 1:
        return alike.pop()
    return ", ".join(f"{name}: {order}" for name, order in words.items() if order)


def _token_axes(page_size: int, layer: torch.Tensor) -> str:
    axes = [axis for axis, size in enumerate(layer.shape[1:]) if size == page_size]
    return f"tokens are axis {' or '.join(map(str, axes))}" if axes and axes[0] else ""


def _layers(
    spec: PoolSpec, tensor: TensorSpec, given: torch.Tensor | Sequence[torch.Tensor]
) -> Sequence[torch.Tensor]:
    layers = list(given)
    if len(layers) != len(tensor.layers):
        raise ConfigError(
            f"pool {spec.name!r}, tensor {tensor.name!r}: {len(layers)} layers given; it has "
            f"{len(tensor.layers)}"
        )
    return layers


def _place_of(spec: PoolSpec, layer: torch.Tensor) -> PagePlace:
    if layer.dim() < 2 or not layer.shape[0] or not layer[0].is_contiguous():
        raise ConfigError(
            f"pool {spec.name!r}: a tensor of shape {tuple(layer.shape)} and strides {layer.stride()}; it "
            "must be [pages, ...], and a page of it contiguous"
        )
    size = layer.element_size()
    stride = layer.stride(0) if layer.shape[0] > 1 else layer[0].numel()
    return PagePlace(layer.data_ptr(), stride * size, layer[0].numel() * size)


def _check_places(spec: PoolSpec, page_size: int, places: Sequence[PagePlace], pages: int) -> None:
    wanted = [spec.item_bytes(tensor, page_size) for tensor in spec.tensors for _ in tensor.layers]
    if len(places) != len(wanted):
        raise ConfigError(f"pool {spec.name!r}: {len(places)} places; it has {len(wanted)} layers of tensors")
    for number, (place, nbytes) in enumerate(zip(places, wanted, strict=True)):
        if place.nbytes != nbytes:
            raise ConfigError(
                f"pool {spec.name!r}: place {number} has {place.nbytes} bytes of a page; the spec has "
                f"{nbytes}"
            )
        if place.address <= 0 or (pages > 1 and place.stride < nbytes):
            raise ConfigError(
                f"pool {spec.name!r}: place {number} at address {place.address}, pages {place.stride} bytes "
                f"apart; an address is above 0, and pages of {nbytes} bytes must not overlap"
            )
    _check_apart(spec, places, pages)


def _check_apart(spec: PoolSpec, places: Sequence[PagePlace], pages: int) -> None:
    """
    Raises:
        ConfigError: two places have bytes in common.
    """
    before: list[tuple[int, PagePlace]] = []  # those that do not end where the next one begins
    for number, place in sorted(enumerate(places), key=lambda one: one[1].address):
        before = [one for one in before if _end(one[1], pages) > place.address]
        for other, earlier in before:
            if _share_bytes(earlier, place, pages):
                raise ConfigError(
                    f"pool {spec.name!r}: places {other} and {number} have bytes in common, from address "
                    f"{place.address} on; each layer of a tensor needs memory of its own"
                )
        before.append((number, place))


def _end(place: PagePlace, pages: int) -> int:
    return place.address + (pages - 1) * place.stride + place.nbytes


def _share_bytes(first: PagePlace, second: PagePlace, pages: int) -> bool:
    """Whether a page of one has a byte of a page of the other, which begins later, but not behind it."""
    if pages > 1 and first.stride == second.stride:  # as layers that lie side by side in a page
        distance = (second.address - first.address) % first.stride
        return distance < first.nbytes or distance + second.nbytes > first.stride
    ours, theirs = (place.address + np.arange(pages) * place.stride for place in (first, second))
    last = np.searchsorted(ours, theirs + second.nbytes - 1, side="right") - 1  # that begins before its end
    return bool((ours[np.maximum(last, 0)] + first.nbytes > theirs)[last >= 0].any())


def _bytes_at(
    address: int, span: int, shape: tuple[int, ...], strides: tuple[int, ...], device: torch.device
) -> torch.Tensor:
    """A view of memory that exists, uint8."""
    if device.type == "cpu":
        flat = torch.frombuffer((ctypes.c_char * span).from_address(address), dtype=torch.uint8)
        return flat.as_strided(shape, strides)
    return torch.as_tensor(_CudaArray(address, span), device=device).as_strided(shape, strides)


class _CudaArray:
    """GPU memory by address, for torch (https://numba.readthedocs.io/en/stable/cuda/cuda_array_interface.html)."""

    def __init__(self, address: int, nbytes: int) -> None:
        self.__cuda_array_interface__: dict[str, Any] = {
            "shape": (nbytes,),
            "typestr": "|u1",
            "data": (address, False),
            "version": 3,
        }
