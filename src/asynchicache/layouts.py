"""The position of the bytes of a slot, as integers only.

Device pools are `layer_first`: per tensor an array `[layers, slots, item]`, the form that model code
reads. Host pools use one of the layouts of `HostLayout`, modelled on SGLang's host pools
(https://github.com/sgl-project/sglang/pull/10031, https://github.com/sgl-project/sglang/pull/11615).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from enum import Enum

from asynchicache.errors import ConfigError
from asynchicache.specs import PoolSpec, TensorSpec

ALIGNMENT = 4096
"""Host slots start at, and are padded to, a multiple of these bytes, as O_DIRECT requires."""

HEADER_BYTES = ALIGNMENT
"""Bytes of a page's header in host memory and in storage: one aligned block, which O_DIRECT can move."""

POISON = 0xDD
"""The fill byte of poisoned memory: it reveals bytes that were never written."""


class HostLayout(Enum):
    """The order of layers, pages and tokens in host memory.

    A slot that holds a state has no tokens, so the two page-first layouts are the same for it.
    """

    PAGE_FIRST_DIRECT = "page_first_direct"
    """`[slots, layers, page_size, token]`: a slot is one run of bytes, which storage reads and writes
    without another copy. Each of its layers is one run too, which a copy engine moves at bus speed."""
    PAGE_FIRST = "page_first"
    """`[slots, page_size, layers, token]`: a slot is one run, but each of its layers is one run per token, or
    per entry of a tensor whose tokens share entries."""
    LAYER_FIRST = "layer_first"
    """`[layers, slots, page_size, token]`, as on the device: neighbouring slots of a layer are one run, but
    a slot is one piece per layer, so storage cannot use this layout."""

    @property
    def whole_slots(self) -> bool:
        """Whether a slot is one run of bytes, as storage requires."""
        return self is not HostLayout.LAYER_FIRST


def round_up(size: int, multiple: int) -> int:
    """The smallest multiple of `multiple` that is at least `size`."""
    return -(-size // multiple) * multiple


@dataclass(frozen=True, slots=True)
class ItemStrides:
    """Positions of the items of one tensor in a tier, in bytes.

    An item, one layer of one slot, is `units` runs of `unit_bytes`: one run, or one per token.

    Attributes:
        offset: from the start of the memory to the first item.
        layers, slots, units: the number of each.
        unit_bytes: contiguous bytes of a unit.
        layer, slot, unit: strides from one to the next.
    """

    offset: int
    layers: int
    slots: int
    units: int
    unit_bytes: int
    layer: int
    slot: int
    unit: int

    @property
    def shape(self) -> tuple[int, int, int, int]:
        """Shape of a view of all items as bytes."""
        return (self.layers, self.slots, self.units, self.unit_bytes)

    @property
    def stride(self) -> tuple[int, int, int, int]:
        """Strides of the same view."""
        return (self.layer, self.slot, self.unit, 1)

    def address(self, layer: int, slot: int, unit: int = 0) -> int:
        """Bytes from the start of the memory to a unit; `layer` is local: an index into `spec.layers`."""
        return self.offset + layer * self.layer + slot * self.slot + unit * self.unit


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """The position of one tensor in the slots of its pool.

    Attributes:
        offset: bytes of the tensors before it in one slot.
        item_bytes: bytes of one layer of one slot.
        units: runs per item in this layout.
    """

    spec: TensorSpec
    offset: int
    item_bytes: int
    units: int

    @property
    def unit_bytes(self) -> int:
        return self.item_bytes // self.units


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """The layout of one pool in host memory.

    Attributes:
        kind: the order of layers, pages and tokens.
        page_bytes: bytes of one slot's content.
        slot_bytes: `page_bytes` padded to `ALIGNMENT`; if slots are whole, the stride between them.
        tensors: by tensor name, in the order of the spec.
    """

    pool: PoolSpec
    kind: HostLayout
    page_bytes: int
    slot_bytes: int
    tensors: Mapping[str, TensorLayout]

    @classmethod
    def of(
        cls, pool: PoolSpec, page_size: int, kind: HostLayout = HostLayout.PAGE_FIRST_DIRECT
    ) -> SlotLayout:
        """
        Raises:
            ConfigError: a page size below 1 or that ends a page within an entry, or an unknown layout.
        """
        if not isinstance(kind, HostLayout):
            raise ConfigError(f"pool {pool.name!r}: layout {kind!r} must be a HostLayout")
        if page_size < 1:
            raise ConfigError(f"pool {pool.name!r} with pages of {page_size} tokens; 1 at least")
        tensors: dict[str, TensorLayout] = {}
        offset = 0
        for spec in pool.tensors:
            item = pool.item_bytes(spec, page_size)
            units = pool.entries(spec, page_size) if kind is HostLayout.PAGE_FIRST else 1
            tensors[spec.name] = TensorLayout(spec, offset, item, units)
            offset += item * len(spec.layers)
        return cls(pool, kind, offset, round_up(offset, ALIGNMENT), tensors)

    def nbytes(self, slots: int) -> int:
        """Bytes of host memory that `slots` slots take."""
        if self.kind.whole_slots:
            return self.slot_bytes * slots
        return sum(size for _, size in self.layer_arrays(slots))

    def layer_arrays(self, slots: int) -> Iterator[tuple[int, int]]:
        """(offset, bytes) of every layer of every tensor in `LAYER_FIRST`; each is aligned."""
        offset = 0
        for tensor in self.tensors.values():
            size = round_up(tensor.item_bytes * slots, ALIGNMENT)
            for _ in tensor.spec.layers:
                yield offset, size
                offset += size

    def strides(self, name: str, slots: int) -> ItemStrides:
        """The position of tensor `name` in host memory with `slots` slots."""
        tensor = self.tensors[name]
        item, unit, layers = tensor.item_bytes, tensor.unit_bytes, len(tensor.spec.layers)
        match self.kind:
            case HostLayout.LAYER_FIRST:
                before = sum(len(self.tensors[other].spec.layers) for other in self._names_before(name))
                offset, layer = list(self.layer_arrays(slots))[before]
                return ItemStrides(offset, layers, slots, 1, item, layer, item, item)
            case HostLayout.PAGE_FIRST_DIRECT:
                return ItemStrides(tensor.offset, layers, slots, 1, item, item, self.slot_bytes, item)
            case HostLayout.PAGE_FIRST:
                slot, token = self.slot_bytes, unit * layers
                return ItemStrides(tensor.offset, layers, slots, tensor.units, unit, unit, slot, token)

    def _names_before(self, name: str) -> list[str]:
        names = list(self.tensors)
        return names[: names.index(name)]

    def signature(self) -> str:
        """The layout as text: two processes must have the same to share pages. Part of the fingerprint."""
        parts = [f"{self.kind.value}:{self.page_bytes}"]
        for tensor in self.tensors.values():
            spec = tensor.spec
            layers = ",".join(map(str, spec.layers))
            shape = "x".join(map(str, spec.shape))
            shared = f"/{spec.tokens_per_entry}" if spec.tokens_per_entry != 1 else ""
            place = f"{tensor.item_bytes}@{tensor.offset}[{layers}]"
            parts.append(f"{spec.name}:{spec.dtype}:{shape}{shared}:{place}")
        return ";".join(parts)
