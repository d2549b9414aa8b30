"""The connector's halves without vLLM: what a running vLLM asked is played again, and bytes are compared.

`tests/engines/vllm/record.py` records it.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from integrations.vllm_player import Player, options

CALLS = Path(__file__).parents[1] / "data" / "calls"
RECORDS = sorted(CALLS.glob("vllm-connector-*.json"))


@pytest.mark.parametrize("path", RECORDS, ids=lambda path: path.stem)
def test_every_recorded_call_is_answered_as_it_was(path: Path, tmp_path: Path) -> None:
    """Two starts over one folder: the second finds what the first has stored."""
    record = json.loads(path.read_text())
    for start in record["starts"]:
        player = Player(record, **options(tmp_path))
        try:
            for call in start:
                player.play(call)
        finally:
            player.close()
        assert player.restored.keys() == {one.pool.name for one in player.groups.groups}


def test_the_records_hold_windows_states_and_hits() -> None:
    records = [json.loads(path.read_text()) for path in RECORDS]
    groups = [one for record in records for one in record["groups"]]
    calls = [call for record in records for start in record["starts"] for call in start]

    assert any(one["states"] for one in groups)
    assert any(one["window"] and one["window"] > 1 for one in groups)
    assert any(call["call"] == "allocated" and call["external"] for call in calls)
    assert any(
        call["call"] == "step" and request["offers"] for call in calls for request in call.get("requests", ())
    )
