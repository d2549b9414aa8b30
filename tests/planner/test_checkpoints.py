"""Where a prefill is cut, by what the option `checkpoints` says."""

from __future__ import annotations

from array import array

import pytest

from asynchicache.errors import ConfigError
from asynchicache.planner.checkpoints import CheckpointPolicy
from asynchicache.planner.hints import NO_HINT, CacheHint
from asynchicache.planner.options import PlannerOptions
from asynchicache.planner.planner import Planner
from asynchicache.planner.request_state import RequestState
from asynchicache.testing.specs import synthetic_spec

PAGE = 4
SLOTS = {"kv": (64, 0), "mamba": (16, 0)}


def serve(planner: Planner, tokens: list[int], hint: CacheHint = NO_HINT) -> tuple[int, tuple[int, ...]]:
    """Prefill one prompt and publish it at every cut; pages restored, and the cuts."""
    request = planner.open(array("q", tokens), b"", hint=hint)
    settle(planner, request, None)
    planner.extend(request, len(tokens) - request.reserved)
    cuts = planner.cuts(request)
    for cut in cuts:
        settle(planner, request, cut)
    planner.release(request)
    return request.hit_pages, cuts


def settle(planner: Planner, request: RequestState, length: int | None) -> None:
    copies = planner.loads.load(request) if length is None else planner.publish(request, length)
    for copy in copies:
        planner.copy_finished(copy, None)


@pytest.mark.parametrize(
    ("text", "policy"),
    [
        ("prompt+output+branch", CheckpointPolicy()),
        ("none", CheckpointPolicy(prompt=False, output=False, branch=False)),
        ("2048", CheckpointPolicy(prompt=False, output=False, branch=False, spacing=2048)),
        ("branch+512+prompt", CheckpointPolicy(output=False, spacing=512)),
    ],
)
def test_words_make_a_policy(text: str, policy: CheckpointPolicy):
    assert CheckpointPolicy.parse(text) == policy


@pytest.mark.parametrize(
    "text", ["", "prompts", "prompt+prompt", "0", "-4", "64+128", "none+prompt", "prompt+"]
)
def test_other_words_are_refused(text: str):
    with pytest.raises(ConfigError, match=r"checkpoints '.*': must be prompt, output, branch and a number"):
        CheckpointPolicy.parse(text)


@pytest.mark.parametrize(
    ("text", "cuts"),
    [
        ("prompt", (40,)),
        ("branch", (24,)),
        ("prompt+branch", (24, 40)),
        ("8", (16, 24, 32, 40)),
        ("prompt+16", (16, 32, 40)),
        ("output", ()),
        ("none", ()),
    ],
)
def test_cuts_lie_behind_what_is_restored(text: str, cuts: tuple[int, ...]):
    assert CheckpointPolicy.parse(text).cuts(12, 40, 24) == cuts
    assert str(CheckpointPolicy.parse(text)) == text


def test_a_spacing_is_a_multiple_of_the_page_size():
    with pytest.raises(ConfigError, match="spacing 6 must be a multiple of the page size, 4"):
        Planner(synthetic_spec(PAGE), SLOTS, PlannerOptions(checkpoints="6"))


def test_prompts_with_a_common_beginning_hit_from_the_third_on():
    planner = Planner(synthetic_spec(PAGE), SLOTS)
    system = list(range(10))  # two pages and a half
    served = [serve(planner, [*system, *range(first, first + 7)]) for first in (100, 200, 300)]
    assert served == [(0, (16,)), (0, (8, 16)), (2, (16,))]
    assert planner.inventory.verify() == []


@pytest.mark.parametrize(("length", "cuts"), [(7, (4,)), (8, (4, 8)), (9, (8,))])
def test_a_prompt_that_will_be_repeated_whole_hits_its_pages(length: int, cuts: tuple[int, ...]):
    """Its last token is computed again, so a state at the end of all its pages is none for it."""
    planner = Planner(synthetic_spec(PAGE), SLOTS)
    assert serve(planner, list(range(length)), CacheHint(repeats=(length,))) == (0, cuts)
    assert serve(planner, list(range(length)))[0] == (length - 1) // PAGE


def test_without_branch_points_they_never_hit():
    planner = Planner(synthetic_spec(PAGE), SLOTS, PlannerOptions(checkpoints="prompt+output"))
    system = list(range(10))
    served = [serve(planner, [*system, *range(first, first + 7)]) for first in (100, 200, 300)]
    assert [pages for pages, _ in served] == [0, 0, 0]


def test_a_spacing_serves_the_second_prompt_already():
    planner = Planner(synthetic_spec(PAGE), SLOTS, PlannerOptions(checkpoints="8"))
    assert serve(planner, list(range(20))) == (0, (8, 16))
    assert serve(planner, [*range(10), *range(100, 110)]) == (2, (16,))
