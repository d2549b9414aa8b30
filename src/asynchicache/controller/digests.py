"""Page digests of long sequences, computed in slices: 262,144 pages take a third of a second."""

from __future__ import annotations

import asyncio

from asynchicache.hashing import page_digests
from asynchicache.tree.node import Node
from asynchicache.tree.radix_tree import UnifiedRadixTree

DIGESTS_A_TURN = 4096
"""Digests computed per loop iteration; takes a few milliseconds."""


async def sliced_digests(tokens: memoryview, page_size: int, prior: bytes) -> list[bytes]:
    """`hashing.page_digests` of any number of tokens; yields to other tasks between slices."""
    step = DIGESTS_A_TURN * page_size
    digests: list[bytes] = []
    for start in range(0, len(tokens), step):
        if start:
            await asyncio.sleep(0)
        digests += page_digests(tokens[start : start + step], page_size, digests[-1] if digests else prior)
    return digests


async def complete_digests(tree: UnifiedRadixTree, node: Node) -> None:
    """Compute the missing digests on the path to `node`; stops if it leaves the tree."""
    while node.parent is not None and (part := tree.first_without_digests(node)) is not None:
        key, above = part.key, part.parent
        assert above is not None, "a root has its seed"
        tokens = memoryview(key).cast("q")
        digests = await sliced_digests(tokens, tree.page_size, tree.digests(above)[-1])
        if part.key is key:  # else the node was split: the next rounds compute the halves
            part.digests = digests
