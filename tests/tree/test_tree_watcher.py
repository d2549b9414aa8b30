"""Whoever watches a tree knows what is in each tier without looking at it."""

from __future__ import annotations

import random
from collections import Counter

import pytest

from asynchicache.tree.node import (
    ABSENT,
    FULL_DEVICE,
    FULL_HOST,
    RESIDENT,
    Node,
    SlotPlace,
    component_of,
    is_full,
    place_of,
)
from asynchicache.tree.radix_tree import UnifiedRadixTree
from asynchicache.types import Tier


class Mirror:
    """What a tree has, as it was told: digests by place; of a state, that of the page it follows."""

    def __init__(self, tree: UnifiedRadixTree) -> None:
        self.there: Counter[tuple[int, bytes]] = Counter()
        self.told: Counter[str] = Counter()
        self._tree = tree

    def pages(self, node: Node, place: SlotPlace, count: int) -> list[tuple[int, bytes]]:
        paged = is_full(place) or self._tree.components[component_of(place) - 1].paged
        return [(place, digest) for digest in self._tree.digests(node)[-(count if paged else 1) :]]

    def on_arrive(self, node: Node, place: SlotPlace) -> None:
        self.told["arrived"] += 1
        self.there.update(self.pages(node, place, node.pages))

    def on_evict(self, node: Node, place: SlotPlace, pages: int) -> None:
        self.told["left"] += 1
        gone = self.pages(node, place, pages)
        assert all(self.there[page] == 1 for page in gone), "something left that had not come"
        self.there.subtract(gone)

    def on_store(self, node: Node, component_id: int) -> None:
        raise AssertionError("nothing is written to storage here")

    def on_clear(self, *tiers: Tier) -> None:
        raise AssertionError("nothing is flushed here")

    def truth(self) -> Counter[tuple[int, bytes]]:
        """What is there, by looking."""
        return Counter(
            page
            for node in self._tree.nodes()
            for place, residency in enumerate(node.residency)
            if residency == RESIDENT
            for page in self.pages(node, place, node.pages)
        )


@pytest.mark.parametrize("seed", range(8))
def test_what_was_told_is_what_is_there(make_bed, seed: int) -> None:
    bed, chance = make_bed(states=1, windows=[2]), random.Random(seed)
    bed.tree.watcher = mirror = Mirror(bed.tree)
    for _ in range(60):
        word = "".join(chance.choice("ab") for _ in range(chance.randrange(1, 7)))
        match = bed.match(word)
        if (match.partial or match.node).residency[FULL_DEVICE] == ABSENT:
            bed.evict(FULL_HOST)  # what is on the host alone would have to be loaded first
        match chance.randrange(3):
            case 0:
                bed.add(word, states=[1])
            case 1:
                bed.add_saved(word, states=[1])
            case 2:
                place = chance.choice(
                    [FULL_DEVICE, FULL_HOST, place_of(1, Tier.HOST), place_of(2, Tier.DEVICE)]
                )
                bed.evict(place, chance.randrange(1, 6))
        assert +mirror.there == mirror.truth()
        bed.check()
    assert min(mirror.told["arrived"], mirror.told["left"]) > 20


def test_a_copy_is_told_of_when_its_bytes_are_there(bed) -> None:
    bed.add("abc")
    bed.tree.watcher = mirror = Mirror(bed.tree)

    saving = bed.save("abc")
    assert not +mirror.there
    bed.finish(saving)

    assert {place for place, _ in +mirror.there} == {FULL_HOST}
    assert sum(mirror.there.values()) == 3


def test_pages_that_are_trimmed_off_a_leaf_have_left(bed) -> None:
    bed.tree.watcher = mirror = Mirror(bed.tree)
    bed.add("abcde")

    bed.evict(FULL_DEVICE, 2)

    assert bed.words(FULL_DEVICE) == {"abc"}
    assert +mirror.there == mirror.truth()
    assert sum(mirror.there.values()) == 3
