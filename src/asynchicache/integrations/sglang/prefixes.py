"""Prefixes that each pool, and all pools together, can restore: the result of `batch_exists_v2`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from asynchicache.storage import hits
from asynchicache.types import ALL_PAGES, Coverage


class PrefixHits(NamedTuple):
    """Restorable prefixes of a chain of pages, in pages.

    Attributes:
        longest: the longest prefix that every pool can restore.
        by_pool: the longest prefix that each pool can restore, bounded by the anchor's; omitted if 0.
        lengths: all lengths that every pool can restore, ascending, without 0.
    """

    longest: int
    by_pool: dict[str, int]
    lengths: list[int]


def prefix_hits(
    anchor: str, present: Sequence[bool], others: Mapping[str, tuple[Coverage, Sequence[bool]]]
) -> PrefixHits:
    """Intersect the prefixes that the pools can restore.

    A pool of trailing pages (a window, a state) may restore 5 pages but not 4. Sets of lengths must
    therefore be intersected; the minimum of maxima is wrong. The caller does the same across ranks
    (sglang issue 39147).

    Args:
        anchor: the pool that must have every page of a prefix.
        present: for each page, whether the anchor has it.
        others: for each other pool, the pages that a prefix needs and the pages that it has.
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
