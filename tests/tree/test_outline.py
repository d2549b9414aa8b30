"""The top of the tree in plain values."""

from __future__ import annotations

from array import array
from itertools import product
from unittest.mock import patch

from asynchicache.hashing import NAMESPACE_BYTES, namespace_seed, page_digests
from asynchicache.tree import outline as outlines
from asynchicache.tree.node import Node
from asynchicache.tree.outline import outline


def add_child(parent: Node, number: int, pages: int = 1) -> Node:
    head = bytes([number])
    node = parent.children[head] = Node(parent, head * pages, head, pages, 1)
    return node


def test_the_most_continued_come_first_and_parents_before_children() -> None:
    root = Node(None, b"", b"", 0, 1)
    lonely = add_child(root, 1, pages=3)
    shared = add_child(root, 2, pages=2)
    for number in range(4):
        add_child(add_child(shared, number), 9)
    lonely.locks[0] = 1

    found = outline([root], 3)

    assert [one.below for one in found] == [8, 1, 1]
    assert [one.parent for one in found] == [-1, 0, 0]
    assert (found[1].pages, found[1].end) == (1, 3)
    everything = outline([root], 100)
    assert len(everything) == 10
    assert [one.users for one in everything[:2]] == [1, 0]


def test_only_the_top_of_a_large_tree_is_visited() -> None:
    root = Node(None, b"", b"", 0, 1)
    for number in range(20):
        add_child(add_child(root, number), 1)
    with patch.object(outlines, "LOOKED_AT", 25):
        assert len(outline([root], 100)) == 25
    assert outline([], 5) == []


def test_runs_of_one_namespace_have_different_names() -> None:
    root, names = Node(None, b"", b"", 0, 1), []
    for salt, number in product((None, "tenant"), (1, 2)):
        node = add_child(root, len(root.children), pages=2)
        node.digests = page_digests(array("Q", [7, number]), 1, namespace_seed(None, salt))
        names.append(node.digests[-1].hex()[2 * NAMESPACE_BYTES :])

    found = [one.digest for one in outline([root], 10)]

    assert len(set(found)) == 4
    assert all(name.startswith(one) and len(one) == 12 for name, one in zip(names, found, strict=True))


class Counted(dict[bytes, Node]):
    """Children that count how many of them were looked at."""

    def values(self):
        for node in super().values():
            seen.append(node)
            yield node


seen: list[Node] = []


def test_what_is_not_visited_is_not_looked_at() -> None:
    """A root with a million prompts, or a million namespaces, costs no more than the top of the tree."""
    seen.clear()
    roots = []
    for _ in range(200):
        roots.append(root := Node(None, b"", b"", 0, 1))
        root.children = Counted()
        for number in range(200):
            add_child(root, number).children = Counted()
    with patch.object(outlines, "LOOKED_AT", 25):
        assert len(outline(roots, 100)) == 25
        assert len(seen) <= 25
        assert len(outline(iter(roots[:1]), 100)) == 25
    assert len(seen) <= 50
