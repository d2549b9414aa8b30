"""The planner against stamped memory: random requests under pressure, checked after every step."""

from __future__ import annotations

import random

import pytest

from asynchicache.errors import CapacityError
from asynchicache.planner.request_state import RequestState
from asynchicache.tree.node import FULL_DEVICE, Node, SlotPlace, place_of
from asynchicache.types import MissReason, Tier, WritePolicy
from controller.simulation import Simulation
from soaking import first

ROOMY = {"kv": (64, 128), "mamba": (16, 32)}


def _serve(sim: Simulation, tokens: list[int], stop: int | None = None) -> int:
    sequence = sim.open(tokens)
    sim.prefetch(sequence)
    sim.load(sequence)
    hit = sequence.hit_pages
    assert sim.compute(sequence, stop or len(tokens))
    sim.close(sequence)
    sim.settle()
    sim.verify()
    return hit


def test_second_turn_is_served_from_the_first():
    sim = Simulation(random.Random(0), slots=ROOMY)
    assert _serve(sim, [1, 2, 3, 4]) == 0
    assert _serve(sim, [1, 2, 3, 4, 5, 6]) == 2


def test_a_prompt_is_never_served_whole():
    sim = Simulation(random.Random(0), slots=ROOMY)
    _serve(sim, [1, 2, 3, 4])
    sequence = sim.open([1, 2, 3, 4])
    assert sequence.matched_pages == 0  # the only state is behind the last token
    assert sequence.branching_pages == 1
    sim.close(sequence)


def test_branch_point_becomes_a_hit_on_the_third_visit():
    sim = Simulation(random.Random(0), slots=ROOMY)
    system = [1, 2, 3, 4]
    _serve(sim, [*system, 10, 11])
    second = sim.open([*system, 20, 21])
    sim.load(second)
    assert second.hit_pages == 0
    assert second.branching_pages == 2
    assert sim.compute(second, 4)  # the planner's cut
    assert sim.compute(second, 6)
    sim.close(second)
    sim.settle()
    third = sim.open([*system, 30, 31])
    sim.load(third)
    assert third.hit_pages == 2
    sim.close(third)
    sim.verify()


def test_restart_is_served_from_storage():
    sim = Simulation(random.Random(0), slots=ROOMY)
    _serve(sim, [1, 2, 3, 4])
    after = Simulation(random.Random(0), slots=ROOMY)
    after.storage = sim.storage
    sequence = after.open([1, 2, 3, 4, 5, 6])
    after.prefetch(sequence)
    after.load(sequence)
    assert sequence.hit_pages == 2
    assert sequence.tier is Tier.STORAGE
    after.close(sequence)
    after.verify()


def test_states_kept_off_the_host_die_with_the_device():
    sim = Simulation(random.Random(0), slots={"kv": (64, 128), "mamba": (3, 0)})
    for client in range(5):
        _serve(sim, [100 + client, 2, 3, 4])
    assert _serve(sim, [100, 2, 3, 4, 5, 6]) == 0  # the pages are there, the state was evicted
    assert _serve(sim, [104, 2, 3, 4, 5, 6]) == 2


def test_no_room_for_a_load_falls_back():
    sim = Simulation(random.Random(0), slots={"kv": (6, 32), "mamba": (4, 8)})
    _serve(sim, [1, 2, 3, 4, 5, 6, 7, 8])
    _serve(sim, [9, 9, 9, 9, 9, 9, 9, 9, 9, 9])
    holder = sim.open([7, 7, 7, 7])
    sim.load(holder)
    assert sim.compute(holder, 4)
    sequence = sim.open([1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12])
    sim.planner.inventory.free[0].allocate(sim.planner.inventory.free[0].available)
    assert sequence.matched_pages == 4
    sim.load(sequence)
    assert sequence.hit_pages in (0, 4)
    if not sequence.hit_pages:
        assert sequence.reason is MissReason.DEVICE_CAPACITY
    sim.close(holder)
    sim.close(sequence)


def test_a_closed_cache_lets_go_of_what_only_finished_requests_borrow():
    sim = Simulation(random.Random(0), slots=ROOMY)
    _serve(sim, [1, 2, 3, 4])
    finished, running = sim.open([1, 2, 3, 4, 5, 6]), sim.open([1, 2, 3, 4, 7, 8])
    sim.carry_out(sim.planner.loads.load(finished))
    finished.closed = True
    sim.close(finished)  # its copy is under way, and nobody will tell of its end
    assert finished in sim.planner.inventory.requests

    sim.planner.abandon()

    assert finished.lease.closed
    assert not running.lease.closed
    sim.verify()
    sim.close(running)
    sim.settle()


def test_a_state_whose_copy_fails_after_it_became_the_trees_is_nobodys_again():
    sim = Simulation(random.Random(0), slots=ROOMY)
    _serve(sim, [1, 2, 3, 4])
    sequence = sim.open([1, 2, 3, 4, 5, 6])
    sim.carry_out(sim.planner.loads.load(sequence))  # brings the state to a slot of the request's own
    (slot,) = sequence.states.values()
    sim.planner.extend(sequence, 2)
    sim.carry_out(sim.planner.publish(sequence, 6, final=True))  # which is the tree's from now on
    assert not sequence.states

    while sim.flying:
        sim.end(0, failed=True)
    sim.close(sequence)
    sim.planner.flush()

    states = sim.planner.inventory.free[place_of(1, Tier.DEVICE)]
    assert (states.held, states.quarantined) == (0, 1)
    assert slot not in states.allocate(states.available)


class _Listener:
    """Takes down what a tree tells."""

    def __init__(self) -> None:
        self.told: list[object] = []

    def on_arrive(self, node: Node, place: SlotPlace) -> None:
        self.told.append(("arrived", place))

    def on_evict(self, node: Node, place: SlotPlace, pages: int) -> None:
        self.told.append(("left", place))

    def on_store(self, node: Node, component_id: int) -> None:
        self.told.append(("stored", component_id))

    def on_clear(self, *tiers: Tier) -> None:
        self.told.append(tiers)


def test_a_flush_is_told_of_in_one_word():
    sim = Simulation(random.Random(0), slots=ROOMY)
    _serve(sim, [1, 2, 3, 4])
    sim.planner.inventory.tree.watcher = listener = _Listener()

    sim.planner.flush()

    assert listener.told == [(Tier.DEVICE, Tier.HOST)]
    assert list(sim.planner.inventory.tree.nodes()) == []
    _serve(sim, [1, 2])
    assert ("arrived", FULL_DEVICE) in listener.told


def test_too_long_a_prompt_names_the_numbers():
    sim = Simulation(random.Random(0), slots={"kv": (4, 4), "mamba": (2, 2)})
    with pytest.raises(CapacityError, match=r"10 tokens need 5 pages of 2; the device holds 4"):
        sim.open(list(range(10)))


def test_selective_waits_for_the_second_request():
    sim = Simulation(random.Random(0), slots=ROOMY, policy=WritePolicy.WRITE_THROUGH_SELECTIVE)
    _serve(sim, [1, 2, 3, 4])
    assert not sim.storage
    _serve(sim, [1, 2, 3, 4, 5, 6])
    assert len(sim.storage) == 3  # two pages and the state behind them


def test_write_back_cleans_ahead_of_need():
    slots = {"kv": (16, 64), "mamba": (8, 16)}
    sim = Simulation(random.Random(0), slots=slots, policy=WritePolicy.WRITE_BACK)
    for client in range(6):
        _serve(sim, [client, 1, 2, 3, 4, 5])
    counters = sim.planner.inventory.counters
    assert counters.backed_up
    assert counters.demoted
    assert not counters.lost


SETS: list[tuple[bool, dict[str, int]]] = [
    (False, {}),
    (True, {}),
    (False, {"swa": 2}),
    (True, {"swa": 2}),
    (False, {"swa": 1}),
    (True, {"swa": 3, "near": 1}),
]


@pytest.mark.parametrize("policy", list(WritePolicy))
@pytest.mark.parametrize(("states", "windows"), SETS)
@pytest.mark.parametrize("seed", first(1, range(2)))
def test_random_requests_under_pressure(
    policy: WritePolicy, states: bool, windows: dict[str, int], seed: int
):
    _press(policy, states, windows, seed)


@pytest.mark.soak
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("policy", list(WritePolicy))
@pytest.mark.parametrize(("states", "windows"), SETS)
def test_random_requests_under_pressure_for_long(policy: WritePolicy, states: bool, windows: dict[str, int]):
    for seed in range(1000, 1400):
        _press(policy, states, windows, seed)


def _press(policy: WritePolicy, states: bool, windows: dict[str, int], seed: int) -> None:
    rng = random.Random(seed)
    slots = {"kv": (rng.randint(14, 20), rng.randint(8, 30))}
    if states:
        slots["mamba"] = (rng.randint(7, 9), rng.randint(2, 8))
    for name, pages in windows.items():
        slots[name] = (rng.randint(9, 16), rng.choice([0, rng.randint(pages + 1, 12)]))
    sim = Simulation(rng, states=states, windows=windows, slots=slots, policy=policy)
    histories: list[list[int]] = [[]]
    for _ in range(250):
        _step(sim, rng, histories)
        sim.verify()
    for sequence in list(sim.live):
        sim.close(sequence)
    sim.settle()
    sim.verify()
    assert all(not any(node.locks) for node in sim.planner.inventory.tree.nodes())
    assert sim.hit_tokens


@pytest.mark.parametrize("seed", range(20))
def test_a_failed_device_leaks_and_lends_nothing(seed: int):
    rng = random.Random(seed)
    sim = Simulation(rng, slots={"kv": (24, 40), "mamba": (9, 12)})
    histories: list[list[int]] = [[]]
    for _ in range(rng.randint(20, 80)):
        _step(sim, rng, histories)
    while sim.flying:
        sim.end(rng.randrange(len(sim.flying)), failed=True)
        sim.verify()
    for sequence in list(sim.live):
        sim.close(sequence)
    while sim.writing:
        sim.end_write(0)
    sim.verify()
    inventory = sim.planner.inventory
    quarantined = {free.name: free.quarantined for free in inventory.free}
    for free in inventory.free:
        assert free.held == sum(
            len(node.slots_at(place))
            for place, other in zip(inventory.tree.places, inventory.free, strict=True)
            if other is free
            for node in inventory.tree.nodes()
        ), quarantined


@pytest.mark.parametrize("seed", [5, 751])
def test_copies_that_fail_and_have_ended_leave_no_wrong_byte(seed: int, monkeypatch: pytest.MonkeyPatch):
    """Loads are not compared that failed themselves, or read what another was to bring; all others are, and
    what is written to storage."""
    rng, dice = random.Random(seed), random.Random(seed + 1)
    sim = Simulation(rng, slots={"kv": (24, 40), "mamba": (9, 12)})
    end, check, failures = sim.end, sim.check, list[int]()

    def end_or_fail(index: int) -> None:
        failed = dice.random() < 0.15
        failures.append(failed)
        end(index, failed=failed, ended=failed)

    def load(request: RequestState) -> None:
        failures.clear()
        with monkeypatch.context() as patch:
            patch.setattr(sim, "check", lambda *loaded: (0, 0) if any(failures) else check(*loaded))
            Simulation.load(sim, request)

    monkeypatch.setattr(sim, "end", end_or_fail)
    monkeypatch.setattr(sim, "load", load)
    histories: list[list[int]] = [[]]
    for _ in range(rng.randint(20, 120)):
        _step(sim, rng, histories)
        sim.verify()
    for request in list(sim.live):
        sim.close(request)
    sim.settle()
    sim.verify()


def _step(sim: Simulation, rng: random.Random, histories: list[list[int]]) -> None:
    choice = rng.random()
    if choice < 0.25 and len(sim.live) < 2:
        base = rng.choice(histories)
        base = base[: rng.randint(0, len(base))]
        tokens = (base + [rng.randint(1, 2) for _ in range(rng.randint(1, 6))])[:14]
        sequence = sim.open(tokens)
        if rng.random() < 0.7:
            sim.prefetch(sequence, fail=rng.choice([0, 0, 0.3]))
        sim.load(sequence)
    elif choice < 0.5 and sim.live:
        sequence = rng.choice(sim.live)
        start = sequence.borrowed * 2
        length = rng.randint(start, len(sequence.tokens))
        if sim.compute(sequence, length, final=rng.random() < 0.3):
            histories.append(list(sequence.tokens))
    elif choice < 0.65 and sim.live:
        sim.close(rng.choice(sim.live))
    elif choice < 0.85 and sim.flying:
        sim.end(rng.randrange(len(sim.flying)))
    elif choice < 0.9 and sim.retired:
        sim.end_forward()
    elif sim.writing:
        sim.end_write(rng.randrange(len(sim.writing)), stored=rng.random() < 0.9)


def test_a_backup_that_found_no_room_is_made_up_for():
    """Ten conversations publish at once; the host's state slots are busy with writes to storage."""
    sim = Simulation(random.Random(0), slots={"kv": (64, 64), "mamba": (20, 4)})
    open_requests = []
    for client in range(8):
        sequence = sim.open([100 + client, 1, 2, 3])
        sim.load(sequence)
        assert sim.compute(sequence, 4)
        open_requests.append(sequence)
    while sim.flying:
        sim.end(0)  # every host slot is now taken by a write that has not ended
    assert sim.planner.backups.postponed
    while sim.writing or sim.flying:
        if sim.flying:
            sim.end(0)
        else:
            sim.end_write(0)
            sim.carry_out(sim.planner.backups.retry())
    for sequence in open_requests:
        sim.close(sequence)
    sim.verify()
    assert sum(pool == "mamba" for pool, _ in sim.storage) == 8
    assert not sim.planner.backups.postponed
