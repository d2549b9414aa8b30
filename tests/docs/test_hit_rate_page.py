"""Pages for operators: every reason for a miss is explained, and every metric they name is there."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from asynchicache import MissReason
from asynchicache.integrations.metrics import FAMILIES

DOCS = Path(__file__).parents[2] / "docs"
ROW = re.compile(r"^\| `(\w+)` \| (.+) \| (.+) \| (.*)\|$", re.MULTILINE)
METRIC = re.compile(r"asynchicache_(\w+)(?:\{([^}]*)\})?")
SERVER = re.compile(r"^\| `asynchicache_(serve_\w+)` \| (?:`(\w+)`)?", re.MULTILINE)
SUFFIXES = ("_bucket", "_count", "_sum")


def test_every_reason_has_its_row_with_a_metric() -> None:
    rows = {
        name: look for name, _, look, _ in ROW.findall((DOCS / "howto" / "hit-rate.md").read_text("utf-8"))
    }

    assert set(rows) == {reason.value for reason in MissReason}
    assert all("asynchicache_" in look for look in rows.values())


@pytest.mark.parametrize("page", ["hit-rate.md", "observability.md", "runbook.md"])
def test_the_metrics_that_a_page_names_are_there_with_these_labels(page: str) -> None:
    known = {family.name: set(family.labels) for family in FAMILIES}
    server = (DOCS / "howto" / "serve.md").read_text("utf-8")
    known |= {name: {label} for name, label in SERVER.findall(server)}
    named = METRIC.findall((DOCS / "howto" / page).read_text("utf-8"))

    assert len(named) >= 3
    for name, labels in named:
        family = next((name.removesuffix(end) for end in SUFFIXES if name.endswith(end)), name)
        assert family in known, name
        assert set(re.findall(r"(\w+)=", labels)) <= known[family] | {"engine"}, name
