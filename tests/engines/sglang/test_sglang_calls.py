"""What SGLang calls in three turns of a conversation, as `make test` plays it again.

`make engines-e2e ARGS="sglang --record -k calls"` writes the record.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from sglang_checks import HYBRID, Start, crowd_out, reachable
from sglang_conversations import Conversations, cached
from sglang_recording import RECORD
from sglang_servers import linker, storage

DEVICE_TOKENS = 512
CALLS = Path(__file__).parents[2] / "data" / "calls"
ADAPTERS = {
    "storage": lambda folder: storage(folder, module_path="sglang_recording", class_name="RecordingStorage"),
    "linker": lambda folder: linker(folder, linker="RecordingLinker", linker_module_path="sglang_recording"),
}


@pytest.mark.parametrize("adapter", ADAPTERS)
def test_the_calls_are_those_that_were_recorded(
    adapter: str, start: Start, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """The device is emptied between turns, so that each of them loads; the names of calls are compared."""
    record, target = tmp_path / "calls", CALLS / f"sglang-0.5.23-{adapter}.json"
    talk = Conversations(clients=1)
    arguments, variables = ADAPTERS[adapter](tmp_path / "store"), {RECORD: str(record)}
    with start(HYBRID, arguments, device_tokens=DEVICE_TOKENS, **variables) as server:
        for turn in range(1, 4):
            assert cached(talk.run(server, [turn])) == max(0, reachable(talk, turn - 1))
            if adapter == "storage":
                server.flush()
            else:  # a flush empties its host memory too
                crowd_out(server, DEVICE_TOKENS)

    calls = [json.loads(line) for line in record.read_text().splitlines()]
    if request.config.getoption("--record"):
        target.write_text(json.dumps(calls, indent=1) + "\n")
    known = json.loads(target.read_text())
    assert {call["call"] for call in calls} == {call["call"] for call in known}
    # How many prompts it takes to empty the device depends on when SGLang evicts; all of them miss.
    assert found(calls) == found(known)


def found(calls: list[dict[str, Any]]) -> list[Any]:
    """What lookups found, in order, without those that found nothing."""
    return [call["answer"] for call in calls if call["call"] == "lookup" and call["answer"]]
