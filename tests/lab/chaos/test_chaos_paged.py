"""The search with an engine that owns its device memory: clean, and not blind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from asynchicache.planner.engine_pages import EnginePlanner
from asynchicache.transfer.local import LocalTransfers
from asynchicache.tree import tier_copies
from asynchicache.tree.radix_tree import UnifiedRadixTree
from asynchicache_lab.chaos.run import run_script
from asynchicache_lab.chaos.search import quick_collection, run_seeds, script_of
from lab.chaos.known_seeds import known_first

Patch = pytest.MonkeyPatch
MAX_SEEDS = 100
ONCE_FOUND = (3472, 4985, 5228, 5664, 8484, 12861, 12941, 18404, 19634, 603262)


def test_nothing_is_violated_and_pages_come_from_both_tiers() -> None:
    found = run_seeds(range(25), paged=True)
    assert found.violations == []
    assert min(found.served["host"], found.served["storage"]) > 500


def test_seeds_that_once_found_something_find_nothing() -> None:
    assert run_seeds(ONCE_FOUND, paged=True).violations == []


def visible_before_the_bytes(patch: Patch) -> None:
    init = UnifiedRadixTree.__init__

    def blind(tree: UnifiedRadixTree, *arguments: Any, host_only: bool = False, **options: Any) -> None:
        init(tree, *arguments, host_only=False, **options)

    patch.setattr(UnifiedRadixTree, "__init__", blind)


def load_does_not_keep_its_host_pages(patch: Patch) -> None:
    patch.setattr(tier_copies, "keep", lambda tree, tier_copy, locks: None)


def backup_reads_before_the_forward(patch: Patch) -> None:
    submit = LocalTransfers.submit
    patch.setattr(
        LocalTransfers,
        "submit",
        lambda engine, operation, **rest: submit(engine, operation, **(rest | {"after": ()})),
    )


def pages_named_from_the_left(patch: Patch) -> None:
    from_host = EnginePlanner._from_host

    def shifted(planner: EnginePlanner, node: Any, into: Any) -> Any:
        return from_host(planner, node, {pool: list(reversed(pages)) for pool, pages in into.items()})

    patch.setattr(EnginePlanner, "_from_host", shifted)


def failed_backup_stays(patch: Patch) -> None:
    finish = tier_copies.finish
    patch.setattr(
        tier_copies, "finish", lambda tree, tier_copy, *, arrived: finish(tree, tier_copy, arrived=True)
    )


def windows_are_saved_in_the_wrong_order(patch: Patch) -> None:
    others = EnginePlanner._others

    def reordered(planner: EnginePlanner, end: Any, numbers: Any, kept: Any) -> Any:
        for pages in numbers.values():
            pages.update(zip(list(pages), reversed(list(pages.values())), strict=True))
        return others(planner, end, numbers, kept)

    patch.setattr(EnginePlanner, "_others", reordered)


PLANTS: list[Callable[[Patch], None]] = [
    visible_before_the_bytes,
    load_does_not_keep_its_host_pages,
    backup_reads_before_the_forward,
    pages_named_from_the_left,
    failed_backup_stays,
    windows_are_saved_in_the_wrong_order,
]


@pytest.mark.parametrize("plant", PLANTS)
def test_a_planted_bug_is_found(plant: Callable[[Patch], None], monkeypatch: Patch) -> None:
    plant(monkeypatch)
    seeds = known_first("engine_memory", plant.__name__, range(MAX_SEEDS))
    with quick_collection():
        assert any(run_script(script_of(seed, paged=True)).violations for seed in seeds)
