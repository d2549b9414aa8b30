"""The installed SGLang asks for what was recorded: a version that would break the adapter fails here."""

from __future__ import annotations

import json
import os
from pathlib import Path
from pkgutil import resolve_name

import pytest
from seams import SEAMS, describe

RECORDED = Path(__file__).parents[2] / "data" / "seams" / "sglang-0.5.23.json"

pytestmark = pytest.mark.skipif(
    Path(os.environ["ASYNCHICACHE_ENGINE_WHEEL"]).name != RECORDED.stem,
    reason="another version, which the tests of behaviour judge",
)


@pytest.mark.parametrize("name", SEAMS["sglang"])
def test_it_is_as_recorded(name: str) -> None:
    recorded = json.loads(RECORDED.read_text())

    assert describe(resolve_name(name)) == recorded[name]


def test_nothing_else_was_recorded() -> None:
    assert set(json.loads(RECORDED.read_text())) == set(SEAMS["sglang"])
