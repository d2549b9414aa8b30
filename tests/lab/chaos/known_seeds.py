"""Seeds that are known to find the planted bugs: tried first, a search for a planted bug is one run.

`scripts/planted_seeds.py` writes the table anew where draws have changed. Until then tests search again,
which only takes longer.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator
from pathlib import Path

FILE = Path(__file__).parents[2] / "data" / "planted_seeds.json"
KNOWN: dict[str, dict[str, int]] = json.loads(FILE.read_text())
"""By search (`chaos`, `engine_memory`, `ranks`) and name of the bug."""


def known_first(search: str, bug: str, seeds: Iterable[int]) -> Iterator[int]:
    """The seed that is known to find a bug, if there is one, and then the others."""
    known = KNOWN.get(search, {}).get(bug)
    if known is not None:
        yield known
    yield from (seed for seed in seeds if seed != known)
