"""Hit-policy arithmetic: find the prefix lengths that every pool can restore.

A set of prefix lengths, in pages, is an integer: bit p stands for the prefix of p pages. Length 0
needs no page, so bit 0 is always set. Intersect the sets of several pools or ranks before taking the
longest length: one pool may be unable to restore the minimum of their maxima.
"""

from __future__ import annotations

from collections.abc import Iterable
from functools import reduce
from operator import and_

from asynchicache.types import Coverage

NOTHING = 1
"""The set that contains only the empty prefix."""

_DIGITS = b"0" + b"1" * 255


def everything(pages: int) -> int:
    """All lengths 0 .. `pages`."""
    return (1 << pages + 1) - 1


def bitmap(present: bytes | bytearray) -> int:
    """Convert the bytes that an engine's `exists` returns: bit p is set if byte p is not zero."""
    return int(present.translate(_DIGITS)[::-1] or b"0", 2)


def restorable(coverage: Coverage, present: int | bytes | bytearray, pages: int) -> int:
    """The lengths up to `pages` that a pool can restore under `coverage`.

    Args:
        coverage: every page of the prefix, or its last n pages (all pages, if the prefix is shorter).
        present: bit (or byte) p says whether page p exists; pages from `pages` on are ignored.
        pages: the longest prefix length to consider.
    """
    have = present if isinstance(present, int) else bitmap(present)
    if coverage.pages is None:
        return _leading(have, pages)
    return _trailing(have, pages, coverage.pages)


def _leading(have: int, pages: int) -> int:
    """Lengths up to the first missing page."""
    run = (~have & have + 1).bit_length() - 1  # the lowest zero bit
    return everything(min(run, pages))


def _trailing(have: int, pages: int, window: int) -> int:
    """Lengths p whose pages p - window .. p - 1 all exist; pages before 0 count as existing.

    Bit p survives if bits p .. p + window - 1 of `ones` are all set. Each shift doubles the length of the
    run known to be set, so the cost is log2(window) operations on integers of `pages` bits.
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
    """The lengths in every set; `NOTHING` if `sets` is empty."""
    every = reduce(and_, sets, -1)  # -1 has every bit set
    return every if every >= 0 else NOTHING


def longest(lengths: int) -> int:
    """The longest prefix of a set, in pages."""
    return lengths.bit_length() - 1


def clamp(lengths: int, limit: int) -> int:
    """The lengths of a set up to `limit` pages."""
    return lengths & everything(limit)


def members(lengths: int) -> list[int]:
    """The lengths of a set, ascending. Linear in the longest; for debugging and tests."""
    return [length for length in range(lengths.bit_length()) if lengths >> length & 1]
