"""What `durable` vouches for: the prefix that a request published, as a restart would look for it. Pure."""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from asynchicache.planner.request_state import RequestState
from asynchicache.tree import tails
from asynchicache.tree.node import FULL
from asynchicache.tree.radix_tree import UnifiedRadixTree


@dataclass(frozen=True, slots=True)
class PromisedPrefix:
    """A prefix that storage must have, page by page, whatever is in memory.

    Attributes:
        words: the sequence; an end inside a page is filled up (`tails.filled_up`).
        seed: the digest of its namespace.
        pages: pages of the prefix, the one of a tail too.
        end: pages behind which a restart can go on: all of them, or of models with states those up to the
            last checkpoint that had a state to keep.
        tail: tokens of the last page, if the prefix ends inside it; else 0.
        needed: by component, the numbers of the pages (of a state: the last one before it) that it needs.
    """

    words: array[int]
    seed: bytes
    pages: int
    end: int
    tail: int
    needed: Mapping[int, Sequence[int]]

    @property
    def resumable(self) -> bool:
        """Whether a restart could go on anywhere: of a hybrid model, no state was published otherwise."""
        return self.end > 0 or not self.pages

    def tokens(self, page_size: int) -> int:
        """Tokens behind which a restart can go on."""
        return (self.end - (self.tail > 0)) * page_size + self.tail


def promise_of(request: RequestState, tree: UnifiedRadixTree) -> PromisedPrefix:
    """What a request published up to its last checkpoint, or if that is more, the prefix that it matched."""
    published, matched = request.published, request.hit_pages if request.loaded else request.match.pages
    pages = end = max(matched, *published.pages, 0)
    if any(not component.paged for component in tree.components):
        end = max(matched, published.resumable)
    words, tail = request.tokens, published.tail
    if tail:
        words = tails.filled_up(tree, words, pages, tail)
        pages = end = pages + 1
    needed: dict[int, Sequence[int]] = {FULL: range(pages)}
    for component in tree.components:
        first = component.first_page(end, inside=tail > 0)
        needed[component.id] = range(first, end)
    return PromisedPrefix(words, request.seed, pages, end, tail, needed)
