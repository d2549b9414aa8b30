"""Slots from numbers, bytes, a ratio, or by themselves; and the refusal that says how much is needed."""

from __future__ import annotations

import math
from functools import partial
from typing import Any

import pytest

from asynchicache.errors import CapacityError, ConfigError
from asynchicache.layouts import ALIGNMENT
from asynchicache.pools.sizing import (
    FreeMemory,
    SizeOptions,
    plan_host_slots,
    plan_shared_host,
    plan_slots,
    slot_cost,
)
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec
from asynchicache.types import trailing_pages

KV = PoolSpec("kv", (TensorSpec("keys", (0,), (2, 8), "bfloat16"),))
STATE = PoolSpec(
    "mamba",
    (TensorSpec("recurrent", (1,), (4, 16), "float32"),),
    coverage=trailing_pages(1),
    per_token=False,
)
INDEX = PoolSpec("dsa", (TensorSpec("indexer", (0,), (16,), "uint8"),), slots_of="kv")
SPEC = ModelSpec("m", 16, 2, (KV, STATE))
PLENTY = FreeMemory(1 << 34, 1 << 34, shared=False)


def test_numbers_are_taken_as_they_are():
    options = SizeOptions(device_slots={"kv": 10, "mamba": 3}, host_slots={"kv": 7, "mamba": 0})

    assert {"kv": (10, 7), "mamba": (3, 0)} == plan_slots(SPEC, options, PLENTY)


def test_the_host_follows_the_ratio():
    options = SizeOptions(device_slots={"kv": 10, "mamba": 3}, host_ratio=1.5)

    assert {"kv": (10, 15), "mamba": (3, 5)} == plan_slots(SPEC, options, PLENTY)


def test_device_bytes_are_divided_and_not_exceeded():
    slots = plan_slots(SPEC, SizeOptions(device_bytes=1 << 20), PLENTY)
    used = sum(slots[pool.name][0] * pool.slot_bytes(16) for pool in SPEC.pools)

    assert 0.9 * (1 << 20) < used <= 1 << 20
    assert slots["kv"][0] > slots["mamba"][0] > 1


def test_host_bytes_are_divided_and_not_exceeded():
    options = SizeOptions(device_slots={"kv": 10, "mamba": 3}, host_bytes=1 << 20)
    slots = plan_slots(SPEC, options, PLENTY)
    used = sum(slots[pool.name][1] * slot_cost(pool, 16, host=True) for pool in SPEC.pools)

    assert 0.9 * (1 << 20) < used <= 1 << 20


@pytest.mark.parametrize("engine", [False, True])
def test_bytes_that_the_host_does_not_have_are_refused(engine: bool):
    """As slots are: what was chosen is not lowered; and so for the memory that pools share."""
    memory, options = FreeMemory(1 << 24, 10 << 20, shared=False), SizeOptions(host_bytes=9 << 20)
    words = r"need 9437184 bytes \(0.01 GiB\), of which 8388608 .*80% of what is free.* lower host_bytes"
    device = {"kv": 10, "mamba": 3}
    with pytest.raises(CapacityError, match=words):
        plan_shared_host(SPEC, options, device, memory, engine=engine)
    plan_alone = (
        partial(plan_host_slots, SPEC, options, device) if engine else partial(plan_slots, SPEC, options)
    )
    with pytest.raises(CapacityError, match=words):
        plan_alone(memory)
    plan = plan_shared_host(SPEC, SizeOptions(host_bytes=8 << 20), device, memory, engine=engine)
    assert plan is not None
    assert 0.9 * (8 << 20) < plan.paid_bytes <= 8 << 20


def test_a_wish_shrinks_to_what_the_container_has():
    options = SizeOptions(device_slots={"kv": 1000, "mamba": 10}, host_ratio=100)
    memory = FreeMemory(1 << 30, 1 << 24, shared=False)
    slots = plan_slots(SPEC, options, memory)

    assert 0 < slots["kv"][1] < 100_000
    assert sum(slots[p.name][1] * slot_cost(p, 16, host=True) for p in SPEC.pools) <= 1 << 24


def test_automatic_sizes_leave_room_where_tiers_share_one_memory():
    memory = FreeMemory(1 << 30, 1 << 30, shared=True)
    slots = plan_slots(SPEC, SizeOptions(), memory)
    device = sum(slots[p.name][0] * p.slot_bytes(16) for p in SPEC.pools)
    host = sum(slots[p.name][1] * slot_cost(p, 16, host=True) for p in SPEC.pools)

    assert device + host <= 1 << 30


def test_a_pool_that_shares_slots_costs_bytes_and_gets_no_slots():
    shared = ModelSpec("m", 16, 2, (KV, INDEX))
    alone = ModelSpec("m", 16, 2, (KV,))
    options = SizeOptions(device_bytes=1 << 20)

    assert set(plan_slots(shared, options, PLENTY)) == {"kv"}
    assert plan_slots(shared, options, PLENTY)["kv"][0] < plan_slots(alone, options, PLENTY)["kv"][0]


def test_host_slots_are_padded_and_have_a_header():
    assert slot_cost(KV, 16, host=False) == 16 * 2 * 8 * 2
    assert slot_cost(KV, 16, host=True) == 2 * ALIGNMENT


def test_slots_that_leave_nothing_for_the_others_are_what_is_to_be_lowered():
    with pytest.raises(CapacityError, match=r"the device pools need \d+ bytes .*: lower device_slots$"):
        plan_slots(SPEC, SizeOptions(device_slots={"kv": 10**15}), PLENTY)
    with pytest.raises(CapacityError, match="raise device_bytes"):
        plan_slots(SPEC, SizeOptions(device_slots={"kv": 100}, device_bytes=1), PLENTY)


def test_too_much_says_how_much_is_needed():
    options = SizeOptions(device_slots={"kv": 1 << 20, "mamba": 1})

    with pytest.raises(CapacityError, match=r"device pools need 536871168 bytes .* 1024 .* device_slots"):
        plan_slots(SPEC, options, FreeMemory(1024, 1 << 34, shared=False))


def test_explicit_host_slots_do_not_shrink():
    options = SizeOptions(device_slots={"kv": 1, "mamba": 1}, host_slots={"kv": 1 << 20, "mamba": 1})

    with pytest.raises(CapacityError, match=r"host pools need .* host_slots"):
        plan_slots(SPEC, options, FreeMemory(1 << 30, 1 << 20, shared=False))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"device_slots": {"kv": 0}}, r"device_slots {'kv': 0} must be a table with, .* number above 0"),
        ({"device_slots": {"kv": True}}, r"device_slots {'kv': True} must be"),
        ({"host_slots": {"kv": -1}}, r"host_slots {'kv': -1} must be a table with, .* of at least 0"),
        ({"host_ratio": -1}, r"host_ratio -1 must be a number of at least 0 and finite"),
        ({"host_ratio": math.inf}, r"host_ratio inf must be"),
        ({"device_bytes": -5}, r"device_bytes -5 must be a whole number of at least 0, or a size"),
        ({"tokens_per_state": 0}, r"tokens_per_state 0 must be a whole number above 0"),
    ],
)
def test_bad_numbers_are_named(options: dict[str, Any], words: str):
    with pytest.raises(ConfigError, match=words):
        SizeOptions(**options)


def test_slots_of_a_pool_that_does_not_exist_are_refused():
    with pytest.raises(ConfigError, match=r"device_slots names 'swa'; .*\['kv', 'mamba'\]"):
        plan_slots(SPEC, SizeOptions(device_slots={"swa": 1}), PLENTY)


def test_too_few_bytes_for_one_slot_of_each():
    with pytest.raises(CapacityError, match=r"leaves 100 bytes .* needs 768.* raise device_bytes"):
        plan_slots(SPEC, SizeOptions(device_bytes=100), PLENTY)


WINDOWS = PoolSpec("swa", (TensorSpec("keys", (1,), (2, 8), "bfloat16"),), coverage=trailing_pages(4))
WINDOWED = ModelSpec("m", 16, 2, (KV, WINDOWS))


def test_windows_are_divided_by_their_pages():
    """Five pages are kept at the end of each turn, whatever its length: a window of four, and one more."""
    budget = 1 << 20
    for pages, share in ((20, 4), (10, 2), (2, 1)):
        options = SizeOptions(device_bytes=budget, tokens_per_state=16 * pages)
        slots = plan_slots(WINDOWED, options, PLENTY)

        assert slots["kv"][0] / slots["swa"][0] == pytest.approx(share, rel=0.05)
        assert 0.99 * budget < sum(n * 512 for n, _ in slots.values()) <= budget


def test_states_follow_the_length_of_turns():
    """Proportions are of bytes as well: here a state costs half as much as a page."""
    short, long = (
        plan_slots(SPEC, SizeOptions(device_bytes=1 << 20, tokens_per_state=16 * pages), PLENTY)
        for pages in (4, 64)
    )

    assert short["kv"][0] / short["mamba"][0] == pytest.approx(4, rel=0.05)
    assert long["kv"][0] / long["mamba"][0] == pytest.approx(64, rel=0.05)


@pytest.mark.parametrize(
    ("pages", "slots"), [(3, (2, 2)), (9, (7, 4)), (1000, (998, 4)), (100_000, (99_805, 389))]
)
def test_a_small_budget_has_states_for_prompts_that_come_again(pages: int, slots: tuple[int, int]):
    """The one that runs and one that is kept come before pages, a few more up to a quarter of the budget."""
    found = plan_slots(SPEC, SizeOptions(device_bytes=pages * 512), PLENTY)

    assert (found["kv"][0], found["mamba"][0]) == slots


def test_a_budget_for_one_state_alone_is_taken():
    assert plan_slots(SPEC, SizeOptions(device_bytes=3 * 256), PLENTY)["mamba"][0] == 1


def test_a_window_is_given_as_a_whole_or_not_at_all():
    """Of 12 slots 6 are what is kept of one window, and the page to write; of few host slots none."""
    options = SizeOptions(device_bytes=12 * 512, host_ratio=0.25)
    slots = plan_slots(WINDOWED, options, PLENTY)

    assert slots == {"kv": (6, 2), "swa": (6, 5)}
    tight = SizeOptions(device_bytes=12 * 512, host_bytes=4 * 2 * ALIGNMENT)
    assert plan_slots(WINDOWED, tight, PLENTY)["swa"] == (6, 0)


def test_too_few_bytes_for_one_window():
    with pytest.raises(CapacityError, match=r"one request needs 3584, for slots {'kv': 1, 'swa': 6}"):
        plan_slots(WINDOWED, SizeOptions(device_bytes=3071), PLENTY)


def test_there_are_no_more_states_than_pages():
    tiny = PoolSpec(
        "mamba", (TensorSpec("conv", (1,), (8,), "uint8"),), coverage=trailing_pages(1), per_token=False
    )
    slots = plan_slots(ModelSpec("m", 16, 2, (KV, tiny)), SizeOptions(device_slots={"kv": 16}), PLENTY)

    assert slots["mamba"][0] == 16
