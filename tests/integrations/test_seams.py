"""The seams that our adapters plug into, as recorded from each engine: an upgrade that breaks us fails here.

`make conformance` compares the records with the engines themselves.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import transformers

from conformance.seams import SEAMS, record

RECORDS = Path(__file__).parents[1] / "data" / "seams"


def recorded(engine: str) -> dict[str, Any]:
    (path,) = RECORDS.glob(f"{engine}-*.json")
    return dict(json.loads(path.read_text()))


@pytest.mark.parametrize("engine", sorted(SEAMS))
def test_all_of_a_seam_is_recorded_and_nothing_else(engine: str) -> None:
    assert set(recorded(engine)) == set(SEAMS[engine])


def test_the_cache_classes_of_transformers_are_as_recorded() -> None:
    if not (RECORDS / f"transformers-{transformers.__version__}.json").exists():
        pytest.skip(f"transformers {transformers.__version__} is not the version that was recorded")

    assert record("transformers") == recorded("transformers")
