"""`verify` names what is broken, whatever of the cache it is, and finds nothing where all is well."""

from __future__ import annotations

import asyncio
import gc
import logging
import warnings
from collections.abc import Callable
from functools import partial

import pytest

from asynchicache.controller.cache_parts import CacheParts
from asynchicache.errors import ClosedError, InternalError
from asynchicache.planner.inventory import SlotInventory
from asynchicache.testing.checks import assert_clean
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.tree.node import ABSENT, FULL_DEVICE, FULL_HOST, SAVING, Node, SlotPlace
from asynchicache.types import PoolTransfer
from cache.interruptions import HOSTED, NEW, STORED, Case, Stage, staged

WINDOWED = Case("full+mamba+swa+dsa", stored=True)
MAMBA_DEVICE = 2


class Opened:
    """What lies behind a cache's front door, with a request that loads and one that was published."""

    def __init__(self, stage: Stage) -> None:
        self.stage = stage
        self.parts: CacheParts = stage.cache._parts
        self.inventory: SlotInventory = self.parts.planner.inventory

    def node(self, place: SlotPlace = FULL_DEVICE) -> Node:
        """A leaf that has slots at a place."""
        return next(node for node in self.inventory.tree.nodes() if node.slots[place] and not node.children)


Plant = Callable[[Opened], object]


def a_slot_that_is_lost(opened: Opened) -> None:
    opened.inventory.free[FULL_HOST].allocate(1)


def a_slot_that_is_free_and_held(opened: Opened) -> None:
    opened.inventory.free[FULL_HOST].release(opened.node(FULL_HOST).slots[FULL_HOST][:1])


def a_slot_with_two_owners(opened: Opened) -> None:
    sequence = next(iter(opened.inventory.requests))
    sequence.duplicates.append(opened.node().slots[FULL_DEVICE][0])


def a_count_of_quarantined_slots(opened: Opened) -> None:
    opened.inventory.free[FULL_DEVICE].quarantined += 1


def a_slot_of_two_nodes(opened: Opened) -> None:
    first, second = [node for node in opened.inventory.tree.nodes() if node.slots[FULL_HOST]][:2]
    second.slots[FULL_HOST][0] = first.slots[FULL_HOST][0]


def a_node_with_pages_nowhere(opened: Opened) -> None:
    node = opened.node(FULL_HOST)
    for place in (FULL_DEVICE, FULL_HOST):
        node.slots[place], node.residency[place] = None, ABSENT


def a_host_copy_without_its_parents(opened: Opened) -> None:
    tree = opened.inventory.tree
    node = next(node for node in tree.nodes() if node.pages > 1 and node.slots[FULL_HOST])
    above = tree.split(node, 1)
    above.residency[FULL_HOST], above.slots[FULL_HOST] = ABSENT, None


def a_state_without_pages(opened: Opened) -> None:
    node = opened.node(MAMBA_DEVICE)
    node.residency[FULL_DEVICE], node.slots[FULL_DEVICE] = ABSENT, None


def a_pin_of_nobody(opened: Opened) -> None:
    opened.inventory.tree.lock_for([], opened.node(), FULL_DEVICE)


def a_candidate_that_is_none(opened: Opened) -> None:
    queue = opened.inventory.tree.queues[FULL_HOST]
    queue.members.clear()


def digests_of_other_tokens(opened: Opened) -> None:
    node = next(node for node in opened.inventory.tree.nodes() if node.digests)
    node.digests[-1] = bytes(32)


def a_slot_given_back_under_a_copy(opened: Opened) -> None:
    (operation, *_) = opened.parts.executor._transfers.in_flight()
    pool, _, destinations = operation.transfers[0]
    assert pool == "kv"
    opened.inventory.free[FULL_DEVICE].release([int(destinations[0])])


def two_copies_into_one_slot(opened: Opened) -> None:
    for _ in range(2):
        operation = CacheOperation(Direction.BACKUP, (PoolTransfer("kv", [0], [30]),))
        opened.parts.executor._transfers.submit(operation, done=lambda _: None)


def an_arrival_that_nobody_brings(opened: Opened) -> None:
    node = opened.node(FULL_HOST)
    node.residency[FULL_HOST] = SAVING


def a_write_of_what_has_not_come(opened: Opened) -> None:
    node = next(node for node, number in opened.parts.planner.backups.writes_in_flight() if number == 0)
    node.residency[FULL_HOST] = SAVING


def copies_that_are_not_counted(opened: Opened) -> None:
    opened.parts.executor._activity._counts.clear()


def a_task_that_outlives_the_cache(opened: Opened) -> None:
    opened.parts.executor._tasks.spawn(asyncio.sleep(60.0)).set_name("forgotten")
    opened.parts.executor.stopped = True


class Seen(Exception):
    """It was seen; nobody goes on with a cache that is broken on purpose."""


async def damaged(plant: Plant, words: str, world: SeededWorld) -> None:
    async with staged(WINDOWED, world) as stage:
        async with stage.cache.request(NEW) as writer:
            await stage.compute(writer, NEW)
            while not stage.cache._parts.planner.backups.writes_in_flight():  # noqa: ASYNC110 - nobody tells
                await asyncio.sleep(1e-4)
            async with stage.cache.request([*HOSTED, 1]) as loader:
                loader.load()
                assert stage.cache.verify() == []
                plant(Opened(stage))
                found = stage.cache.verify()
                assert any(words in problem for problem in found), found
                raise Seen


@pytest.mark.parametrize(
    ("plant", "words"),
    [
        (a_slot_that_is_lost, "leaked or stolen"),
        (a_slot_that_is_free_and_held, "leaked or stolen"),
        (a_slot_with_two_owners, "has two owners"),
        (a_count_of_quarantined_slots, "1 slots counted in state 2, not so marked"),
        (a_slot_of_two_nodes, "belongs to 2 nodes"),
        (a_node_with_pages_nowhere, "has full pages nowhere"),
        (a_host_copy_without_its_parents, "has full pages in HOST and its parent has not"),
        (a_state_without_pages, "has component 1 in DEVICE without full pages"),
        (a_pin_of_nobody, "locks at place 0, leases hold"),
        (a_candidate_that_is_none, "is no candidate at place 1"),
        (digests_of_other_tokens, "has digests that its tokens do not give"),
        (a_slot_given_back_under_a_copy, "is free, and a load uses it"),
        (two_copies_into_one_slot, "kv host slots: two copies write slot 30"),
        (an_arrival_that_nobody_brings, "is on its way to place 1, brought by 0 copies"),
        (a_write_of_what_has_not_come, "component 0 goes to storage before it is on the host"),
        (copies_that_are_not_counted, "are in flight, 0 are counted"),
        (a_task_that_outlives_the_cache, "task forgotten is left behind"),
    ],
)
def test_what_is_broken_is_named(plant: Plant, words: str, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # what is broken on purpose does not end as it should
        with pytest.raises((Seen, ClosedError, InternalError)):
            run_seeded(0, partial(damaged, plant, words))
        gc.collect()


# What a cache that nobody uses holds


async def used(world: SeededWorld) -> None:
    async with staged(WINDOWED, world) as stage:
        cache = stage.cache
        assert_clean(cache)
        async with cache.request([*HOSTED, 1]) as request:
            with pytest.raises(AssertionError, match="a request of 21 tokens is open"):
                assert_clean(cache)
            request.load()
            with pytest.raises(AssertionError, match="1 copies and 0 storage calls are in flight"):
                assert_clean(cache)
        assert cache.verify() == [], "being used is no fault"
        async with cache.request([*STORED, 1]) as request:
            reading = asyncio.create_task(request.prefetch())
            await asyncio.sleep(5e-4)
            with pytest.raises(AssertionError, match="2 storage calls are in flight"):
                assert_clean(cache)
            await reading
        await cache.drain()
        assert_clean(cache)
        free = Opened(stage).inventory.free[FULL_HOST]
        free.quarantine(free.allocate(2))
        with pytest.raises(AssertionError, match="kv host slots: 2 are in quarantine"):
            assert_clean(cache)


def test_a_cache_is_clean_when_nobody_uses_it() -> None:
    run_seeded(0, used)
