"""The page of metrics has every metric with its labels, and no other."""

from __future__ import annotations

import re
from pathlib import Path

from asynchicache.integrations.metrics import FAMILIES

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "metrics.md"

_ROW = re.compile(r"^\| `(asynchicache_\w+)` \| ([^|]*)\| ([^|]+)\|", re.MULTILINE)
_NAME = re.compile(r"asynchicache_\w+")
_SUFFIXES = ("_bucket", "_count", "_sum")


def rows() -> dict[str, tuple[str, ...]]:
    """Labels by name, as the tables of the page have them."""
    found = _ROW.findall(PAGE.read_text("utf-8"))
    return {name: tuple(re.findall(r"`(\w+)`", labels)) for name, labels, _ in found}


def test_the_page_and_the_code_have_the_same_metrics_and_labels() -> None:
    expected = {family.full_name: family.labels for family in FAMILIES}

    assert rows() == expected | {"asynchicache_cache": ("model", "page_size")}


def test_queries_ask_for_metrics_that_are_there() -> None:
    queries = PAGE.read_text("utf-8").split("```promql")[1]
    asked = {_without_suffix(name) for name in _NAME.findall(queries)}

    assert len(asked) >= 4
    assert asked <= set(rows())


def _without_suffix(name: str) -> str:
    return next((name.removesuffix(end) for end in _SUFFIXES if name.endswith(end)), name)
