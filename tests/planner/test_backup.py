"""What goes down to the host and to storage: which pages, when, and what is known of storage after it."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping

import pytest

from asynchicache.hashing import page_digests
from asynchicache.planner import backup
from asynchicache.planner.actions import StorageWrite
from asynchicache.planner.backup import BackupPlanner
from asynchicache.transfer.plan import Direction
from asynchicache.tree import tier_copies
from asynchicache.tree.node import FULL, FULL_DEVICE, FULL_HOST, Node, SlotPlace, place_of
from asynchicache.tree.tier_copies import CopyRequest
from asynchicache.types import Tier, WritePolicy, token_array
from controller.simulation import Simulation

STATES = 1
BACK = WritePolicy.WRITE_BACK
HEAD = [1, 2, 3, 4]
SIMULATIONS: list[Simulation] = []


@pytest.fixture(autouse=True)
def _clean() -> Iterator[None]:
    """What a test leaves open is closed after it, and nothing is lost or held."""
    SIMULATIONS.clear()
    yield
    for sim in SIMULATIONS:
        for sequence in list(sim.live):
            sim.close(sequence)
        sim.settle()
        sim.verify()
        assert all(not any(node.locks) for node in sim.planner.inventory.tree.nodes())


def simulation(
    *,
    kv: tuple[int, int] = (64, 64),
    mamba: tuple[int, int] | None = None,
    swa: tuple[int, int] | None = None,
    policy: WritePolicy = BACK,
    memory: Mapping[Tier, int] | None = None,
) -> Simulation:
    """Under write-back nothing goes down by itself."""
    slots = {"kv": kv} | ({"mamba": mamba} if mamba else {}) | ({"swa": swa} if swa else {})
    windows = {"swa": 2} if swa else {}
    sim = Simulation(
        random.Random(0), states=bool(mamba), windows=windows, slots=slots, policy=policy, memory=memory
    )
    SIMULATIONS.append(sim)
    return sim


def published(sim: Simulation, tokens: list[int], *stops: int) -> Node:
    """Compute a prompt, publish it at its stops; the node that it ends in."""
    sequence = sim.open(tokens)
    sim.load(sequence)
    for stop in stops or (len(tokens),):
        assert sim.compute(sequence, stop)
    node = sequence.lease.node
    sim.close(sequence)
    while sim.retired:
        sim.end_forward()
    return node


def writer(sim: Simulation) -> BackupPlanner:
    return sim.planner.backups


def touched(sim: Simulation, ends: list[Node]) -> dict[int, list[bytes]]:
    """By component, the digests of the pages that storage is told of."""
    uses = writer(sim).pages_to_touch(ends)
    return {component_id: [page.digest for page in pages] for component_id, pages in uses.items()}


def written(work: StorageWrite) -> dict[str, tuple[list[bytes], list[int]]]:
    """By pool, digests and slots."""
    return {pool: ([page.digest for page in pages], slots) for pool, (pages, slots) in work.pages.items()}


def saved(sim: Simulation, node: Node) -> None:
    """Copy a path to the host, without a write to storage that follows."""
    for copy in writer(sim).backup(node):
        sim.planner.copy_finished(copy, None)


def stored(sim: Simulation, node: Node) -> None:
    saved(sim, node)
    work = writer(sim).store(node)
    assert work is not None
    writer(sim).write_finished(work, stored=True)


def digests(tokens: list[int]) -> list[bytes]:
    return page_digests(token_array(tokens), 2, b"")


# To the host


@pytest.mark.parametrize(
    ("policy", "due"),
    [
        (WritePolicy.WRITE_THROUGH, [True] * 4),
        (WritePolicy.WRITE_THROUGH_SELECTIVE, [False, False, True, True]),
        (WritePolicy.WRITE_BACK, [False] * 4),
    ],
)
def test_a_policy_says_after_how_many_requests_a_page_is_due(policy: WritePolicy, due: list[bool]) -> None:
    sim = simulation(policy=policy)
    node = published(sim, HEAD)

    found = []
    for hits in range(4):
        node.hits = hits
        found.append(writer(sim).due(node))
    assert found == due


def test_a_backup_copies_what_the_host_lacks_of_a_path_and_nothing_twice() -> None:
    sim = simulation(mamba=(8, 8))
    upper = published(sim, HEAD)
    saved(sim, upper)
    lower = published(sim, [*HEAD, 5, 6, 7, 8, 9, 10])
    before = sim.planner.inventory.counters.backed_up

    (copy,) = writer(sim).backup(lower, period=7)

    assert (copy.direction, copy.publishes, copy.period) == (Direction.BACKUP, lower, 7)
    moved = {
        transfer.pool: (list(transfer.sources), list(transfer.destinations)) for transfer in copy.transfers
    }
    assert moved == {
        "kv": (lower.slots_at(FULL_DEVICE), lower.slots_at(FULL_HOST)),
        "mamba": (lower.slots_at(place_of(STATES, Tier.DEVICE)), lower.slots_at(place_of(STATES, Tier.HOST))),
    }
    assert [len(slots) for slots, _ in moved.values()] == [3, 1]
    assert sim.planner.inventory.counters.backed_up == before + 4
    assert writer(sim).backup(lower) == [], "it is under way"
    assert not writer(sim).lacks_room(lower)
    sim.planner.copy_finished(copy, None)
    assert writer(sim).backup(lower) == [], "it is there"


def test_a_backup_belongs_to_the_period_that_it_begins_in() -> None:
    sim = simulation()
    node = published(sim, HEAD)
    sim.planner.activity.close_period()

    (copy,) = writer(sim).backup(node)
    assert copy.period == sim.planner.activity.period == 1
    sim.planner.copy_finished(copy, None)


@pytest.mark.parametrize(
    ("kv", "mamba", "pools"),
    [((64, 0), (8, 8), []), ((64, 64), (8, 0), ["kv"]), ((64, 64), (8, 8), ["kv", "mamba"])],
)
def test_pools_without_host_slots_stay_on_the_device(
    kv: tuple[int, int], mamba: tuple[int, int], pools: list[str]
) -> None:
    sim = simulation(kv=kv, mamba=mamba)
    node = published(sim, HEAD)

    assert writer(sim).lacks_room(node) == bool(pools)
    copies = writer(sim).backup(node)
    assert [transfer.pool for copy in copies for transfer in copy.transfers] == pools
    assert not writer(sim).postponed
    for copy in copies:
        sim.planner.copy_finished(copy, None)


def held_host(sim: Simulation, node: Node) -> StorageWrite:
    """Take a path to the host and keep it there: it is being written to storage."""
    saved(sim, node)
    work = writer(sim).store(node)
    assert work is not None
    return work


def test_what_finds_no_host_slots_is_owed_and_what_stands_on_it_too() -> None:
    sim = simulation(kv=(64, 4), mamba=(8, 8))
    work = held_host(sim, published(sim, [90, 91]))
    upper = published(sim, [*HEAD, 5, 6, 7, 8])
    lower = published(sim, [*HEAD, 5, 6, 7, 8, 9, 10])
    counters = sim.planner.inventory.counters
    before = counters.backed_up, counters.host_pressure

    assert writer(sim).backup(lower, period=3) == []
    assert (counters.backed_up, counters.host_pressure) == (before[0], before[1] + 4), "only what was tried"
    assert writer(sim).postponed == {
        CopyRequest(upper, FULL): 3,
        CopyRequest(upper, STATES): 3,
        CopyRequest(lower, FULL): 3,
        CopyRequest(lower, STATES): 3,
    }
    writer(sim).write_finished(work, stored=True)


def test_a_state_that_finds_no_host_slot_keeps_back_no_pages() -> None:
    sim = simulation(mamba=(8, 1))
    work = held_host(sim, published(sim, [90, 91]))
    upper = published(sim, HEAD)
    lower = published(sim, [*HEAD, 5, 6])
    pressure = sim.planner.inventory.counters.host_pressure

    (copy,) = writer(sim).backup(lower)
    assert {transfer.pool for transfer in copy.transfers} == {"kv"}
    assert copy.publishes is lower
    assert set(writer(sim).postponed) == {CopyRequest(upper, STATES), CopyRequest(lower, STATES)}
    assert sim.planner.inventory.counters.host_pressure == pressure + 2
    sim.planner.copy_finished(copy, None)

    assert writer(sim).retry() == [], "there is still none"
    assert len(writer(sim).postponed) == 2
    writer(sim).write_finished(work, stored=True)
    (first, second) = writer(sim).retry()[:1], writer(sim).postponed
    assert [transfer.pool for copy in first for transfer in copy.transfers] == ["mamba"]
    assert len(second) == 1, "one slot was given back"
    for copy in first:
        sim.planner.copy_finished(copy, None)


def test_what_is_owed_keeps_its_period_and_its_order() -> None:
    sim = simulation(kv=(64, 4))
    work = held_host(sim, published(sim, list(range(90, 98))))
    one, other = published(sim, [1, 2]), published(sim, [3, 4])
    assert writer(sim).backup(one, period=4) == writer(sim).backup(other, period=6) == []

    writer(sim).write_finished(work, stored=True)
    copies = writer(sim).retry()

    assert [(copy.publishes, copy.period) for copy in copies] == [(one, 4), (other, 6)]
    assert not writer(sim).postponed
    for copy in copies:
        sim.planner.copy_finished(copy, None)


def test_what_is_saved_by_then_or_gone_is_owed_no_more() -> None:
    sim = simulation(kv=(64, 4))
    work = held_host(sim, published(sim, list(range(90, 98))))
    one, other = published(sim, [1, 2]), published(sim, [3, 4])
    assert writer(sim).backup(one) == writer(sim).backup(other) == []
    writer(sim).write_finished(work, stored=True)
    saved(sim, one)
    sim.planner.inventory.evict(FULL_DEVICE, 64, dirty=True)
    assert other.parent is None

    assert writer(sim).retry() == []
    assert not writer(sim).postponed


def test_too_much_that_is_owed_is_given_up_the_oldest_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "_MAX_POSTPONED", 3)
    sim = simulation(kv=(64, 4))
    work = held_host(sim, published(sim, list(range(90, 98))))
    nodes = [published(sim, [first, 2]) for first in range(5)]

    for node in nodes:
        assert writer(sim).backup(node) == []
    assert [want.node for want in writer(sim).postponed] == nodes[2:]
    writer(sim).write_finished(work, stored=True)


def test_a_state_that_is_owed_brings_its_own_pages_along(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were owed as well, and given up for the state."""
    monkeypatch.setattr(backup, "_MAX_POSTPONED", 1)
    sim = simulation(kv=(64, 4), mamba=(8, 8))
    work = held_host(sim, published(sim, list(range(90, 98))))
    upper = published(sim, [1, 2])
    lower = published(sim, [1, 2, 3, 4])
    assert writer(sim).backup(lower) == []
    assert set(writer(sim).postponed) == {CopyRequest(lower, STATES)}

    assert writer(sim).retry() == [], "there is still no room"
    assert set(writer(sim).postponed) == {CopyRequest(lower, STATES)}
    writer(sim).write_finished(work, stored=True)
    (copy,) = writer(sim).retry()
    moved = [(transfer.pool, list(transfer.sources)) for transfer in copy.transfers]
    assert moved == [
        ("kv", upper.slots_at(FULL_DEVICE)),
        ("kv", lower.slots_at(FULL_DEVICE)),
        ("mamba", lower.slots_at(place_of(STATES, Tier.DEVICE))),
    ]
    sim.planner.copy_finished(copy, None)


def test_while_somebody_waits_for_a_path_nothing_else_is_given_host_slots() -> None:
    sim = simulation()
    urgent, other = published(sim, [1, 2]), published(sim, [3, 4])
    writer(sim).urgent.append(urgent)

    assert writer(sim).backup(other, period=5) == []
    assert writer(sim).postponed == {CopyRequest(other, FULL): 5}
    (copy,) = writer(sim).retry()
    assert copy.publishes is urgent
    assert writer(sim).postponed == {CopyRequest(other, FULL): 5}, "its turn comes later"
    sim.planner.copy_finished(copy, None)
    assert writer(sim).backup(urgent) == []
    writer(sim).urgent.remove(urgent)
    (copy,) = writer(sim).retry()
    assert (copy.publishes, copy.period) == (other, 5)
    sim.planner.copy_finished(copy, None)


def test_while_a_path_that_somebody_waits_for_is_written_free_slots_are_for_all() -> None:
    sim = simulation(kv=(64, 2))
    urgent, other, late = (published(sim, [first, 2]) for first in (1, 3, 5))
    writer(sim).urgent.append(urgent)
    (copy,) = writer(sim).backup(urgent)

    (beside,) = writer(sim).backup(other)

    assert beside.publishes is other
    sim.planner.copy_finished(copy, None)
    sim.planner.copy_finished(beside, None)
    assert not writer(sim).backup(late), "it would evict one of them, which is not stored yet"
    writer(sim).urgent.clear()
    for copy in writer(sim).retry():
        sim.planner.copy_finished(copy, None)


def test_where_nothing_can_be_on_the_host_nothing_is_owed() -> None:
    sim = simulation(kv=(64, 0))
    urgent, other = published(sim, [1, 2]), published(sim, [3, 4])
    writer(sim).urgent.append(urgent)

    assert writer(sim).backup(other) == writer(sim).retry() == []
    assert not writer(sim).postponed
    writer(sim).urgent.clear()


def test_room_for_a_path_is_not_made_at_the_cost_of_what_is_to_be_saved() -> None:
    """The host gives up a window, and with it goes a state that is on the device only, and just about to be
    copied: it could not be resumed at."""
    sim = simulation(mamba=(8, 8), swa=(16, 3))
    state, window = (sim.planner.inventory.names.index(name) for name in ("mamba", "swa"))
    upper = published(sim, HEAD)
    saved(sim, upper)
    books = sim.planner.inventory
    books.evict(place_of(state, Tier.HOST), 8, dirty=True)
    lower = published(sim, [*HEAD, 5, 6, 7, 8, 9, 10])
    books.evict(place_of(window, Tier.DEVICE), 2, dirty=True)
    assert [bool(upper.slots_at(place_of(window, tier))) for tier in (Tier.DEVICE, Tier.HOST)] == [
        False,
        True,
    ]
    assert upper.slots_at(place_of(state, Tier.DEVICE))

    copies = writer(sim).backup(lower)

    moved = [(transfer.pool, len(transfer.sources)) for copy in copies for transfer in copy.transfers]
    assert sorted(moved) == [("kv", 3), ("mamba", 1), ("mamba", 1), ("swa", 3)]
    assert not upper.slots_at(place_of(window, Tier.HOST)), "it had to make room"
    for copy in copies:
        sim.planner.copy_finished(copy, None)


def test_room_in_a_shared_memory_is_not_made_at_the_cost_of_what_is_tried_again() -> None:
    """Only its own window could make room for a state, and without it the state is worth nothing."""
    sizes = {"kv": (8, 8), "mamba": (8, 8), "swa": (16, 8)}
    spec = simulation(**sizes).spec
    slot_bytes = {pool.name: pool.slot_bytes(spec.page_size) for pool in spec.pools}
    sim = simulation(**sizes, memory={Tier.HOST: 2 * (slot_bytes["kv"] + slot_bytes["swa"])})
    state, window = (sim.planner.inventory.names.index(name) for name in ("mamba", "swa"))
    node = published(sim, HEAD)
    writer(sim).postponed[CopyRequest(node, window)] = 0
    for copy in writer(sim).retry():
        sim.planner.copy_finished(copy, None)
    sim.planner.inventory.evict(place_of(window, Tier.DEVICE), 2, dirty=True)
    assert node.slots_at(place_of(window, Tier.HOST))
    assert node.slots_at(place_of(state, Tier.DEVICE))

    writer(sim).postponed[CopyRequest(node, state)] = 0
    for copy in writer(sim).retry():
        assert all(transfer.sources for transfer in copy.transfers)
        sim.planner.copy_finished(copy, None)
    assert sim.planner.inventory.verify() == []


def test_paths_that_somebody_waits_for_get_host_slots_in_turn() -> None:
    sim = simulation()
    nodes = [published(sim, [first, 2]) for first in range(2)]
    writer(sim).urgent += nodes

    (copy,) = [copy for node in nodes[::-1] for copy in writer(sim).backup(node)]
    assert copy.publishes is nodes[0]
    sim.planner.copy_finished(copy, None)
    assert writer(sim).retry() == [], (
        "the first has all that it needs, and keeps its place until it is stored"
    )
    writer(sim).urgent.remove(nodes[0])
    (copy,) = writer(sim).retry()
    assert copy.publishes is nodes[1]
    writer(sim).urgent.clear()
    sim.planner.copy_finished(copy, None)


def test_a_path_longer_than_the_host_waits_for_no_room() -> None:
    sim = simulation(kv=(64, 3))
    node = published(sim, list(range(8)))
    assert tier_copies.missing_on_host(sim.planner.inventory.tree, node)
    assert not writer(sim).lacks_room(node)


# Ahead of need


@pytest.mark.parametrize(("more", "cleaned"), [(2, 0), (3, 1), (4, 1), (5, 2)])
def test_so_many_pages_are_kept_free_or_clean(more: int, cleaned: int) -> None:
    """Four of thirty-two are the target; two conversations of two pages are the first to go."""
    sim = simulation(kv=(32, 64))
    assert writer(sim)._clean_target == 4
    first = published(sim, [1, 2, 3, 4])
    second = published(sim, [5, 6, 7, 8])
    filler = sim.open([9] * 48)
    sim.load(filler)
    sim.planner.extend(filler, 48 - 2 * (4 - 2))  # 22 pages; 26 are taken
    sim.planner.extend(filler, 2 * more)  # so 6 - more are free

    copies = writer(sim).clean()

    assert sim.planner.inventory.free[FULL_DEVICE].available == 6 - more
    assert [copy.publishes for copy in copies] == [first, second][:cleaned]
    for copy in copies:
        sim.planner.copy_finished(copy, None)
    sim.planner.inventory.evict(FULL_DEVICE, 64, dirty=False)
    assert sim.planner.inventory.free[FULL_DEVICE].available == 6 - more + 2 * cleaned, (
        "those that are clean may go"
    )


def test_only_under_write_back_pages_are_cleaned() -> None:
    for policy in (WritePolicy.WRITE_THROUGH, WritePolicy.WRITE_THROUGH_SELECTIVE):
        sim = simulation(kv=(4, 8), policy=policy)
        sequence = sim.open(list(range(8)))
        sim.load(sequence)
        sim.planner.extend(sequence, 8)
        assert writer(sim).clean() == []


# To storage


def test_a_write_has_what_is_on_the_host_and_not_in_storage() -> None:
    sim = simulation(mamba=(8, 8))
    upper = published(sim, HEAD)
    stored(sim, upper)
    tokens = [*HEAD, 5, 6, 7, 8]
    lower = published(sim, tokens)
    assert writer(sim).store(lower) is None, "it is not on the host yet"
    saved(sim, lower)

    work = writer(sim).store(lower)

    assert work is not None
    chain = digests(tokens)
    assert written(work) == {
        "kv": (chain[2:], lower.slots_at(FULL_HOST)),
        "mamba": (chain[3:], lower.slots_at(place_of(STATES, Tier.HOST))),
    }
    assert [(mark.node, mark.component_id, mark.slots) for mark in work.marks] == [
        (lower, FULL, 2),
        (lower, STATES, 1),
    ]
    assert (upper.stored, lower.stored) == (0b11, 0b11)
    assert writer(sim).store(lower) is None, "nobody writes it twice"
    assert writer(sim).storing() == {lower}
    assert writer(sim).writes_in_flight() == {(lower, FULL), (lower, STATES)}
    writer(sim).write_finished(work, stored=True)
    assert (writer(sim).storing(), writer(sim).writes_in_flight(), lower.stored) == (set(), set(), 0b11)


def test_what_a_write_reads_stays_until_it_ends() -> None:
    sim = simulation(mamba=(8, 8))
    node = published(sim, HEAD)
    saved(sim, node)
    work = writer(sim).store(node)
    assert work is not None
    books = sim.planner.inventory
    books.evict(place_of(STATES, Tier.HOST), 8, dirty=True)
    books.evict(FULL_HOST, 64, dirty=True)
    assert [free.held for free in books.free] == [2, 2, 1, 1]

    writer(sim).write_finished(work, stored=True)
    books.evict(place_of(STATES, Tier.HOST), 8, dirty=True)
    books.evict(FULL_HOST, 64, dirty=True)
    assert [free.held for free in books.free] == [2, 0, 1, 0]


def test_a_state_alone_keeps_the_pages_that_it_is_behind() -> None:
    sim = simulation(mamba=(8, 8))
    node = published(sim, HEAD)
    stored(sim, node)
    node.stored = 0b01
    work = writer(sim).store(node)
    assert work is not None
    assert [*work.pages] == ["mamba"]
    sim.planner.inventory.evict(FULL_DEVICE, 64, dirty=True)
    sim.planner.inventory.evict(FULL_HOST, 64, dirty=True)
    assert sim.planner.inventory.free[FULL_HOST].held == 2
    writer(sim).write_finished(work, stored=True)


def test_a_path_is_in_flight_from_the_first_copy_to_the_end_of_the_write() -> None:
    sim = simulation(mamba=(8, 8))
    node = published(sim, HEAD)
    assert (writer(sim).in_flight(node), writer(sim).is_stored(node)) == (False, False)
    (copy,) = writer(sim).backup(node)
    assert writer(sim).in_flight(node)
    sim.planner.copy_finished(copy, None)
    assert (writer(sim).in_flight(node), writer(sim).is_stored(node)) == (False, False)
    work = writer(sim).store(node)
    assert work is not None
    assert (writer(sim).in_flight(node), writer(sim).is_stored(node)) == (True, False)
    writer(sim).write_finished(work, stored=True)
    assert (writer(sim).in_flight(node), writer(sim).is_stored(node)) == (False, True)


def test_a_path_is_in_flight_where_any_of_its_nodes_is() -> None:
    sim = simulation()
    upper = published(sim, HEAD)
    work = held_host(sim, upper)
    lower = published(sim, [*HEAD, 5, 6])
    other = published(sim, [7, 8])

    assert (writer(sim).in_flight(lower), writer(sim).in_flight(other)) == (True, False)
    writer(sim).write_finished(work, stored=True)
    assert not writer(sim).in_flight(lower)
    (copy,) = writer(sim).backup(lower)
    assert (writer(sim).in_flight(upper), writer(sim).in_flight(lower)) == (False, True)
    sim.planner.copy_finished(copy, None)


def test_what_is_stored_already_is_not_in_flight_though_it_is_copied() -> None:
    """Storage brought it, the device computes it anew and saves it: nothing of it comes nearer to storage."""
    sim = simulation()
    node = published(sim, HEAD)
    node.stored = 0b1
    (copy,) = writer(sim).backup(node)

    assert not writer(sim).in_flight(node)
    assert writer(sim).is_stored(node)
    sim.planner.copy_finished(copy, None)


def test_each_component_of_a_path_must_be_stored() -> None:
    sim = simulation(mamba=(8, 8))
    upper = published(sim, HEAD)
    stored(sim, upper)
    lower = published(sim, [*HEAD, 5, 6])
    stored(sim, lower)
    root = upper.parent
    assert root is not None

    for node in (upper, lower):
        for bits in (0b00, 0b01, 0b10):
            node.stored = bits
            assert not writer(sim).is_stored(lower), (node, bits)
        node.stored = 0b11
    assert writer(sim).is_stored(lower)
    assert writer(sim).is_stored(root), "of nothing all is stored"


def test_of_a_window_what_its_end_needs_must_be_stored() -> None:
    sim = simulation(swa=(16, 16))
    upper = published(sim, HEAD)
    lower = published(sim, [*HEAD, 5, 6, 7, 8, 9, 10])
    stored(sim, upper)
    stored(sim, lower)
    assert writer(sim).is_stored(lower)

    upper.stored = 0b01
    assert writer(sim).is_stored(lower), "the lower one's three pages are kept for it"
    assert not writer(sim).is_stored(upper)
    lower.stored = 0b01
    assert not writer(sim).is_stored(lower)


def test_what_was_evicted_meanwhile_is_not_known_to_be_stored() -> None:
    sim = simulation()
    node = published(sim, HEAD)
    stored(sim, node)
    sim.planner.flush()

    assert node.parent is None
    assert not writer(sim).is_stored(node)


# What storage is told of uses, and asked


def test_uses_are_told_beginnings_last_and_the_last_path_last() -> None:
    sim = simulation(mamba=(8, 8))
    head, one, other = (published(sim, HEAD + tail) for tail in ([], [5, 6, 7, 8], [9, 10]))
    for node in (head, one, other):
        saved(sim, node)
        stored_now = writer(sim).store(node)
        assert stored_now is not None
        writer(sim).write_finished(stored_now, stored=True)
    first, second = digests([*HEAD, 5, 6, 7, 8]), digests([*HEAD, 9, 10])

    assert touched(sim, [one, other]) == {
        FULL: [first[3], first[2], second[2], first[1], first[0]],
        STATES: [first[3], second[2]],
    }
    assert touched(sim, [other, one]) == {
        FULL: [second[2], first[3], first[2], first[1], first[0]],
        STATES: [second[2], first[3]],
    }
    one.stored = 0b10
    assert touched(sim, [one]) == {FULL: [first[1], first[0]], STATES: [first[3]]}
    one.stored = head.stored = 0
    assert touched(sim, [one]) == {}
    assert touched(sim, []) == {}


def test_of_windows_the_use_of_what_an_end_needs_is_told() -> None:
    sim = simulation(swa=(16, 16))
    tokens = [*HEAD, 5, 6, 7, 8, 9, 10]
    upper, middle, lower = published(sim, HEAD), published(sim, tokens[:8]), published(sim, tokens)
    for node in (upper, middle, lower):
        saved(sim, node)
    for node in sim.planner.inventory.tree.nodes():  # some were cut where a window begins
        node.stored = 0b11
    chain = digests(tokens)

    assert touched(sim, [lower]) == {FULL: chain[::-1], 1: chain[:1:-1]}
    assert touched(sim, [upper]) == {FULL: chain[1::-1], 1: chain[1::-1]}
    assert touched(sim, [upper, lower])[1] == [chain[1], chain[0], *chain[:1:-1]]
    assert writer(sim).pages_marked_stored(lower)[1] == {FULL: range(5), 1: [2, 3, 4]}


def test_a_window_that_storage_lost_a_page_of_is_written_anew() -> None:
    sim = simulation(swa=(16, 16))
    node = published(sim, HEAD)
    stored(sim, node)
    assert node.stored == 0b11

    writer(sim).unmark(node, 1, {0: False, 1: True}, written=())
    assert node.stored == 0b01
    work = writer(sim).store(node)
    assert work is not None
    assert written(work) == {"swa": (digests(HEAD)[:1], node.slots_at(place_of(1, Tier.HOST))[:1])}
    writer(sim).write_finished(work, stored=True)


def test_claims_are_all_pages_of_a_path_and_what_is_marked_of_others() -> None:
    sim = simulation(mamba=(8, 8))
    tokens = [*HEAD, 5, 6, 7, 8]
    upper, lower = published(sim, HEAD), published(sim, tokens)
    chain = digests(tokens)

    assert writer(sim).pages_marked_stored(lower) == (chain, {FULL: range(4)})
    upper.stored = 0b10
    assert writer(sim).pages_marked_stored(lower) == (chain, {FULL: range(4), STATES: [1]})
    lower.stored = 0b10
    assert writer(sim).pages_marked_stored(lower) == (chain, {FULL: range(4), STATES: [1, 3]})
    assert writer(sim).pages_marked_stored(upper) == (chain[:2], {FULL: range(2), STATES: [1]})
    root = upper.parent
    assert root is not None
    assert writer(sim).pages_marked_stored(root) == ([], {FULL: range(0)})


def test_what_storage_lost_is_written_anew_and_what_it_has_is_not() -> None:
    sim = simulation(mamba=(8, 8))
    tokens = [*HEAD, 5, 6, 7, 8, 9, 10]
    upper, lower = published(sim, HEAD), published(sim, tokens)
    for node in (upper, lower):
        stored(sim, node)
    chain = digests(tokens)

    answers = {0: True, 1: True, 2: True, 3: False, 4: True}
    writer(sim).unmark(lower, FULL, answers, written=())
    assert (upper.stored, lower.stored) == (0b11, 0b10)
    work = writer(sim).store(lower)
    assert work is not None
    assert written(work) == {"kv": ([chain[3]], [lower.slots_at(FULL_HOST)[1]])}
    writer(sim).write_finished(work, stored=True)
    assert lower.stored == 0b11

    writer(sim).unmark(lower, STATES, {1: False, 4: True}, written=())
    assert (upper.stored, lower.stored) == (0b01, 0b11), "the state of the upper one's end"
    work = writer(sim).store(lower)
    assert work is not None
    assert written(work) == {"mamba": ([chain[1]], upper.slots_at(place_of(STATES, Tier.HOST)))}
    writer(sim).write_finished(work, stored=True)


@pytest.mark.parametrize(("lost", "upper_bits", "lower_bits"), [(0, 0, 1), (1, 0, 1), (2, 1, 0), (4, 1, 0)])
def test_a_page_belongs_to_one_node(lost: int, upper_bits: int, lower_bits: int) -> None:
    sim = simulation()
    upper, lower = published(sim, HEAD), published(sim, [*HEAD, 5, 6, 7, 8, 9, 10])
    for node in (upper, lower):
        stored(sim, node)

    writer(sim).unmark(lower, FULL, {page: page != lost for page in range(5)}, written=())
    assert (upper.stored, lower.stored) == (upper_bits, lower_bits)


def test_what_was_on_its_way_when_storage_was_asked_is_not_lost() -> None:
    sim = simulation()
    node = published(sim, HEAD)
    stored(sim, node)

    writer(sim).unmark(node, FULL, {0: False, 1: False}, written={node})
    assert node.stored == 1
    node.stored = 0
    work = writer(sim).store(node)
    assert work is not None
    writer(sim).unmark(node, FULL, {0: False, 1: False}, written=())
    assert node.stored == 1, "it is being written again"
    writer(sim).write_finished(work, stored=True)


def test_what_was_written_since_storage_was_asked_is_not_lost() -> None:
    """Two ask at once: the first answer has the pages written anew before the second one comes."""
    sim = simulation()
    node = published(sim, HEAD)
    stored(sim, node)
    lost = {0: False, 1: False}

    with writer(sim).noting_writes() as second:
        with writer(sim).noting_writes() as first:
            pass
        writer(sim).unmark(node, FULL, lost, written=first)
        stored(sim, node)
    assert (first, second) == (set(), {node})
    writer(sim).unmark(node, FULL, lost, written=second)
    assert node.stored == 1
    with writer(sim).noting_writes() as third:
        pass
    writer(sim).unmark(node, FULL, lost, written=third)
    assert node.stored == 0


def test_too_much_to_remember_is_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(backup, "_MAX_REMEMBERED", 3)
    sim = simulation()
    first, second = published(sim, [1, 2, 3, 4, 5, 6]), published(sim, [7, 8, 9, 10, 11, 12])
    for node in (first, second):
        stored(sim, node)
        writer(sim).unmark(node, FULL, {0: True, 1: True, 2: False}, written=())

    sizes = []
    for node in (first, second):
        work = writer(sim).store(node)
        assert work is not None
        sizes.append(len(work.pages["kv"][0]))
        writer(sim).write_finished(work, stored=True)
    assert sizes == [3, 1]


class Listener:
    """Takes down what a tree tells of storage."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def on_arrive(self, node: Node, place: SlotPlace) -> None: ...

    def on_evict(self, node: Node, place: SlotPlace, pages: int) -> None: ...

    def on_store(self, node: Node, number: int) -> None:
        self.told.append((node, number))

    def on_clear(self, *tiers: Tier) -> None:
        self.told.append(tiers)


def listening(sim: Simulation) -> Listener:
    listener = Listener()
    sim.planner.inventory.tree.watcher = listener
    return listener


def test_what_is_stored_is_told_of_parents_first() -> None:
    sim = simulation(mamba=(8, 8))
    node = published(sim, HEAD)
    saved(sim, node)
    work = writer(sim).store(node)
    assert work is not None
    upper = sim.planner.inventory.tree.split(node, 1)
    listener = listening(sim)

    writer(sim).write_finished(work, stored=True)
    assert listener.told == [(upper, FULL), (node, FULL), (node, STATES)]


@pytest.mark.parametrize("outcome", ["failed", "forgotten"])
def test_what_is_not_there_is_not_told_of(outcome: str) -> None:
    sim = simulation()
    node = published(sim, HEAD)
    saved(sim, node)
    work = writer(sim).store(node)
    assert work is not None
    if outcome == "forgotten":
        writer(sim).forget_stored()
    listener = listening(sim)

    writer(sim).write_finished(work, stored=outcome == "forgotten")
    assert listener.told == []
    assert node.stored == 0
    assert not writer(sim).storing()


def test_storage_that_is_empty_has_nothing_of_the_whole_tree() -> None:
    sim = simulation()
    nodes = [published(sim, HEAD), published(sim, [*HEAD, 5, 6]), published(sim, [9, 9])]
    for node in nodes:
        stored(sim, node)
    writer(sim).unmark(nodes[0], FULL, {0: True, 1: False}, written=())
    listener = listening(sim)
    forgotten = writer(sim).forgotten

    writer(sim).forget_stored()

    assert [node.stored for node in nodes] == [0, 0, 0]
    assert listener.told == [(Tier.STORAGE,)]
    assert writer(sim).forgotten != forgotten
    work = writer(sim).store(nodes[0])
    assert work is not None
    assert len(work.pages["kv"][0]) == 2, "what it had of it is gone too"
    writer(sim).write_finished(work, stored=True)
