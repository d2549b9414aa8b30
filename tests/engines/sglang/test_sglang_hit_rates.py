"""Hit rates of conversations that outgrow device memory, turn by turn.

`make engines-e2e ARGS="sglang --measure -s -k hit_rates"` runs it; docs/benchmarks/sglang.md has what it
prints. The shape is that of SGLang's pull request 20457: ten clients, twelve turns, a model with states.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang_checks import HYBRID, ROUNDS, Start, Uncached
from sglang_conversations import Conversations, Turn, compare, hit_rates
from sglang_servers import HICACHE, PAGE, STATES, linker, storage

DEVICE_TOKENS, DEVICE_STATES = 2048, 40
PREFETCHES_ALL = json.dumps({"prefetch_threshold": 1})


@pytest.fixture(scope="module", autouse=True)
def measured(request: pytest.FixtureRequest) -> None:
    if not request.config.getoption("--measure"):
        pytest.skip("takes minutes, and is not a test: --measure")


def host(ratio: float) -> dict[str, dict[str, int]]:
    """A host tier of so many times the device's pages and states."""
    return {"host_slots": {"kv": int(DEVICE_TOKENS * ratio) // PAGE, "mamba": int(DEVICE_STATES * ratio)}}


def talk(start: Start, folder: Path, arguments: list[str], restart_before: int) -> list[Turn]:
    """Have all conversations; a server that is restarted is killed."""
    talk = Conversations()
    files = {"SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR": str(folder)}
    for turns in (range(restart_before), range(restart_before, ROUNDS)):
        if turns:
            with start(HYBRID, arguments, device_tokens=DEVICE_TOKENS, **files) as server:
                talk.run(server, turns)
                server.kill()
    return talk.turns


@pytest.mark.timeout(3600)
def test_hit_rates_by_turn(start: Start, uncached: Uncached, tmp_path: Path) -> None:
    assert f"--max-mamba-cache-size={DEVICE_STATES}" in STATES
    of_sglang = [*HICACHE, "--hicache-storage-backend=file"]
    of_sglang += [f"--hicache-storage-backend-extra-config={PREFETCHES_ALL}"]
    rows = {
        "device only": ([], ROUNDS),
        "HiCache, host 1.5, no storage": ([*HICACHE, "--hicache-ratio=1.5"], ROUNDS),
        "HiCache, host 1.5, SGLang's `file`": ([*of_sglang, "--hicache-ratio=1.5"], ROUNDS),
        "HiCache, host 1.5, asynchicache": ([*storage(tmp_path / "a"), "--hicache-ratio=1.5"], ROUNDS),
        "HiCache, host 4, asynchicache": ([*storage(tmp_path / "b"), "--hicache-ratio=4"], ROUNDS),
        "the same, killed after turn 5": ([*storage(tmp_path / "c"), "--hicache-ratio=4"], 6),
        "linker, host 1.5": (linker(tmp_path / "d", **host(1.5)), ROUNDS),
        "linker, host 4": (linker(tmp_path / "e", **host(4)), ROUNDS),
        "the same, killed after turn 5 ": (linker(tmp_path / "f", **host(4)), 6),
    }
    for name, (arguments, restart) in rows.items():
        turns = talk(start, tmp_path / "files", arguments, restart)
        cached = sum(each.answer.cached for each in turns) / sum(each.answer.prompt for each in turns)
        rates = " | ".join(f"{rate:.3f}" for rate in hit_rates(turns))
        print(f"| {name} | {rates} | {cached:.3f} |", flush=True)
        assert compare(uncached(HYBRID), turns).different == []
