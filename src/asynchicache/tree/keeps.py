"""What hints keep from eviction for some seconds, and in which shares of a memory. Pure.

A hint marks the ends of a path. Nothing else happens until eviction gets to such a node: then it is set
aside until its time is over, if its namespace and all of them together have a share left; else it goes as any
other. So a hint costs nothing before, what it keeps is counted in slots that exist, and seconds stay seconds
however fast the clock of the tree runs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

from asynchicache.tree.node import Keep, Node

HINTED_SHARE = 0.25
"""The share of a memory that hints can favour at a time, over all namespaces; more have no effect."""

_MOST_OF_THE_REST = 4
"""A namespace may use so many times what it leaves of that share. One alone gets four fifths, the next four
fifths of the rest, and so on: clients choose namespaces, so a share of each would not bound their sum, and
whoever comes late finds some room (the dynamic thresholds of Choudhury and Hahne, 1998)."""

_SLACK = 64


class HintShare:
    """How much of one memory hints favour, in any unit."""

    __slots__ = ("_by_seed", "most", "used")

    def __init__(self, capacity: float = 0) -> None:
        self.most = HINTED_SHARE * capacity
        self.used = 0.0
        self._by_seed: dict[bytes, float] = {}

    def take(self, seed: bytes, amount: float) -> bool:
        """Take so much for a namespace, if it may have it."""
        held = self._by_seed.get(seed, 0) + amount
        if held > _MOST_OF_THE_REST * (self.most - self.used - amount):
            return False
        self.used += amount
        self._by_seed[seed] = held
        return True

    def give_back(self, seed: bytes, amount: float) -> None:
        self.used -= amount
        self._by_seed[seed] -= amount
        if not self._by_seed[seed]:
            del self._by_seed[seed]

    @property
    def namespaces(self) -> int:
        """Namespaces that have a part of it."""
        return len(self._by_seed)


@dataclass(slots=True, eq=False)
class _Charge:
    """What one node takes of a share: for itself, or for those on the shelf that stand on it."""

    seed: bytes
    slots: int
    reasons: int = 1


class Shelf:
    """Candidates that one eviction queue sets aside.

    Attributes:
        share: of the memory that the slots are in; queues whose pools share a memory have one together.
        slot_cost: of a slot, in the unit of `share`.
        ends: a heap of when the time of its nodes is over, and of nodes that left; empty if there are none.
    """

    __slots__ = ("_charges", "_held", "_paths", "ends", "share", "slot_cost")

    def __init__(self, *, paths: bool = False) -> None:
        """`paths`: with a node all those above it are kept, so they are charged too, once."""
        self.share = HintShare()
        self.slot_cost = 1
        self._paths = paths
        self._held: dict[Node, float] = {}
        self._charges: dict[Node, _Charge] = {}
        self.ends: list[tuple[float, int, Node]] = []

    def take(self, node: Node, keep: Keep, slots: int) -> bool:
        """Set a node aside until its time is over; False if that would be more than its share."""
        if node in self._held:
            return True
        new, above = [(node, slots)], node.parent
        while self._paths and above is not None and above.parent is not None and above not in self._charges:
            new.append((above, above.pages))
            above = above.parent
        if not self.share.take(keep.seed, self.slot_cost * sum(count for _, count in new)):
            return False
        for charged, count in new:
            self._charges[charged] = _Charge(keep.seed, count)
        if self._paths and above in self._charges:
            self._charges[above].reasons += 1
        self._held[node] = keep.until
        heappush(self.ends, (keep.until, node.serial, node))
        return True

    def discard(self, node: Node) -> None:
        if self._held.pop(node, None) is None:
            return
        charged: Node | None = node
        while charged in self._charges:
            charge = self._charges[charged]
            charge.reasons -= 1
            if charge.reasons:
                break
            self.share.give_back(charge.seed, self.slot_cost * charge.slots)
            del self._charges[charged]
            charged = charged.parent if self._paths else None
        if len(self.ends) > 2 * len(self._held) + _SLACK:
            self.ends = [(until, node.serial, node) for node, until in self._held.items()]
            heapify(self.ends)

    def split(self, upper: Node, lower: Node) -> None:
        """A node of a path was cut in two: what it was charged is divided."""
        charge = self._charges.get(lower)
        if charge is not None and self._paths:
            self._charges[upper] = _Charge(charge.seed, upper.pages)
            charge.slots -= upper.pages

    def first(self) -> Node | None:
        """The node whose time is over first."""
        ends = self.ends
        while ends and self._held.get(ends[0][2]) != ends[0][0]:
            heappop(ends)
        return ends[0][2] if ends else None

    def take_out(self, now: float) -> Iterator[Node]:
        """Take out the nodes whose time is over."""
        while (node := self.first()) is not None and self.ends[0][0] <= now:
            self.discard(node)
            yield node

    @property
    def used(self) -> int:
        """What its nodes take of the share."""
        return self.slot_cost * sum(charge.slots for charge in self._charges.values())

    def problems(self) -> list[str]:
        """Nodes that are charged and keep nothing, or the other way round."""
        expected = Counter(self._held.keys())
        expected.update(node.parent for node in self._charges if self._paths and node.parent is not None)
        return [
            f"{node!r} is charged to a hint for {charge.reasons} reasons, there are {expected[node]}"
            for node, charge in self._charges.items()
            if charge.reasons != expected[node]
        ]

    def __contains__(self, node: Node) -> bool:
        return node in self._held
