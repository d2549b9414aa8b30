"""Hit-policy arithmetic: the prefix lengths at which every pool has what it needs.

A set of prefix lengths, in pages, is an integer: bit p stands for the prefix of p pages. Length 0
needs nothing, so bit 0 is always set. Sets of several pools, or ranks, are intersected before the
longest is taken: the least of their maxima may be a length that one of them cannot restore.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import and_

from asynchicache.types import Coverage

NOTHING = 1
"""The set with the empty prefix only."""

_DIGITS = b"0" + b"1" * 255


def everything(pages: int) -> int:
    """All lengths 0 .. `pages`."""
    return (1 << pages + 1) - 1


def bitmap(present: bytes | bytearray) -> int:
    """Bit p set where byte p is not zero: what an engine's `exists` answers, as an integer."""
    return int(present.translate(_DIGITS)[::-1] or b"0", 2)


def restorable(coverage: Coverage, present: int | bytes | bytearray, pages: int) -> int:
    """The lengths up to `pages` at which a pool has what `coverage` asks.

    Args:
        coverage: every page of the prefix, or the last n before its end (all, if it is shorter).
        present: bit (or byte) p tells whether page p is there; further pages are ignored.
        pages: the longest prefix in question.
    """
    have = present if isinstance(present, int) else bitmap(present)
    if coverage.pages is None:
        return _leading(have, pages)
    return _trailing(have, pages, coverage.pages)


def _leading(have: int, pages: int) -> int:
    """Lengths up to the first page that is missing."""
    run = (~have & have + 1).bit_length() - 1  # the lowest zero bit
    return everything(min(run, pages))


def _trailing(have: int, pages: int, window: int) -> int:
    """Lengths p whose pages p - window .. p - 1 are all there; pages before 0 count as there.

    Bit p survives where bits p .. p + window - 1 of `ones` are all set. The run that is known to be
    set doubles with every shift, so the cost is log2(window) operations on integers of `pages` bits.
    """
    window = min(window, pages)
    ones = have << window | (1 << window) - 1
    known = 1
    while known < window:
        step = min(known, window - known)
        ones &= ones >> step
        known += step
    return (ones if window else NOTHING) & everything(pages)


def intersect(sets: Iterable[int]) -> int:
    """The lengths that are in every set; `NOTHING` if there is no set."""
    every = reduce(and_, sets, -1)  # -1 has every bit set
    return every if every >= 0 else NOTHING


def longest(lengths: int) -> int:
    """The longest prefix of a set, in pages."""
    return lengths.bit_length() - 1


def clamp(lengths: int, limit: int) -> int:
    """The lengths of a set that are `limit` pages at most."""
    return lengths & everything(limit)


def members(lengths: int) -> list[int]:
    """The lengths of a set, ascending; for people and tests, linear in the longest."""
    return [length for length in range(lengths.bit_length()) if lengths >> length & 1]
