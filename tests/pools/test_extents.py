"""Extents go from pool to pool, and a slot is never in two pools' memory."""

from __future__ import annotations

import random

import pytest

from asynchicache.errors import CapacityError, InternalError
from asynchicache.pools.extents import (
    ExtentAllocator,
    ExtentMemory,
    ExtentPlan,
    choose_extent_bytes,
    whole_slots,
)

PAGE, STATE = 4, 30  # an extent of one state holds 6 or 7 whole pages


@pytest.fixture
def memory() -> ExtentMemory:
    return ExtentMemory(ExtentPlan({"kv": PAGE, "mamba": STATE}, STATE, 4))


@pytest.fixture
def pages(memory) -> ExtentAllocator:
    return ExtentAllocator(memory, PAGE, name="kv host slots")


@pytest.fixture
def states(memory) -> ExtentAllocator:
    return ExtentAllocator(memory, STATE, name="mamba host slots")


def test_slots_that_cross_a_border_are_not_used(pages):
    assert [pages.slots_in(extent) for extent in range(4)] == [
        range(7),
        range(8, 15),
        range(15, 22),
        range(23, 30),
    ]
    assert pages.whole == 6  # of an extent that may begin anywhere
    assert pages.capacity == 30


def test_an_extent_goes_from_pool_to_pool_when_it_is_empty(memory, pages, states):
    held = pages.allocate(8)
    assert (memory.free, states.available, pages.spare) == (2, 2, 6)
    assert states.allocate(2) == [2, 3]
    with pytest.raises(CapacityError, match="mamba host slots: 1 slots wanted, 0 of 4 free"):
        states.allocate(1)

    pages.release(held[:7])
    assert states.allocate(1) == [0]
    pages.release(held[7:])
    states.release([0, 2, 3])
    assert (memory.free, pages.held, states.held) == (4, 0, 0)


def test_pages_come_from_the_lowest_extent_that_is_not_full(pages):
    slots = pages.allocate(14)
    pages.release([*slots[:2], *slots[7:13]])

    assert pages.allocate(3) == [0, 1, 8]


def test_a_quarantined_slot_keeps_its_extent(memory, states):
    slots = states.allocate(2)
    states.condemn(slots[:1])
    states.release(slots)

    assert memory.free == 3
    assert (states.held, states.quarantined, states.available) == (0, 1, 3)
    assert states.problems() == []


def test_slots_move_out_of_an_extent(memory, pages, states):
    slots = pages.allocate(9)
    pages.release(slots[1:7])
    assert pages.emptiest() == [0, 1]

    assert pages.used_in(0) == [0]
    assert pages.allocate_outside(0, 1) == [10]
    pages.release([0])
    assert states.allocate(3) == [0, 2, 3]


def test_slots_do_not_move_into_new_extents(pages):
    pages.allocate(7)

    with pytest.raises(CapacityError, match="1 slots wanted outside of an extent, 0 free"):
        pages.allocate_outside(0, 1)
    assert pages.problems() == []


def test_what_fits_beside_each_other(memory, pages, states):
    pages.allocate(1)
    assert memory.fits([(pages, 6), (states, 3)])
    assert not memory.fits([(pages, 7), (states, 3)])
    assert memory.short([(pages, 7), (states, 3)], pages) == 1
    states.allocate(3)
    assert memory.short([(states, 1)], states) == 1
    pages.release(pages.allocate(3))
    assert memory.short([(states, 1)], pages) == 1  # it has more free slots than the extents have at least


def test_only_extents_that_are_ready_are_used(memory, pages, states):
    memory.open_only(1)
    assert (states.available, states.closed, pages.closed) == (1, 3, 18)
    memory.open_only(3)
    assert states.allocate(3) == [0, 1, 2]
    for count in (2, 5, -1):
        with pytest.raises(InternalError, match=f"{count} of 4 extents cannot be all that are open"):
            memory.open_only(count)
    with pytest.raises(InternalError, match="opens by extents"):
        states.open_only(2)


@pytest.mark.parametrize(
    ("sizes", "nbytes", "expected"),
    [
        ([100, 2500], 10**6, 2500),  # pages fit into a state exactly
        ([100, 130], 10**6, 1300),  # both fit into ten of the larger
        ([100, 100], 10**6, 100),
        ([100, 130], 3000, 130 * 4),  # little memory: extents that are not full cost more than what crosses
        ([8800, 8801], 3 * 8801, 8801 * 2),  # one of 8801 bytes might hold no slot of 8800
    ],
)
def test_the_extent_that_wastes_least(sizes, nbytes, expected):
    assert choose_extent_bytes(sizes, nbytes) == expected


@pytest.mark.parametrize(("extent", "slot", "count"), [(12, 4, 3), (13, 4, 2), (4, 4, 1), (7, 4, 0)])
def test_whole_slots_of_any_extent(extent, slot, count):
    assert whole_slots(extent, slot) == count
    starts = range(0, 50 * extent, extent)
    assert min((start + extent) // slot - -(-start // slot) for start in starts) >= count


@pytest.mark.parametrize("seed", range(8))
def test_random_use_keeps_every_slot_in_an_extent_of_its_pool(seed):
    chance = random.Random(seed)
    sizes = {"kv": 4, "swa": 6, "mamba": chance.choice([13, 24, 30])}
    plan = ExtentPlan(sizes, sizes["mamba"] * chance.choice([1, 2]), 12)
    memory = ExtentMemory(plan)
    pools = [ExtentAllocator(memory, size, name=name) for name, size in sizes.items()]
    held: list[list[int]] = [[] for _ in pools]
    for _ in range(400):
        index = chance.randrange(len(pools))
        pool, slots = pools[index], held[index]
        if chance.random() < 0.5 and pool.available:
            slots += pool.allocate(chance.randint(1, min(pool.available, 10)))
        elif slots:
            chance.shuffle(slots)
            pool.release([slots.pop() for _ in range(chance.randint(1, len(slots)))])
        assert pool.problems() == []
        bytes_held = [
            byte
            for size, slots in zip(sizes.values(), held, strict=True)
            for slot in slots
            for byte in range(slot * size, (slot + 1) * size)
        ]
        assert len(bytes_held) == len(set(bytes_held))
        assert [pool.held for pool in pools] == [len(slots) for slots in held]


def test_an_extent_given_away_while_a_slot_lives_is_a_problem(memory, pages, states):
    pages.allocate(1)
    memory.give_back(0)
    states.allocate(4)

    assert "kv host slots: slot 0 is in use in an extent of another pool, or of none" in pages.problems()
