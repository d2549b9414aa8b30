"""Work that the planner orders, as values: copies and storage writes."""

from __future__ import annotations

from dataclasses import dataclass, field

from asynchicache.hashing import PlacedPage
from asynchicache.planner.request_state import RequestState
from asynchicache.tracing import Span, Tracer
from asynchicache.tree.node import Locks, Node
from asynchicache.tree.tier_copies import TierCopy
from asynchicache.types import Direction, PoolTransfer

PoolTransfers = list[PoolTransfer]


@dataclass(slots=True, eq=False)
class Copy:
    """A copy between device and host, or within the device. `Planner.copy_finished` settles it.

    Attributes:
        direction, transfers: the direction, and the slots to copy in each pool.
        tier_copy: the tree's record of the copy, with its locks.
        user: the request whose own slots the copy uses. They are kept until the copy has ended.
        reads: device slots that `user` will read and this copy does not write.
        publishes: the end of the path to copy to the next tier once this copy has arrived.
        span: its tracing span, if there is a tracer.
        period: its period of `Activity`. None: the period in which it is submitted.
    """

    direction: Direction
    transfers: PoolTransfers
    tier_copy: TierCopy
    user: RequestState | None = None
    reads: list[tuple[str, list[int]]] = field(default_factory=list)
    publishes: Node | None = None
    span: Span | None = None
    period: int | None = None

    def serve(self, request: RequestState) -> Copy:
        """Keep the slots of `request` until this copy has ended; returns the copy."""
        request.references += 1
        self.user = request
        return self


def begin_span(tracer: Tracer, copy: Copy) -> Span:
    """Begin the tracing span of a copy that is about to be submitted."""
    slots = {transfer.pool: len(transfer.sources) for transfer in copy.transfers}
    user = copy.user
    if copy.direction is not Direction.LOAD or user is None:
        return tracer.copying(copy.direction.value, slots, 0, "")
    return tracer.copying(copy.direction.value, slots, user.hit_pages, user.tier.name.lower())


@dataclass(slots=True, eq=False)
class StoredSpan:
    """One component of a node that is marked stored, including the halves split off the node later.

    Attributes:
        node, component_id: the node and component that are marked.
        slots: the number of slots: one per page, or one for a state at the node's end.
    """

    node: Node
    component_id: int
    slots: int
    start: int = field(init=False)

    def __post_init__(self) -> None:
        self.start = self.node.end - self.slots

    def nodes(self) -> list[Node]:
        """The node, and the nodes above it that were split off it."""
        found = [self.node]
        while (above := found[-1].parent) is not None and above.end > self.start:
            found.append(above)
        return found


@dataclass(slots=True, eq=False)
class StorageWrite:
    """Host pages to write to storage.

    `BackupPlanner.write_finished` takes the result; `BackupPlanner.finish` releases the locks.

    Attributes:
        pages: by pool, the pages and their host slots.
        marks: nodes marked stored when the write begins, so that they are not written twice.
        locks: host slots kept during the write.
        forgotten: `BackupPlanner.forgotten` when the write began. If it has changed since, the pages may not
            be in storage.
    """

    forgotten: int
    pages: dict[str, tuple[list[PlacedPage], list[int]]] = field(default_factory=dict)
    marks: list[StoredSpan] = field(default_factory=list)
    locks: Locks = field(default_factory=list)
