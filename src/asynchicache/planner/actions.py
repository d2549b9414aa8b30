"""What the planner asks to be carried out, as values."""

from __future__ import annotations

from dataclasses import dataclass, field

from asynchicache.planner.request_state import RequestState
from asynchicache.tracing import Span, Tracer
from asynchicache.tree.copies import TierCopy
from asynchicache.tree.node import Node, Pins
from asynchicache.types import Direction, PoolTransfer

Transfers = list[PoolTransfer]


@dataclass(slots=True, eq=False)
class Copy:
    """Bytes to move between device and host, or within the device; `Planner.copy_finished` ends it.

    Attributes:
        direction, transfers: what and where.
        tier_copy: what the tree was told about it, and what is kept meanwhile.
        user: the request whose own slots it touches, kept until it has ended.
        reads: device slots that its user will read though this copy does not write them.
        publishes: the end of the path that is due for the next tier once the copy is there.
        span: to be told when it has ended, if somebody traces.
        period: of `Activity` that it belongs to; None: the one in which it is carried out.
    """

    direction: Direction
    transfers: Transfers
    tier_copy: TierCopy
    user: RequestState | None = None
    reads: list[tuple[str, list[int]]] = field(default_factory=list)
    publishes: Node | None = None
    span: Span | None = None
    period: int | None = None

    def serve(self, sequence: RequestState) -> Copy:
        """This copy, which keeps the slots of `sequence` from being given back until it has ended."""
        sequence.users += 1
        self.user = sequence
        return self


def begin_span(tracer: Tracer, copy: Copy) -> Span:
    """The span of a copy that is about to be submitted."""
    slots = {transfer.pool: len(transfer.sources) for transfer in copy.transfers}
    user = copy.user
    if copy.direction is not Direction.LOAD or user is None:
        return tracer.copying(copy.direction.value, slots, 0, "")
    return tracer.copying(copy.direction.value, slots, user.hit_pages, user.tier.name.lower())


@dataclass(slots=True, eq=False)
class StoredSpan:
    """One component of one node, and of the halves that are split off the node later.

    Attributes:
        node, component_id: what it marks.
        slots: how many it has: one a page, or one for a state at the node's end.
    """

    node: Node
    component_id: int
    slots: int
    start: int = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.node.end - self.slots

    def nodes(self) -> list[Node]:
        """The node, and above it what was part of it."""
        found = [self.node]
        while (above := found[-1].parent) is not None and above.end > self.start:
            found.append(above)
        return found


@dataclass(slots=True, eq=False)
class StorageWrite:
    """Host pages to write to storage, until `BackupPlanner.finish`.

    `BackupPlanner.write_finished` tells of the answer.

    Attributes:
        pages: by pool, digests and the host slots that hold their pages.
        marks: what counts as stored from now on, so that nobody writes it twice.
        pins: what is kept meanwhile.
        forgotten: `BackupPlanner.forgotten` when it began; it is in storage only if that still holds.
    """

    forgotten: int
    pages: dict[str, tuple[list[bytes], list[int]]] = field(default_factory=dict)
    marks: list[StoredSpan] = field(default_factory=list)
    pins: Pins = field(default_factory=list)
