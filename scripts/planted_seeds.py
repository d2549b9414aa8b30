"""Write the seeds that find planted bugs anew, for those that the seed in the table no longer finds.

python scripts/planted_seeds.py [--seeds MOST] [NAME ...]
"""

from __future__ import annotations

import argparse
import json
import sys
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))

from asynchicache_lab.chaos.run import run_script
from asynchicache_lab.chaos.search import quick_collection, script_of
from asynchicache_lab.ranks.chaos import draw_rank_script, run_rank_script
from lab.chaos import test_chaos_paged, test_chaos_teeth
from lab.chaos.known_seeds import FILE, KNOWN, known_first
from lab.chaos.planted import BUGS
from lab.ranks import test_rank_chaos

Plant = Callable[[pytest.MonkeyPatch], None]


def _finds_in_chaos(seed: int) -> bool:
    return bool(run_script(script_of(seed, paged=False)).violations)


def _finds_with_engine_memory(seed: int) -> bool:
    return bool(run_script(script_of(seed, paged=True)).violations)


def _finds_in_ranks(seed: int) -> bool:
    return bool(run_rank_script(draw_rank_script(seed)).violations)


def _searches() -> Iterator[tuple[str, dict[str, Plant], Callable[[int], bool], int]]:
    """By search: its name, what is planted, how a seed is tried, and the most seeds."""
    yield "chaos", {bug.name: bug.plant for bug in BUGS}, _finds_in_chaos, test_chaos_teeth.MAX_SEEDS
    for name, plants, finds, most in (
        ("engine_memory", test_chaos_paged.PLANTS, _finds_with_engine_memory, test_chaos_paged.MAX_SEEDS),
        ("ranks", test_rank_chaos.PLANTS, _finds_in_ranks, test_rank_chaos.MAX_SEEDS),
    ):
        yield name, {plant.__name__: plant for plant in plants}, finds, most


def main(names: list[str], most_seeds: int | None) -> int:
    missed = 0
    warnings.simplefilter("ignore")  # runs that do not end leave their tasks
    for search, plants, finds, most in _searches():
        table, most = KNOWN.setdefault(search, {}), most_seeds or most
        for name in [name for name in table if name not in plants]:
            del table[name]
        for name, plant in plants.items() if not names else ():
            missed += not _note(search, name, plant, finds, most)
        for name in names:
            if name in plants:
                missed += not _note(search, name, plants[name], finds, most)
    return missed > 0


def _note(search: str, name: str, plant: Plant, finds: Callable[[int], bool], most: int) -> bool:
    """Look for a seed that finds a bug, and write it down."""
    with pytest.MonkeyPatch.context() as patch, quick_collection():
        plant(patch)
        found = next((seed for seed in known_first(search, name, range(most)) if finds(seed)), None)
    sys.stdout.write(f"{search}: {name}: {found}\n")
    sys.stdout.flush()
    if found is not None and KNOWN[search].get(name) != found:
        KNOWN[search][name] = found
        FILE.write_text(json.dumps(KNOWN, indent=1, sort_keys=True) + "\n")
    return found is not None


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help="bugs. Default: all")
    parser.add_argument("--seeds", type=int, metavar="MOST", help="tried for each. Default: as the tests do")
    given = parser.parse_args()
    sys.exit(main(given.names, given.seeds))
