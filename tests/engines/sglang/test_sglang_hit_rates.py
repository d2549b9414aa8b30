"""Hit rates of conversations that outgrow device memory, turn by turn.

`make engines-e2e ARGS="sglang --measure -s -k hit_rates"` runs it; docs/benchmarks/sglang.md has what it
prints. The shape is that of SGLang's pull request 20457: ten clients, twelve turns, a model with states.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import NamedTuple

import pytest
from sglang_checks import HYBRID, ROUNDS, Start, Uncached
from sglang_conversations import Conversations, Turn, compare, hit_rates
from sglang_servers import HICACHE, PAGE, STATES, linker, storage

DEVICE_TOKENS, DEVICE_STATES = 2048, 40
PREFETCHES_ALL = json.dumps({"prefetch_threshold": 1})


@pytest.fixture(scope="module", autouse=True)
def measured(request: pytest.FixtureRequest) -> None:
    if request.config.getoption("--measure") is None:
        pytest.skip("takes minutes, and is not a test: --measure")


def host(ratio: float) -> dict[str, dict[str, int]]:
    """A host tier of so many times the device's pages and states."""
    return {"host_slots": {"kv": int(DEVICE_TOKENS * ratio) // PAGE, "mamba": int(DEVICE_STATES * ratio)}}


class Row(NamedTuple):
    """One server and how it is used.

    Attributes:
        arguments: of the server.
        killed_before: the turn before which it is killed.
        at_once: clients that ask at the same time.
    """

    arguments: list[str]
    killed_before: int = ROUNDS
    at_once: int = 4


def talk(start: Start, folder: Path, row: Row) -> list[Turn]:
    """Have all conversations."""
    talk = Conversations(at_once=row.at_once)
    files = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}
    for turns in (range(row.killed_before), range(row.killed_before, ROUNDS)):
        if turns:
            with start(HYBRID, row.arguments, device_tokens=DEVICE_TOKENS, **files) as server:
                talk.run(server, turns)
                server.kill()
    return talk.turns


@pytest.mark.timeout(3600)
def test_hit_rates_by_turn(
    start: Start, uncached: Uncached, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    assert f"--max-mamba-cache-size={DEVICE_STATES}" in STATES
    of_sglang = [*HICACHE, "--hicache-storage-backend=file"]
    of_sglang += [f"--hicache-storage-backend-extra-config={PREFETCHES_ALL}"]
    small, large = "--hicache-ratio=1.5", "--hicache-ratio=4"
    waiting = "--schedule-policy=lpm"
    rows = {
        "device only": Row([]),
        "HiCache, host 1.5, no storage": Row([*HICACHE, small]),
        "HiCache, host 1.5, SGLang's `file`": Row([*of_sglang, small]),
        "HiCache, host 1.5, asynchicache": Row([*storage(tmp_path / "a"), small]),
        "HiCache, host 4, asynchicache": Row([*storage(tmp_path / "b"), large]),
        "the same, killed after turn 5": Row([*storage(tmp_path / "c"), large], killed_before=6),
        "linker, host 1.5": Row(linker(tmp_path / "d", **host(1.5))),
        "linker, host 4": Row(linker(tmp_path / "e", **host(4))),
        "linker, host 4, killed after turn 5": Row(linker(tmp_path / "f", **host(4)), killed_before=6),
        "HiCache, host 1.5, ten at once": Row([*storage(tmp_path / "g"), small, waiting], at_once=10),
        "linker, host 1.5, ten at once": Row([*linker(tmp_path / "h", **host(1.5)), waiting], at_once=10),
    }
    wanted = request.config.getoption("--measure")
    for name, row in ((name, row) for name, row in rows.items() if wanted in name):
        turns = talk(start, tmp_path / "files", row)
        cached = sum(each.answer.cached for each in turns) / sum(each.answer.prompt for each in turns)
        rates = " | ".join(f"{rate:.3f}" for rate in hit_rates(turns))
        print(f"| {name} | {rates} | {cached:.3f} |", flush=True)
        assert compare(uncached(HYBRID), turns).different == []
