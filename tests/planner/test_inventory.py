"""Who holds which slot, and what making room costs: exact counts."""

from __future__ import annotations

import random
from collections.abc import Iterable

import pytest

from asynchicache.errors import ConfigError
from asynchicache.planner.inventory import PlannerCounters
from asynchicache.planner.request_state import RequestState
from asynchicache.tree.node import FULL_DEVICE, FULL_HOST, Node, place_of
from asynchicache.types import PoolTransfer, Tier, WritePolicy
from controller.simulation import Simulation

BACK = WritePolicy.WRITE_BACK


def simulation(
    policy: WritePolicy = BACK, windows: dict[str, int] | None = None, **slots: tuple[int, int]
) -> Simulation:
    return Simulation(random.Random(0), states="mamba" in slots, windows=windows, slots=slots, policy=policy)


def published(sim: Simulation, tokens: list[int], *stops: int) -> Node:
    request = sim.open(tokens)
    sim.load(request)
    for stop in stops or (len(tokens),):
        assert sim.compute(request, stop)
    node = request.lease.node
    sim.close(request)
    return node


def saved(sim: Simulation, node: Node) -> None:
    for copy in sim.planner.backups.backup(node):
        sim.planner.copy_finished(copy, None)


# Room


def test_room_that_is_free_costs_nothing() -> None:
    sim = simulation(kv=(8, 8))
    published(sim, [1, 2, 3, 4])
    books = sim.planner.inventory

    assert books.make_room(FULL_DEVICE, 6)
    assert books.counters == PlannerCounters(evicted=[0, 0])
    assert books.make_room(FULL_DEVICE, 7)
    assert books.counters.evicted == [1, 0], "no more than it takes"
    assert books.free[FULL_DEVICE].available == 7


def test_room_that_cannot_be_made_is_refused_and_what_may_go_has_gone() -> None:
    sim = simulation(kv=(8, 8))
    published(sim, [1, 2, 3, 4])
    running = sim.open([5, 6, 7, 8])
    sim.load(running)
    sim.planner.extend(running, 4)
    books = sim.planner.inventory

    assert not books.make_room(FULL_DEVICE, 7)
    assert books.free[FULL_DEVICE].available == 6
    assert books.make_room(FULL_DEVICE, 6)
    assert books.make_room_for_all({FULL_DEVICE: 6, FULL_HOST: 8}) is None
    assert books.make_room_for_all({FULL_DEVICE: 6, FULL_HOST: 9}) == FULL_HOST
    assert books.make_room_for_all({FULL_DEVICE: 7, FULL_HOST: 9}) == FULL_DEVICE
    assert books.make_room_for_all({}) is None
    sim.close(running)


@pytest.mark.parametrize(
    ("policy", "demoted", "lost"), [(BACK, 2, 0), (WritePolicy.WRITE_THROUGH_SELECTIVE, 0, 2)]
)
def test_under_write_back_pages_with_a_copy_on_the_host_go_first(
    policy: WritePolicy, demoted: int, lost: int
) -> None:
    sim = simulation(policy, kv=(6, 8))
    dirty = published(sim, [1, 2, 3, 4])
    clean = published(sim, [5, 6, 7, 8])
    saved(sim, clean)
    books = sim.planner.inventory

    assert books.make_room(FULL_DEVICE, 4)
    assert (books.counters.demoted, books.counters.lost) == (demoted, lost)
    assert books.counters.evicted == [2, 0]
    assert (dirty.parent is None) == bool(lost)
    assert books.make_room(FULL_DEVICE, 6)
    assert (books.counters.demoted, books.counters.lost) == (2, 2)
    sim.verify()


@pytest.mark.parametrize("policy", [BACK, WritePolicy.WRITE_THROUGH_SELECTIVE])
def test_room_is_made_until_enough_is_usable_where_a_failed_copy_may_write_what_goes_first(
    policy: WritePolicy,
) -> None:
    sim = simulation(policy, kv=(8, 8), mamba=(4, 4))
    nodes = [published(sim, [first, 2]) for first in (1, 3, 5)]
    books, place = sim.planner.inventory, place_of(1, Tier.DEVICE)
    condemned = [slot for node in nodes[:2] for slot in node.slots_at(place)]
    books.condemn(Tier.DEVICE, books.transfers(1, condemned, condemned))

    assert books.make_room(place, 2)
    assert (books.free[place].quarantined, books.counters.evicted[place]) == (2, 3)
    assert not books.make_room(place, 3), "nothing is left to evict"
    sim.verify()


@pytest.mark.parametrize("policy", [BACK, WritePolicy.WRITE_THROUGH_SELECTIVE])
def test_room_in_a_shared_memory_is_made_beside_what_a_failed_copy_may_write(policy: WritePolicy) -> None:
    sizes = simulation(kv=(8, 0), mamba=(4, 0)).planner.inventory
    page, state = (
        free.slot_bytes for free in (sizes.free[FULL_DEVICE], sizes.free[place_of(1, Tier.DEVICE)])
    )
    memory = {Tier.DEVICE: 8 * page + 4 * state}
    sim = Simulation(random.Random(0), slots={"kv": (8, 0), "mamba": (4, 0)}, policy=policy, memory=memory)
    end = published(sim, [1, 2, 3, 4], 2, 4)
    books, place = sim.planner.inventory, place_of(1, Tier.DEVICE)
    assert end.parent is not None
    superseded = end.parent.slots_at(place)  # of the least value, so it goes first
    books.condemn(Tier.DEVICE, books.transfers(1, superseded, superseded))

    assert books.make_room(place, books.memory[Tier.DEVICE].left // state + 1)
    assert books.free[place].quarantined == 1
    sim.verify()


def test_what_is_evicted_is_counted_by_place() -> None:
    sim = simulation(kv=(8, 8), mamba=(4, 4))
    for first in (1, 3):
        saved(sim, published(sim, [first, 2, 3, 4]))
    books = sim.planner.inventory

    books.evict(place_of(1, Tier.HOST), 1, dirty=True)
    books.evict(FULL_DEVICE, 4, dirty=True)
    assert books.counters.evicted == [4, 0, 2, 1]
    assert [free.held for free in books.free] == [0, 4, 0, 1]
    books.evict(FULL_HOST, 0, dirty=True)
    books.evict(FULL_HOST, -3, dirty=True)
    assert books.counters.evicted == [4, 0, 2, 1], "nothing was wanted"


class Tracer:
    """Takes down what is told of evictions."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def evicting(self, pool: str, tier: str, slots: int) -> Tracer:
        self.told.append((pool, tier, slots))
        return self

    def finish(self, error: BaseException | None = None, **attributes: str | int) -> None:
        assert error is None
        self.told.append(attributes)


def test_an_eviction_is_traced_with_what_became_of_it() -> None:
    sim = simulation(kv=(8, 8), mamba=(4, 4))
    saved(sim, published(sim, [1, 2, 3, 4]))
    published(sim, [5, 6])
    tracer = sim.planner.inventory.tracer = Tracer()  # type: ignore[assignment]

    sim.planner.inventory.evict(FULL_DEVICE, 8, dirty=True)
    sim.planner.inventory.evict(place_of(1, Tier.HOST), 1, dirty=True)
    assert tracer.told == [
        ("kv", "device", 8),
        {"freed": 3, "demoted": 2, "lost": 1},
        ("mamba", "host", 1),
        {"freed": 1, "demoted": 0, "lost": 0},
    ]


def test_a_copy_of_the_counters_stays_as_it_was() -> None:
    counters = PlannerCounters(evicted=[1, 2], demoted=3)
    copy = counters.copy()
    assert copy == counters
    counters.evicted[0] += 1
    counters.demoted += 1
    assert copy == PlannerCounters(evicted=[1, 2], demoted=3)


# Windows


@pytest.mark.parametrize(
    ("device", "host", "words"),
    [
        (4, 0, "has 4 device pages; one request needs 5: a window of 3 and the page kept before it"),
        (5, 3, "has 3 host pages; a window of 3 and the page kept before it need 4"),
    ],
)
def test_a_pool_without_room_for_a_window_is_refused(device: int, host: int, words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        simulation(windows={"swa": 3}, kv=(8, 8), swa=(device, host))


@pytest.mark.parametrize(("device", "host"), [(5, 0), (5, 4)])
def test_room_for_one_window_is_enough(device: int, host: int) -> None:
    sim = simulation(windows={"swa": 3}, kv=(8, 8), swa=(device, host))
    assert [free.capacity for free in sim.planner.inventory.free] == [8, 8, device, host]


# Slots of others


def test_who_watches_the_host_is_told_of_slots_of_every_pool() -> None:
    sim = simulation(kv=(8, 8), mamba=(4, 4))
    left: list[tuple[str, list[int]]] = []

    def note(pool: str, slots: Iterable[int]) -> None:
        left.append((pool, list(slots)))

    books = sim.planner.inventory
    books.watch_host(note)
    node = published(sim, [1, 2])
    saved(sim, node)
    pages, states = (list(node.slots_at(place_of(number, Tier.HOST))) for number in (0, 1))
    books.evict(FULL_HOST, 1, dirty=True)

    assert sorted(left) == [("kv", pages), ("mamba", states)]
    assert books.sharing(0) == ["kv"]
    assert books.transfers(1, [5], [6]) == [PoolTransfer("mamba", [5], [6])]


@pytest.mark.parametrize("poisoned", [False, True])
def test_slots_that_a_device_may_still_write_to_are_not_lent_again(poisoned: bool) -> None:
    sim = simulation(kv=(8, 8))
    books = sim.planner.inventory
    slots = books.free[FULL_HOST].allocate(2)

    books.give_back(FULL_HOST, slots, poisoned=poisoned)
    assert books.free[FULL_HOST].quarantined == (2 if poisoned else 0)
    assert books.free[FULL_HOST].available == (6 if poisoned else 8)


def test_a_failed_copy_condemns_where_it_went() -> None:
    sim = simulation(kv=(8, 8), mamba=(4, 4))
    books = sim.planner.inventory
    slots = books.free[place_of(1, Tier.HOST)].allocate(1)

    books.condemn(Tier.HOST, books.transfers(1, [0], slots))
    books.free[place_of(1, Tier.HOST)].release(slots)
    assert [free.quarantined for free in books.free] == [0, 0, 0, 1]


def test_host_slots_that_are_not_ready_are_not_lent() -> None:
    sim = simulation(kv=(8, 8), mamba=(4, 4))
    books = sim.planner.inventory

    books.open_host("mamba", 1)
    books.open_host("kv", 3)
    assert [free.available for free in books.free] == [8, 3, 4, 1]


# What is wrong


def leaked(sim: Simulation, request: RequestState) -> None:
    sim.planner.inventory.free[FULL_DEVICE].allocate(1)


def stolen(sim: Simulation, request: RequestState) -> None:
    request.pages.append(request.pages[-1] + 1)


def shared(sim: Simulation, request: RequestState) -> None:
    request.duplicates.append(request.pages[-1])


def state_leaked(sim: Simulation, request: RequestState) -> None:
    sim.planner.inventory.free[place_of(1, Tier.DEVICE)].allocate(1)


def state_shared(sim: Simulation, request: RequestState) -> None:
    request.snapshots[1] = request.states[1]


def window_shared(sim: Simulation, request: RequestState) -> None:
    number = sim.planner.inventory.names.index("swa")
    sim.planner.inventory.private.append(
        lambda: {place_of(number, Tier.DEVICE): list(request.windows[number].own)[:1]}
    )


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (leaked, ["kv device slots: [1] leaked or stolen"]),
        (stolen, ["kv device slots: [1] leaked or stolen"]),
        (shared, ["kv device slots: slot 0 has two owners"]),
        (state_leaked, ["mamba device slots: [1] leaked or stolen"]),
        (state_shared, ["mamba device slots: slot 0 has two owners"]),
        (window_shared, ["swa device slots: slot 0 has two owners"]),
    ],
    ids=lambda value: value.__name__ if callable(value) else "",
)
def test_a_slot_has_one_owner(damage, words: list[str]) -> None:
    sim = simulation(windows={"swa": 2}, kv=(8, 8), mamba=(4, 4), swa=(8, 8))
    request = sim.open([1, 2])
    sim.load(request)
    sim.planner.extend(request, 2)
    assert sim.planner.inventory.verify() == []

    damage(sim, request)
    assert sim.planner.inventory.verify() == words
    request.lease.close()


def test_slots_of_a_copy_whose_page_is_gone_have_an_owner() -> None:
    sim = simulation(kv=(8, 8))
    node = published(sim, [1, 2, 3, 4])
    saved(sim, node)
    sim.planner.inventory.evict(FULL_DEVICE, 2, dirty=True)
    first, second = sim.open([1, 2, 3, 4, 5]), sim.open([1, 2, 3, 4, 6])
    (load,) = sim.planner.loads.load(first)
    assert sim.planner.inventory.verify() == []
    sim.planner.copy_finished(load, RuntimeError("planted"))
    assert sim.planner.inventory.verify() == []
    assert sim.planner.inventory.free[FULL_DEVICE].quarantined == 2
    for request in (first, second):
        sim.close(request)
    sim.verify()
