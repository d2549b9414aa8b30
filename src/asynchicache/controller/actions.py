"""What the planner asks to be carried out, as values."""

from __future__ import annotations

from dataclasses import dataclass, field

from asynchicache.controller.sequence import Sequence
from asynchicache.transfer.plan import Direction
from asynchicache.tree.copies import Flight
from asynchicache.tree.node import FULL, Node
from asynchicache.types import PoolTransfer

Transfers = list[PoolTransfer]
Pins = list[tuple[Node, int]]


@dataclass(slots=True)
class Copy:
    """Bytes to move between device and host, or within the device; `Planner.copied` ends it.

    Attributes:
        direction, transfers: what and where.
        flight: what the tree was told about it, and what is kept meanwhile.
        user: the request whose own slots it touches, kept until it has ended.
        reads: device slots that its user will read though this copy does not write them.
        publishes: the end of the path that is due for the next tier once the copy is there.
    """

    direction: Direction
    transfers: Transfers
    flight: Flight
    user: Sequence | None = None
    reads: list[tuple[str, list[int]]] = field(default_factory=list)
    publishes: Node | None = None


@dataclass(slots=True, eq=False)
class Mark:
    """One component of one node, and of the halves that are split off the node later."""

    node: Node
    component: int
    start: int = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.node.end - self.node.pages if self.component == FULL else self.node.end

    def nodes(self) -> list[Node]:
        """The node, and above it what was part of it."""
        found = [self.node]
        while (above := found[-1].parent) is not None and above.end > self.start:
            found.append(above)
        return found


@dataclass(slots=True, eq=False)
class Store:
    """Host pages to write to storage; `Writer.wrote` tells of the answer, `Writer.finish` ends it.

    Attributes:
        pages: by pool, digests and the host slots that hold their pages.
        marks: what counts as stored from now on, so that nobody writes it twice.
        pins: what is kept meanwhile.
    """

    pages: dict[str, tuple[list[bytes], list[int]]] = field(default_factory=dict)
    marks: list[Mark] = field(default_factory=list)
    pins: Pins = field(default_factory=list)
