"""What vLLM calls of our tier as chunks are computed, evicted and wanted again; printed as JSON.

The record lets `make test` play vLLM's part without vLLM.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    runpy.run_path(str(Path(__file__).with_name("conftest.py")))  # makes vLLM importable

from rig import FULL, MAMBA, WINDOW, Rig, key

BLOCKS = [[key(f"block {number}", group) for group in (0, 1)] for number in range(4)]
STATE = key("block 3", 2)


def play(folder: Path) -> list[dict[str, Any]]:
    """Two turns of a hybrid model's conversation, two requests with wishes; ten rows in the primary tier."""
    tier = {"type": "RecordingTier", "module_path": "recorder", "storage": "file"}
    rig = Rig({**tier, "storage_options": {"path": str(folder)}}, chunks=10, groups=(FULL, WINDOW, MAMBA))
    first_turn = [one for block in BLOCKS[:2] for one in block]
    second_turn = [one for block in BLOCKS for one in block] + [STATE]
    context = rig.request()
    rig.ask_to_the_end(first_turn, context)  # nothing is there
    rig.compute(first_turn, context)
    rig.finish(context)
    rig.evict_all()
    rig.fetch(second_turn)  # a prefix of it is there
    rig.finish(rig.compute(second_turn[4:]))
    rig.evict_all()
    rig.fetch(second_turn)
    rig.evict_all()
    rig.ask(second_turn, rig.request({"asynchicache": {"no_load": True}}))
    rig.finish(rig.compute([key("private")], rig.request({"asynchicache": {"no_store": True}})))
    rig.evict_all()
    rig.fetch([key("private"), STATE])
    calls = rig.tier.calls
    rig.shutdown()
    return calls


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        calls = play(Path(folder))
    sys.stdout.write("[\n" + ",\n".join(json.dumps(call) for call in calls) + "\n]\n")


if __name__ == "__main__":
    main()
