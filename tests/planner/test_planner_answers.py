"""What the planner says of a request, and where it says no: reasons, cuts, advice, room."""

from __future__ import annotations

import random
from array import array
from collections.abc import Iterator

import pytest

from asynchicache.errors import CapacityError
from asynchicache.planner.options import PlannerOptions
from asynchicache.planner.planner import Planner
from asynchicache.planner.request_state import RequestState
from asynchicache.tree.node import FULL_DEVICE, FULL_HOST, place_of
from asynchicache.types import MissReason, Tier
from controller.simulation import Simulation

ROOMY = {"kv": (64, 128), "mamba": (16, 32), "swa": (32, 64)}
SYSTEM = list(range(1, 9))
SIMULATIONS: list[Simulation] = []


@pytest.fixture(autouse=True)
def _closed() -> Iterator[None]:
    """Requests that a test leaves open are closed after it."""
    SIMULATIONS.clear()
    yield
    for sim in SIMULATIONS:
        for request in list(sim.live):
            sim.close(request)
        for copy in sim.flying:
            sim.planner.copy_finished(copy, None)


def simulation(*, states: bool = True, window: int = 0, **slots: tuple[int, int]) -> Simulation:
    windows = {"swa": window} if window else {}
    pools = {"kv", *windows, *(["mamba"] if states else [])}
    sizes = {name: slots.get(name, size) for name, size in ROOMY.items() if name in pools}
    SIMULATIONS.append(Simulation(random.Random(0), states=states, windows=windows, slots=sizes))
    return SIMULATIONS[-1]


def served(sim: Simulation, tokens: list[int], *stops: int) -> None:
    """Serve a prompt, publish it where it stops, and let everything end."""
    request = sim.open(tokens)
    sim.load(request)
    for stop in stops or (len(tokens),):
        assert sim.compute(request, stop)
    sim.close(request)
    sim.settle()


def asked(sim: Simulation, tokens: list[int]) -> RequestState:
    return sim.open(tokens)


# Why it was not more


def test_nobody_computed_it() -> None:
    sim = simulation()
    request = asked(sim, SYSTEM)

    assert sim.planner.reason(request) is MissReason.COLD
    assert sim.planner.held_back_by(request) == "kv"
    assert sim.planner.hit_advice(request) == ("", "")


def test_all_but_the_last_page_is_there() -> None:
    sim = simulation()
    served(sim, SYSTEM)
    request = asked(sim, [*SYSTEM, 9])

    assert sim.planner.reason(request) is MissReason.NONE
    sim.load(request)
    assert sim.planner.reason(request) is MissReason.NONE


def test_a_state_is_missing_that_a_stop_would_have_left() -> None:
    sim = simulation()
    served(sim, [*SYSTEM, 20, 21])
    request = asked(sim, [*SYSTEM, 30, 31])

    assert sim.planner.reason(request) is MissReason.STATE
    assert sim.planner.held_back_by(request) == "mamba"
    assert sim.planner.hit_advice(request) == (
        "mamba",
        "publish 'mamba' at 8 tokens: stop a prefill there (request.cuts); where a chat "
        "template rewrites what it repeats, say so with CacheHint(repeats=...)",
    )
    assert sim.planner.cuts(request) == (8, 10)


def test_a_window_had_to_make_room() -> None:
    sim = simulation(states=False, window=2, swa=(4, 0))
    served(sim, SYSTEM)
    served(sim, [50, 51, 52, 53, 54, 55])
    request = asked(sim, [*SYSTEM, 9])

    assert sim.planner.reason(request) is MissReason.WINDOW
    assert sim.planner.hit_advice(request) == (
        "swa",
        "'swa' had to make room for others: raise its device or host slots",
    )
    assert sim.planner.cuts(request) == (8,)


def test_a_window_that_went_with_its_full_pages_was_not_short_of_slots() -> None:
    """The host needs its pages: its copies of both pools go, and the device has a window no more."""
    sim = simulation(states=False, window=2)
    served(sim, SYSTEM)
    inventory = sim.planner.inventory
    inventory.evict(place_of(1, Tier.DEVICE), 64, dirty=True)
    inventory.evict(FULL_HOST, 64, dirty=True)
    request = asked(sim, [*SYSTEM, 9])

    assert sim.planner.reason(request) is MissReason.WINDOW
    assert sim.planner.hit_advice(request)[1].startswith("publish 'swa' at 8 tokens")


@pytest.mark.parametrize(
    ("reason", "advice"),
    [
        (
            MissReason.HOST_CAPACITY,
            "the host holds 128 pages of 'kv': raise them, or let fewer prompts wait at once",
        ),
        (MissReason.DEADLINE, ""),
    ],
)
def test_advice_is_about_what_cut_the_hit(reason: MissReason, advice: str) -> None:
    sim = simulation()
    served(sim, [*SYSTEM, 20, 21])
    request = asked(sim, [*SYSTEM, 30, 31])
    request.cut(reason, below=4)

    assert sim.planner.reason(request) is reason
    assert sim.planner.hit_advice(request)[1] == advice
    request.cut(reason, below=0)
    assert sim.planner.reason(request) is MissReason.STATE, "it did not cut what is there now"


def test_where_nothing_is_held_back_windows_ask_for_no_cut() -> None:
    sim = simulation(states=False, window=2)
    served(sim, SYSTEM)

    assert sim.planner.cuts(asked(sim, [*SYSTEM, 9])) == ()


def test_what_a_request_was_told_itself_counts() -> None:
    sim = simulation()
    request = asked(sim, SYSTEM)
    request.reason = MissReason.DEADLINE

    assert sim.planner.reason(request) is MissReason.DEADLINE


def test_what_was_loaded_reaches_as_far_as_its_pages() -> None:
    sim = simulation()
    served(sim, [*SYSTEM, 20, 21], 8, 10)
    request = asked(sim, [*SYSTEM, 30, 31])
    sim.load(request)

    assert request.hit_pages == 4
    assert sim.planner.hit_advice(request) == ("", "")


# Room


def test_a_prompt_that_no_empty_device_could_hold_is_refused() -> None:
    sim = simulation(kv=(3, 8))

    with pytest.raises(CapacityError, match="8 tokens need 4 pages of 2; the device holds 3"):
        sim.planner.open(array("q", SYSTEM), b"")


def test_no_pages_are_left() -> None:
    sim = simulation(kv=(4, 8))
    request = asked(sim, SYSTEM)
    sim.load(request)

    with pytest.raises(CapacityError, match="5 more kv device slots wanted, 4 of 4 are free"):
        sim.planner.extend(request, 10)
    assert sim.planner.extend(request, 8)["kv"] == [0, 1, 2, 3]


def test_no_state_is_left() -> None:
    sim = simulation(mamba=(1, 2))
    first, second = asked(sim, SYSTEM), asked(sim, [9, 9, 9])
    sim.load(first)

    with pytest.raises(CapacityError, match="1 more mamba device slots wanted, 0 of 1 are free"):
        sim.planner.admit(second)
    sim.close(first)
    sim.planner.admit(second)
    assert second.states


def test_a_request_rests_and_matches_again() -> None:
    sim = simulation()
    served(sim, SYSTEM)
    request = asked(sim, [*SYSTEM, 9])
    sim.planner.rest(request)
    sim.planner.flush()

    assert sim.planner.inventory.free[FULL_DEVICE].held == 0
    sim.planner.rematch(request, prefetched=False)
    assert (request.matched_pages, request.resting) == (0, False)
    sim.close(request)
    sim.verify()


@pytest.mark.parametrize("window", [0, 2])
def test_without_room_for_the_rest_what_is_on_the_device_is_the_hit(window: int) -> None:
    sim = simulation(window=window, kv=(6, 64))
    served(sim, SYSTEM, 4, 8)
    sim.planner.inventory.evict(FULL_DEVICE, 2, dirty=True)
    blocker = asked(sim, [90] * 8)
    sim.load(blocker)
    sim.planner.extend(blocker, 8)
    request = asked(sim, [*SYSTEM, 9])
    assert request.matched_pages == 4
    sim.load(request)

    assert request.hit_pages == 2
    assert sim.planner.reason(request) is MissReason.DEVICE_CAPACITY


@pytest.mark.parametrize("window", [0, 2])
def test_pages_on_the_device_without_a_state_are_no_hit(window: int) -> None:
    sim = simulation(window=window, kv=(7, 64))
    served(sim, SYSTEM, 2, 8)
    other = asked(sim, [*SYSTEM[:6], 90, 91])  # stays, so that pages 2 and 3 of both do
    sim.load(other)
    sim.compute(other, 8)
    sim.settle()
    sim.planner.inventory.evict(FULL_DEVICE, 1, dirty=True)
    free = sim.planner.inventory.free[FULL_DEVICE].available
    blocker = asked(sim, [70] * 2 * free)
    sim.load(blocker)
    sim.planner.extend(blocker, 2 * free)
    request = asked(sim, [*SYSTEM, 9])
    assert request.matched_pages == 4
    sim.load(request)  # and compares the state with what it must be

    assert request.hit_pages == 1


# Snapshots


def test_a_snapshot_is_published_where_it_was_taken() -> None:
    sim = simulation()
    request = asked(sim, [*SYSTEM, 9])
    sim.load(request)
    assert sim.compute(request, 8)
    sim.carry_out(sim.planner.snapshot(request, 8))
    (slot,) = request.snapshots.values()
    sim.carry_out(sim.planner.snapshot(request, 8))

    assert request.snapshots == {1: slot}, "the one that it has is written again"
    sim.settle()
    name = sim.planner.inventory.names[1]
    assert sim.memory[name, Tier.DEVICE][slot] == sim.digests(request)[3]
    sim.carry_out(sim.planner.publish(request, 8))
    sim.settle()
    sim.verify()


def test_without_room_for_a_snapshot_the_state_does_not_pass_for_it() -> None:
    sim = simulation(mamba=(1, 2))
    request = asked(sim, SYSTEM)
    sim.load(request)
    assert sim.compute(request, 4)
    skipped = sim.planner.inventory.counters.states_skipped

    assert sim.planner.snapshot(request, 4) == []
    assert sim.planner.inventory.counters.states_skipped == skipped + 1
    assert request.snapshot_tokens == 4
    sim.carry_out(sim.planner.publish(request, 4))
    assert {transfer.pool for copy in sim.flying for transfer in copy.transfers} == {"kv"}, "no state"


def test_a_model_without_states_has_nothing_to_keep() -> None:
    sim = simulation(states=False)
    request = asked(sim, SYSTEM)
    sim.load(request)

    assert sim.planner.snapshot(request, 0) == []


# Publication


def test_a_shorter_publication_than_the_last_one_is_none() -> None:
    sim = simulation()
    request = asked(sim, SYSTEM)
    sim.load(request)
    assert sim.compute(request, 8)

    assert sim.planner.publish(request, 4) == []
    assert request.borrowed == 4


def test_a_publication_of_nothing_is_none() -> None:
    sim = simulation()
    request = asked(sim, SYSTEM)
    sim.load(request)

    assert sim.planner.publish(request, 0) == []
    sim.verify()


def test_the_last_publication_in_the_middle_of_a_page_keeps_its_state() -> None:
    sim = simulation()
    request = asked(sim, [*SYSTEM, 9])
    sim.load(request)
    assert sim.compute(request, 9, final=True)

    assert request.states, "it belongs to no page, so it is the request's still"
    sim.close(request)
    sim.settle()
    sim.verify()


def test_two_that_end_alike_leave_one_state() -> None:
    sim = simulation()
    first, second = asked(sim, SYSTEM), asked(sim, SYSTEM)
    for request in (first, second):
        sim.load(request)
        assert sim.compute(request, 8, final=True)

    assert not first.states
    assert second.states, "the tree had one already"
    for request in (first, second):
        sim.close(request)
    sim.settle()
    sim.verify()


def test_checkpoints_that_no_page_ends_at_are_refused() -> None:
    spec = simulation().spec
    with pytest.raises(Exception, match="spacing 3 must be a multiple of the page size, 2"):
        Planner(spec, {"kv": (8, 8), "mamba": (4, 4)}, PlannerOptions(checkpoints="3"))


@pytest.mark.parametrize("failing", ["state", "load", "snapshot"])
def test_after_a_copy_that_failed_and_has_ended_slots_are_free_and_nothing_is_published(failing: str) -> None:
    """The cache goes on, and so might the engine; what it computes stands on bytes that never came."""
    sim = simulation()
    served(sim, SYSTEM)
    if failing == "load":
        sim.planner.inventory.evict(FULL_DEVICE, 64, dirty=True)
    request = asked(sim, [*SYSTEM, 9, 10])
    sim.carry_out(sim.planner.loads.load(request))
    if failing == "snapshot":
        sim.settle()
        sim.planner.extend(request, 2)
        sim.carry_out(sim.planner.snapshot(request, 10))
    while sim.flying:
        sim.end(0, failed=True, ended=True)
    if failing != "snapshot":
        sim.planner.extend(request, 2)

    assert sim.planner.publish(request, 10) == []

    assert request.published.lost
    sim.close(request)
    sim.planner.flush()
    assert [(free.held, free.quarantined) for free in sim.planner.inventory.free] == [(0, 0)] * 4
    sim.verify()


def test_what_failed_to_come_is_in_quarantine() -> None:
    sim = simulation()
    served(sim, SYSTEM)
    sim.planner.inventory.evict(FULL_DEVICE, 64, dirty=True)
    request = asked(sim, [*SYSTEM, 9])
    for copy in sim.planner.loads.load(request):
        sim.carry_out([copy])
        sim.end(sim.flying.index(copy), failed=True)

    assert sim.planner.inventory.free[FULL_DEVICE].quarantined == 4
    assert sim.planner.publish(request, 8) == [], "what it stood on is gone"
    assert request.poisoned
    assert request.published.lost
    sim.close(request)
    sim.settle()
    sim.verify()
