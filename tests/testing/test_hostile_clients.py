"""Everything a request allows, by everyone at once, while storage comes and goes: no seed finds a fault."""

from __future__ import annotations

import pytest

from asynchicache.errors import InternalError
from asynchicache.testing.seeded import run_seeded
from asynchicache.tree.radix_tree import UnifiedRadixTree
from testing.hostile import hostile

SEEDS = range(8)
STEPS = 300_000


def test_no_seed_finds_wrong_bytes_a_lost_slot_or_a_hang() -> None:
    restored = [run_seeded(seed, hostile, max_steps=STEPS) for seed in SEEDS]

    assert sum(map(bool, restored)) > len(SEEDS) // 2


@pytest.mark.soak
def test_a_seed_notices_when_published_windows_are_anybodys_at_once(monkeypatch) -> None:
    """One in a hundred does, and which changes with every change of the order in which tasks run."""
    monkeypatch.setattr(UnifiedRadixTree, "_keep_taken", lambda *_: None)

    with pytest.raises((AssertionError, InternalError)):  # noqa: PT012  the first seed that fails ends it
        for seed in range(20, 1000):
            run_seeded(seed, hostile, max_steps=STEPS)


@pytest.mark.soak
@pytest.mark.parametrize("first", range(1000, 4000, 100))
def test_no_seed_of_many_finds_a_fault(first: int) -> None:
    for seed in range(first, first + 100):
        run_seeded(seed, hostile, max_steps=STEPS)
