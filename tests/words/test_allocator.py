"""Slots are free, held once, or quarantined, and the counts add up."""

from __future__ import annotations

import random

import pytest

from asynchicache.errors import CapacityError, InternalError
from asynchicache.pools.allocator import SlotAllocator


@pytest.fixture
def pool() -> SlotAllocator:
    return SlotAllocator(6, name="kv device slots")


def counts(pool: SlotAllocator) -> tuple[int, int, int]:
    return pool.held, pool.available, pool.quarantined


def test_slots_come_in_ascending_runs(pool):
    assert pool.allocate(2) == [0, 1]
    assert pool.allocate(3) == [2, 3, 4]
    assert counts(pool) == (5, 1, 0)


def test_a_run_that_was_given_back_comes_again_as_a_run(pool):
    slots = pool.allocate(6)
    pool.release(slots[2:5])

    assert pool.allocate(3) == [2, 3, 4]


def test_nothing_is_nothing(pool):
    assert pool.allocate(0) == []
    pool.release([])
    assert counts(pool) == (0, 6, 0)


def test_all_or_none(pool):
    pool.allocate(4)

    with pytest.raises(CapacityError, match="kv device slots: 3 slots wanted, 2 of 6 free"):
        pool.allocate(3)

    assert counts(pool) == (4, 2, 0)


def test_no_capacity(pool):
    empty = SlotAllocator(0)

    assert empty.allocate(0) == []
    with pytest.raises(CapacityError):
        empty.allocate(1)


@pytest.mark.parametrize("slots", [[2], [0, 5], [0, 0], [1, -1], [1, 6], [-6]])
@pytest.mark.parametrize("give", [SlotAllocator.release, SlotAllocator.quarantine])
def test_what_is_not_held_cannot_be_given_back(pool, slots, give):
    pool.allocate(2)

    with pytest.raises(InternalError, match=rf"slot {slots[-1]} given back while it is not held"):
        give(pool, slots)

    assert counts(pool) == (2, 4, 0)
    assert pool.audit([0, 1]) == []
    assert pool.problems() == []


def test_quarantined_slots_never_come_back(pool):
    pool.quarantine(pool.allocate(2))

    assert counts(pool) == (0, 4, 2)
    assert pool.allocate(4) == [2, 3, 4, 5]
    with pytest.raises(CapacityError):
        pool.allocate(1)
    with pytest.raises(InternalError):
        pool.release([0])
    assert repr(pool) == "<SlotAllocator kv device slots: 4 held, 0 free, 2 quarantined>"


def test_random_use_agrees_with_sets():
    generator = random.Random(5)
    pool, held, lost = SlotAllocator(20), set(), set()
    for _ in range(2000):
        if held and generator.random() < 0.5:
            some = generator.sample(sorted(held), generator.randint(1, len(held)))
            held -= set(some)
            if generator.random() < 0.002:
                pool.quarantine(some)
                lost |= set(some)
            else:
                pool.release(some)
        elif count := generator.randint(0, pool.available):
            some = pool.allocate(count)
            assert not set(some) & (held | lost)
            held |= set(some)
        assert pool.audit(held) == []
        assert counts(pool) == (len(held), 20 - len(held) - len(lost), len(lost))
        assert pool.problems() == []


def free_twice(pool):
    pool.release(pool.allocate(1))
    pool._free.append(pool._free[-1])


def free_but_marked_held(pool):
    pool._state[5] = 1


def miscounted_quarantine(pool):
    pool.quarantined += 1


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (free_twice, "a slot is free twice"),
        (free_but_marked_held, "6 slots counted in state 0, not so marked"),
        (miscounted_quarantine, "1 slots counted in state 2, not so marked"),
    ],
)
def test_damage_is_named(pool, damage, message):
    damage(pool)

    assert any(message in problem for problem in pool.problems())


def test_slots_that_are_not_open_are_not_handed_out(pool: SlotAllocator) -> None:
    pool.open_only(2)

    assert (pool.capacity, pool.closed, counts(pool)) == (6, 4, (0, 2, 0))
    held = pool.allocate(2)
    with pytest.raises(CapacityError, match="1 slots wanted, 0 of 6 free"):
        pool.allocate(1)
    pool.open_only(5)
    assert pool.allocate(1) == [2]
    pool.release(held)
    assert (counts(pool), pool.problems()) == ((1, 4, 0), [])
    assert pool.allocate(4) == [0, 1, 3, 4]


@pytest.mark.parametrize("count", [-1, 7, 1])
def test_slots_in_use_cannot_be_closed(pool: SlotAllocator, count: int) -> None:
    pool.allocate(2)

    with pytest.raises(InternalError, match=f"{count} slots cannot be all that is open"):
        pool.open_only(count)


def test_condemned_slots_are_quarantined_by_whoever_gives_them_back() -> None:
    free = SlotAllocator(6)
    slots = free.allocate(4)
    free.condemn([1, 2])
    assert (free.held, free.quarantined) == (4, 0)

    free.release(slots)

    assert (free.held, free.quarantined, free.available) == (0, 2, 4)
    assert sorted(free.allocate(4)) == [0, 3, 4, 5]
    assert free.problems() == []


def test_condemned_slots_may_be_quarantined_at_once() -> None:
    free = SlotAllocator(3)
    slots = free.allocate(2)
    free.condemn(slots)

    free.quarantine(slots)

    assert (free.held, free.quarantined, free.available) == (0, 2, 1)
    assert free.problems() == []


def test_only_what_is_held_can_be_condemned() -> None:
    free = SlotAllocator(3, name="kv device slots")
    free.allocate(1)

    with pytest.raises(InternalError, match="kv device slots: slot 2 condemned while it is not held"):
        free.condemn([0, 2])

    free.release([0])
    assert (free.available, free.quarantined) == (3, 0)


def test_what_is_quarantined_already_is_not_condemned_again() -> None:
    free = SlotAllocator(3)
    slots = free.allocate(2)
    free.quarantine(slots[:1])

    free.condemn(slots)
    free.release(slots[1:])

    assert (free.held, free.quarantined, free.available) == (0, 2, 1)
    assert free.problems() == []
