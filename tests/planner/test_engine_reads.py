"""What is read from storage beside pages on their way to the host from the pages of an engine."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import pytest

from asynchicache.planner.actions import Copy
from asynchicache.planner.planner import Planner
from asynchicache.planner.readings import ReadPlan, ReadResult
from asynchicache.planner.request_state import RequestState
from asynchicache.types import MissReason, Outcome
from controller.simulation import small_spec

SIZE = 2
PAGES = 8
PROMPT = array("q", range(1, SIZE * PAGES + 2))
SAVED = 4
"""Pages of the prompt that the engine has computed."""

KV, MAMBA = 0, 1


def opened() -> Planner:
    slots = {"kv": (0, 32), "mamba": (0, 8)}
    return Planner(small_spec(page_size=SIZE), slots, engine_pages={"kv": 32, "mamba": 8})


def saving(planner: Planner, *, states: bool) -> Copy:
    """The copy of the first pages to the host begins."""
    request = planner.open(PROMPT[: SAVED * SIZE + 1], b"")
    (load,) = planner.engine.load(request, {})
    planner.copy_finished(load, None)
    named = {"kv": range(SAVED), "mamba": [0]}
    (copy,) = planner.engine.backup(request, SAVED, named, states=states, usable=True)
    planner.release(request)
    return copy


def asked(planner: Planner, request: RequestState, states: Sequence[int]) -> ReadPlan:
    """What is read of a store that has all full pages, and these states."""
    query = planner.prefetches.make_query(request.tokens, b"")
    assert query is not None
    flags = bytes(page in states for page in range(query.pages))
    plan = planner.prefetches.choose(query, {KV: b"\1" * query.pages, MAMBA: flags}, request)
    if plan.reading is None:
        planner.prefetches.release(query)
    return plan


def read(planner: Planner) -> list[ReadResult]:
    """All reads begin, and everything arrives."""
    reads = list(iter(planner.prefetches.next_read, None))
    return [
        result for one in reads for result in planner.prefetches.deliver(one, [Outcome.HIT] * len(one.pages))
    ]


def ended(planner: Planner, request: RequestState) -> int:
    """Pages of the prompt that memory restores in the end, when nothing leaks."""
    planner.rematch(request)
    pages = request.match.pages
    planner.release(request)
    planner.flush()
    assert planner.inventory.verify() == []
    assert [free.held for free in planner.inventory.free] == [0] * len(planner.inventory.free)
    return pages


@pytest.mark.parametrize("first", ["the copy", "the read"])
def test_pages_that_are_being_saved_are_not_read(first: str) -> None:
    """Their slots are taken: what storage has of them came in vain."""
    planner = opened()
    copy = saving(planner, states=False)
    request = planner.open(PROMPT, b"")
    plan = asked(planner, request, [PAGES - 1])

    assert plan.reading is not None
    assert plan.reading.pages == {KV: [4, 5, 6, 7], MAMBA: [7]}
    if first == "the copy":
        planner.copy_finished(copy, None)
    (result,) = read(planner)
    assert (result.pages, result.reason) == (PAGES, MissReason.NONE)
    if first == "the read":
        planner.rematch(request)
        assert request.match.pages == 0
        planner.copy_finished(copy, None)
    assert ended(planner, request) == PAGES


def test_nothing_is_asked_for_where_all_is_being_saved() -> None:
    planner = opened()
    copy = saving(planner, states=True)
    request = planner.open(PROMPT[: SAVED * SIZE + 1], b"")

    assert planner.prefetches.make_query(request.tokens, b"") is None
    planner.copy_finished(copy, None)
    assert ended(planner, request) == SAVED


def test_a_state_before_pages_that_are_being_saved_is_not_read_again() -> None:
    """It came for an earlier request, whose pages gave way to those that are being saved."""
    planner = opened()
    early = planner.open(PROMPT[: SAVED * SIZE + 1], b"")
    assert asked(planner, early, [SAVED - 1]).reading is not None
    copy = saving(planner, states=False)
    read(planner)
    request = planner.open(PROMPT, b"")
    plan = asked(planner, request, [SAVED - 1])

    assert plan.reading is None
    planner.copy_finished(copy, None)
    planner.release(early)
    assert ended(planner, request) == SAVED


def test_a_read_behind_pages_that_were_never_saved_gives_nothing() -> None:
    planner = opened()
    copy = saving(planner, states=False)
    request = planner.open(PROMPT, b"")
    assert asked(planner, request, [PAGES - 1]).reading is not None
    planner.copy_finished(copy, RuntimeError("planted"))

    (result,) = read(planner)
    assert result.pages == 0
    planner.rematch(request)
    assert request.match.pages == 0
    planner.release(request)
    planner.flush()
    assert planner.inventory.verify() == []


def test_room_for_one_window_divides_no_node_whose_other_window_is_saved() -> None:
    """What the engine saved first has no pages of `swa`, and its pages of `near` must go in part."""
    slots = {"kv": (0, 32), "swa": (0, 16), "near": (0, 3)}
    spec = small_spec(page_size=SIZE, states=False, windows={"swa": 4, "near": 1})
    planner = Planner(spec, slots, engine_pages={"kv": 32, "swa": 32, "near": 32})

    def saved(pages: int, *names: str) -> None:
        request = planner.open(PROMPT[: pages * SIZE + 1], b"")
        for load in planner.engine.load(request, {}):
            planner.copy_finished(load, None)
        named = {name: range(pages) for name in names}
        for copy in planner.engine.backup(request, pages, named, states=True, usable=True):
            assert all(len(one.sources) == len(one.destinations) for one in copy.transfers)
            planner.copy_finished(copy, None)
        planner.release(request)

    saved(3, "kv", "near")
    saved(5, "kv")
    saved(5, "kv", "swa", "near")
    assert planner.inventory.counters.backed_up == 3 + 2 + 2 + 5 + 2
