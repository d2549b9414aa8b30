"""What the planner asks to be carried out, as values."""

from __future__ import annotations

from dataclasses import dataclass, field

from asynchicache.controller.sequence import Sequence
from asynchicache.transfer.plan import Direction
from asynchicache.tree.copies import Flight
from asynchicache.tree.node import Node
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
class Store:
    """Host pages to write to storage; `Writer.wrote` ends it.

    Attributes:
        pages: by pool, digests and the host slots that hold their pages.
        marks: components of nodes that count as stored from now on.
        pins: what is kept meanwhile.
    """

    pages: dict[str, tuple[list[bytes], list[int]]] = field(default_factory=dict)
    marks: Pins = field(default_factory=list)
    pins: Pins = field(default_factory=list)
