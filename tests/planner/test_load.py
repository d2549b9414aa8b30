"""What a load brings to the device, from where, and what a request holds after it: exact slots and counts."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from asynchicache.errors import CapacityError
from asynchicache.planner.actions import Copy
from asynchicache.planner.load import by_place
from asynchicache.planner.request_state import RequestState
from asynchicache.transfer.plan import Direction
from asynchicache.tree.node import FULL, FULL_DEVICE, FULL_HOST, Node, place_of
from asynchicache.tree.tier_copies import CopyRequest
from asynchicache.types import MissReason, Tier, WritePolicy
from controller.simulation import Simulation

HEAD = [1, 2, 3, 4]
LONG = [*HEAD, 5, 6, 7, 8]
SIMULATIONS: list[Simulation] = []


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    SIMULATIONS.clear()
    yield
    for sim in SIMULATIONS:
        for request in list(sim.live):
            sim.close(request)
        sim.settle()
        sim.verify()
        assert all(not any(node.locks) for node in sim.planner.inventory.tree.nodes())


def simulation(
    *,
    kv: tuple[int, int] = (64, 64),
    mamba: tuple[int, int] | None = None,
    swa: tuple[int, int] | None = None,
    window: int = 2,
    policy: WritePolicy = WritePolicy.WRITE_BACK,
    eviction: str = "lru",
) -> Simulation:
    slots = {"kv": kv} | ({"mamba": mamba} if mamba else {}) | ({"swa": swa} if swa else {})
    windows = {"swa": window} if swa else {}
    sim = Simulation(
        random.Random(0), states=bool(mamba), windows=windows, slots=slots, policy=policy, eviction=eviction
    )
    SIMULATIONS.append(sim)
    return sim


def published(sim: Simulation, tokens: list[int], *stops: int) -> Node:
    request = sim.open(tokens)
    sim.load(request)
    for stop in stops or (len(tokens),):
        assert sim.compute(request, stop)
    node = request.lease.node
    sim.close(request)
    while sim.retired:
        sim.end_forward()
    return node


def end(sim: Simulation, copies: list[Copy]) -> None:
    sim.carry_out(copies)
    while sim.flying:
        sim.end(0)


def moved(copies: list[Copy]) -> list[tuple[Direction, str, list[int], list[int]]]:
    return [(copy.direction, *map(_plain, transfer)) for copy in copies for transfer in copy.transfers]  # type: ignore[misc]


def _plain(value: object) -> object:
    return value if isinstance(value, str) else list(value)  # type: ignore[call-overload]


def back_up(sim: Simulation, node: Node) -> None:
    """Copy a path to the host, and leave it there."""
    copies = sim.planner.backups.backup(node)
    for copy in copies:
        copy.publishes = None
    end(sim, copies)


def off_the_device(sim: Simulation, *numbers: int) -> None:
    for number in numbers:
        sim.planner.inventory.evict(place_of(number, Tier.DEVICE), 64, dirty=True)


def sources(request: RequestState) -> dict[tuple[str, Tier], int]:
    return {place: count for place, count in request.sources.items() if count}


# Where a prefix comes from


def test_a_prefix_on_the_device_is_borrowed_as_it_is() -> None:
    sim = simulation()
    upper, lower = published(sim, HEAD), published(sim, LONG)
    request = sim.open([*LONG, 9])

    copies = sim.planner.loads.load(request)

    assert moved(copies) == []
    assert [copy.direction for copy in copies] == [Direction.LOAD]
    assert request.references == 2
    assert request.loaded
    assert (request.hit_pages, request.borrowed, request.reserved) == (4, 4, 8)
    assert request.pages == upper.slots_at(FULL_DEVICE) + lower.slots_at(FULL_DEVICE)
    assert (request.tier, request.reason) == (Tier.DEVICE, MissReason.NONE)
    assert sources(request) == {("kv", Tier.DEVICE): 4}
    end(sim, copies)
    assert request.references == 1


def test_what_is_on_the_host_only_is_copied() -> None:
    sim = simulation()
    upper, lower = published(sim, HEAD), published(sim, LONG)
    back_up(sim, lower)
    sim.planner.inventory.evict(FULL_DEVICE, 2, dirty=True)
    assert not lower.slots_at(FULL_DEVICE)
    request = sim.open([*LONG, 9])
    assert sim.planner.loads.tier(request) is Tier.HOST

    copies = sim.planner.loads.load(request)

    assert moved(copies) == [(Direction.LOAD, "kv", lower.slots_at(FULL_HOST), lower.slots_at(FULL_DEVICE))]
    assert request.pages == upper.slots_at(FULL_DEVICE) + lower.slots_at(FULL_DEVICE)
    assert request.tier is Tier.HOST
    assert sources(request) == {("kv", Tier.DEVICE): 2, ("kv", Tier.HOST): 2}
    end(sim, copies)


def test_a_state_on_the_device_is_copied_there_and_one_on_the_host_comes_along() -> None:
    sim = simulation(mamba=(8, 8))
    node = published(sim, HEAD)
    (source,) = node.slots_at(place_of(1, Tier.DEVICE))
    request = sim.open(LONG)

    copies = sim.planner.loads.load(request)

    assert moved(copies) == [(Direction.FORK, "mamba", [source], [request.states[1]])]
    assert [copy.direction for copy in copies] == [Direction.FORK, Direction.LOAD], "the last one covers all"
    assert copies[1].reads == [("mamba", [request.states[1]])]
    assert request.references == 3
    assert sources(request) == {("kv", Tier.DEVICE): 2, ("mamba", Tier.DEVICE): 1}
    end(sim, copies)
    sim.close(request)

    back_up(sim, node)
    off_the_device(sim, 1, 0)
    (source,) = node.slots_at(place_of(1, Tier.HOST))
    request = sim.open(LONG)
    copies = sim.planner.loads.load(request)
    assert moved(copies) == [
        (Direction.LOAD, "kv", node.slots_at(FULL_HOST), node.slots_at(FULL_DEVICE)),
        (Direction.LOAD, "mamba", [source], [request.states[1]]),
    ]
    assert not node.slots_at(place_of(1, Tier.DEVICE)), "each request has its own"
    assert (request.tier, request.references) == (Tier.HOST, 2)
    assert sources(request) == {("kv", Tier.HOST): 2, ("mamba", Tier.HOST): 1}
    end(sim, copies)


@pytest.mark.parametrize("lower_on_host", [False, True])
def test_a_tier_is_the_farthest_that_any_pool_comes_from(lower_on_host: bool) -> None:
    sim = simulation(mamba=(8, 8))
    node = published(sim, HEAD)
    back_up(sim, node)
    if lower_on_host:
        off_the_device(sim, 1)
    request = sim.open(LONG)
    expected = Tier.HOST if lower_on_host else Tier.DEVICE

    assert sim.planner.loads.tier(request) is expected
    sim.load(request)
    assert request.tier is expected
    empty = sim.open([9, 9])
    assert sim.planner.loads.tier(empty) is Tier.DEVICE


def test_what_a_prefetch_brought_is_counted_for_storage() -> None:
    sim = simulation(mamba=(8, 8), policy=WritePolicy.WRITE_THROUGH)
    published(sim, HEAD)
    published(sim, LONG)
    sim.settle()
    after = simulation(mamba=(8, 8))
    after.storage = sim.storage
    published(after, HEAD)
    request = after.open([*LONG, 9])
    assert (request.matched_pages, request.prefetched_pages) == (2, 0)
    after.prefetch(request)
    assert (request.matched_pages, request.prefetched_pages) == (4, 2)
    after.load(request)

    assert request.tier is Tier.STORAGE
    assert sources(request) == {
        ("kv", Tier.DEVICE): 2,
        ("kv", Tier.STORAGE): 2,
        ("mamba", Tier.STORAGE): 1,
    }
    again = after.open([*LONG, 9])
    after.load(again)
    assert again.tier is Tier.HOST, "of the state: the pages are on the device"
    assert sources(again) == {("kv", Tier.DEVICE): 4, ("mamba", Tier.HOST): 1}


def test_a_match_that_others_made_longer_was_not_prefetched() -> None:
    sim = simulation()
    request = sim.open([*LONG, 9])
    published(sim, LONG)
    sim.planner.rematch(request, prefetched=False)

    assert (request.matched_pages, request.prefetched_pages) == (4, 0)
    assert not request.prefetched
    sim.planner.flush()
    sim.planner.rematch(request)
    assert (request.matched_pages, request.prefetched_pages) == (4, 0), "its lease keeps it"


def test_a_match_that_became_shorter_was_prefetched_no_further() -> None:
    sim = simulation()
    node = published(sim, LONG)
    request = sim.open([*LONG, 9])
    request.prefetched_pages = 4
    sim.planner.rest(request)
    sim.planner.inventory.evict(FULL_DEVICE, 1, dirty=True)
    assert node.pages == 3

    sim.planner.rematch(request)
    assert (request.matched_pages, request.prefetched_pages) == (3, 3)


# What is kept


def test_what_a_load_reads_stays_until_it_has_ended() -> None:
    sim = simulation(mamba=(8, 8))
    node = published(sim, HEAD)
    back_up(sim, node)
    off_the_device(sim, 1, 0)
    request = sim.open(LONG)
    copies = sim.planner.loads.load(request)
    books = sim.planner.inventory

    books.evict(place_of(1, Tier.HOST), 8, dirty=True)
    books.evict(FULL_HOST, 64, dirty=True)
    assert [free.held for free in books.free] == [2, 2, 1, 1]
    end(sim, copies)
    books.evict(FULL_DEVICE, 64, dirty=True)
    assert books.free[FULL_DEVICE].held == 2, "the request borrows them"
    sim.close(request)
    for place in (place_of(1, Tier.HOST), FULL_HOST, FULL_DEVICE):
        books.evict(place, 64, dirty=True)
    assert [free.held for free in books.free] == [0, 0, 0, 0]


def test_a_state_that_is_copied_on_the_device_stays_until_it_is() -> None:
    sim = simulation(mamba=(8, 0))
    published(sim, HEAD)
    request = sim.open(LONG)
    copies = sim.planner.loads.load(request)
    sim.close(request)
    books = sim.planner.inventory
    books.evict(place_of(1, Tier.DEVICE), 8, dirty=True)
    assert books.free[place_of(1, Tier.DEVICE)].held == 2
    end(sim, copies)
    books.evict(place_of(1, Tier.DEVICE), 8, dirty=True)
    assert books.free[place_of(1, Tier.DEVICE)].held == 0


def test_a_load_waits_for_what_another_one_is_still_bringing() -> None:
    sim = simulation(swa=(16, 16), window=1)
    upper, lower = published(sim, HEAD), published(sim, LONG)
    back_up(sim, upper)
    back_up(sim, lower)
    off_the_device(sim, 1, 0)
    first, second = sim.open([*LONG, 9]), sim.open([*LONG, 8])

    bringing = sim.planner.loads.load(first)
    waiting = sim.planner.loads.load(second)

    assert moved(waiting) == []
    tree = sim.planner.inventory.tree
    window = [node for node in tree.nodes() if node.slots_at(place_of(1, Tier.DEVICE))]
    assert [node.end for node in window] == [4]
    pages = {slot for pool, slots in waiting[-1].reads if pool == "kv" for slot in slots}
    assert pages == set(second.pages) == set(first.pages)
    assert [slots for pool, slots in waiting[-1].reads if pool == "swa"] == [
        window[0].slots_at(place_of(1, Tier.DEVICE))
    ]
    end(sim, bringing + waiting)
    third = sim.open([*LONG, 7])
    copies = sim.planner.loads.load(third)
    assert copies[-1].reads == []
    end(sim, copies)


# Without room


def test_without_a_slot_for_its_state_a_request_is_given_nothing() -> None:
    sim = simulation(mamba=(2, 8))
    node = published(sim, HEAD)
    back_up(sim, node)
    others = [sim.open([9, number]) for number in range(2)]
    for other in others:
        sim.load(other)
    request = sim.open(LONG)
    assert request.matched_pages == 2
    copies = sim.planner.loads.load(request)

    assert moved(copies) == []
    assert (request.hit_pages, request.pages, request.states) == (0, [], {})
    assert sim.planner.reason(request) is MissReason.DEVICE_CAPACITY
    assert sources(request) == {}
    assert request.tier is Tier.DEVICE
    end(sim, copies)
    with pytest.raises(CapacityError):
        sim.planner.extend(request, 2)
    sim.close(others.pop())
    sim.planner.extend(request, 2)
    assert len(request.states) == 1


def test_a_request_after_a_failure_is_served_without_the_cache() -> None:
    sim = simulation(mamba=(8, 8), swa=(16, 16))
    published(sim, HEAD)
    request = sim.open(LONG)

    copies = sim.planner.loads.load_nothing(request)

    assert (moved(copies), len(copies), request.references) == ([], 1, 2)
    assert request.loaded
    assert (request.hit_pages, request.pages, request.reason) == (0, [], MissReason.TRANSFER_FAILED)
    assert [(window.first, window.slots) for window in request.windows.values()] == [(0, [])]
    assert request.lease.node.parent is None
    end(sim, copies)
    assert sim.planner.reason(request) is MissReason.TRANSFER_FAILED


def test_slots_that_copies_take_are_counted_by_place() -> None:
    sim = simulation(mamba=(8, 8))
    upper, lower = published(sim, HEAD), published(sim, [*LONG, 9, 10])

    wanted = [CopyRequest(upper, FULL), CopyRequest(lower, FULL), CopyRequest(lower, 1)]
    assert by_place(wanted) == {FULL_DEVICE: 5, place_of(1, Tier.DEVICE): 1}


# Room as a request grows


def test_so_many_pages_are_new() -> None:
    sim = simulation()
    request = sim.open([1, 2, 3])
    sim.load(request)

    assert [sim.planner.new_pages(request, tokens) for tokens in range(5)] == [0, 1, 1, 2, 2]
    assert sim.planner.extend(request, 3) == {"kv": request.pages}
    assert (len(request.pages), request.reserved) == (2, 3)
    assert [sim.planner.new_pages(request, tokens) for tokens in range(4)] == [0, 0, 1, 1]
    assert sim.planner.extend(request, 1) == {"kv": []}
    assert sim.planner.extend(request, 1) == {"kv": request.pages[2:]}
    assert (len(request.pages), request.reserved) == (3, 5)


def test_a_window_grows_with_the_pages() -> None:
    sim = simulation(swa=(16, 0), window=2)
    request = sim.open(LONG)
    sim.load(request)
    given = sim.planner.extend(request, 5)
    window = request.windows[1]

    assert given == {"kv": request.pages, "swa": window.slots}
    assert (len(window.slots), window.own, window.first) == (3, set(window.slots), 0)
    more = sim.planner.extend(request, 2)
    assert more == {"kv": request.pages[3:], "swa": window.slots[3:]}
    assert len(window.slots) == 4


def test_where_a_window_has_no_room_no_pages_are_taken() -> None:
    sim = simulation(swa=(3, 0), window=1)
    request = sim.open(LONG)
    sim.load(request)

    with pytest.raises(CapacityError, match="4 more swa device slots wanted, 3 of 3 are free"):
        sim.planner.extend(request, 8)
    assert request.pages == request.windows[1].slots == []
    assert request.reserved == 0
    sim.planner.extend(request, 6)


# Windows


def grown(sim: Simulation, tokens: list[int], length: int) -> RequestState:
    request = sim.open(tokens)
    sim.load(request)
    sim.planner.extend(request, length)
    return request


def test_a_restored_window_is_the_trees_until_it_is_left_behind() -> None:
    sim = simulation(swa=(16, 16), window=2)
    node = published(sim, LONG)
    slots = [slot for part in (node,) for slot in part.slots_at(place_of(1, Tier.DEVICE))]
    request = grown(sim, [*LONG, 9, 10], 2)
    window = request.windows[1]

    assert window.first == 2
    assert window.slots[:2] == slots[-2:]
    assert window.own == set(window.slots[2:])
    assert len(window.slots) == 3


@pytest.mark.parametrize(
    ("length", "first", "freed"),
    [(0, 0, 0), (6, 0, 0), (7, 0, 0), (8, 1, 1), (9, 1, 1), (10, 2, 2), (20, 2, 2)],
)
def test_a_request_lets_go_of_what_lies_before_its_window(length: int, first: int, freed: int) -> None:
    """Five pages have room; nothing is published, so all of them are the request's own. Three are kept."""
    sim = simulation(swa=(16, 16), window=2)
    request = grown(sim, [*LONG, 9, 10], 10)
    window = request.windows[1]
    slots, place = list(window.slots), place_of(1, Tier.DEVICE)

    retired = sim.planner.windows.retire(request, length)

    assert (window.first, window.slots, window.own) == (first, slots[first:], set(slots[first:]))
    assert (retired is None) == (freed == 0)
    assert sim.planner.inventory.verify() == [], "a forward may still read them"
    if retired is not None:
        assert retired.slots == {place: sorted(slots[:freed])}
        assert sim.planner.inventory.free[place].held == 5
        sim.planner.windows.finish(retired)
    assert sim.planner.inventory.free[place].held == 5 - freed


def test_pages_that_a_failed_forward_may_still_write_to_are_not_lent_again() -> None:
    sim = simulation(swa=(16, 16), window=2)
    request = grown(sim, LONG, 8)
    retired = sim.planner.windows.retire(request, 8)
    assert retired is not None
    sim.planner.windows.finish(retired, RuntimeError("the device failed"))

    assert sim.planner.inventory.free[place_of(1, Tier.DEVICE)].quarantined == 1


@pytest.mark.parametrize(("snapshot", "first"), [(2, 0), (6, 0), (8, 1), (10, 2)])
def test_a_snapshot_that_may_yet_be_published_keeps_its_window(snapshot: int, first: int) -> None:
    sim = simulation(mamba=(8, 0), swa=(16, 0), window=2)
    request = grown(sim, [*LONG, 9, 10], 10)
    end(sim, sim.planner.snapshot(request, snapshot))

    retired = sim.planner.windows.retire(request, 10)
    assert request.windows[sim.planner.inventory.names.index("swa")].first == first
    if retired is not None:
        sim.planner.windows.finish(retired)


def test_a_window_that_the_tree_had_already_stays_the_requests() -> None:
    sim = simulation(swa=(16, 16), window=2)
    first, second = grown(sim, LONG, 8), grown(sim, LONG, 8)
    for request in (first, second):
        for page in range(4):
            stamp = sim.digests(request)[page]
            sim.memory["kv", Tier.DEVICE][request.pages[page]] = stamp
        sim.planner.publish(request, 8)

    assert first.windows[1].own == set()
    assert second.windows[1].own == set(second.windows[1].slots)
    assert second.duplicates == second.pages[:4]
    assert first.duplicates == []
    assert (first.borrowed, second.borrowed) == (4, 4)


# The planner's counts


@pytest.mark.parametrize(("tokens", "hit"), [(8, 3), (9, 4), (10, 4)])
def test_all_but_the_last_page_of_a_prompt_is_no_miss(tokens: int, hit: int) -> None:
    sim = simulation()
    published(sim, [*LONG, 9, 10, 11, 12])
    request = sim.open([*LONG, 9, 10][:tokens])

    assert request.matched_pages == hit
    assert sim.planner.reason(request) is MissReason.NONE
    shorter = sim.open([*LONG[:6], 50, 51, 52])
    assert sim.planner.reason(shorter) is MissReason.COLD


def test_the_second_request_on_a_path_makes_it_due() -> None:
    sim = simulation(policy=WritePolicy.WRITE_THROUGH_SELECTIVE)
    upper = published(sim, HEAD)
    lower = published(sim, LONG)
    assert (upper.hits, lower.hits) == (2, 1)
    (copy,) = sim.flying
    assert copy.publishes is upper
    assert len(copy.transfers[0].sources) == 2

    sim.close(sim.open([*HEAD, 50]))
    assert (upper.hits, lower.hits) == (3, 1)
    assert sim.flying == [copy], "it is on its way"
    sim.close(sim.open([*LONG, 50]))
    assert [copy.publishes for copy in sim.flying] == [upper, lower]
    assert sim.planner.inventory.counters.backed_up == 4


@pytest.mark.parametrize("poisoned", [False, True])
def test_all_that_a_request_has_of_its_own_goes_back(poisoned: bool) -> None:
    sim = simulation(mamba=(8, 0), swa=(16, 0))
    request = grown(sim, LONG, 8)
    end(sim, sim.planner.snapshot(request, 8))
    books = sim.planner.inventory
    held = [free.held for free in books.free]
    assert sorted(held) == [0, 0, 0, 2, 4, 4]
    request.poisoned = poisoned

    sim.close(request)
    assert [free.quarantined for free in books.free] == (held if poisoned else [0] * 6)
    assert [free.available for free in books.free] == [
        free.capacity - (count if poisoned else 0) for free, count in zip(books.free, held, strict=True)
    ]


def test_a_request_is_given_back_with_the_last_copy_for_it() -> None:
    sim = simulation(mamba=(8, 0))
    published(sim, HEAD)
    request = sim.open(LONG)
    copies = sim.planner.loads.load(request)
    assert request.references == 3
    sim.close(request)
    for copy in copies:
        assert request in sim.planner.inventory.requests
        assert sim.planner.copy_finished(copy, None) is None
    assert request not in sim.planner.inventory.requests


def test_a_copy_that_failed_makes_nothing_due_and_its_request_poisoned() -> None:
    sim = simulation(policy=WritePolicy.WRITE_THROUGH)
    request = grown(sim, LONG, 8)
    (copy,) = sim.planner.publish(request, 8)
    assert copy.publishes is request.lease.node
    assert copy.user is None
    assert sim.planner.copy_finished(copy, RuntimeError("planted")) is None
    assert not request.poisoned, "it was no copy for the request"
    assert sim.planner.inventory.free[FULL_HOST].quarantined == 4
    assert sim.planner.inventory.tier_copies == []
