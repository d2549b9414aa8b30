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
from asynchicache.tree.copies import CopyRequest
from asynchicache.tree.node import FULL, FULL_DEVICE, FULL_HOST, Node, place_of
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
        for sequence in list(sim.live):
            sim.close(sequence)
        sim.settle()
        sim.verify()
        assert all(not any(node.pins) for node in sim.planner.state.tree.nodes())


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
    sequence = sim.open(tokens)
    sim.load(sequence)
    for stop in stops or (len(tokens),):
        assert sim.compute(sequence, stop)
    node = sequence.lease.node
    sim.close(sequence)
    while sim.retired:
        sim.end_forward()
    return node


def end(sim: Simulation, copies: list[Copy]) -> None:
    sim.start(copies)
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
        sim.planner.state.evict(place_of(number, Tier.DEVICE), 64, dirty=True)


def sources(sequence: RequestState) -> dict[tuple[str, Tier], int]:
    return {place: count for place, count in sequence.sources.items() if count}


# Where a prefix comes from


def test_a_prefix_on_the_device_is_borrowed_as_it_is() -> None:
    sim = simulation()
    upper, lower = published(sim, HEAD), published(sim, LONG)
    sequence = sim.open([*LONG, 9])

    copies = sim.planner.loads.load(sequence)

    assert moved(copies) == []
    assert [copy.direction for copy in copies] == [Direction.LOAD]
    assert sequence.users == 2
    assert sequence.loaded
    assert (sequence.hit_pages, sequence.borrowed, sequence.reserved) == (4, 4, 8)
    assert sequence.pages == upper.slots_at(FULL_DEVICE) + lower.slots_at(FULL_DEVICE)
    assert (sequence.tier, sequence.reason) == (Tier.DEVICE, MissReason.NONE)
    assert sources(sequence) == {("kv", Tier.DEVICE): 4}
    end(sim, copies)
    assert sequence.users == 1


def test_what_is_on_the_host_only_is_copied() -> None:
    sim = simulation()
    upper, lower = published(sim, HEAD), published(sim, LONG)
    back_up(sim, lower)
    sim.planner.state.evict(FULL_DEVICE, 2, dirty=True)
    assert not lower.slots_at(FULL_DEVICE)
    sequence = sim.open([*LONG, 9])
    assert sim.planner.loads.tier(sequence) is Tier.HOST

    copies = sim.planner.loads.load(sequence)

    assert moved(copies) == [(Direction.LOAD, "kv", lower.slots_at(FULL_HOST), lower.slots_at(FULL_DEVICE))]
    assert sequence.pages == upper.slots_at(FULL_DEVICE) + lower.slots_at(FULL_DEVICE)
    assert sequence.tier is Tier.HOST
    assert sources(sequence) == {("kv", Tier.DEVICE): 2, ("kv", Tier.HOST): 2}
    end(sim, copies)


def test_a_state_on_the_device_is_copied_there_and_one_on_the_host_comes_along() -> None:
    sim = simulation(mamba=(8, 8))
    node = published(sim, HEAD)
    (source,) = node.slots_at(place_of(1, Tier.DEVICE))
    sequence = sim.open(LONG)

    copies = sim.planner.loads.load(sequence)

    assert moved(copies) == [(Direction.FORK, "mamba", [source], [sequence.states[1]])]
    assert [copy.direction for copy in copies] == [Direction.FORK, Direction.LOAD], "the last one covers all"
    assert copies[1].reads == [("mamba", [sequence.states[1]])]
    assert sequence.users == 3
    assert sources(sequence) == {("kv", Tier.DEVICE): 2, ("mamba", Tier.DEVICE): 1}
    end(sim, copies)
    sim.close(sequence)

    back_up(sim, node)
    off_the_device(sim, 1, 0)
    (source,) = node.slots_at(place_of(1, Tier.HOST))
    sequence = sim.open(LONG)
    copies = sim.planner.loads.load(sequence)
    assert moved(copies) == [
        (Direction.LOAD, "kv", node.slots_at(FULL_HOST), node.slots_at(FULL_DEVICE)),
        (Direction.LOAD, "mamba", [source], [sequence.states[1]]),
    ]
    assert not node.slots_at(place_of(1, Tier.DEVICE)), "each request has its own"
    assert (sequence.tier, sequence.users) == (Tier.HOST, 2)
    assert sources(sequence) == {("kv", Tier.HOST): 2, ("mamba", Tier.HOST): 1}
    end(sim, copies)


@pytest.mark.parametrize("lower_on_host", [False, True])
def test_a_tier_is_the_farthest_that_any_pool_comes_from(lower_on_host: bool) -> None:
    sim = simulation(mamba=(8, 8))
    node = published(sim, HEAD)
    back_up(sim, node)
    if lower_on_host:
        off_the_device(sim, 1)
    sequence = sim.open(LONG)
    expected = Tier.HOST if lower_on_host else Tier.DEVICE

    assert sim.planner.loads.tier(sequence) is expected
    sim.load(sequence)
    assert sequence.tier is expected
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
    sequence = after.open([*LONG, 9])
    assert (sequence.matched_pages, sequence.fetched_pages) == (2, 0)
    after.prefetch(sequence)
    assert (sequence.matched_pages, sequence.fetched_pages) == (4, 2)
    after.load(sequence)

    assert sequence.tier is Tier.STORAGE
    assert sources(sequence) == {
        ("kv", Tier.DEVICE): 2,
        ("kv", Tier.STORAGE): 2,
        ("mamba", Tier.STORAGE): 1,
    }
    again = after.open([*LONG, 9])
    after.load(again)
    assert again.tier is Tier.HOST, "of the state: the pages are on the device"
    assert sources(again) == {("kv", Tier.DEVICE): 4, ("mamba", Tier.HOST): 1}


def test_a_match_that_others_made_longer_was_not_fetched() -> None:
    sim = simulation()
    sequence = sim.open([*LONG, 9])
    published(sim, LONG)
    sim.planner.rematch(sequence, fetched=False)

    assert (sequence.matched_pages, sequence.fetched_pages) == (4, 0)
    assert not sequence.prefetched
    sim.planner.flush()
    sim.planner.rematch(sequence)
    assert (sequence.matched_pages, sequence.fetched_pages) == (4, 0), "its lease keeps it"


def test_a_match_that_became_shorter_was_fetched_no_further() -> None:
    sim = simulation()
    node = published(sim, LONG)
    sequence = sim.open([*LONG, 9])
    sequence.fetched_pages = 4
    sim.planner.rest(sequence)
    sim.planner.state.evict(FULL_DEVICE, 1, dirty=True)
    assert node.pages == 3

    sim.planner.rematch(sequence)
    assert (sequence.matched_pages, sequence.fetched_pages) == (3, 3)


# What is kept


def test_what_a_load_reads_stays_until_it_has_ended() -> None:
    sim = simulation(mamba=(8, 8))
    node = published(sim, HEAD)
    back_up(sim, node)
    off_the_device(sim, 1, 0)
    sequence = sim.open(LONG)
    copies = sim.planner.loads.load(sequence)
    books = sim.planner.state

    books.evict(place_of(1, Tier.HOST), 8, dirty=True)
    books.evict(FULL_HOST, 64, dirty=True)
    assert [free.held for free in books.free] == [2, 2, 1, 1]
    end(sim, copies)
    books.evict(FULL_DEVICE, 64, dirty=True)
    assert books.free[FULL_DEVICE].held == 2, "the request borrows them"
    sim.close(sequence)
    for place in (place_of(1, Tier.HOST), FULL_HOST, FULL_DEVICE):
        books.evict(place, 64, dirty=True)
    assert [free.held for free in books.free] == [0, 0, 0, 0]


def test_a_state_that_is_copied_on_the_device_stays_until_it_is() -> None:
    sim = simulation(mamba=(8, 0))
    published(sim, HEAD)
    sequence = sim.open(LONG)
    copies = sim.planner.loads.load(sequence)
    sim.close(sequence)
    books = sim.planner.state
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
    tree = sim.planner.state.tree
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
    sequence = sim.open(LONG)
    assert sequence.matched_pages == 2
    copies = sim.planner.loads.load(sequence)

    assert moved(copies) == []
    assert (sequence.hit_pages, sequence.pages, sequence.states) == (0, [], {})
    assert sim.planner.reason(sequence) is MissReason.DEVICE_CAPACITY
    assert sources(sequence) == {}
    assert sequence.tier is Tier.DEVICE
    end(sim, copies)
    with pytest.raises(CapacityError):
        sim.planner.extend(sequence, 2)
    sim.close(others.pop())
    sim.planner.extend(sequence, 2)
    assert len(sequence.states) == 1


def test_a_request_after_a_failure_is_served_without_the_cache() -> None:
    sim = simulation(mamba=(8, 8), swa=(16, 16))
    published(sim, HEAD)
    sequence = sim.open(LONG)

    copies = sim.planner.loads.load_nothing(sequence)

    assert (moved(copies), len(copies), sequence.users) == ([], 1, 2)
    assert sequence.loaded
    assert (sequence.hit_pages, sequence.pages, sequence.reason) == (0, [], MissReason.TRANSFER_FAILED)
    assert [(window.first, window.slots) for window in sequence.windows.values()] == [(0, [])]
    assert sequence.lease.node.parent is None
    end(sim, copies)
    assert sim.planner.reason(sequence) is MissReason.TRANSFER_FAILED


def test_slots_that_copies_take_are_counted_by_place() -> None:
    sim = simulation(mamba=(8, 8))
    upper, lower = published(sim, HEAD), published(sim, [*LONG, 9, 10])

    wanted = [CopyRequest(upper, FULL), CopyRequest(lower, FULL), CopyRequest(lower, 1)]
    assert by_place(wanted) == {FULL_DEVICE: 5, place_of(1, Tier.DEVICE): 1}


# Room as a request grows


def test_so_many_pages_are_new() -> None:
    sim = simulation()
    sequence = sim.open([1, 2, 3])
    sim.load(sequence)

    assert [sim.planner.new_pages(sequence, tokens) for tokens in range(5)] == [0, 1, 1, 2, 2]
    assert sim.planner.extend(sequence, 3) == {"kv": sequence.pages}
    assert (len(sequence.pages), sequence.reserved) == (2, 3)
    assert [sim.planner.new_pages(sequence, tokens) for tokens in range(4)] == [0, 0, 1, 1]
    assert sim.planner.extend(sequence, 1) == {"kv": []}
    assert sim.planner.extend(sequence, 1) == {"kv": sequence.pages[2:]}
    assert (len(sequence.pages), sequence.reserved) == (3, 5)


def test_a_window_grows_with_the_pages() -> None:
    sim = simulation(swa=(16, 0), window=2)
    sequence = sim.open(LONG)
    sim.load(sequence)
    given = sim.planner.extend(sequence, 5)
    window = sequence.windows[1]

    assert given == {"kv": sequence.pages, "swa": window.slots}
    assert (len(window.slots), window.own, window.first) == (3, set(window.slots), 0)
    more = sim.planner.extend(sequence, 2)
    assert more == {"kv": sequence.pages[3:], "swa": window.slots[3:]}
    assert len(window.slots) == 4


def test_where_a_window_has_no_room_no_pages_are_taken() -> None:
    sim = simulation(swa=(3, 0), window=2)
    sequence = sim.open(LONG)
    sim.load(sequence)

    with pytest.raises(CapacityError, match="4 more swa device slots wanted, 3 of 3 are free"):
        sim.planner.extend(sequence, 8)
    assert sequence.pages == sequence.windows[1].slots == []
    assert sequence.reserved == 0
    sim.planner.extend(sequence, 6)


# Windows


def grown(sim: Simulation, tokens: list[int], length: int) -> RequestState:
    sequence = sim.open(tokens)
    sim.load(sequence)
    sim.planner.extend(sequence, length)
    return sequence


def test_a_restored_window_is_the_trees_until_it_is_left_behind() -> None:
    sim = simulation(swa=(16, 16), window=2)
    node = published(sim, LONG)
    slots = [slot for part in (node,) for slot in part.slots_at(place_of(1, Tier.DEVICE))]
    sequence = grown(sim, [*LONG, 9, 10], 2)
    window = sequence.windows[1]

    assert window.first == 2
    assert window.slots[:2] == slots[-2:]
    assert window.own == set(window.slots[2:])
    assert len(window.slots) == 3


@pytest.mark.parametrize(
    ("length", "first", "freed"),
    [(0, 0, 0), (4, 0, 0), (5, 0, 0), (6, 1, 1), (7, 1, 1), (8, 2, 2), (20, 3, 3)],
)
def test_a_request_lets_go_of_what_lies_before_its_window(length: int, first: int, freed: int) -> None:
    """Five pages have room; nothing is published, so all of them are the request's own."""
    sim = simulation(swa=(16, 16), window=2)
    sequence = grown(sim, [*LONG, 9, 10], 10)
    window = sequence.windows[1]
    slots, place = list(window.slots), place_of(1, Tier.DEVICE)

    retired = sim.planner.windows.retire(sequence, length)

    assert (window.first, window.slots, window.own) == (first, slots[first:], set(slots[first:]))
    assert (retired is None) == (freed == 0)
    assert sim.planner.state.verify() == [], "a forward may still read them"
    if retired is not None:
        assert retired.slots == {place: sorted(slots[:freed])}
        assert sim.planner.state.free[place].held == 5
        sim.planner.windows.finish(retired)
    assert sim.planner.state.free[place].held == 5 - freed


def test_pages_that_a_failed_forward_may_still_write_to_are_not_lent_again() -> None:
    sim = simulation(swa=(16, 16), window=2)
    sequence = grown(sim, LONG, 8)
    retired = sim.planner.windows.retire(sequence, 8)
    assert retired is not None
    sim.planner.windows.finish(retired, RuntimeError("the device failed"))

    assert sim.planner.state.free[place_of(1, Tier.DEVICE)].quarantined == 2


@pytest.mark.parametrize(("snapshot", "first"), [(2, 0), (4, 0), (6, 1), (8, 2), (10, 3)])
def test_a_snapshot_that_may_yet_be_published_keeps_its_window(snapshot: int, first: int) -> None:
    sim = simulation(mamba=(8, 0), swa=(16, 0), window=2)
    sequence = grown(sim, [*LONG, 9, 10], 10)
    end(sim, sim.planner.snapshot(sequence, snapshot))

    retired = sim.planner.windows.retire(sequence, 10)
    assert sequence.windows[sim.planner.state.names.index("swa")].first == first
    if retired is not None:
        sim.planner.windows.finish(retired)


def test_a_window_that_the_tree_had_already_stays_the_requests() -> None:
    sim = simulation(swa=(16, 16), window=2)
    first, second = grown(sim, LONG, 8), grown(sim, LONG, 8)
    for sequence in (first, second):
        for page in range(4):
            stamp = sim.stamp("kv", sim.digests(sequence)[page])
            sim.memory["kv", Tier.DEVICE][sequence.pages[page]] = stamp
        sim.planner.publish(sequence, 8)

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
    sequence = sim.open([*LONG, 9, 10][:tokens])

    assert sequence.matched_pages == hit
    assert sim.planner.reason(sequence) is MissReason.NONE
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
    assert sim.planner.state.counters.backed_up == 4


@pytest.mark.parametrize("poisoned", [False, True])
def test_all_that_a_request_has_of_its_own_goes_back(poisoned: bool) -> None:
    sim = simulation(mamba=(8, 0), swa=(16, 0))
    sequence = grown(sim, LONG, 8)
    end(sim, sim.planner.snapshot(sequence, 8))
    books = sim.planner.state
    held = [free.held for free in books.free]
    assert sorted(held) == [0, 0, 0, 2, 4, 4]
    sequence.poisoned = poisoned

    sim.close(sequence)
    assert [free.quarantined for free in books.free] == (held if poisoned else [0] * 6)
    assert [free.available for free in books.free] == [
        free.capacity - (count if poisoned else 0) for free, count in zip(books.free, held, strict=True)
    ]


def test_a_request_is_given_back_with_the_last_copy_for_it() -> None:
    sim = simulation(mamba=(8, 0))
    published(sim, HEAD)
    sequence = sim.open(LONG)
    copies = sim.planner.loads.load(sequence)
    assert sequence.users == 3
    sim.close(sequence)
    for copy in copies:
        assert sequence in sim.planner.state.sequences
        assert sim.planner.copy_finished(copy, None) is None
    assert sequence not in sim.planner.state.sequences


def test_a_copy_that_failed_makes_nothing_due_and_its_request_poisoned() -> None:
    sim = simulation(policy=WritePolicy.WRITE_THROUGH)
    sequence = grown(sim, LONG, 8)
    (copy,) = sim.planner.publish(sequence, 8)
    assert copy.publishes is sequence.lease.node
    assert copy.user is None
    assert sim.planner.copy_finished(copy, RuntimeError("planted")) is None
    assert not sequence.poisoned, "it was no copy for the request"
    assert sim.planner.state.free[FULL_HOST].quarantined == 4
    assert sim.planner.state.tier_copies == []
