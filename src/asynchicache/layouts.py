"""Where the bytes of a slot lie, as integers only.

Device pools are `layer_first`: per tensor an array `[layers, slots, item]`, the form that model code
reads. Host slots are `page_first_direct`: everything of one slot in one run of bytes, so that
storage reads and writes it without a further copy, and one layer of one page is still one run.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from asynchicache.specs import PoolSpec, TensorSpec

ALIGNMENT = 4096
"""Host slots start on, and are padded to, this many bytes: what O_DIRECT asks of memory and files."""


def round_up(size: int, multiple: int) -> int:
    """The least multiple of `multiple` that is not below `size`."""
    return -(-size // multiple) * multiple


@dataclass(frozen=True, slots=True)
class TensorLayout:
    """Where one tensor lies in a host slot.

    Attributes:
        spec: the tensor.
        offset: bytes from the slot's start to the tensor's first layer.
        item_bytes: bytes of one layer of one slot; layers follow one another.
    """

    spec: TensorSpec
    offset: int
    item_bytes: int

    def layer_offset(self, layer: int) -> int:
        """Bytes from the slot's start to local layer `layer` (its index in `spec.layers`)."""
        return self.offset + layer * self.item_bytes


@dataclass(frozen=True, slots=True)
class SlotLayout:
    """Where everything of one pool lies in one host slot (`page_first_direct`).

    Attributes:
        pool: the pool.
        page_bytes: bytes of one slot's content.
        slot_bytes: `page_bytes` padded to `ALIGNMENT`; the stride from slot to slot.
        tensors: by tensor name, in the order of the spec.
    """

    pool: PoolSpec
    page_bytes: int
    slot_bytes: int
    tensors: Mapping[str, TensorLayout]

    @classmethod
    def of(cls, pool: PoolSpec, page_size: int) -> SlotLayout:
        tensors: dict[str, TensorLayout] = {}
        offset = 0
        for spec in pool.tensors:
            item = pool.item_bytes(spec, page_size)
            tensors[spec.name] = TensorLayout(spec, offset, item)
            offset += item * len(spec.layers)
        return cls(pool, offset, round_up(offset, ALIGNMENT), tensors)

    def signature(self) -> str:
        """What two processes must agree on to read each other's pages; part of the fingerprint."""
        parts = [f"page_first_direct:{self.page_bytes}"]
        for tensor in self.tensors.values():
            spec = tensor.spec
            layers = ",".join(map(str, spec.layers))
            shape = "x".join(map(str, spec.shape))
            parts.append(f"{spec.name}:{spec.dtype}:{shape}:{tensor.item_bytes}@{tensor.offset}[{layers}]")
        return ";".join(parts)
