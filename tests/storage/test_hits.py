"""Hit-policy arithmetic against its definition, and against examples of HiCache's hit policies."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from asynchicache.storage.hits import (
    NOTHING,
    bitmap,
    clamp,
    everything,
    intersect,
    longest,
    members,
    restorable,
)
from asynchicache.types import ALL_PAGES, Coverage, trailing_pages


def pages(*numbers: int) -> int:
    return sum(1 << number for number in numbers)


def upto(last: int) -> int:
    return pages(*range(last + 1))


def by_definition(coverage: Coverage, present: int, count: int) -> list[int]:
    """Each length on its own: are the pages there that it needs?"""
    lengths = []
    for length in range(count + 1):
        first = 0 if coverage.pages is None else max(0, length - coverage.pages)
        if all(present >> page & 1 for page in range(first, length)):
            lengths.append(length)
    return lengths


def by_leading_run(present: int, count: int) -> list[int]:
    lengths = [0]
    while len(lengths) <= count and present >> lengths[-1] & 1:
        lengths.append(lengths[-1] + 1)
    return lengths


# Eight pages; what the attention pool has, what another pool has, the longest prefix of both.
EXAMPLES = [
    pytest.param(upto(7), [(ALL_PAGES, pages(0, 1, 2, 3, 4, 6, 7))], 5, id="index-keys-with-a-hole"),
    pytest.param(upto(7), [(trailing_pages(1), pages(3, 5))], 6, id="last-state-of-two"),
    pytest.param(upto(4), [(trailing_pages(1), pages(3, 5))], 4, id="state-beyond-attention"),
    pytest.param(upto(7), [(trailing_pages(3), pages(2, 3, 4, 6, 7))], 5, id="window-whole-once"),
    pytest.param(upto(7), [(trailing_pages(3), pages(0, 1))], 2, id="window-longer-than-prefix"),
    pytest.param(
        upto(7),
        [(trailing_pages(3), pages(2, 3, 4)), (trailing_pages(1), pages(7))],
        0,
        id="no-length-suits-both-though-each-has-one",
    ),
    pytest.param(0, [(trailing_pages(1), upto(7))], 0, id="no-attention-at-all"),
    pytest.param(0, [(ALL_PAGES, upto(7))], 0, id="index-keys-without-attention"),
    pytest.param(0, [(trailing_pages(3), upto(7))], 0, id="a-window-without-attention"),
]


@pytest.mark.parametrize(("kv", "others", "expected"), EXAMPLES)
def test_worked_examples(kv: int, others: list[tuple[Coverage, int]], expected: int) -> None:
    sets = [restorable(ALL_PAGES, kv, 8)] + [restorable(coverage, have, 8) for coverage, have in others]

    assert longest(intersect(sets)) == expected


def test_the_least_of_the_maxima_may_suit_nobody() -> None:
    sets = [restorable(trailing_pages(3), pages(2, 3, 4), 8), restorable(trailing_pages(1), pages(7), 8)]

    assert [members(lengths) for lengths in sets] == [[0, 5], [0, 8]]
    assert min(map(longest, sets)) == 5
    assert longest(intersect(sets)) == 0


def test_ranks_are_intersected_as_pools_are() -> None:
    """Each rank alone could restore 6 pages or more; together they can 4."""
    ranks = [restorable(trailing_pages(1), pages(3, 5), 8), restorable(trailing_pages(1), pages(3, 6), 8)]

    assert [longest(lengths) for lengths in ranks] == [6, 7]
    assert longest(intersect(ranks)) == 4


def test_every_valid_length_of_the_window_example() -> None:
    swa = restorable(trailing_pages(3), pages(2, 3, 4, 6, 7), 8)

    assert members(swa) == [0, 5]


@given(st.integers(0, 40), st.integers(0, 2**44), st.integers(1, 44) | st.none())
def test_restorable_is_its_definition(count: int, present: int, window: int | None) -> None:
    coverage = Coverage(window)

    assert members(restorable(coverage, present, count)) == by_definition(coverage, present, count)


@given(
    st.integers(0, 24),
    st.lists(st.tuples(st.integers(1, 30) | st.none(), st.integers(0, 2**26)), min_size=1, max_size=5),
)
def test_several_pools_are_brute_force(count: int, pools: list[tuple[int | None, int]]) -> None:
    # Three of four pages are there: with every second one, few lengths are common.
    have = [(Coverage(window), present | present << 1) for window, present in pools]
    lengths = intersect(restorable(coverage, present, count) for coverage, present in have)

    each = [set(by_definition(coverage, present, count)) for coverage, present in have]
    assert members(lengths) == sorted(set.intersection(*each))
    assert longest(lengths) == max(set.intersection(*each))


@given(st.integers(0, 40), st.integers(0, 2**44))
def test_every_page_means_the_leading_run(count: int, present: int) -> None:
    assert members(restorable(ALL_PAGES, present, count)) == by_leading_run(present, count)


@given(st.binary(max_size=40), st.integers(1, 9) | st.none())
def test_bytes_mean_the_same_as_bits(present: bytes, window: int | None) -> None:
    bits = pages(*(page for page, there in enumerate(present) if there))
    coverage = Coverage(window)

    assert bitmap(present) == bits
    assert restorable(coverage, bytearray(present), 40) == restorable(coverage, bits, 40)


@given(st.lists(st.integers(0, 2**20).map(lambda bits: bits | 1), min_size=1, max_size=4), st.integers(0, 20))
def test_intersection_and_clamp_are_those_of_sets(sets: list[int], limit: int) -> None:
    common = set.intersection(*(set(members(lengths)) for lengths in sets))

    assert members(intersect(sets)) == sorted(common)
    assert longest(intersect(sets)) == max(common)
    assert members(clamp(intersect(sets), limit)) == sorted(length for length in common if length <= limit)


def test_nothing_is_common_to_no_pools() -> None:
    assert intersect([]) == NOTHING
    assert longest(NOTHING) == 0


def test_long_prefixes() -> None:
    count = 4096
    one_hole = everything(count - 1) & ~pages(1000)

    window = restorable(trailing_pages(1024), one_hole, count)

    assert members(window) == [*range(1001), *range(1001 + 1024, count + 1)]
    assert longest(restorable(ALL_PAGES, one_hole, count)) == 1000
