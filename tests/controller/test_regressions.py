"""Faults of the planner that were found by hand, one test each."""

from __future__ import annotations

import random

import pytest

from asynchicache.controller.storage_pools import worst_outcomes
from asynchicache.errors import CapacityError
from asynchicache.tree.node import FULL_DEVICE, FULL_HOST, place_of
from asynchicache.types import MissReason, Outcome, Tier, WritePolicy
from controller.simulation import Simulation

ROOMY = {"kv": (64, 64), "mamba": (16, 16)}
WINDOWED = {"kv": (64, 64), "mamba": (16, 16), "swa": (8, 0)}


def _publish(sim: Simulation, tokens: list[int], *lengths: int) -> None:
    sequence = sim.open(tokens)
    sim.load(sequence)
    for length in lengths or (len(tokens),):
        assert sim.compute(sequence, length)
    sim.close(sequence)


def _settle(sim: Simulation) -> None:
    """As `Simulation.settle`, with the retries that a controller adds; bounded."""
    for _ in range(200):
        if sim.flying:
            sim.end(0)
        elif sim.writing:
            sim.end_write(0)
        else:
            return
        sim.carry_out(sim.planner.backups.retry())
    raise AssertionError("copies follow on copies for ever")


@pytest.mark.parametrize("host_states", [1, 2, 3])
def test_states_of_one_path_do_not_chase_each_other_off_the_host(host_states: int):
    """Five states are on the device and fewer fit on the host: each retry used to evict another."""
    sim = Simulation(random.Random(0), slots={"kv": (64, 64), "mamba": (16, host_states)})
    _publish(sim, list(range(10)), 2, 4, 6, 8, 10)
    _settle(sim)
    sim.verify()
    assert sum(pool == "mamba" for pool, _ in sim.storage) == 5


def test_what_is_owed_waits_for_what_it_stands_on():
    """Pages of a child must not come to the host before the pages of their parent."""
    sim = Simulation(random.Random(0), states=False, slots={"kv": (64, 4)})
    _publish(sim, [9] * 8)
    while sim.flying:
        sim.end(0)  # all four host slots are being written to storage
    _publish(sim, [1, 2, 3, 4], 2, 4)
    assert len(sim.planner.backups.postponed) == 2
    assert not sim.planner.backups.retry()
    assert len(sim.planner.backups.postponed) == 2
    _settle(sim)
    sim.verify()
    assert len(sim.storage) == 6


def test_what_is_owed_is_saved_whole_though_it_is_split_meanwhile():
    """The upper half was on no list, and the lower one waited for it for ever."""
    sim = Simulation(random.Random(0), states=False, slots={"kv": (64, 4)})
    _publish(sim, [9] * 8)
    while sim.flying:
        sim.end(0)  # all four host slots are being written to storage
    _publish(sim, [1, 2, 3, 4])
    sim.close(sim.open([1, 2, 7, 8]))
    _settle(sim)
    sim.verify()
    assert len(sim.storage) == 6
    assert not sim.planner.backups.postponed


def test_paths_that_are_owed_do_not_chase_each_other_off_the_host():
    """Each retry took the ground of one path from under another, which was owed no less by that."""
    sim = Simulation(random.Random(0), states=False, slots={"kv": (64, 4)})
    _publish(sim, [9] * 8)
    while sim.flying:
        sim.end(0)  # all four host slots are being written to storage
    for first in (10, 20):
        _publish(sim, list(range(first, first + 10)), 2, 4, 6, 8, 10)
    _settle(sim)
    sim.verify()


def test_room_for_a_load_is_not_made_at_the_cost_of_what_it_stands_on():
    """What another request had brought since the match was nobody's, and was evicted for what follows it."""
    sim = Simulation(random.Random(0), states=False, slots={"kv": (4, 64)})
    for tokens in ([1, 2, 3, 4, 5, 6], [9] * 8):
        _publish(sim, tokens)
        _settle(sim)
    late = sim.open([1, 2, 3, 4, 5, 6, 7])  # all of it is on the host
    early = sim.open([1, 2, 7])
    sim.load(early)
    sim.close(early)
    other = sim.open([8, 8, 8])
    sim.load(other)
    sim.planner.extend(other, 3)
    sim.load(late)
    sim.verify()
    assert (late.hit_pages, late.reason) == (1, MissReason.DEVICE_CAPACITY)
    sim.close(late)
    sim.close(other)


@pytest.mark.parametrize(("kv", "windows"), [(4, {}), (16, {"swa": 2})], ids=["pages", "a-window"])
def test_admission_is_not_given_at_the_cost_of_what_it_stands_on(kv: int, windows: dict[str, int]):
    """What others had brought since the match made room for what follows it, so that the load had too
    little, and the hit that was promised was lost."""
    slots = {"kv": (kv, 64), **dict.fromkeys(windows, (4, 64))}
    sim = Simulation(random.Random(0), states=False, windows=windows, slots=slots)
    for tokens in ([1, 2, 3, 4, 5, 6], [9] * 8):
        _publish(sim, tokens)
        _settle(sim)
    late = sim.open([1, 2, 3, 4, 5, 6, 7])  # all of it is on the host
    early = sim.open([1, 2, 3, 4, 7] if windows else [1, 2, 7])
    sim.load(early)
    sim.close(early)
    other = sim.open([8] if windows else [8, 8, 8])
    sim.load(other)
    sim.planner.extend(other, len(other.tokens))
    with pytest.raises(CapacityError):
        sim.planner.admit(late)
    sim.close(other)
    _settle(sim)
    sim.planner.admit(late)
    sim.load(late)
    assert (late.hit_pages, late.reason) == (3, MissReason.NONE)
    sim.verify()
    sim.close(late)


def test_states_stay_off_a_host_without_pages():
    sim = Simulation(random.Random(0), slots={"kv": (64, 0), "mamba": (16, 16)})
    _publish(sim, [1, 2, 3, 4])
    sim.settle()
    sim.verify()


def test_a_snapshot_that_found_no_slot_is_not_the_working_state():
    """The working state has moved on by the time the length is published."""
    sim = Simulation(random.Random(0), slots={"kv": (64, 64), "mamba": (2, 8)})
    other = sim.open([7, 7])
    sim.load(other)
    sequence = sim.open([1, 2, 3, 4, 5, 6])
    sim.load(sequence)
    sim.planner.extend(sequence, 6)
    assert sim.planner.snapshot(sequence, 4) == []
    sim.close(other)  # now there would be a slot
    copies = sim.planner.publish(sequence, 4)
    assert sequence.borrowed == 2
    assert {transfer.pool for copy in copies for transfer in copy.transfers} == {"kv"}
    sim.close(sequence)


def test_a_state_beyond_the_shared_pages_is_another_sequences():
    """The tree has [1, 2, 9, 9] with its state, storage has [1, 2, 3, 4] with another one."""
    sim = Simulation(random.Random(0), slots=ROOMY)
    _publish(sim, [1, 2, 3, 4])
    sim.settle()
    sim.planner.flush()
    _publish(sim, [1, 2, 9, 9])
    sim.settle()
    sequence = sim.open([1, 2, 3, 4, 5])
    sim.prefetch(sequence)
    sim.load(sequence)
    assert sequence.hit_pages == 2
    sim.close(sequence)
    sim.verify()


def test_a_write_that_failed_is_undone_for_both_halves_of_a_split_node():
    sim = Simulation(random.Random(0), states=False, slots={"kv": (64, 64)})
    _publish(sim, [1, 2, 3, 4, 5, 6, 7, 8])
    while sim.flying:
        sim.end(0)
    tree = sim.planner.inventory.tree
    (node,) = tree.nodes()
    upper = tree.split(node, 2)
    assert sim.planner.backups.storing() == {upper, node}
    sim.end_write(0, stored=False)
    assert not sim.planner.backups.storing()
    assert (upper.stored, node.stored) == (0, 0)
    work = sim.planner.backups.store(node)
    assert work is not None
    assert len(work.pages["kv"][0]) == 4
    sim.planner.backups.write_finished(work, stored=True)


def test_a_state_under_way_is_not_hidden_by_the_pages_before_it():
    """Two writes of one node: the end of the first says nothing about the second."""
    sim = Simulation(random.Random(0), slots={"kv": (64, 64), "mamba": (16, 1)})
    _publish(sim, [8, 8])
    while sim.flying:
        sim.end(0)  # the only host slot for a state is being written to storage
    _publish(sim, [1, 2])
    while sim.flying:
        sim.end(0)
    sim.end_write(0)
    sim.carry_out(sim.planner.backups.retry())
    sim.end(0)
    pages, state = sim.writing
    assert [*pages.pages] == ["kv"]
    assert [*state.pages] == ["mamba"]
    sim.end_write(0)
    assert sim.planner.backups.storing() == {mark.node for mark in state.marks}
    sim.settle()
    sim.verify()


def test_slots_of_a_late_write_are_kept():
    sim = Simulation(random.Random(0), states=False, slots={"kv": (64, 64)})
    _publish(sim, [1, 2])
    sim.end(0)
    work = sim.writing.pop()
    sim.planner.backups.write_finished(work, stored=False, late=True)
    (node,) = sim.planner.inventory.tree.nodes()
    assert node.stored == 0
    assert node.locks[FULL_HOST]
    sim.planner.backups.finish(work)
    assert not node.locks[FULL_HOST]
    sim.verify()


def test_a_pool_that_timed_out_keeps_the_slot_that_it_shares():
    """Its engine may still write there, whatever the other pool's page was worth."""
    assert worst_outcomes([[Outcome.CORRUPT], [Outcome.TIMEOUT]]) == [Outcome.TIMEOUT]
    assert worst_outcomes([[Outcome.HIT], [Outcome.MISS]]) == [Outcome.MISS]


def test_a_partial_backup_before_a_read_is_carried_out():
    """Room for some of the path only: the copies that were begun must not be forgotten."""
    slots = {"kv": (64, 2)}
    sim = Simulation(random.Random(0), states=False, slots=slots, policy=WritePolicy.WRITE_BACK)
    _publish(sim, [1, 2, 3, 4, 5, 6], 2, 6)
    query = sim.planner.prefetches.make_query(sim.open([*range(1, 9), 9]).tokens, b"")
    assert query is not None
    choice = sim.planner.prefetches.choose(query, {0: b"\1" * 4})
    assert (choice.reading, choice.reason) == (None, MissReason.HOST_CAPACITY)
    sim.carry_out(choice.backups)
    sim.planner.prefetches.release(query)
    sim.close(sim.live[0])
    sim.settle()
    sim.verify()
    books = sim.planner.inventory
    assert not books.tier_copies
    assert books.free[FULL_HOST].held == sum(len(node.slots_at(FULL_HOST)) for node in books.tree.nodes())


@pytest.mark.parametrize("eviction", ["size", "lru"])
def test_pages_that_are_computed_again_do_not_fall_behind_in_the_queue(eviction: str):
    """The host had them, met twice; published again they counted as met once, which no queue expects."""
    sim = Simulation(random.Random(0), windows={"swa": 2}, slots=WINDOWED, eviction=eviction)
    tokens = list(range(8))
    for _ in range(3):
        _publish(sim, [*tokens, 9], 8)
        _settle(sim)
    _publish(sim, list(range(50, 58)))
    _settle(sim)
    books = sim.planner.inventory
    books.evict(FULL_HOST, 1, dirty=True)  # the other prompt goes first: the queue knows by now
    books.evict(place_of(2, Tier.DEVICE), 8, dirty=True)
    books.evict(FULL_DEVICE, 64, dirty=True)  # the pages are on the host, their window nowhere
    _publish(sim, [*tokens, 9], 8)
    _settle(sim)
    sim.verify()


@pytest.mark.parametrize("policy", list(WritePolicy))
@pytest.mark.parametrize("order", [0, -1], ids=["the first copy fails first", "the last copy fails first"])
def test_a_state_handed_over_while_its_load_fails_is_lost_once(policy: WritePolicy, order: int):
    """B's state becomes the tree's below a node that A's load then takes back, before B's own load fails."""
    sim = Simulation(random.Random(0), slots={"kv": (64, 128), "mamba": (16, 32)}, policy=policy)
    for tokens in ([1, 2, 3, 4], [1, 2, 3, 4, 9, 9], [1, 2, 3, 4, 9, 9]):
        _publish(sim, tokens)
        sim.settle()
    books = sim.planner.inventory
    sim.carry_out([copy for node in list(books.tree.nodes()) for copy in sim.planner.backups.backup(node)])
    sim.settle()
    for place in (place_of(1, Tier.DEVICE), FULL_DEVICE) * 3:
        books.evict(place, 100, dirty=policy is not WritePolicy.WRITE_BACK)
        sim.settle()
    first, second = sim.open([1, 2, 3, 4, 5, 6]), sim.open([1, 2, 3, 4, 7, 8])
    for sequence in (first, second):
        sim.carry_out(sim.planner.loads.load(sequence))
    assert sim.flying
    sim.planner.extend(second, 2)
    sim.carry_out(sim.planner.publish(second, 6, final=True))

    while sim.flying:
        sim.end(range(len(sim.flying))[order], failed=True)
    sim.close(first)
    sim.close(second)

    assert books.verify() == []
    assert not books.requests


def test_a_copy_that_ends_takes_no_other_that_looks_alike_off_the_list():
    """Two loads of nothing are equal by value; the first one was forgotten, and what it kept with it."""
    sim = Simulation(random.Random(0), slots=ROOMY)
    first, second = sim.open([1, 2, 3]), sim.open([4, 5, 6])
    kept = sim.planner.loads.load(first)[0]
    ended = sim.planner.loads.load(second)[0]
    sim.planner.copy_finished(ended, None)
    assert [tier_copy is kept.tier_copy for tier_copy in sim.planner.inventory.tier_copies] == [True]
    sim.planner.copy_finished(kept, None)
    assert not sim.planner.inventory.tier_copies
    for sequence in (first, second):
        sim.close(sequence)
    sim.verify()
