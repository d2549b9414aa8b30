"""SGLang's host pools lie, and its pages are named, as recorded for the tests that have no SGLang."""

from __future__ import annotations

import json
import os
from pathlib import Path

from sglang_pools import OPTIONS, record
from sglang_trees import stand_in_for_kernels

RECORDED = Path(__file__).parents[2] / "data" / "sglang_host_pools.json"


def test_pools_and_names_are_as_recorded() -> None:
    """`ASYNCHICACHE_RECORD=1` writes the record anew."""
    stand_in_for_kernels()
    found = json.loads(json.dumps(record(OPTIONS)))
    if os.environ.get("ASYNCHICACHE_RECORD"):
        RECORDED.write_text(json.dumps(found, indent=1) + "\n")

    assert found == json.loads(RECORDED.read_text())
