"""Eviction policies, and the queue that keeps candidates in a policy's order.

A policy maps a node to a key; the node with the smallest key is evicted first. The key of a node may
only grow (a use makes it more valuable), so the queue corrects a key when the entry is popped instead of
on every use.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from heapq import heappop, heappush

from asynchicache.errors import ConfigError
from asynchicache.tree.node import Node

Key = tuple[int, int]
Policy = Callable[[Node, int], Key]
"""From a node and a component id to what orders its eviction."""

_PROTECTED_HITS = 2
_SLACK = 64


def lru(node: Node, component_id: int) -> Key:
    """Least recently used first."""
    return (0, node.used[component_id])


def lfu(node: Node, component_id: int) -> Key:
    """Least often used first; the older of equals."""
    return (node.hits, node.used[component_id])


def slru(node: Node, component_id: int) -> Key:
    """Segmented LRU: nodes seen twice outlive nodes seen once (Karedla et al., 1994)."""
    return (int(node.hits >= _PROTECTED_HITS), node.used[component_id])


def fifo(node: Node, component_id: int) -> Key:
    """Oldest first, however often it was used."""
    return (0, node.born)


POLICIES: Mapping[str, Policy] = {"lru": lru, "lfu": lfu, "slru": slru, "fifo": fifo}


def policy(name: str) -> Policy:
    """The policy of that name.

    Raises:
        ConfigError: there is none.
    """
    if name not in POLICIES:
        raise ConfigError(f"eviction policy {name!r} is none of {sorted(POLICIES)}")
    return POLICIES[name]


class EvictionQueue:
    """Nodes from which one component can be evicted in one tier, in the order of the policy.

    A heap with lazy correction. An entry may be out of date because the node was used since or is no
    longer a candidate; `pop` notices, so a use costs nothing here. Stale entries are swept out before
    they outnumber the others.
    """

    __slots__ = ("_component_id", "_flag", "_heap", "_policy", "members")

    def __init__(self, policy: Policy, component_id: int, number: int) -> None:
        """`number` tells this queue from the tree's others: a bit in `Node.queued`."""
        self._policy = policy
        self._component_id = component_id
        self._flag = 1 << number
        self._heap: list[tuple[Key, int, Node]] = []
        self.members: set[Node] = set()

    def add(self, node: Node) -> None:
        self.members.add(node)
        if node.queued & self._flag:
            return
        if len(self._heap) > 2 * len(self.members) + _SLACK:
            self._sweep()
        else:
            self._push(node)

    def discard(self, node: Node) -> None:
        self.members.discard(node)

    def hurry(self, node: Node) -> None:
        """Add an entry for a node whose key has fallen; the only such case is `supersede`.

        Needed even if the node is no candidate at the moment: it may become one again while its old entry
        is in the heap. A node without an entry gets one with the right key when it is added.
        """
        if node.queued & self._flag:
            self._push(node)

    def pop(self) -> Node | None:
        """Take out the policy's first choice; None if there is no candidate."""
        heap, members = self._heap, self.members
        while heap:
            key, _, node = heappop(heap)
            node.queued &= ~self._flag
            if node not in members:
                continue
            if key != self._policy(node, self._component_id):
                self._push(node)
                continue
            members.discard(node)
            return node
        return None

    def key(self, node: Node) -> Key:
        """What orders `node` here now."""
        return self._policy(node, self._component_id)

    def entries(self) -> list[tuple[Key, int, Node]]:
        """What is in the heap, out of date or not; for `verify`."""
        return list(self._heap)

    def _sweep(self) -> None:
        for _, _, node in self._heap:
            node.queued &= ~self._flag
        self._heap.clear()
        for node in self.members:
            self._push(node)

    def _push(self, node: Node) -> None:
        node.queued |= self._flag
        heappush(self._heap, (self._policy(node, self._component_id), node.serial, node))

    def __len__(self) -> int:
        return len(self.members)
