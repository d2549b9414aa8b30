"""`bench tree` counts hits as a set of prefixes does, and its workload is the one that it says."""

from __future__ import annotations

import json
from collections.abc import Iterable
from io import StringIO

import pytest
from rich.console import Console

from asynchicache.errors import ConfigError
from asynchicache_lab.bench.tree import SETS, present, run_tree
from asynchicache_lab.bench.workload import SCENARIOS, ChatTurn, ChatWorkload, stats, turns

TINY = SCENARIOS["tiny"]


# The workload


@pytest.mark.parametrize(
    ("scenario", "counted"),
    [("tiny", (32, 16_998, 37_345, "05df27664d4b")), ("chat", (512, 268_850, 2_071_403, "3f96dc73885e"))],
)
def test_the_chat_is_the_same_everywhere(scenario, counted):
    assert stats(SCENARIOS[scenario]) == counted


def test_another_seed_is_another_chat():
    assert stats(ChatWorkload(8, 4, 256, seed=1)).digest != stats(TINY).digest


def test_a_turn_continues_its_session_or_goes_back_within_its_last_turn():
    last: dict[int, ChatTurn] = {}
    begun: dict[int, int] = {}
    went_back = 0
    for turn in turns(ChatWorkload(8, 12, 256)):
        before = last.get(turn.session)
        if before is not None:
            shared = common(before.tokens, turn.tokens)
            assert shared >= begun[turn.session]
            went_back += shared < len(before.tokens)
            begun[turn.session] = shared
        else:
            begun[turn.session] = 256
        assert begun[turn.session] < turn.prompt < len(turn.tokens)
        last[turn.session] = turn

    assert 0 < went_back < 30
    assert len({tuple(turn.tokens[:256]) for turn in last.values()}) == 1


def test_every_session_takes_one_turn_a_round():
    chat = list(turns(TINY))

    assert [turn.round for turn in chat] == sorted(turn.round for turn in chat)
    assert {(turn.session, turn.round) for turn in chat} == {(s, r) for s in range(8) for r in range(4)}


def common(one: Iterable[int], other: Iterable[int]) -> int:
    count = 0
    for a, b in zip(one, other, strict=False):
        if a != b:
            break
        count += 1
    return count


# The bench


def naive_hit_rate(page_size: int, *, states: bool) -> float:
    """Hits of a cache that forgets nothing: the set of prefixes that it could give back."""
    known: set[bytes] = set()
    hits = prompts = 0
    for turn in turns(TINY):
        text = turn.tokens.tobytes()
        ends = [end * page_size for end in range(1, len(turn.tokens) // page_size + 1)]
        hits += max((end for end in ends if end <= turn.prompt and text[: end * 8] in known), default=0)
        prompts += turn.prompt
        known |= {text[: end * 8] for end in (ends[-1:] if states else ends)}
    return hits / prompts


@pytest.mark.parametrize("page_size", [16, 64])
def test_hits_are_those_of_a_set_of_prefixes(page_size):
    sets = run_tree("tiny", page_size)["sets"]

    assert sets["full"]["hit_rate"] == pytest.approx(naive_hit_rate(page_size, states=False))
    assert sets["full+mamba"]["hit_rate"] == pytest.approx(naive_hit_rate(page_size, states=True))
    assert sets["full+swa"]["hit_rate"] == sets["full"]["hit_rate"]  # every page is in a window that is kept
    assert sets["full+swa+mamba"]["hit_rate"] == sets["full+mamba"]["hit_rate"]


def test_half_the_room_hits_less():
    fit, half = (run_tree("tiny", fill=fill)["sets"] for fill in ("fit", "half"))

    for name in SETS:
        assert 0 < half[name]["hit_rate"] < fit[name]["hit_rate"]


def test_the_result_is_plain_json_with_stable_keys():
    result = run_tree("tiny", seed=3, window=512)

    assert json.loads(json.dumps(result)) == result
    assert (result["scenario"], result["seed"], result["window"], result["turns"]) == ("tiny", 3, 512, 32)
    assert set(result["sets"]) == set(SETS)
    for row in result["sets"].values():
        assert set(row) == {"turns_s", "match_us", "tokens_s", "hit_rate"}
        assert row["turns_s"] > 0
    assert set(result["full_hit_match_us"]) == {"one_node", "nodes_256"}


def test_the_result_can_be_read():
    written = StringIO()

    Console(file=written, width=100).print(present(run_tree("tiny")))

    assert "full+swa+mamba" in written.getvalue()
    assert "nodes_256" in written.getvalue()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"scenario": "none"}, "scenario 'none' is none of"),
        ({"page_size": 0}, "page_size 0 must be 1 to 512"),
        ({"page_size": 513}, "page_size 513 must be 1 to 512"),
        ({"fill": "full"}, "fill 'full' is none of"),
        ({"window": 0}, "window 0 must be 1"),
    ],
)
def test_arguments_outside_their_rule_are_named(arguments, message):
    with pytest.raises(ConfigError, match=message):
        run_tree(**arguments)
