"""What `bench serve` expects, how it judges, and that it runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from asynchicache.cli.main import main
from asynchicache.errors import ConfigError
from asynchicache_lab.bench.serve.clients import ServeTurn, questions
from asynchicache_lab.bench.serve.handover import HandoverReport
from asynchicache_lab.bench.serve.options import HandoverOptions, ServeBenchOptions
from asynchicache_lab.bench.serve.plain import PlainTurn
from asynchicache_lab.bench.serve.report import ServeReport
from engines import executable

OPTIONS = ServeBenchOptions(num_clients=2, num_rounds=3, first_length=100, request_length=20, output_length=4)


def report(**changes: Any) -> ServeReport:
    """A run in which everything went well."""
    tokens = [[[client, round_] for client in range(2)] for round_ in range(3)]
    kept = [OPTIONS.kept(number) for number in range(3)]
    cached = [[ServeTurn(one, kept[number], 10.0) for one in turns] for number, turns in enumerate(tokens)]
    uncached = [
        [ServeTurn(one, 0, 40.0 + 10 * number) for one in turns] for number, turns in enumerate(tokens)
    ]
    plain = [[PlainTurn([0, round_], 5.0) for round_ in range(3)]]
    found = ServeReport(
        OPTIONS, cached, uncached, list(cached), plain, rss_bytes=[100, 200, 200, 210, 205, 202]
    )
    for name, value in changes.items():
        setattr(found, name, value)
    return found


def test_the_ceiling_is_what_was_computed_in_whole_pages() -> None:
    assert [OPTIONS.prompt(number) for number in range(3)] == [100, 124, 148]
    assert [OPTIONS.kept(number) for number in range(3)] == [0, 96, 112]  # of 103, then of 127 tokens
    assert OPTIONS.ceiling == 2 * (96 + 112)


def test_a_run_in_which_all_went_well() -> None:
    found = report()
    assert found.ok
    result = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert result["cached_tokens"] == result["ceiling_tokens"]
    assert result["ttft_ratio"] == 5.5  # of 50 and 60 ms by 10; the first round has no hits
    assert result["rss_growth"] == pytest.approx(0.01)


@pytest.mark.parametrize("play", ["cached", "uncached", "outage"])
def test_one_other_token_is_a_violation(play: str) -> None:
    found = report()
    rounds = [list(turns) for turns in getattr(found, play)]
    rounds[2][1] = replace(rounds[2][1], tokens=[1, 9])
    assert not report(**{play: rounds}).ok


def test_other_answers_than_those_of_plain_transformers_are_a_violation() -> None:
    assert not report(plain=[[PlainTurn([0, 0], 5.0), PlainTurn([0, 1], 5.0), PlainTurn([0, 3], 5.0)]]).ok


def test_errors_are_violations() -> None:
    assert not report(errors=["client 1"]).ok
    assert not report(unhandled=["Traceback"]).ok


def test_no_two_conversations_begin_alike() -> None:
    asked = questions(OPTIONS)
    assert [[len(one) for one in client] for client in asked] == [[100, 20, 20]] * 2
    assert asked[0][0][:16] != asked[1][0][:16]
    assert asked == questions(OPTIONS)


@pytest.mark.soak
@pytest.mark.engine("redis")
@pytest.mark.parametrize("storage", ["file", "redis"])
def test_it_runs(storage: str, tmp_path: Path) -> None:
    if storage == "redis":
        executable("redis-server")
    file = tmp_path / "result.json"
    sizes = ["--num-clients", "6", "--num-rounds", "4", "--first-length", "200", "--plain-clients", "2"]
    assert main(["bench", "serve", *sizes, "--storage", storage, "--json", str(file)]) == 0
    result = json.loads(file.read_text())
    assert result["cached_tokens"] == result["ceiling_tokens"]
    assert result["tokens_equal"]
    assert result["errors"] == result["unhandled"] == []


def test_a_handover_is_measured_by_medians_and_beside_the_host() -> None:
    found = HandoverReport(HandoverOptions(), [2.0, 1.0, 9.0], [3.0], [4.0, 2.0])
    result = json.loads(json.dumps(found.as_json(), allow_nan=False))
    assert found.ok
    assert (result["storage_ratio"], result["waiting_ratio"]) == (1.5, 1.5)
    found.misses = 1
    assert not found.ok
    assert HandoverOptions(tokens=2000).whole == 1984
    with pytest.raises(ConfigError, match="4090"):
        HandoverOptions(tokens=4090)


@pytest.mark.soak
@pytest.mark.engine("redis")
@pytest.mark.parametrize("model", ["qwen3_5", "deepseek_v4"])
def test_a_prefill_and_a_decoder_are_measured(model: str, tmp_path: Path) -> None:
    executable("redis-server")
    written = tmp_path / "handover.json"
    words = [
        "bench",
        "handover",
        "--model",
        model,
        "--rounds",
        "2",
        "--tokens",
        "200",
        "--json",
        str(written),
    ]
    assert main(words) == 0
    result = json.loads(written.read_text())
    assert result["ok"]
    assert result["storage_ratio"] > 0
