"""The README stays one page, and the glossary a list that a newcomer reads once."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
README_BYTES = 6_000
GLOSSARY_TERMS = 40


def test_the_readme_is_one_page() -> None:
    assert len((ROOT / "README.md").read_bytes()) <= README_BYTES


def test_the_glossary_is_short_and_defines_each_term_once() -> None:
    page = (ROOT / "docs" / "reference" / "glossary.md").read_text("utf-8")
    rows = re.findall(r"^\| \*\*(.+?)\*\* \|", page, re.MULTILINE)
    terms = [term for row in rows for term in row.split(", ")]

    assert 0 < len(rows) <= GLOSSARY_TERMS
    assert sorted(set(terms)) == sorted(terms)
