"""Plans reads from storage: what to ask for, what to read, and what to insert. Pure.

A read has three steps with storage calls between them: `make_query`, `choose`, `deliver`. Host slots are
allocated only for pages that storage has. A failure loses the failed pages and those after them, never
earlier ones.

Reads of several requests run concurrently, and no page is read twice at once: a read leaves out pages that
other reads are bringing, and is committed after those reads. A read depends only on reads that began before
it. So no two reads wait for each other, and the last one waits for the slowest read, not for the sum.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from asynchicache.hashing import common_pages, page_digests, tail_digests
from asynchicache.planner.actions import Copy
from asynchicache.planner.backup import BackupPlanner
from asynchicache.planner.state import CacheState
from asynchicache.storage import hits
from asynchicache.tree import tails
from asynchicache.tree.components import Component, prefix_locks
from asynchicache.tree.copies import missing_on_host
from asynchicache.tree.node import (
    ABSENT,
    FULL,
    FULL_DEVICE,
    FULL_HOST,
    SAVING,
    Locks,
    Node,
    SlotPlace,
    place_of,
)
from asynchicache.tree.radix_tree import Pages, device_end
from asynchicache.types import ALL_PAGES, MissReason, Outcome, Tier

Outcomes = Mapping[int, Sequence[Outcome]]
"""By component, the outcome of each page that was read, in page order."""


@dataclass(slots=True, eq=False)
class StorageQuery:
    """A prefix that may be in storage, and the part of it that is in memory.

    Attributes:
        tokens, seed: the sequence and its namespace digest.
        tail: tokens of the last page, if the prefix ends inside it (`tails.filled_up`); 0: it does not.
        pages: the most pages that could be restored.
        matched_pages: pages that are restorable without storage.
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
class StorageRead:
    """Pages to read: by component, their numbers and the host slots that they go to.

    Attributes:
        query: the query that the read serves.
        target: the pages of the prefix that would be restorable.
        pages: by component, ascending, the pages that the prefix needs and that are neither in memory nor
            being read.
        needs: uncommitted reads that bring other pages of the prefix.
        joined: whether there were any.
        held: it is not committed yet, because its request still computes the pages before it.
        slots: by component, the host slots for `pages`, in the same order.
        outcomes: the outcome of each page; None until storage has answered.
    """

    query: StorageQuery
    target: int
    pages: dict[int, list[int]]
    needs: list[StorageRead] = field(default_factory=list)
    joined: bool = False
    held: bool = False
    slots: dict[int, list[int]] = field(default_factory=dict)
    outcomes: Outcomes | None = None

    def digests(self, component_id: int) -> list[bytes]:
        """Digests of the pages to read for a component."""
        spans = _spans(self.pages[component_id])
        return [digest for first, last in spans for digest in self.query.digests[first : last + 1]]


@dataclass(frozen=True, slots=True)
class ReadPlan:
    """What to read, or why there is nothing to read.

    Attributes:
        read: the read; None if it would gain nothing.
        reason: why there is no read.
        backups: copies to carry out in either case.
        full_pages: how far full pages reach in memory and storage together.
        limit: the component that keeps the prefix shorter than that; None if none does.
    """

    read: StorageRead | None
    reason: MissReason
    backups: list[Copy]
    full_pages: int
    limit: int | None


@dataclass(frozen=True, slots=True)
class ReadResult:
    """The result of a read.

    Attributes:
        read: the read.
        pages: pages that are restorable now.
        arrived: pages and states that arrived.
        reason: why some did not arrive.
        backups: copies to carry out.
    """

    read: StorageRead
    pages: int
    arrived: int
    reason: MissReason
    backups: list[Copy]


_READ_REASONS = (
    (Outcome.CORRUPT, MissReason.CORRUPT),
    (Outcome.TIMEOUT, MissReason.DEADLINE),
    (Outcome.FAILED, MissReason.STORAGE_FAILED),
    (Outcome.REJECTED, MissReason.STORAGE_FAILED),
    (Outcome.MISS, MissReason.COLD),
)
"""The reason reported for an incomplete read: the first outcome memory_pages that any page had."""


class PrefetchPlanner:
    """Plans reads from storage."""

    def __init__(self, state: CacheState, writer: BackupPlanner) -> None:
        self._state = state
        self._backups = writer
        self._tree = state.tree
        self._windows = {component.id for component in state.tree.windows}
        self._reads: set[StorageRead] = set()  # reads that hold host slots
        self.in_flight: list[StorageRead] = []  # uncommitted reads, in the order they began
        state.private.append(self._private)

    def can_read(self, component_id: int) -> bool:
        """Whether storage can serve a component: only if it has host slots."""
        return self._state.free[place_of(component_id, Tier.HOST)].capacity > 0

    def known_digests(self, tokens: array[int], seed: bytes) -> list[bytes]:
        """Digests of the first pages of a sequence, as far as they were computed before."""
        match = self._tree.match(tokens, seed, limit=self._max_restorable_pages(tokens))
        return _known_digests(self._tip(tokens, match.node, match.full_pages))[: match.full_pages]

    def _max_restorable_pages(self, tokens: array[int]) -> int:
        """The most pages that could be restored; at least one token is left to compute."""
        return (len(tokens) - 1) // self._tree.page_size

    def missing_tokens(self, tokens: array[int], seed: bytes) -> int:
        """The most tokens that storage could add to what is restorable from memory, in whole pages. A tail
        alone is not worth a question, unless all of the sequence is in one page."""
        pages, size = self._max_restorable_pages(tokens), self._state.page_size
        if not self.can_read(FULL):
            return 0
        if self._tree.tails and not pages:
            root, most = self._tree.roots.get(seed), len(tokens) - 1
            tail = tails.find(self._tree, root, tokens, most) if root is not None else None
            return most - (tail.tokens if tail is not None else 0)
        return (pages - self._tree.match(tokens, seed, limit=pages).pages) * size

    def backup_in_flight(self, tokens: array[int], seed: bytes) -> bool:
        """Whether pages that a longer match needs are on their way from an engine's pages to the host."""
        if not self._tree.host_only:
            return False
        pages = self._max_restorable_pages(tokens)
        match = self._tree.match(tokens, seed, limit=pages)
        if match.pages >= pages:
            return False
        tip = self._tip(tokens, match.node, match.full_pages)
        ahead = self._tree.child(tip, tokens) if tip.end == match.full_pages < pages else None
        return any(
            SAVING in node.residency for node in (*_path(tip), *([ahead] if ahead is not None else []))
        )

    def tail_digests(
        self, tokens: array[int], seed: bytes, digests: Sequence[bytes], pages: int
    ) -> list[bytes]:
        """Digests of the tails at which a prefix may end behind its first `pages` pages, the shortest first.

        `digests`: of these pages, and maybe more.
        """
        keys = tails.keys_behind(self._tree, tokens, pages, len(tokens) - 1)
        return tail_digests(keys, digests[pages - 1] if pages else seed)

    def make_tail_query(
        self, tokens: array[int], seed: bytes, digests: list[bytes], count: int
    ) -> StorageQuery | None:
        """As `make_query`, for a prefix that ends with `count` tokens of its last page.

        `digests`: of its pages, the last one that of the tail.
        """
        sequence = tails.filled_up(self._tree, tokens, len(digests) - 1, count)
        return self.make_query(sequence, seed, digests, tail=count)

    def make_query(
        self, tokens: array[int], seed: bytes, digests: list[bytes] | None = None, *, tail: int = 0
    ) -> StorageQuery | None:
        """Make the query for what lies beyond memory; None if storage cannot add anything.

        Args:
            tokens: the sequence.
            seed: the digest of its namespace.
            digests: of all pages that could be restored. Default: computed now.
            tail: see `StorageQuery`.
        """
        pages, size = (
            self._max_restorable_pages(tokens) if digests is None else len(digests),
            self._tree.page_size,
        )
        match = self._tree.match(tokens, seed, limit=pages)
        if match.pages >= pages or not self.can_read(FULL):
            return None
        tip, memory_pages = self._tip(tokens, match.node, match.full_pages), match.full_pages
        if digests is None:
            known = _known_digests(tip)[:memory_pages]
            rest = tokens[len(known) * size : pages * size]
            digests = known + page_digests(rest, size, known[-1] if known else seed)
        kept = self._ends(tip)
        for component in self._tree.windows:
            kept += prefix_locks(
                component, tip
            )  # the read completes these windows, so its slots must not come from them
        _give_digests(tip, digests, memory_pages)
        resident = self._resident_flags(tip, memory_pages)
        query = StorageQuery(
            tokens,
            seed,
            tail,
            pages,
            match.pages,
            memory_pages,
            tip,
            match.version,
            digests,
            resident,
            kept,
            self._backups.forgotten,
            self._tree.epoch,
        )
        self._state.lock(query.locks)
        return query

    def _tip(self, tokens: array[int], node: Node, full_pages: int) -> Node:
        """The node at or below `node` that contains the last of the sequence's full pages."""
        while node.end < full_pages:
            child = self._tree.child(node, tokens)
            assert child is not None, "a match went that way"
            node = child
        return node

    def _resident_flags(self, tip: Node, memory_pages: int) -> dict[int, bytearray]:
        """By component, a byte per page before `memory_pages`: 1 if the path to `tip` has it in memory."""
        resident = {
            component.id: bytearray(max(memory_pages, tip.end)) for component in self._tree.components
        }
        for node in _path(tip) if resident else ():
            for component in self._tree.components:
                if component.nearest(node) is not None:
                    count = node.pages if component.paged else 1
                    resident[component.id][node.end - count : node.end] = b"\1" * count
        return {component_id: flags[:memory_pages] for component_id, flags in resident.items()}

    @staticmethod
    def _ends(tip: Node) -> Locks:
        """Locks that keep every full page of the path to `tip` where it is."""
        if tip.parent is None:
            return []
        if tip.residency[FULL_DEVICE] != ABSENT:
            return [(tip, FULL_DEVICE)]
        above = device_end(tip)
        return [(tip, FULL_HOST)] + ([(above, FULL_DEVICE)] if above.parent is not None else [])

    def estimate(self, query: StorageQuery, reach: int) -> tuple[int, int]:
        """What a read would add if full pages reach to `reach`: pages, and bytes with states and windows.

        No bytes if other reads are bringing a part of it anyway.
        """
        pages = max(reach - query.matched_pages, 0)
        if not pages or self._others(query):
            return pages, 0
        free = self._state.free
        nbytes = max(reach - query.memory_pages, 0) * free[FULL_HOST].slot_bytes
        for component in self._tree.components:
            count = min(self._state.spec.owners[component.id].coverage.pages or pages, pages)
            nbytes += count * free[place_of(component.id, Tier.HOST)].slot_bytes
        return pages, nbytes

    def release(self, query: StorageQuery) -> None:
        """Release the locks of a query that gets no `deliver`, which releases them itself."""
        self._state.unlock(query.locks)

    def last_stored_node(self, query: StorageQuery) -> Node | None:
        """The node of the last page in memory, if it is marked stored and not being written.

        Asking for that page along with the others shows whether storage still has what it had.
        """
        node = query.tip
        if not node.stored >> FULL & 1 or node in self._backups.storing():
            return None
        return node

    def first_page(self, query: StorageQuery, component_id: int) -> int:
        """The first page of a component that any prefix longer than `query.matched_pages` may need."""
        pages = self._state.spec.owners[component_id].coverage.pages or 0
        return max(query.matched_pages + 1 - pages, 0)

    # What to read

    def choose(
        self, query: StorageQuery, present: Mapping[int, bytes], *, join: bool = True, computed: int = 0
    ) -> ReadPlan:
        """Choose the longest prefix that storage and memory restore together, and allocate its host slots.

        Args:
            query: the query.
            present: by component, a byte per page of the query, 1 if storage has it. A short answer is padded
                with 0.
            join: leave out pages that other reads are bringing, and wait for those reads.
            computed: pages that the request computes itself; the read is held until then. 0: none.
        """
        others = self._others(query) if join and not computed else []
        in_flight = self._in_flight_flags(query, others)
        in_flight[FULL][query.memory_pages : computed] = b"\1" * max(computed - query.memory_pages, 0)
        sets = []
        for component_id in range(self._tree.width):
            there = _either(
                query.pages,
                present.get(component_id, b""),
                in_flight[component_id],
                self._present_flags(query, component_id),
            )
            sets.append(self._restorable(component_id, there, query))
        lengths = hits.intersect(sets)
        full, limit = hits.longest(sets[FULL]), self._limit(sets)
        if hits.longest(lengths) <= query.matched_pages:
            return ReadPlan(None, self._miss_reason(full, limit, query), [], full, limit)
        on_host, backups = self._ensure_ancestors_on_host(query)
        while on_host and (target := hits.longest(lengths)) > max(query.matched_pages, computed):
            read_or_limit = self._take_slots(query, target, others, in_flight)
            if isinstance(read_or_limit, StorageRead):
                read_or_limit.held = computed > 0
                return ReadPlan(read_or_limit, MissReason.NONE, backups, full, limit)
            lengths = hits.clamp(lengths, read_or_limit)
        return ReadPlan(None, MissReason.HOST_CAPACITY, backups, full, limit)

    def _others(self, query: StorageQuery) -> list[tuple[StorageRead, int]]:
        """Reads in flight that share a prefix with the query, and the number of pages shared. Held ones are
        left out: they end when another request has computed what comes before."""
        reads = [read for read in self.in_flight if not read.held]
        found = [(read, common_pages(read.query.digests, query.digests)) for read in reads]
        return [(read, shared) for read, shared in found if shared]

    def _in_flight_flags(
        self, query: StorageQuery, others: Sequence[tuple[StorageRead, int]]
    ) -> dict[int, bytearray]:
        """By component, a byte per page of the query: 1 if another read is bringing it."""
        in_flight = {component_id: bytearray(query.pages) for component_id in range(self._tree.width)}
        for read, shared in others:
            for component_id, pages in read.pages.items():
                for first, last in _spans(pages):
                    end = min(last + 1, shared, query.pages)
                    if first < end:
                        in_flight[component_id][first:end] = b"\1" * (end - first)
        return in_flight

    @staticmethod
    def _present_flags(query: StorageQuery, component_id: int) -> bytes | bytearray:
        """A byte per page that the query's path has in memory: 1 if the component has it there."""
        return b"\1" * query.memory_pages if component_id == FULL else query.resident[component_id]

    def _restorable(self, component_id: int, there: bytes | bytearray, query: StorageQuery) -> int:
        """The prefix lengths of a query that a component can restore, as a bit set."""
        coverage = ALL_PAGES if component_id == FULL else self._state.spec.owners[component_id].coverage
        if not (query.tail and component_id in self._windows):
            return hits.restorable(coverage, there, query.pages)
        whole = hits.restorable(coverage, there, query.whole_pages)
        return whole | (whole << 1 & (there[query.whole_pages] > 0) << query.pages)

    def _first_needed(self, component: Component, query: StorageQuery, pages: int) -> int:
        """The first page of a component that a prefix of `pages` pages of a query needs."""
        ends_inside = component.paged and query.tail > 0 and pages == query.pages
        coverage = self._state.spec.owners[component.id].coverage.pages
        return 0 if coverage is None else max(pages - coverage - ends_inside, 0)

    @staticmethod
    def _limit(sets: Sequence[int]) -> int | None:
        """The component that allows the shortest prefix, if that is shorter than the full pages allow.

        `sets`: by component, the prefix lengths that it allows.
        """
        full = hits.longest(sets[FULL])
        reaches = [hits.longest(hits.clamp(lengths, full)) for lengths in sets]
        return reaches.index(min(reaches)) if min(reaches) < full else None

    def _miss_reason(self, full: int, limit: int | None, query: StorageQuery) -> MissReason:
        """Why a read would gain nothing, though storage may have pages."""
        if full <= query.matched_pages or limit is None:
            return MissReason.COLD
        paged = {component.id: component.paged for component in self._tree.components}
        return MissReason.WINDOW if paged[limit] else MissReason.STATE

    def _ensure_ancestors_on_host(self, query: StorageQuery) -> tuple[bool, list[Copy]]:
        """Back up and lock the path before the read: its pages need their ancestors on the host.

        Returns:
            Whether the path is (or will be) on the host, and the copies for that.
        """
        if not query.locks:
            return True, []
        return self._keep_on_host(query, query.locks[0][0])

    def _keep_on_host(self, query: StorageQuery, tip: Node) -> tuple[bool, list[Copy]]:
        if tip.parent is None:
            return True, []
        backups = self._backups.backup(tip) if missing_on_host(self._tree, tip) else []
        if tip.residency[FULL_HOST] == ABSENT:
            return False, backups
        self._tree.lock_for(query.locks, tip, FULL_HOST)
        return True, backups

    def _take_slots(
        self,
        query: StorageQuery,
        target: int,
        others: Sequence[tuple[StorageRead, int]],
        in_flight: Mapping[int, bytearray],
    ) -> StorageRead | int:
        """Allocate host slots for a read up to `target`; or return the longest prefix that fits."""
        read = StorageRead(query, target, self._missing(query, target, in_flight))
        full = read.pages.get(FULL, [])
        if not self._state.make_room(FULL_HOST, len(full)):
            return full[min(self._state.free[FULL_HOST].available, len(full) - 1)]
        counts = {place_of(component_id, Tier.HOST): len(pages) for component_id, pages in read.pages.items()}
        if self._state.make_room_for_all(counts) is not None:
            return 0
        for component_id, pages in read.pages.items():
            read.slots[component_id] = self._state.free[place_of(component_id, Tier.HOST)].allocate(
                len(pages)
            )
        read.needs = [other for other, shared in others if self._reads_any(other, min(shared, target))]
        read.joined = bool(read.needs)
        self._reads.add(read)
        self.in_flight.append(read)
        return read

    @staticmethod
    def _reads_any(other: StorageRead, shared: int) -> bool:
        """Whether a read is bringing one of the first `shared` pages."""
        return any(pages and pages[0] < shared for pages in other.pages.values())

    def _missing(
        self, query: StorageQuery, target: int, in_flight: Mapping[int, bytearray]
    ) -> dict[int, list[int]]:
        """By component, the pages that a prefix of `target` pages needs and that are neither in memory nor
        being read."""
        wanted = {FULL: _zeros(in_flight[FULL], query.memory_pages, target)}
        for component in self._tree.components:
            first = self._first_needed(component, query, target)
            there = _either(query.pages, in_flight[component.id], query.resident[component.id])
            wanted[component.id] = _zeros(there, first, target)
        return {component_id: pages for component_id, pages in wanted.items() if pages}

    # What arrived

    def deliver(self, read: StorageRead, outcomes: Outcomes) -> list[ReadResult]:
        """Take storage's answer for all pages of a read, and commit every read that is now ready.

        A read is committed once the reads that it needs are. Slots of pages that timed out stay with the
        read, because the engine may still write to them; `finish` gives them back.

        Returns:
            The results of the reads committed by this call, in the order they began.
        """
        read.outcomes = outcomes
        return self._commit_ready()

    def release_held(self, read: StorageRead) -> list[ReadResult]:
        """Commit a held read once it has arrived: the pages before it are in the tree, or never will be.

        Returns:
            As `deliver`.
        """
        read.held = False
        return self._commit_ready()

    def _commit_ready(self) -> list[ReadResult]:
        results = []
        for other in list(self.in_flight):  # a read comes after those that it needs, so one pass is enough
            if other.outcomes is not None and not (other.needs or other.held):
                results.append(self._commit(other, other.outcomes))
                self.in_flight.remove(other)
                self._committed(other)
        return results

    def _committed(self, read: StorageRead) -> None:
        """A read was committed: lock its pages for every read in flight that depends on it, so they are not
        evicted before that read commits."""
        for other in self.in_flight:
            if read in other.needs:
                other.needs.remove(read)
                self._lock_dependencies(other)

    def _lock_dependencies(self, read: StorageRead) -> None:
        """Lock all that is in memory now of what the prefix of `read` needs."""
        query = read.query
        match = self._tree.match(query.tokens, query.seed, limit=read.target)
        tip = self._tip(query.tokens, match.node, match.full_pages)
        kept = self._ends(tip)
        for component in self._tree.components:
            first = self._first_needed(component, query, read.target)
            node = tip
            while (
                node.parent is not None and node.end > first and (component.paged or node.end == read.target)
            ):
                tier = component.nearest(node)
                if tier is not None:
                    kept += [(node, place_of(component.id, tier)), (node, place_of(FULL, tier))]
                node = node.parent
        for node, place in kept:
            self._tree.lock_for(query.locks, node, place)

    def _commit(self, read: StorageRead, outcomes: Outcomes) -> ReadResult:
        """Insert what arrived into the tree, up to the longest prefix that is restorable now."""
        query = read.query
        memory_pages, matched_pages, resident = query.memory_pages, query.matched_pages, query.resident
        if query.version != self._tree.version:
            match = self._tree.match(query.tokens, query.seed, limit=query.pages)
            tip, memory_pages = self._tip(query.tokens, match.node, match.full_pages), match.full_pages
            matched_pages, resident = match.pages, self._resident_flags(tip, memory_pages)
        restorable, late = matched_pages, _late(read, outcomes)
        pages = hits.longest(self._restorable_lengths(read, outcomes, memory_pages, resident))
        full = max(pages, self._wanted(read))
        # Lists, not sets: they compare identities in C, and an Enum's hash is Python code.
        hit = sum(results.count(Outcome.HIT) for results in outcomes.values())
        reason = MissReason.NONE
        if hit < sum(map(len, outcomes.values())):
            reason = next(why for one, why in _READ_REASONS if any(one in some for some in outcomes.values()))
        backups: list[Copy] = []
        if full > matched_pages and query.epoch == self._tree.epoch:
            above, backups = self._host_node_before(read, min(memory_pages, full), outcomes)
            end = self._insert(read, above, full, outcomes) if above is not None else None
            if end is not None:
                self._insert_others(read, end, pages, outcomes)
                restorable = max(pages, restorable)
            else:
                reason = MissReason.HOST_CAPACITY if reason is MissReason.NONE else reason
        self._release(read, late)
        self.release(query)
        return ReadResult(read, restorable, hit, reason, backups)

    def _wanted(self, read: StorageRead) -> int:
        """The most pages of `read` that other reads depend on; these may need no state there."""
        return max(
            (
                min(common_pages(read.query.digests, other.query.digests), other.target)
                for other in self.in_flight
                if read in other.needs
            ),
            default=0,
        )

    def _restorable_lengths(
        self, read: StorageRead, outcomes: Outcomes, memory_pages: int, resident: Mapping[int, bytearray]
    ) -> int:
        """The prefix lengths that are restorable from what arrived and what is in memory, as a bit set."""
        query, sets = read.query, []
        for component_id in range(self._tree.width):
            there = b"\1" * memory_pages if component_id == FULL else resident[component_id]
            arrived = self._hit_flags(read, component_id, outcomes)
            sets.append(self._restorable(component_id, _either(query.pages, there, arrived), query))
        return hits.intersect(sets)

    @staticmethod
    def _hit_flags(read: StorageRead, component_id: int, outcomes: Outcomes) -> bytearray:
        flags, pages = bytearray(read.query.pages), read.pages.get(component_id, [])
        results = outcomes.get(component_id, ())
        if results.count(Outcome.HIT) < len(pages):
            pages = [page for page, one in zip(pages, results, strict=True) if one is Outcome.HIT]
        for first, last in _spans(pages):
            flags[first : last + 1] = b"\1" * (last + 1 - first)
        return flags

    def _host_node_before(
        self, read: StorageRead, pages: int, outcomes: Outcomes
    ) -> tuple[Node | None, list[Copy]]:
        """The node behind which the full pages that arrived can be inserted, on the way to the first `pages`
        pages, which are in memory; and the backups for that.

        Pages that another request published during the read may be on the device only: what arrived becomes
        their host copy. What did not arrive is backed up.

        Returns:
            The node; None if the path does not get onto the host, or ended at a device failure.
        """
        query = read.query
        node = self._tree.reach(query.tokens, query.seed, pages)
        if node is None:
            return None, []
        above = node
        while above.residency[FULL_HOST] == ABSENT and above.parent is not None:
            above = above.parent
        if len(self._arrived(read, above.end, node.end, outcomes)) == node.end - above.end:
            return above, []
        on_host, backups = self._keep_on_host(query, node)
        return node if on_host else None, backups

    @staticmethod
    def _arrived(read: StorageRead, start: int, end: int, outcomes: Outcomes) -> range:
        """Positions in `read.pages[FULL]` of what arrived, from page `start` to the first gap or `end`."""
        numbers, results = read.pages.get(FULL, []), outcomes.get(FULL, ())
        first = bisect_left(numbers, start)
        last = first + _run_length(numbers, first, start, end)
        if results.count(Outcome.HIT) < len(results):
            last = next((at for at in range(first, last) if results[at] is not Outcome.HIT), last)
        return range(first, last)

    def _insert(self, read: StorageRead, node: Node, pages: int, outcomes: Outcomes) -> Node:
        """Insert full pages behind `node`, which is on the host, up to `pages` or the first that did not
        arrive; returns the node at their end."""
        query = read.query
        arrived = self._arrived(read, node.end, pages, outcomes)
        if not arrived:
            return node
        first, last = arrived.start, arrived.stop
        slots = read.slots[FULL]
        if query.tail and node.end + last - first == query.pages:
            result = tails.insert_host(self._tree, node, query.tokens, slots[first:last], query.tail)
        else:
            result = self._tree.insert_host(node, query.tokens, slots[first:last])
        read.slots[FULL] = slots[:first] + result.duplicates + slots[last:]
        # Nodes above too: another request may have published them during the read.
        _give_digests(result.node, query.digests, result.node.end)
        for fresh in result.filled:
            if query.forgotten == self._backups.forgotten:
                self._mark_stored(fresh, FULL)
        return result.node

    def _insert_others(self, read: StorageRead, node: Node, pages: int, outcomes: Outcomes) -> None:
        """Insert the windows and states that arrived for a prefix of `pages` pages, which ends at `node` or
        before it."""
        if not (self._tree.components and pages):
            return
        end = node if node.end == pages else self._tree.reach(read.query.tokens, read.query.seed, pages)
        if end is None:
            return
        for window in self._tree.windows:
            self._tree.cut_window(end, window.first_kept(end))
        for component in self._tree.components:
            if component.id in read.slots:
                read.slots[component.id] = self._attach(read, component, end, outcomes[component.id])
                self._tree.use(component, end)

    def _attach(
        self, read: StorageRead, component: Component, end: Node, results: Sequence[Outcome]
    ) -> list[int]:
        """Insert the pages of one component that arrived and that a prefix ending at `end` needs; returns
        the slots that the tree did not take."""
        needed = range(self._first_needed(component, read.query, end.end), end.end)
        arrived: dict[int, int] = {}
        left: list[int] = []
        slots = read.slots[component.id]
        for page, slot, outcome in zip(read.pages[component.id], slots, results, strict=True):
            if outcome is Outcome.HIT and page in needed:
                arrived[page] = slot
            else:
                left.append(slot)
        for first, last in _spans(list(arrived)):
            run = [arrived[page] for page in range(first, last + 1)]
            left += self._take(read.query, component, Pages(first, run))
        return left

    def _take(self, query: StorageQuery, component: Component, pages: Pages) -> list[int]:
        """Insert a run of pages, or one state; returns the slots that the tree did not take."""
        node = self._tree.reach(query.tokens, query.seed, pages.first + len(pages.slots))
        if node is None:
            return list(pages.slots)
        if component.paged:
            refused = self._tree.take_pages(node, component.id, Tier.HOST, pages)
        else:
            taken = self._tree.take_state(node, component.id, Tier.HOST, pages.slots[0])
            refused = {} if taken else {pages.first: pages.slots[0]}
        if not refused and query.forgotten == self._backups.forgotten:
            self._mark_run_stored(node, component.id, pages.first)
        return list(refused.values())

    def _mark_run_stored(self, node: Node, component_id: int, first: int) -> None:
        while node.end > first and node.parent is not None:
            self._mark_stored(node, component_id)
            node = node.parent

    def _mark_stored(self, node: Node, component_id: int) -> None:
        """Mark what was read as stored, so that it is not written again."""
        node.stored |= 1 << component_id
        if self._tree.watcher is not None:
            self._tree.watcher.on_store(node, component_id)

    def _release(self, read: StorageRead, late: Mapping[int, Collection[int]]) -> None:
        """Free the slots that the tree did not take, except those that a late read may still write to."""
        for component_id, slots in read.slots.items():
            gone = [slot for slot in slots if slot not in late[component_id]]
            self._state.free[place_of(component_id, Tier.HOST)].release(gone)
            read.slots[component_id] = [slot for slot in slots if slot in late[component_id]]

    def finish(self, read: StorageRead, *, safe: bool = True) -> None:
        """Give back the late slots of a read; unless `safe`, an engine may still write to them forever."""
        for component_id, slots in read.slots.items():
            self._state.give_back(place_of(component_id, Tier.HOST), slots, poisoned=not safe)
        self._reads.discard(read)

    def _private(self) -> Mapping[SlotPlace, list[int]]:
        owned: dict[SlotPlace, list[int]] = {}
        for read in self._reads:
            for component_id, slots in read.slots.items():
                owned.setdefault(place_of(component_id, Tier.HOST), []).extend(slots)
        return owned


def _path(node: Node) -> list[Node]:
    """The nodes from `node` up to, and without, the root."""
    found = []
    while node.parent is not None:
        found.append(node)
        node = node.parent
    return found


def _give_digests(end: Node, digests: Sequence[bytes], pages: int) -> None:
    """Set the digests of the nodes on the path to `end` that end at or before `pages`."""
    for node in _path(end):
        if node.digests is None and node.end <= pages:
            node.digests = list(digests[node.end - node.pages : node.end])


def _known_digests(tip: Node) -> list[bytes]:
    """Digests of the pages up to `tip`, as far as they were computed."""
    digests: list[bytes] = []
    for node in reversed(_path(tip)):
        if node.digests is None:
            break
        digests += node.digests
    return digests


def _late(read: StorageRead, outcomes: Outcomes) -> dict[int, set[int]]:
    """By component, the slots that an engine may still write to: those whose read timed out."""
    late: dict[int, set[int]] = {}
    for component_id, slots in read.slots.items():
        results = outcomes[component_id] if Outcome.TIMEOUT in outcomes[component_id] else ()
        late[component_id] = {
            slot for slot, one in zip(slots, results, strict=False) if one is Outcome.TIMEOUT
        }
    return late


def _run_length(numbers: Sequence[int], at: int, first: int, end: int) -> int:
    """Length of the run `first, first + 1, ...` below `end` in the ascending `numbers` from index `at`."""
    count = min(len(numbers) - at, end - first)
    if count <= 0 or numbers[at] != first:
        return 0
    if numbers[at + count - 1] == first + count - 1:  # nearly always
        return count
    return next(step for step in range(count) if numbers[at + step] != first + step)


def _spans(pages: Sequence[int]) -> Iterator[tuple[int, int]]:
    """First and last of each run of consecutive numbers in an ascending series."""
    if pages and pages[-1] - pages[0] == len(pages) - 1:  # nearly always
        yield pages[0], pages[-1]
        return
    for _, run in groupby(enumerate(pages), key=lambda item: item[1] - item[0]):
        numbers = [page for _, page in run]
        yield numbers[0], numbers[-1]


def _either(pages: int, *flags: bytes | bytearray) -> bytearray:
    """A byte per page: 1 where any of `flags` has 1. Shorter ones are padded with 0."""
    every = 0
    for some in flags:
        every |= int.from_bytes(some[:pages], "little")
    return bytearray(every.to_bytes(pages, "little"))


def _zeros(flags: bytearray, first: int, end: int) -> list[int]:
    """Numbers from `first` up to, and without, `end` whose flag is 0 or missing."""
    if 1 not in flags[first:end]:  # nearly always
        return list(range(first, end))
    return [page for page in range(first, end) if page >= len(flags) or not flags[page]]
