"""How far a prefix can be restored, pool by pool and for all of them: the answer of `batch_exists_v2`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from asynchicache.storage import hits
from asynchicache.types import ALL_PAGES, Coverage


class PrefixHits(NamedTuple):
    """What storage has of a chain of pages.

    Attributes:
        longest: the longest prefix, in pages, that every pool can restore.
        by_pool: how far each pool reaches by itself, at most as far as the first; 0 is left out.
        lengths: every prefix that all pools can restore, ascending, without 0.
    """

    longest: int
    by_pool: dict[str, int]
    lengths: list[int]


def prefix_hits(
    anchor: str, present: Sequence[bool], others: Mapping[str, tuple[Coverage, Sequence[bool]]]
) -> PrefixHits:
    """Intersect what pools can restore.

    A pool with trailing pages (a window, a state) can restore 5 pages and not 4: so sets are intersected,
    never maxima compared, here and by the caller among ranks (sglang issue 39147).

    Args:
        anchor: the pool that every page of a prefix needs.
        present: for each page, whether the anchor has it.
        others: for each other pool what a prefix needs of it, and which pages it has.
    """
    pages = len(present)
    reach = hits.restorable(ALL_PAGES, bytearray(present), pages)
    bound = hits.longest(reach)
    sets = {anchor: reach}
    for name, (coverage, there) in others.items():
        sets[name] = hits.restorable(coverage, bytearray(there), bound)
    every = hits.intersect(sets.values())
    by_pool = {name: hits.longest(lengths) for name, lengths in sets.items()}
    return PrefixHits(
        hits.longest(every),
        {name: length for name, length in by_pool.items() if length},
        [length for length in hits.members(every) if length],
    )
