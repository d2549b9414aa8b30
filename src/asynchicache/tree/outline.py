"""The top of the tree in plain values, for people who look at a cache. Pure."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from asynchicache.hashing import NAMESPACE_BYTES
from asynchicache.tree.node import FULL_DEVICE, FULL_HOST, RESIDENT, Node

LOOKED_AT = 2000
"""Nodes that are visited at most: those near the root, which many sequences share."""


class PrefixOutline(NamedTuple):
    """One run of pages that sequences share, or the rest of one sequence.

    Attributes:
        parent: index of the run before it in the outline; -1 for none.
        digest: of its last page, 6 bytes in hex that follow the namespace; empty if nobody needed it yet.
        pages, end: how many pages it has, and the pages from the beginning to its end.
        below: runs that continue it, directly or not, as far as was looked.
        users: requests and copies that hold it or what continues it.
        on_device, on_host: whether its attention pages are there.
    """

    parent: int
    digest: str
    pages: int
    end: int
    below: int
    users: int
    on_device: bool
    on_host: bool


def outline(roots: Iterable[Node], most: int) -> list[PrefixOutline]:
    """The `most` runs that are continued most often, parents before children.

    Visits at most `LOOKED_AT` nodes, so a large tree is not walked.
    """
    found, parents = _visit(roots)
    below, users = [0] * len(found), [node.locks[FULL_DEVICE] + node.locks[FULL_HOST] for node in found]
    for number in range(len(found) - 1, -1, -1):  # children come after their parents
        if parents[number] >= 0:
            below[parents[number]] += 1 + below[number]
            users[parents[number]] += users[number]
    # A parent has more below it than its child, so it is chosen whenever its child is.
    chosen = sorted(sorted(range(len(found)), key=lambda number: -below[number])[:most])
    index_of = {number: index for index, number in enumerate(chosen)}
    return [
        PrefixOutline(
            index_of.get(parents[number], -1),
            _digest(found[number]),
            found[number].pages,
            found[number].end,
            below[number],
            users[number],
            found[number].residency[FULL_DEVICE] == RESIDENT,
            found[number].residency[FULL_HOST] == RESIDENT,
        )
        for number in chosen
    ]


def _visit(roots: Iterable[Node]) -> tuple[list[Node], list[int]]:
    """Nodes near the roots, nearest first, and the index of each one's parent."""
    found: list[Node] = []
    parents: list[int] = []
    firsts = (child for root in islice(roots, LOOKED_AT) for child in root.children.values())
    waiting = deque((child, -1) for child in islice(firsts, LOOKED_AT))
    while waiting and len(found) < LOOKED_AT:
        node, parent = waiting.popleft()
        more = LOOKED_AT - len(found) - len(waiting)  # those behind would not get their turn
        waiting.extend((child, len(found)) for child in islice(node.children.values(), max(more, 0)))
        found.append(node)
        parents.append(parent)
    return found, parents


def _digest(node: Node) -> str:
    return node.digests[-1][NAMESPACE_BYTES:][:6].hex() if node.digests else ""
