"""What a request asks of storage, what it waits for, and the calls that bring it. Pure."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from asynchicache.hashing import PlacedPage
from asynchicache.planner.actions import Copy
from asynchicache.planner.request_state import RequestState
from asynchicache.tree.node import Locks, Node
from asynchicache.types import MissReason, Outcome


@dataclass(slots=True, eq=False)
class StorageQuery:
    """A prefix that may be in storage, and the part of it that is in memory.

    Attributes:
        tokens, seed: the sequence and its namespace digest.
        tail: tokens of the last page, if the prefix ends inside it (`tails.filled_up`); 0: it does not.
        pages: the most pages that could be restored.
        matched_pages: pages that are restorable without storage. What is on its way to the host from an
            engine's pages counts, here and below.
        memory_pages: full pages in memory.
        tip: the node that contains the last of them.
        version: the tree's version when the query was made.
        digests: the digests of all `pages`.
        resident: by component except the full one, a byte per page before `memory_pages`: 1 if the page,
            or the state after it, is in memory.
        locks: kept until the read is committed.
        epoch: the tree's epoch when the query was made: pages of another one are not inserted.
        forgotten: `BackupPlanner.forgotten` when the query was made. If it has changed since, pages that
            arrive are not marked stored.
    """

    tokens: array[int]
    seed: bytes
    tail: int
    pages: int
    matched_pages: int
    memory_pages: int
    tip: Node
    version: int
    digests: list[bytes]
    resident: dict[int, bytearray]
    locks: Locks
    forgotten: int
    epoch: int

    @property
    def whole_pages(self) -> int:
        """As `pages`, without one that the prefix ends inside."""
        return self.pages - (self.tail > 0)


@dataclass(slots=True, eq=False)
class PageRead:
    """A page, or a state, whose read has begun.

    Attributes:
        key: its component and digest.
        slot: the host slot that it goes to.
        waiters: the readings that need it.
        stage: number of the stage of a chain of stores that it came from.
        outcome: storage's answer; None until there is one. After `TIMEOUT` the engine may still write to the
            slot, and nobody reads the page again until it no longer does.
    """

    key: tuple[int, bytes]
    slot: int
    waiters: list[Reading]
    outcome: Outcome | None = None
    stage: int = 0


@dataclass(slots=True, eq=False)
class Reading:
    """What the prefix of one request needs from storage.

    Attributes:
        query: the query that it follows from.
        target: the pages of the prefix that would be restorable.
        pages: by component, ascending, the numbers of the pages that were not in memory.
        request: the request that will use them, if it is known.
        turn: the place of the request among those that wait.
        unbegun: those of `pages` whose read has not begun, for anybody.
        unanswered: the number of those whose read has begun and was not answered.
        joined: whether other readings began to read some of them.
        wanted: whether somebody waits; else no more reads begin for it.
        lacks_room: there was no room for the next page.
        lost: the outcomes of pages that did not arrive.
    """

    query: StorageQuery
    target: int
    pages: dict[int, list[int]]
    request: RequestState | None
    turn: int
    unbegun: dict[int, list[int]]
    unanswered: int = 0
    joined: bool = False
    wanted: bool = True
    lacks_room: bool = False
    lost: list[Outcome] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether nothing is left to read or to wait for."""
        return not self.unanswered and not any(self.unbegun.values())


@dataclass(slots=True, eq=False)
class StorageRead:
    """One call: pages of one component on one path.

    Attributes:
        pages: in the order of the path.
        placed: the same pages, as storage is asked for them.
    """

    component_id: int
    pages: list[PageRead]
    placed: list[PlacedPage]

    @property
    def slots(self) -> list[int]:
        """The host slots to read into."""
        return [page.slot for page in self.pages]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What to read, and what keeps it from being more.

    Attributes:
        reading: what to read; None if it would gain nothing.
        reason: why it is not all of the prefix; NONE if it is.
        backups: copies to carry out in either case.
        full_pages: how far full pages reach in memory and storage together.
        limit: the component that keeps the prefix shorter than that; None if none does.
        reach: pages that memory and storage could restore together, whatever there is room for.
    """

    reading: Reading | None
    reason: MissReason
    backups: list[Copy]
    full_pages: int
    limit: int | None
    reach: int


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The result of a reading.

    Attributes:
        pages: pages that are restorable now.
        reason: why some did not arrive.
        backups: copies to carry out.
    """

    reading: Reading
    pages: int
    reason: MissReason
    backups: list[Copy]
