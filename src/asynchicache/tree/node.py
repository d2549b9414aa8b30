"""A node of the tree, and the places where its bytes can be."""

from __future__ import annotations

from array import array
from collections.abc import Iterator
from typing import NamedTuple, NewType, TypeAlias

from asynchicache.types import Residency, Tier

# Plain integers: reading a member of an enumeration costs more than the comparison it is for.
ABSENT = Residency.ABSENT.value
LOADING = Residency.LOADING.value
RESIDENT = Residency.RESIDENT.value
SAVING = Residency.SAVING.value

FULL = 0
"""The component whose pages make the path: attention KV. Others are numbered from 1."""

TIERS = 2
"""Tiers that a node has slots in; storage is known by key only."""


SlotPlace = NewType("SlotPlace", int)
"""One component in one tier: the index of its slots, residency and locks in a node's lists.

An integer at run time, because the tree indexes lists with it on every step of a walk: an integer
subclass or an enumeration would take the slow path of each such access. Ask it with the functions below.
"""

_TIERS = (Tier.DEVICE, Tier.HOST)


def place_of(component_id: int, tier: Tier) -> SlotPlace:
    """The place of a component in a tier."""
    return TIERS * component_id + tier  # type: ignore[return-value]  # calling a NewType costs as much again


def component_of(place: SlotPlace) -> int:
    """The id of the component whose place this is."""
    return place // TIERS


def tier_of(place: SlotPlace) -> Tier:
    """The tier of a place."""
    return _TIERS[place % TIERS]


def other_tier(place: SlotPlace) -> SlotPlace:
    """The place of the same component in the other tier."""
    return place ^ 1  # type: ignore[return-value]


def is_full(place: SlotPlace) -> bool:
    """Whether this is a place of the full component, whose pages make the path."""
    return place < TIERS


def all_places(components: int) -> list[SlotPlace]:
    """Every place of a tree with that number of components, in the order of a node's lists."""
    return [place_of(component_id, tier) for component_id in range(components) for tier in _TIERS]


FULL_DEVICE = place_of(FULL, Tier.DEVICE)
FULL_HOST = place_of(FULL, Tier.HOST)


NodeSlots: TypeAlias = "list[int] | array[int]"
"""Slots of a node. A list is faster; an array takes 4 bytes for a slot, and a list 40."""


class Keep(NamedTuple):
    """Until when a hint keeps what it marks, in the seconds of `UnifiedRadixTree.now`, and for whom."""

    until: float
    seed: bytes


class Node:
    """Pages `end - pages` to `end` of every sequence that runs through it.

    Attributes:
        key: token ids of its pages, int64 little-endian; `head` is the first page of it.
        pages, end: how many pages it has, and the page number behind its last.
        slots, residency, locks: by `place`: slot numbers or None, where they stand, leases on them.
        worth: by component, what orders its eviction. A node is worth at least what its descendants are;
            that is made up for when they go, so that a use touches one node only.
        keep: the hint that keeps it longest, over or not; None if none does.
        superseded: bit by component, a later state of the same sequence took its place.
        published: the policy's, about a node whose end was published and not asked for since; else -1.
        device_children, host_children: children whose full component has slots in that tier.
        digests: page digests, once computed; `stored`: bit by component, storage has it.
        dropped: bit by component, its slots were evicted from every tier of the tree.
        pending: copies in flight into this node; a split adds the new half to them.
        holders: the lock lists that name a window of this node, one entry per lock; a split adds the new
            half to them. Other places need none: a lock on the end of a path covers both halves.
        queued: bit by eviction queue, has an entry in its heap.
        tail: tokens of a node that ends inside its only page (`tree.tails`); 0: all of its pages are whole.
        tails: how many children are such nodes; `heads`: sorted heads of all children, if there may be any.
        serial: number of the node.
    """

    __slots__ = (
        "children",
        "device_children",
        "digests",
        "dropped",
        "end",
        "head",
        "heads",
        "hits",
        "holders",
        "host_children",
        "keep",
        "key",
        "locks",
        "pages",
        "parent",
        "pending",
        "published",
        "queued",
        "residency",
        "serial",
        "slots",
        "stored",
        "superseded",
        "tail",
        "tails",
        "worth",
    )

    def __init__(self, parent: Node | None, key: bytes, head: bytes, pages: int, components: int) -> None:
        self.parent = parent
        self.key = key
        self.head = head
        self.pages = pages
        self.end: int = pages if parent is None else parent.end + pages
        self.children: dict[bytes, Node] = {}
        places = TIERS * components
        self.slots: list[NodeSlots | None] = [None] * places
        self.residency: list[int] = [ABSENT] * places
        self.locks: list[int] = [0] * places
        self.worth: list[float] = [0] * components
        self.keep: Keep | None = None
        self.superseded = 0
        self.published: float = -1
        self.device_children = 0
        self.host_children = 0
        self.digests: list[bytes] | None = None
        self.stored = 0
        self.dropped = 0
        self.holders: list[Locks] | None = None
        self.pending: list[Pending] | None = None
        self.queued = 0
        self.hits = 0
        self.tail = 0
        self.tails = 0
        self.heads: list[bytes] | None = None
        self.serial = 0

    def path(self, first: int = 0) -> Iterator[Node]:
        """This node and those above it, the last one first, that have pages from number `first` on; without
        the root. A node may be split while it is at its turn."""
        node = self
        while node.parent is not None and node.end > first:
            yield node
            node = node.parent

    def seed(self) -> bytes:
        """The digest of the namespace that it belongs to."""
        node = self
        while node.parent is not None:
            node = node.parent
        assert node.digests is not None, "a root has its seed"
        return node.digests[0]

    def slots_at(self, place: SlotPlace) -> list[int]:
        """A list of the slots at a place; empty if it has none."""
        slots = self.slots[place]
        return list(slots) if slots is not None else []

    def count_slots(self, place: SlotPlace) -> int:
        """The number of slots at a place."""
        slots = self.slots[place]
        return len(slots) if slots is not None else 0

    def __repr__(self) -> str:
        states = "".join("-lRs"[state] for state in self.residency)
        return f"<Node {self.serial} pages {self.end - self.pages}..{self.end} {states} locks {self.locks}>"


Locks = list[tuple[Node, SlotPlace]]
"""Places of nodes that must not be evicted, on behalf of one lease or copy."""


class Pending:
    """Copies in flight into one place of some nodes; the nodes grow when one of them is split.

    `orphans` are slots, by place, that the tree dropped while these copies still used them.
    """

    __slots__ = ("nodes", "orphans", "place")

    def __init__(self, place: SlotPlace, nodes: list[Node]) -> None:
        self.place = place
        self.nodes = nodes
        self.orphans: dict[SlotPlace, list[int]] = {}
