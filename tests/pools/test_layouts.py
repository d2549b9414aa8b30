"""Host layouts: every byte of every item has a place of its own, and the place that the layout promises."""

from __future__ import annotations

import pytest
import torch

from asynchicache.errors import ConfigError, UsageError
from asynchicache.layouts import ALIGNMENT, HostLayout, SlotLayout
from asynchicache.pools.device import DevicePool
from asynchicache.pools.host import HostPool
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.types import trailing_pages

KV = PoolSpec(
    "kv", (TensorSpec("keys", (0, 2, 3), (5,), "bfloat16"), TensorSpec("scales", (2,), (), "float32"))
)
STATES = PoolSpec(
    "mamba", (TensorSpec("conv", (1, 3), (7, 3), "bfloat16"),), coverage=trailing_pages(1), per_token=False
)
ENTRIES = PoolSpec(
    "entries",
    (
        TensorSpec("hca", (1, 3), (5,), "bfloat16", tokens_per_entry=4),
        TensorSpec("csa", (0,), (3,), "uint8", tokens_per_entry=2),
    ),
)
PAGE_SIZE, SLOTS = 4, 3


@pytest.mark.parametrize("layout", list(HostLayout))
@pytest.mark.parametrize("spec", [KV, STATES, ENTRIES], ids=lambda spec: spec.name)
def test_every_byte_of_every_item_has_a_place_of_its_own(spec: PoolSpec, layout: HostLayout) -> None:
    place = SlotLayout.of(spec, PAGE_SIZE, layout)
    used = torch.zeros(place.nbytes(SLOTS), dtype=torch.uint8)

    for tensor in spec.tensors:
        strides = place.strides(tensor.name, SLOTS)
        assert strides.units * strides.unit_bytes == spec.item_bytes(tensor, PAGE_SIZE)
        used.as_strided(strides.shape, strides.stride, strides.offset).add_(1)

    assert used.max() == 1
    assert int(used.sum()) == SLOTS * spec.slot_bytes(PAGE_SIZE)


def test_layers_of_a_page_follow_one_another_in_page_first_direct() -> None:
    strides = SlotLayout.of(KV, PAGE_SIZE).strides("keys", SLOTS)

    assert (strides.units, strides.layer, strides.slot) == (1, 40, ALIGNMENT)
    assert strides.address(2, 1) == ALIGNMENT + 80


def test_layers_of_a_token_follow_one_another_in_page_first() -> None:
    strides = SlotLayout.of(KV, PAGE_SIZE, HostLayout.PAGE_FIRST).strides("keys", SLOTS)

    assert (strides.units, strides.unit_bytes, strides.layer, strides.unit) == (4, 10, 10, 30)
    assert strides.address(1, 2, 3) == 2 * ALIGNMENT + 10 + 90


def test_pages_of_a_layer_follow_one_another_in_layer_first() -> None:
    place = SlotLayout.of(KV, PAGE_SIZE, HostLayout.LAYER_FIRST)

    assert (place.strides("keys", SLOTS).slot, place.strides("keys", SLOTS).layer) == (40, ALIGNMENT)
    assert place.strides("scales", SLOTS).offset == 3 * ALIGNMENT  # each layer is pinned by itself
    assert place.nbytes(SLOTS) == 4 * ALIGNMENT


def test_a_layout_is_part_of_what_two_processes_must_agree_on() -> None:
    signatures = {SlotLayout.of(KV, PAGE_SIZE, layout).signature() for layout in HostLayout}

    assert len(signatures) == len(HostLayout)
    assert SlotLayout.of(KV, PAGE_SIZE).signature() == (
        "page_first_direct:136;keys:bfloat16:5:40@0[0,2,3];scales:float32::16@120[2]"
    )


def test_tokens_that_share_an_entry_are_one_unit() -> None:
    place = SlotLayout.of(ENTRIES, PAGE_SIZE, HostLayout.PAGE_FIRST)

    strides = place.strides("csa", SLOTS)
    assert (strides.offset, strides.units, strides.unit_bytes) == (20, 2, 3)
    assert place.signature() == "page_first:26;hca:bfloat16:5/4:10@0[1,3];csa:uint8:3/2:6@20[0]"
    device = DevicePool(ENTRIES, PAGE_SIZE, SLOTS)
    assert [tuple(device.tensor(name).shape) for name in ("hca", "csa")] == [(2, 3, 1, 5), (1, 3, 2, 3)]


def test_a_page_that_ends_within_an_entry_has_no_layout() -> None:
    with pytest.raises(ConfigError, match="4 tokens share an entry of hca, which do not divide page_size 6"):
        SlotLayout.of(ENTRIES, 6)


def test_pages_of_no_tokens_are_refused() -> None:
    with pytest.raises(ConfigError, match="pool 'kv' with pages of 0 tokens; 1 at least"):
        SlotLayout.of(KV, 0)


def test_storage_gets_no_slot_that_is_in_pieces() -> None:
    pool = HostPool(KV, PAGE_SIZE, SLOTS, pin=False, layout=HostLayout.LAYER_FIRST)

    with pytest.raises(UsageError, match="a host slot is in pieces in layout 'layer_first'"):
        pool.page(0)
    pool.close()
