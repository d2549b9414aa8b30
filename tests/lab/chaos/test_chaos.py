"""The seeded search: it finds nothing, its runs replay, its scripts travel, and what it finds is cut down."""

from __future__ import annotations

import gc
import logging
from collections import Counter
from pathlib import Path

import msgspec
import pytest

from asynchicache.errors import ConfigError, InternalError
from asynchicache.planner.planner import Planner
from asynchicache_lab.chaos.edges import EDGES
from asynchicache_lab.chaos.faults import KINDS
from asynchicache_lab.chaos.ledger import Ledger
from asynchicache_lab.chaos.run import ScriptReport, run_script
from asynchicache_lab.chaos.script import (
    CacheSizes,
    ChaosClient,
    ClientTurn,
    DeviceFaults,
    Life,
    ModelShape,
    Script,
    ScriptEvent,
)
from asynchicache_lab.chaos.search import Findings, run_seeds, search
from asynchicache_lab.chaos.shrink import Shrinker, violation_kind
from asynchicache_lab.chaos.workload import draw_script

SEEDS = (*range(13), *(200 + edge for edge in EDGES if edge < 27))
ONCE_FOUND = (832, 1210, 1219, 1290, 1897, 3172, 4707, 5150, 7538, 9672)
ONCE_FOUND += (15346, 16334, 16666, 17661, 18345, 30208, 31001, 500152, 508228)
FOUND = Path(__file__).parents[2] / "data" / "chaos"


@pytest.fixture(scope="module")
def findings() -> Findings:
    return run_seeds(SEEDS)


def test_no_seed_finds_a_violation(findings: Findings) -> None:
    assert [(found.seed, found.violations) for found in findings.violations] == []
    assert findings.seeds == len(SEEDS)


def test_seeds_that_once_found_something_find_nothing() -> None:
    assert [(found.seed, found.violations) for found in run_seeds(ONCE_FOUND).violations] == []


def test_a_seed_does_enough(findings: Findings) -> None:
    assert findings.operations.total() >= 150 * len(SEEDS)
    assert len(findings.families) >= 4
    assert min(findings.served[tier] for tier in ("device", "host", "storage", "nowhere")) > 0


def test_few_seeds_use_most_kinds_of_faults(findings: Findings) -> None:
    used = {kind for kind in KINDS if findings.faults[kind]}
    assert used <= set(KINDS)
    assert len(used) >= len(KINDS) * 0.7


@pytest.mark.soak
def test_every_kind_of_fault_is_used_by_many_seeds() -> None:
    found = search(range(1000), 2, lambda done, total: None)

    assert found.violations == []
    assert [kind for kind in KINDS if not found.faults[kind]] == []
    assert set(found.faults) <= set(KINDS)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(100_000, 120_000, 1000))
def test_no_seed_of_many_finds_a_violation(first: int) -> None:
    assert search(range(first, first + 1000), 2, lambda done, total: None).violations == []


def test_a_seed_replays_its_run() -> None:
    runs = [run_script(draw_script(seed)).ledger for seed in (5, 5, 6)]

    assert (runs[0].operations, runs[0].faults, runs[0].served) == (
        runs[1].operations,
        runs[1].faults,
        runs[1].served,
    )
    assert runs[0].operations != runs[2].operations


def test_a_script_survives_its_file(tmp_path: Path) -> None:
    for seed in range(50):
        script = draw_script(seed)
        file = tmp_path / "script.json"
        file.write_text(script.text())
        assert Script.load(file) == script


def test_a_file_that_is_no_script_is_named(tmp_path: Path) -> None:
    file = tmp_path / "script.json"
    file.write_text('{"seed": "seven"}')

    with pytest.raises(ConfigError, match=r"script\.json.*seed"):
        Script.load(file)


def test_all_families_of_models_are_drawn() -> None:
    families = Counter(draw_script(seed).model.family for seed in range(300))

    assert families.keys() >= {"full", "full+mamba", "full+swa", "full+dsa", "full+mamba+swa+dsa"}


def test_errors_that_the_library_only_logs_are_violations(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise InternalError("planted")

    monkeypatch.setattr(Planner, "copy_finished", fail)
    script = msgspec.structs.replace(draw_script(0), lives=draw_script(0).lives[:1])
    before = logging.getLogger("asynchicache").handlers[:]

    violations = run_script(script).violations

    assert any("could not be handled: InternalError: planted" in violation for violation in violations)
    assert logging.getLogger("asynchicache").handlers == before


def needs(script: Script) -> list[str]:
    """A violation that takes a request of bob's, and one after it that waits for storage."""
    turns = [turn for life in script.lives for client in life.clients for turn in client.turns]
    bobs = [place for place, turn in enumerate(turns) if turn.tenant == "bob"]
    return ["wrong bytes: 1"] if bobs and any(turn.durable for turn in turns[bobs[0] + 1 :]) else []


def test_a_script_is_cut_down_to_what_its_violation_takes() -> None:
    def run(script: Script) -> ScriptReport:
        return ScriptReport(script.seed, Ledger(violations=needs(script)), 0.0)

    script = next(
        script for seed in range(100) if needs(script := draw_script(seed)) and len(script.lives) > 1
    )

    smaller, report = Shrinker(run, most_runs=5000).shrink(script, run(script))

    assert report.violations == needs(smaller) != []
    assert (smaller.requests, smaller.events, len(smaller.lives)) == (2, 0, 1)
    assert smaller.model == ModelShape(page_size=smaller.model.page_size)
    life = smaller.lives[0]
    assert life == Life(sizes={"kv": life.sizes["kv"]}, clients=life.clients)


def test_other_violations_are_not_taken_for_the_one_that_was_found() -> None:
    def run(script: Script) -> ScriptReport:
        words = "wrong bytes: 1" if script.requests >= 3 else "hang: 2"
        return ScriptReport(script.seed, Ledger(violations=[words]), 0.0)

    smaller, report = Shrinker(run).shrink(draw_script(1), run(draw_script(1)))

    assert smaller.requests == 3
    assert violation_kind(report.violations[0]) == "wrong bytes"


def test_a_run_that_never_comes_back_to_its_loop_is_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    def spin(*_: object) -> None:
        while True:
            pass

    monkeypatch.setattr(Planner, "open", spin)
    monkeypatch.setattr("asynchicache_lab.chaos.run.CPU_SECONDS", 0.2)

    clients = (ChaosClient(turns=(ClientTurn(prompt=(1, 2, 3)),)),)
    life = Life(sizes={"kv": CacheSizes(device=4, host=4)}, clients=clients)
    violations = run_script(Script(seed=1, model=ModelShape(), lives=(life,))).violations

    gc.collect()  # what it leaves is to warn now, and not in the run of another test
    assert any("no turn of the loop for 0.2 s" in words for words in violations)


def test_a_run_without_requests_is_clean() -> None:
    script = Script(seed=1, model=ModelShape(), lives=(Life(sizes={"kv": CacheSizes(device=4, host=4)}),))

    report = run_script(script)

    assert report.violations == []
    assert report.ledger.operations["open"] == 1  # the one that ends each life


# What the search has found, each as the script that it was cut down to.


@pytest.mark.parametrize("found", sorted(FOUND.glob("*.json")), ids=lambda path: path.stem)
def test_what_was_found_stays_mended(found: Path) -> None:
    assert run_script(Script.load(found)).violations == []


def test_who_drains_a_cache_that_closes_around_a_copy_that_never_ends_is_told() -> None:
    client = ChaosClient(turns=(ClientTurn(prompt=tuple(range(8))),))
    drains = tuple(
        ScriptEvent(what=what, wait=wait) for wait in (0.0005, 0.001) for what in ("drain", "flush")
    )
    life = Life(
        sizes={"kv": CacheSizes(device=8, host=8)},
        clients=(client,),
        events=drains,
        device=DeviceFaults(never=0),
        close=0.01,
    )
    for seed in range(4):
        report = run_script(Script(seed=seed, model=ModelShape(), lives=(life,)))

        assert report.violations == []
        assert report.ledger.faults["transfer.never"] == 1
