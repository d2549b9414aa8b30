"""Events as they wait in a queue, and digests that are computed in turns with other tasks."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Coroutine
from typing import Any

import pytest

from asynchicache.controller.digests import DIGESTS_A_TURN, complete_digests, sliced_digests
from asynchicache.controller.event_hub import EventHub, EventSubscription
from asynchicache.controller.namespaces import Namespaces
from asynchicache.controller.tree_events import TreeEvents
from asynchicache.events import CacheEvent, EventsDropped, PagesRemoved, PagesStored, TiersCleared
from asynchicache.hashing import page_digests
from asynchicache.tree.node import FULL_DEVICE, FULL_HOST, Node, place_of
from asynchicache.types import Tier, WritePolicy, token_array
from controller.simulation import Simulation

EVENTS: list[CacheEvent] = [TiersCleared((tier,)) for tier in Tier] + [EventsDropped(9)]


def finished(work: Coroutine[Any, Any, Any]) -> tuple[int, Any]:
    """Run a coroutine by hand: how many turns it gave to others, and what it returned."""
    turns = 0
    while True:
        try:
            work.send(None)
        except StopIteration as end:
            return turns, end.value
        turns += 1


# A queue


@pytest.mark.asyncio
async def test_what_waits_is_taken_in_order_and_once() -> None:
    events = EventSubscription(3)
    for event in EVENTS[:3]:
        events.put(event)

    assert events.take() == EVENTS[:3]
    assert events.take() == []
    assert events.dropped == 0


@pytest.mark.asyncio
async def test_the_oldest_go_when_there_are_too_many() -> None:
    events = EventSubscription(2)
    for event in EVENTS:
        events.put(event)
    assert events.dropped == 2
    assert events.take() == [EventsDropped(2), *EVENTS[2:]]
    assert events.take() == []

    for event in EVENTS[:3]:
        events.put(event)
    assert events.dropped == 3, "since the start"
    assert events.take() == [EventsDropped(1), *EVENTS[1:3]]


@pytest.mark.asyncio
async def test_iteration_tells_of_losses_where_they_were() -> None:
    events = EventSubscription(2)
    for event in EVENTS[:3]:
        events.put(event)

    assert await anext(events) == EventsDropped(1)
    assert await anext(events) == EVENTS[1]
    for event in EVENTS[:2]:
        events.put(event)
    assert [await anext(events) for _ in range(3)] == [EventsDropped(1), *EVENTS[:2]]


@pytest.mark.asyncio
async def test_who_iterates_is_woken_by_news_and_by_the_end() -> None:
    events, heard = EventSubscription(2), []

    async def listen() -> None:
        async for event in events:
            heard.append(event)

    listening = asyncio.create_task(listen())
    for event in EVENTS:
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        events.put(event)
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert heard == EVENTS
    assert not listening.done()
    events.close()
    await listening


@pytest.mark.asyncio
async def test_what_waits_at_the_end_may_still_be_read_and_no_more_is_told() -> None:
    with EventSubscription(2) as events:
        assert events.open
        assert events.__enter__() is events
        events.put(EVENTS[0])
    assert not events.open
    events.put(EVENTS[1])

    assert await events.wait()
    assert [event async for event in events] == EVENTS[:1]
    assert not await events.wait()
    events.close()
    assert events.dropped == 0


@pytest.mark.asyncio
async def test_waiting_ends_with_the_first_event_only() -> None:
    events = EventSubscription(2)
    waiting = asyncio.create_task(events.wait())
    await asyncio.sleep(0)
    assert not waiting.done()
    events.put(EVENTS[0])
    assert await waiting
    events.take()
    waiting = asyncio.create_task(events.wait())
    for _ in range(3):
        await asyncio.sleep(0)
    assert not waiting.done(), "what was taken is no news"
    events.close()
    assert not await waiting


# A tree


def simulation(**slots: tuple[int, int]) -> Simulation:
    return Simulation(
        random.Random(0), states="mamba" in slots, windows={"swa": 2} if "swa" in slots else {}, slots=slots,
        policy=WritePolicy.WRITE_BACK,
    )  # fmt: skip


def published(sim: Simulation, tokens: list[int]) -> Node:
    sequence = sim.open(tokens)
    sim.load(sequence)
    assert sim.compute(sequence, len(tokens))
    node = sequence.lease.node
    sim.close(sequence)
    sim.settle()
    return node


def announcer(sim: Simulation, told: list[CacheEvent]) -> TreeEvents:
    books = sim.planner.inventory
    names = Namespaces(books.tree.roots)
    return TreeEvents(books.tree, books.spec.owners, names, told.append)


def test_pages_are_described_by_their_tokens_and_what_comes_before() -> None:
    sim = simulation(kv=(64, 64), mamba=(8, 8))
    tokens = [1, 2, 3, 4, 5, 6, 7, 8]
    upper, lower = published(sim, tokens[:4]), published(sim, tokens)
    chain = page_digests(token_array(tokens), 2, b"")
    describe = announcer(sim, []).describe

    def pages(name: str, tier: Tier, first: int, end: int) -> PagesStored:
        parent = chain[first - 1] if first else None
        return PagesStored(
            name, tier, tuple(chain[first:end]), parent, array("q", tokens[2 * first : 2 * end]), 2
        )

    assert describe(upper, 0, Tier.DEVICE) == pages("kv", Tier.DEVICE, 0, 2)
    assert describe(lower, 0, Tier.HOST) == pages("kv", Tier.HOST, 2, 4)
    assert describe(upper, 1, Tier.DEVICE) == pages("mamba", Tier.DEVICE, 1, 2)
    assert describe(lower, 1, Tier.STORAGE) == pages("mamba", Tier.STORAGE, 3, 4)
    sim.planner.inventory.tree.split(upper, 1)
    assert describe(upper, 1, Tier.DEVICE) == pages("mamba", Tier.DEVICE, 1, 2), "the parent is another node"


def test_what_leaves_is_told_page_by_page_and_a_state_by_its_last() -> None:
    sim = simulation(kv=(64, 64), mamba=(8, 8))
    node = published(sim, [1, 2, 3, 4, 5, 6])
    chain = page_digests(token_array([1, 2, 3, 4, 5, 6]), 2, b"")
    told: list[CacheEvent] = []

    announcer(sim, told).on_evict(node, FULL_HOST, 2)
    announcer(sim, told).on_evict(node, place_of(1, Tier.DEVICE), 3)
    assert told == [
        PagesRemoved("kv", Tier.HOST, tuple(chain[1:])),
        PagesRemoved("mamba", Tier.DEVICE, (chain[2],)),
    ]


def test_what_is_there_is_told_by_component_and_tier_but_not_what_is_writing() -> None:
    sim = simulation(kv=(64, 64), mamba=(8, 8))
    node = published(sim, [1, 2])
    speaker = announcer(sim, [])
    sim.carry_out(sim.planner.backups.backup(node))

    def present(**writing: Any) -> list[tuple[str, Tier]]:
        return [(event.pool, event.tier) for event in speaker.present(node, **writing)]

    assert present() == [("kv", Tier.DEVICE), ("mamba", Tier.DEVICE)]
    sim.settle()
    assert present() == [(pool, tier) for pool in ("kv", "mamba") for tier in Tier]
    assert present(writing={(node, 1)}) == [
        *(("kv", tier) for tier in Tier),
        ("mamba", Tier.DEVICE),
        ("mamba", Tier.HOST),
    ]
    node.stored = 0b10
    assert present()[2:] == [("mamba", tier) for tier in Tier]


def test_after_a_clear_only_what_the_cleared_tiers_still_have_is_told() -> None:
    sim = simulation(kv=(64, 64))
    published(sim, [1, 2])
    told: list[CacheEvent] = []

    announcer(sim, told).on_clear(Tier.DEVICE)
    assert told[0] == TiersCleared((Tier.DEVICE,))
    assert [event.tier for event in told[1:] if isinstance(event, PagesStored)] == [Tier.DEVICE]
    assert len(told) == 2


@pytest.mark.asyncio
async def test_each_listener_is_told_and_the_tree_is_watched_while_there_is_one() -> None:
    sim = simulation(kv=(64, 64))
    hub = EventHub(sim.planner, Namespaces(sim.planner.inventory.tree.roots))
    tree = sim.planner.inventory.tree
    first, second = hub.subscribe(9), hub.subscribe(9)

    published(sim, [1, 2])
    assert first.take() == second.take() != []
    first.close()
    published(sim, [3, 4])
    assert first.take() == []
    assert second.take()
    assert tree.watcher is not None
    hub.close()
    assert not second.open
    published(sim, [5, 6])
    assert tree.watcher is None


def test_a_snapshot_computes_digests_in_turns_with_others() -> None:
    """Each node of 511 is a task of its own; after 256 of them others have their turn."""
    sim = simulation(kv=(600, 0))
    for number in range(511):
        published(sim, [number, 1])
    hub = EventHub(sim.planner, Namespaces(sim.planner.inventory.tree.roots))

    turns, events = finished(hub.snapshot())
    assert turns == 1
    assert len(events) == 511
    assert {event.tokens[0] for event in events} == set(range(511))


# Digests in slices


@pytest.mark.parametrize(
    ("pages", "turns"),
    [(0, 0), (1, 0), (DIGESTS_A_TURN, 0), (DIGESTS_A_TURN + 1, 1), (3 * DIGESTS_A_TURN, 2)],
)
def test_many_digests_take_turns(pages: int, turns: int) -> None:
    tokens = array("q", range(2 * pages))

    assert finished(sliced_digests(memoryview(tokens), 2, b"seed")) == (
        turns,
        page_digests(tokens, 2, b"seed"),
    )


def test_digests_of_a_whole_path_are_completed() -> None:
    sim = simulation(kv=(64, 0))
    tokens = list(range(12))
    nodes = [published(sim, tokens[:length]) for length in (4, 8, 12)]
    chain = page_digests(token_array(tokens), 2, b"")
    tree = sim.planner.inventory.tree
    assert [node.digests for node in nodes] == [None] * 3

    assert finished(complete_digests(tree, nodes[1])) == (0, None)
    assert [node.digests for node in nodes] == [chain[:2], chain[2:4], None]
    finished(complete_digests(tree, nodes[2]))
    assert nodes[2].digests == chain[4:]


def test_digests_of_a_node_that_is_cut_meanwhile_are_right() -> None:
    pages = DIGESTS_A_TURN + 10
    sim = simulation(kv=(pages, 0))
    tokens = list(range(2 * pages))
    node = published(sim, tokens)
    tree = sim.planner.inventory.tree
    work = complete_digests(tree, node)
    work.send(None)
    upper = tree.split(node, 3)
    finished(work)

    chain = page_digests(token_array(tokens), 2, b"")
    assert (upper.digests, node.digests) == (chain[:3], chain[3:])


def test_digests_of_what_left_the_tree_meanwhile_are_nobodys_business() -> None:
    pages = DIGESTS_A_TURN + 10
    sim = simulation(kv=(pages, 0))
    node = published(sim, list(range(2 * pages)))
    work = complete_digests(sim.planner.inventory.tree, node)
    work.send(None)
    sim.planner.inventory.evict(FULL_DEVICE, pages, dirty=True)

    assert node.parent is None
    assert finished(work) == (0, None)
