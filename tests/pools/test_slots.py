"""Device and host pools: shapes, sharing of memory, alignment, bounds."""

from __future__ import annotations

from contextlib import closing

import pytest
import torch

from asynchicache.errors import CapacityError, ClosedError, ConfigError, UsageError
from asynchicache.layouts import HEADER_BYTES, POISON
from asynchicache.pools.device import DevicePool
from asynchicache.pools.host import HostPool
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.types import trailing_pages

PAGES = PoolSpec(
    "kv",
    (
        TensorSpec("keys", (0, 2), (3, 5), "bfloat16"),
        TensorSpec("scales", (2,), (), "float32"),
    ),
)
STATES = PoolSpec(
    "mamba",
    (
        TensorSpec("conv", (1, 3), (7, 3), "bfloat16"),
        TensorSpec("recurrent", (1, 3), (2, 3, 5), "float32"),
    ),
    coverage=trailing_pages(1),
    per_token=False,
)


def test_device_tensors_have_the_shapes_that_models_read() -> None:
    pages, states = DevicePool(PAGES, 4, 6), DevicePool(STATES, 4, 6)

    assert pages.tensor("keys").shape == (2, 6, 4, 3, 5)
    assert pages.tensor("keys").dtype == torch.bfloat16
    assert pages.tensor("scales").shape == (1, 6, 4)
    assert states.tensor("recurrent").shape == (2, 6, 2, 3, 5)
    assert pages.items("keys").shape == (2, 6, 4 * 3 * 5 * 2)
    assert pages.nbytes == sum(pages.items(tensor.name).numel() for tensor in PAGES.tensors)


def test_device_items_are_the_memory_of_the_tensor() -> None:
    pool = DevicePool(PAGES, 4, 6)

    pool.tensor("keys")[1, 5] = 1.0

    expected = torch.full((4 * 3 * 5,), 1.0, dtype=torch.bfloat16).view(torch.uint8)
    assert torch.equal(pool.items("keys")[1, 5], expected)
    assert not pool.items("keys")[1, 4].any()


def test_device_memory_is_zero_or_poisoned() -> None:
    assert not DevicePool(STATES, 1, 2).items("conv").any()
    assert (DevicePool(STATES, 1, 2, poison=True).items("conv") == POISON).all()


def test_host_slots_are_aligned_and_follow_one_another() -> None:
    pool = HostPool(PAGES, 4, 3, pin=False)
    slot_bytes = pool.layout.slot_bytes

    assert slot_bytes % 4096 == 0
    assert pool.items("keys").data_ptr() % 4096 == 0
    pool.page(1)[0] = 1
    pool.page(2)[slot_bytes - 1] = 2
    run = pool.pages(1, 2)
    assert (run[0], run[-1], len(run)) == (1, 2, 2 * slot_bytes)
    pool.close()


def test_headers_are_apart_from_pages() -> None:
    pool = HostPool(PAGES, 4, 3, pin=False)

    pool.header(2)[:] = b"h" * HEADER_BYTES

    assert not any(pool.pages(0, 3))
    assert [bytes(pool.header(slot)) for slot in (1, 2)] == [bytes(HEADER_BYTES), b"h" * HEADER_BYTES]
    pool.close()


def test_host_items_lie_where_the_layout_says() -> None:
    pool = HostPool(PAGES, 4, 3, pin=False)
    layout = pool.layout.tensors["scales"]

    pool.items("scales")[0, 2] = 9

    start = layout.offset
    assert pool.items("scales").shape == (1, 3, 1, layout.item_bytes)
    assert bytes(pool.page(2)[start : start + layout.item_bytes]) == b"\x09" * layout.item_bytes
    assert not any(pool.page(2)[:start])
    pool.close()


@pytest.mark.parametrize(("first", "count"), [(-1, 1), (3, 1), (2, 2), (0, 0)])
def test_host_slots_that_are_not_there_are_refused(first: int, count: int) -> None:
    pool = HostPool(PAGES, 4, 3, pin=False)

    with pytest.raises(UsageError, match="no host slots"):
        pool.pages(first, count)
    pool.close()


@pytest.mark.parametrize("slot", [-1, 3])
def test_headers_of_slots_that_are_not_there_are_refused(slot: int) -> None:
    with closing(HostPool(PAGES, 4, 3, pin=False)) as pool, pytest.raises(UsageError, match="no host slots"):
        pool.header(slot)


def test_a_closed_host_pool_hands_out_nothing() -> None:
    pool = HostPool(PAGES, 4, 3, pin=False)

    pool.close()
    pool.close()

    with pytest.raises(ClosedError):
        pool.page(0)
    with pytest.raises(ClosedError):
        pool.items("keys")


def test_a_pool_may_have_no_host_slots() -> None:
    pool = HostPool(PAGES, 4, 0, pin=True)

    assert pool.items("scales").shape == (1, 0, 1, 16)
    assert not pool.pinned
    with pytest.raises(UsageError, match="it has 0"):
        pool.page(0)
    pool.close()


def test_pools_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="0 slots"):
        DevicePool(PAGES, 4, 0)
    with pytest.raises(ConfigError, match="pages of 0 tokens"):
        HostPool(PAGES, 0, 4, pin=False)
    with pytest.raises(ConfigError, match="-1 slots"):
        HostPool(PAGES, 4, -1, pin=False)
    with pytest.raises(CapacityError, match="no room on cpu"):
        DevicePool(PAGES, 4, 1 << 50)
