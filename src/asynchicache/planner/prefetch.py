"""Plans reads from storage: what to ask for, what to read, and what to insert. Pure.

A request asks with `make_query` and `choose`, which gives a `Reading`: the pages that its prefix lacks. They
are read by calls of `next_read`, in order of turn of the requests. No page is read twice at once: its read
belongs to all readings that need it. Host slots are allocated when a read begins, so a page that nobody waits
for any more, and whose read has not begun, costs nothing. `deliver` takes what storage answered; a reading of
which everything was answered enters the tree. A failure loses the failed pages and those after them, never
earlier ones.

What was read for requests that have not used it yet is bounded (`READ_AHEAD_SHARE`): otherwise prompts that
wait for their turn would push out each other's pages.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left, insort
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import count, groupby, takewhile
from operator import attrgetter

from asynchicache.hashing import common_pages, page_digests, placed_pages, tail_digests
from asynchicache.planner.actions import Copy
from asynchicache.planner.backup import BackupPlanner
from asynchicache.planner.inventory import SlotInventory
from asynchicache.planner.readings import PageRead, Reading, ReadPlan, ReadResult, StorageQuery, StorageRead
from asynchicache.planner.request_state import RequestState
from asynchicache.storage import hits
from asynchicache.tree import tails
from asynchicache.tree.components import Component, prefix_locks
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
from asynchicache.tree.radix_tree import Match, Pages, device_end
from asynchicache.tree.tier_copies import missing_on_host
from asynchicache.types import ALL_PAGES, MissReason, Outcome, Tier

READ_AHEAD_SHARE = 0.875
"""The most of the host slots of a pool that may hold what was read for requests that have not used it; the
first in turn is not bound by it. The rest is for what is computed meanwhile, on its way to storage."""

_READ_REASONS = (
    (Outcome.CORRUPT, MissReason.CORRUPT),
    (Outcome.TIMEOUT, MissReason.DEADLINE),
    (Outcome.FAILED, MissReason.STORAGE_FAILED),
    (Outcome.REJECTED, MissReason.STORAGE_FAILED),
    (Outcome.MISS, MissReason.COLD),
)
"""The reason reported for an incomplete read: the first outcome that any page had."""


class PrefetchPlanner:
    """Plans reads from storage."""

    def __init__(self, inventory: SlotInventory, writer: BackupPlanner) -> None:
        self._inventory = inventory
        self._backups = writer
        self._tree = inventory.tree
        self._windows = {component.id for component in inventory.tree.windows}
        self.in_flight: list[Reading] = []  # in order of turn
        self._begun: dict[tuple[int, bytes], PageRead] = {}  # pages whose read holds a host slot
        self._unused: dict[RequestState, Counter[SlotPlace]] = {}  # read for requests that have not loaded
        self._turns = 0
        inventory.private.append(self._private)

    def can_read(self, component_id: int) -> bool:
        """Whether storage can serve a component: only if it has host slots."""
        return self._inventory.free[place_of(component_id, Tier.HOST)].capacity > 0

    def known_digests(self, tokens: array[int], seed: bytes) -> list[bytes]:
        """Digests of the first pages of a sequence, as far as they were computed before."""
        match = self._tree.match(tokens, seed, limit=self._max_restorable_pages(tokens))
        return _known_digests(self._tip(tokens, match.node, match.full_pages))[: match.full_pages]

    def _max_restorable_pages(self, tokens: array[int]) -> int:
        """The most pages that could be restored; at least one token is left to compute."""
        return (len(tokens) - 1) // self._tree.page_size

    def wanted(self, tokens: array[int], until: int) -> tuple[int, int]:
        """The longest prefix of up to `until` tokens that could ever be restored: whole pages, and tokens
        behind them."""
        if self._tree.tails:
            return divmod(min(until, len(tokens) - 1), self._inventory.page_size)
        return min(until // self._inventory.page_size, self._max_restorable_pages(tokens)), 0

    def in_memory(self, tokens: array[int], seed: bytes) -> tuple[int, int]:
        """What memory restores of a sequence: whole pages, and tokens behind them."""
        match = self._tree.match(tokens, seed, limit=self._max_restorable_pages(tokens))
        tail = tails.find(self._tree, match.node, tokens, len(tokens) - 1) if self._tree.tails else None
        return match.pages, 0 if tail is None else tail.tokens

    def last_needed(self, query: StorageQuery, pages: int) -> Iterator[tuple[int, range]]:
        """By component, full pages first: pages of which storage must have one, or it cannot restore `pages`
        pages or more. Nothing for what memory has."""
        for component_id in range(self._tree.width):
            most = None if component_id == FULL else self._inventory.spec.owners[component_id].coverage.pages
            if most != 0 and 1 not in self._present_flags(query, component_id)[pages - 1 :]:
                yield component_id, range(pages - 1, pages if most is None else query.pages)

    def reach(self, query: StorageQuery, present: Mapping[int, bytes]) -> tuple[int, int]:
        """The longest prefix that storage and memory restore together: whole pages, and tokens behind them.

        `present`: see `choose`.
        """
        pages = hits.longest(hits.intersect(self._restorable_sets(query, present)))
        return (pages - 1, query.tail) if query.tail and pages == query.pages else (pages, 0)

    def missing_tokens(self, tokens: array[int], seed: bytes, *, tail: bool = False) -> int:
        """The most tokens that storage could add to what is restorable from memory, in whole pages. A tail
        alone is not worth a question, unless all of the sequence is in one page, or `tail` says so."""
        pages, size = self._max_restorable_pages(tokens), self._inventory.page_size
        if not self.can_read(FULL):
            return 0
        found, behind = self.in_memory(tokens, seed)
        if self._tree.tails and found == pages and (tail or not pages):
            return len(tokens) - 1 - pages * size - behind
        return (pages - found) * size

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
            SAVING in node.residency for node in (*tip.path(), *([ahead] if ahead is not None else []))
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
        tip, memory_pages = self._tip_in_memory(tokens, seed, match, pages)
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
        query.matched_pages = self._matched(query, match, memory_pages, resident)
        if query.matched_pages >= pages:
            return None
        self._inventory.lock(query.locks)
        return query

    def _tip_in_memory(self, tokens: array[int], seed: bytes, match: Match, limit: int) -> tuple[Node, int]:
        """The node that contains the last full page of a sequence in memory; and the number of these pages.

        Those on their way from an engine's pages count: what storage has of them would be read in vain.
        """
        if self._tree.host_only:
            return self._tree.known_pages(tokens, seed, limit)
        return self._tip(tokens, match.node, match.full_pages), match.full_pages

    def _matched(
        self, query: StorageQuery, match: Match, memory_pages: int, resident: Mapping[int, bytearray]
    ) -> int:
        """Pages that are restorable without storage, also from what is on its way from an engine's pages."""
        if not self._tree.host_only:
            return match.pages
        return hits.longest(self._restorable_lengths(query, {}, memory_pages, resident))

    def _tier(self, component: Component, node: Node) -> Tier | None:
        """The nearest tier that has a node's slots of a component, or gets them from an engine's pages."""
        saving = self._tree.host_only and node.residency[place_of(component.id, Tier.HOST)] == SAVING
        return Tier.HOST if saving else component.nearest(node)

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
        for node in tip.path() if resident else ():
            for component in self._tree.components:
                if self._tier(component, node) is not None:
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

        No bytes if others wait for a part of it anyway.
        """
        pages = max(reach - query.matched_pages, 0)
        shared = (common_pages(other.query.digests, query.digests) for other in self.in_flight)
        if not pages or any(count > query.memory_pages for count in shared):
            return pages, 0
        free = self._inventory.free
        nbytes = max(reach - query.memory_pages, 0) * free[FULL_HOST].slot_bytes
        for component in self._tree.components:
            count = min(self._inventory.spec.owners[component.id].coverage.pages or pages, pages)
            nbytes += count * free[place_of(component.id, Tier.HOST)].slot_bytes
        return pages, nbytes

    def bytes_that_fit(self, tokens: array[int], seed: bytes) -> int | None:
        """The most bytes that a read of all of a sequence brings; None if it does not fit into free slots."""
        pages, tail = self._max_restorable_pages(tokens), int(self._tree.tails)
        match = self._tree.match(tokens, seed, limit=pages)
        if match.pages >= pages:
            return 0
        counts = {FULL: pages + tail - match.full_pages}
        for component in self._tree.components:
            coverage = self._inventory.spec.owners[component.id].coverage.pages
            counts[component.id] = pages + tail if coverage is None else min(coverage + tail, pages + tail)
        free, room = self._inventory.free, dict[int, int]()
        for component_id, most in counts.items():
            slots = free[place_of(component_id, Tier.HOST)]
            if most > slots.available:
                return None
            memory = id(slots.memory)  # pools that share it pay from it together
            room[memory] = room.get(memory, 0) + most * slots.slot_bytes
            if slots.memory is not None and room[memory] > slots.memory.left:
                return None
        return sum(room.values())

    def release(self, query: StorageQuery) -> None:
        """Release the locks of a query without a reading, which releases them itself."""
        self._inventory.unlock(query.locks)

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
        pages = self._inventory.spec.owners[component_id].coverage.pages or 0
        return max(query.matched_pages + 1 - pages, 0)

    # What to read

    def choose(
        self,
        query: StorageQuery,
        present: Mapping[int, bytes],
        request: RequestState | None = None,
        *,
        most: int | None = None,
    ) -> ReadPlan:
        """Choose the longest prefix that storage and memory restore together, and wait for what it lacks.

        Args:
            present: by component, a byte per page of the query, 1 if storage has it. A short answer is padded
                with 0.
            request: the request that will use the prefix.
            most: the most pages of it. Default: all that the host holds.
        """
        sets = self._restorable_sets(query, present)
        lengths = hits.intersect(sets)
        reach, full, limit = hits.longest(lengths), hits.longest(sets[FULL]), self._limit(sets)
        reason = self._miss_reason(query, full, limit)
        if reach <= query.matched_pages:
            return ReadPlan(None, reason, [], full, limit, reach)
        most = self._inventory.host_pages if most is None else most
        target = hits.longest(hits.clamp(lengths, most))
        reason = MissReason.HOST_CAPACITY if target < reach else reason
        if target <= query.matched_pages:
            return ReadPlan(None, reason, [], full, limit, reach)
        self._lock_dependencies(query, target)  # the room for its pages must not come from what else it needs
        on_host, backups = self._ensure_ancestors_on_host(query)
        if not on_host:
            return ReadPlan(None, MissReason.HOST_CAPACITY, backups, full, limit, reach)
        return ReadPlan(self._wait_for(query, target, request), reason, backups, full, limit, reach)

    def _restorable_sets(self, query: StorageQuery, present: Mapping[int, bytes]) -> list[int]:
        """By component, the prefix lengths that storage and memory restore together."""
        sets = []
        for component_id in range(self._tree.width):
            there = _either(
                query.pages,
                self._can_come(query, component_id, present.get(component_id, b"")),
                self._present_flags(query, component_id),
            )
            sets.append(self._restorable(component_id, there, query))
        return sets

    def _can_come(self, query: StorageQuery, component_id: int, present: bytes) -> bytes | bytearray:
        """A byte per page: 1 if storage has it, or it arrived; 0 if an earlier read of it is overdue."""
        if not self._begun:
            return present
        flags = bytearray(present[: query.pages].ljust(query.pages, b"\0"))
        for page, digest in enumerate(query.digests):
            read = self._begun.get((component_id, digest))
            if read is not None:
                flags[page] = read.outcome in (None, Outcome.HIT)
        return flags

    def _wait_for(self, query: StorageQuery, target: int, request: RequestState | None) -> Reading:
        """Wait for the pages that a prefix of `target` pages lacks."""
        missing = self._missing(query, target)
        turn = self._turn(request)
        reading = Reading(query, target, missing, request, turn, {})
        for component_id, pages in missing.items():
            left = reading.unbegun[component_id] = []
            for page in pages:
                read = self._begun.get((component_id, query.digests[page]))
                if read is None:
                    left.append(page)
                else:
                    self._join(reading, read)
        insort(self.in_flight, reading, key=attrgetter("turn"))
        return reading

    def _turn(self, request: RequestState | None) -> int:
        """The turn of a request: when it asked first, or began to wait for its turn."""
        if request is not None and request.turn:
            return request.turn
        self._turns += 1
        if request is not None:
            request.turn = self._turns
        return self._turns

    def queue(self, request: RequestState) -> None:
        """A request goes to the end of the line of those that wait for their turn."""
        request.turn = 0
        turn = self._turn(request)
        for reading in self.in_flight:
            if reading.request is request:
                reading.turn = turn
        self.in_flight.sort(key=attrgetter("turn"))

    @staticmethod
    def _join(reading: Reading, read: PageRead) -> None:
        read.waiters.append(reading)
        reading.joined = True
        reading.unanswered += read.outcome is None
        _note_stage(reading, read)

    def next_read(self, most: Mapping[int, int] | None = None) -> StorageRead | None:
        """Begin the next read: pages of the first in turn that waits for some and has room.

        States and windows of a prefix begin after its full pages, which are of use without them.

        Args:
            most: by component, the most pages of a call now. Default: any number.

        Returns:
            The read; None if no further read can begin now.
        """
        read = self._next_read(most)
        for observer in self._inventory.observers:
            observer.read_chosen(read)
        return read

    def _next_read(self, most: Mapping[int, int] | None) -> StorageRead | None:
        short: set[int] = set()
        for reading in self.in_flight:
            for component_id, pages in reading.unbegun.items() if reading.wanted else ():
                if not pages:
                    continue
                count = len(pages) if most is None else min(most.get(component_id, 0), len(pages))
                if count and component_id not in short:
                    room = self._room(reading, component_id, count)
                    if room:
                        reading.lacks_room = False
                        return self._begin(reading, component_id, pages[:room])
                    short.add(component_id)
                reading.lacks_room |= component_id in short
                break
        return None

    def _room(self, reading: Reading, component_id: int, count: int) -> int:
        """How many of `count` slots are there for the next pages of a reading; evicts if necessary."""
        place = place_of(component_id, Tier.HOST)
        free = self._inventory.free[place]
        if not self._is_first(reading):
            count = min(count, int(free.capacity * READ_AHEAD_SHARE) - self._ahead(place))
        if count <= 0 or self._inventory.make_room(place, count):
            return max(count, 0)
        return min(count, free.available)

    def _is_first(self, reading: Reading) -> bool:
        """Whether nobody before a reading holds, or waits for, what was read ahead."""
        turns = [other.turn for other in self._unused] + [other.turn for other in self.in_flight]
        return reading.turn <= min(turns, default=reading.turn)

    def _ahead(self, place: SlotPlace) -> int:
        """Slots that hold, or wait for, what was read and is not used yet."""
        reads = sum(place_of(component_id, Tier.HOST) == place for component_id, _ in self._begun)
        return reads + sum(slots[place] for slots in self._unused.values())

    def _begin(self, reading: Reading, component_id: int, pages: list[int]) -> StorageRead:
        """Allocate the slots of pages of a reading; others that need them wait for this read."""
        place, digests = place_of(component_id, Tier.HOST), reading.query.digests
        slots = self._inventory.free[place].allocate(len(pages))
        begun = [
            PageRead((component_id, digests[page]), slot, []) for page, slot in zip(pages, slots, strict=True)
        ]
        self._begun.update((read.key, read) for read in begun)
        for other in self.in_flight:
            left = other.unbegun.get(component_id)
            if not left:
                continue
            shared = bisect_left(pages, common_pages(digests, other.query.digests))
            dropped = _drop(left, pages[:shared])
            for page, read in zip(pages, begun, strict=True) if dropped else ():
                if page in dropped:
                    read.waiters.append(other)
            other.unanswered += len(dropped)
            other.joined |= bool(dropped) and other is not reading
        return StorageRead(component_id, begun, placed_pages(digests, pages))

    @staticmethod
    def _present_flags(query: StorageQuery, component_id: int) -> bytes | bytearray:
        """A byte per page that the query's path has in memory: 1 if the component has it there."""
        return b"\1" * query.memory_pages if component_id == FULL else query.resident[component_id]

    def _restorable(self, component_id: int, there: bytes | bytearray, query: StorageQuery) -> int:
        """The prefix lengths of a query that a component can restore, as a bit set."""
        coverage = ALL_PAGES if component_id == FULL else self._inventory.spec.owners[component_id].coverage
        if not (query.tail and component_id in self._windows):
            return hits.restorable(coverage, there, query.pages)
        whole = hits.restorable(coverage, there, query.whole_pages)
        return whole | (whole << 1 & (there[query.whole_pages] > 0) << query.pages)

    def _first_needed(self, component: Component, query: StorageQuery, pages: int) -> int:
        """The first page of a component that a prefix of `pages` pages of a query needs."""
        ends_inside = component.paged and query.tail > 0 and pages == query.pages
        coverage = self._inventory.spec.owners[component.id].coverage.pages
        return 0 if coverage is None else max(pages - coverage - ends_inside, 0)

    @staticmethod
    def _limit(sets: Sequence[int]) -> int | None:
        """The component that allows the shortest prefix, if that is shorter than the full pages allow.

        `sets`: by component, the prefix lengths that it allows.
        """
        full = hits.longest(sets[FULL])
        reaches = [hits.longest(hits.clamp(lengths, full)) for lengths in sets]
        return reaches.index(min(reaches)) if min(reaches) < full else None

    def _miss_reason(self, query: StorageQuery, full: int, limit: int | None) -> MissReason:
        """Why memory and storage together do not restore all pages of a query."""
        begun = (self._begun.get((limit or FULL, digest)) for digest in query.digests if self._begun)
        if any(read is not None and read.outcome is Outcome.TIMEOUT for read in begun):
            return MissReason.DEADLINE
        if limit is None:
            return MissReason.NONE if full == query.pages else MissReason.COLD
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

    def _missing(self, query: StorageQuery, target: int) -> dict[int, list[int]]:
        """By component, full pages first, what a prefix of `target` pages needs and memory lacks."""
        wanted = {FULL: list(range(query.memory_pages, target))}
        for component in self._tree.components:
            first = self._first_needed(component, query, target)
            wanted[component.id] = _zeros(query.resident[component.id], first, target)
        return {component_id: pages for component_id, pages in wanted.items() if pages}

    # What arrived

    def deliver(self, read: StorageRead, outcomes: Sequence[Outcome]) -> list[ReadResult]:
        """Take storage's answer for the pages of a read, and end readings that waited for the last of them.

        Slots of pages that timed out stay with the read, because the engine may still write to them; `finish`
        gives them back.

        Returns:
            The results of the readings that have ended, in order of turn.
        """
        for page, outcome in zip(read.pages, outcomes, strict=True):
            page.outcome = outcome
            for reading in page.waiters:
                reading.unanswered -= 1
                if outcome is not Outcome.HIT:
                    reading.lost.append(outcome)
                _note_stage(reading, page)
            if outcome is not Outcome.HIT and outcome is not Outcome.TIMEOUT:
                self._give_up(page)
        waiters = {reading: None for page in read.pages for reading in page.waiters}
        return [self._end(one) for one in sorted(waiters, key=attrgetter("turn")) if one.ended]

    def settle(self, reading: Reading) -> list[Copy]:
        """Insert what has arrived in order so far, because the request goes on with that.

        Returns:
            The copies to carry out.
        """
        if reading not in self.in_flight:
            return []
        _, backups = self._insert_arrived(reading)
        self._lock_dependencies(reading.query, reading.target)  # for what still follows
        return backups

    def ready(self) -> list[ReadResult]:
        """End the readings all of whose pages had arrived for others when they began to wait."""
        return [self._end(reading) for reading in list(self.in_flight) if reading.wanted and reading.ended]

    def abandon(self, reading: Reading) -> list[ReadResult]:
        """Nobody waits for a reading any more: no further read begins for it. What has begun arrives for
        whoever comes next."""
        reading.wanted = False
        reading.unbegun.clear()
        return [self._end(reading)] if reading.ended and reading in self.in_flight else []

    def used(self, request: RequestState) -> None:
        """A request has used what was read for it, or never will."""
        self._unused.pop(request, None)

    def was_read_for(self, request: RequestState) -> bool:
        """Whether something was read for a request that it has not used."""
        return request in self._unused

    def _end(self, reading: Reading) -> ReadResult:
        """Insert what arrived for a reading of which everything was answered."""
        pages, backups = self._insert_arrived(reading)
        self.in_flight.remove(reading)
        for component_id, numbers in reading.pages.items():
            for page in numbers:
                read = self._begun.get((component_id, reading.query.digests[page]))
                if read is not None and reading in read.waiters:
                    read.waiters.remove(reading)
                    if not read.waiters and read.outcome is Outcome.HIT:
                        self._give_up(read)  # it stands behind a page that did not arrive
        self.release(reading.query)
        reason = MissReason.NONE
        if pages < reading.target:
            found = (why for one, why in _READ_REASONS if one in reading.lost)
            reason = next(found, MissReason.HOST_CAPACITY)
        return ReadResult(reading, pages, reason, backups)

    def _give_up(self, read: PageRead) -> None:
        """Free the slot of a page that does not enter the tree."""
        del self._begun[read.key]
        self._inventory.free[place_of(read.key[0], Tier.HOST)].release([read.slot])

    def _lock_dependencies(self, query: StorageQuery, target: int) -> None:
        """Lock all that is in memory now of what a prefix of `target` pages needs."""
        match = self._tree.match(query.tokens, query.seed, limit=target)
        tip, _ = self._tip_in_memory(query.tokens, query.seed, match, target)
        kept = self._ends(tip)
        for component in self._tree.components:
            first = self._first_needed(component, query, target)
            node = tip
            while node.parent is not None and node.end > first and (component.paged or node.end == target):
                tier = self._tier(component, node)
                if tier is not None:
                    kept += [(node, place_of(component.id, tier)), (node, place_of(FULL, tier))]
                node = node.parent
        for node, place in kept:
            self._tree.lock_for(query.locks, node, place)

    def _insert_arrived(self, reading: Reading) -> tuple[int, list[Copy]]:
        """Insert what arrived in order: full pages, and the windows and states of the longest prefix that is
        restorable now.

        Returns:
            Its pages, and copies to carry out.
        """
        query = reading.query
        memory_pages, matched_pages, resident = query.memory_pages, query.matched_pages, query.resident
        if query.version != self._tree.version:
            match = self._tree.match(query.tokens, query.seed, limit=query.pages)
            tip, memory_pages = self._tip_in_memory(query.tokens, query.seed, match, query.pages)
            resident = self._resident_flags(tip, memory_pages)
            matched_pages = self._matched(query, match, memory_pages, resident)
        came = self._arrived(reading)
        if query.epoch != self._tree.epoch or not came:
            return matched_pages, []
        pages = hits.longest(self._restorable_lengths(query, came, memory_pages, resident))
        full = came.get(FULL, {})
        if memory_pages not in full and pages <= matched_pages:
            return matched_pages, []
        before = memory_pages if memory_pages in full else min(memory_pages, pages)
        above, backups = self._host_node_before(query, before, full)
        if above is None:
            return matched_pages, backups
        node = self._insert(reading, above, full)
        if pages > matched_pages:
            self._insert_others(reading, node, pages, came)
        self._keep_for_others(reading)
        return max(pages, matched_pages), backups

    def _arrived(self, reading: Reading) -> dict[int, dict[int, PageRead]]:
        """By component and page, what has arrived for a reading and is not in the tree."""
        found: dict[int, dict[int, PageRead]] = {}
        for component_id, pages in reading.pages.items():
            reads = ((page, self._begun.get((component_id, reading.query.digests[page]))) for page in pages)
            arrived = {page: one for page, one in reads if one is not None and one.outcome is Outcome.HIT}
            if arrived:
                found[component_id] = arrived
        return found

    def _restorable_lengths(
        self,
        query: StorageQuery,
        came: Mapping[int, Mapping[int, PageRead]],
        memory_pages: int,
        resident: Mapping[int, bytearray],
    ) -> int:
        """The prefix lengths that are restorable from what arrived and what is in memory, as a bit set."""
        sets = []
        for component_id in range(self._tree.width):
            there = b"\1" * memory_pages if component_id == FULL else resident[component_id]
            flags = _either(query.pages, there)
            for page in came.get(component_id, ()):
                flags[page] = 1
            sets.append(self._restorable(component_id, flags, query))
        return hits.intersect(sets)

    def _host_node_before(
        self, query: StorageQuery, pages: int, full: Mapping[int, PageRead]
    ) -> tuple[Node | None, list[Copy]]:
        """The node behind which the full pages that arrived can be inserted, on the way to the first `pages`
        pages, which are in memory; and the backups for that.

        Pages that another request published during the read may be on the device only: what arrived becomes
        their host copy. What did not arrive is backed up.

        Returns:
            The node; None if the path does not get onto the host, or ended at a device failure.
        """
        node = self._tree.reach(query.tokens, query.seed, pages)
        if node is None:
            return None, []
        above = node
        while above.residency[FULL_HOST] == ABSENT and above.parent is not None:
            above = above.parent
        if all(page in full for page in range(above.end, node.end)):
            return above, []
        on_host, backups = self._keep_on_host(query, node)
        return node if on_host else None, backups

    def _insert(self, reading: Reading, node: Node, full: Mapping[int, PageRead]) -> Node:
        """Insert full pages behind `node`, which is on the host, up to the first that did not arrive; returns
        the node at their end."""
        query = reading.query
        run = [full[page] for page in takewhile(full.__contains__, count(node.end))]
        if not run:
            return node
        slots = [read.slot for read in run]
        if query.tail and node.end + len(run) == query.pages:
            result = tails.insert_host(self._tree, node, query.tokens, slots, query.tail)
        else:
            result = self._tree.insert_host(node, query.tokens, slots)
        self._taken(run, result.duplicates)
        # Nodes above too: another request may have published them during the read.
        _give_digests(result.node, query.digests, result.node.end)
        for fresh in result.filled:
            if query.forgotten == self._backups.forgotten:
                self._mark_stored(fresh, FULL)
        return result.node

    def _taken(self, reads: Sequence[PageRead], refused: Collection[int]) -> None:
        """The tree has the pages of `reads` now; slots that it refused are freed."""
        place = place_of(reads[0].key[0], Tier.HOST)
        for read in reads:
            del self._begun[read.key]
        self._inventory.free[place].release(list(refused))
        users = (one.request for one in reads[0].waiters if one.wanted and one.request is not None)
        user = next((one for one in users if not (one.loaded or one.closed)), None)
        if user is not None:
            self._unused.setdefault(user, Counter())[place] += len(reads) - len(refused)

    def _insert_others(
        self, reading: Reading, node: Node, pages: int, came: Mapping[int, Mapping[int, PageRead]]
    ) -> None:
        """Insert the windows and states that arrived for a prefix of `pages` pages, which ends at `node` or
        before it."""
        if not (self._tree.components and pages):
            return
        end = node if node.end == pages else self._tree.reach(reading.query.tokens, reading.query.seed, pages)
        if end is None:
            return
        for window in self._tree.windows:
            self._tree.cut_window(end, window.first_kept(end))
        for component in self._tree.components:
            if component.id in came:
                self._attach(reading, component, end, came[component.id])
                self._tree.use(component, end)

    def _attach(
        self, reading: Reading, component: Component, end: Node, came: Mapping[int, PageRead]
    ) -> None:
        """Insert the pages of one component that arrived and that a prefix ending at `end` needs."""
        needed = range(self._first_needed(component, reading.query, end.end), end.end)
        arrived = [page for page in came if page in needed]
        for first, last in _spans(arrived):
            reads = [came[page] for page in range(first, last + 1)]
            left = self._take(reading.query, component, Pages(first, [read.slot for read in reads]))
            self._taken(reads, left)

    def _keep_for_others(self, reading: Reading) -> None:
        """Lock what was inserted for the other readings that need it, so that it is not evicted before they
        end."""
        for other in self.in_flight:
            if other is not reading and common_pages(other.query.digests, reading.query.digests):
                self._lock_dependencies(other.query, other.target)

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
        for part in node.path(first):
            self._mark_stored(part, component_id)

    def _mark_stored(self, node: Node, component_id: int) -> None:
        """Mark what was read as stored, so that it is not written again."""
        node.stored |= 1 << component_id
        if self._tree.watcher is not None:
            self._tree.watcher.on_store(node, component_id)

    def finish(self, read: StorageRead, *, safe: bool = True) -> None:
        """Give back the late slots of a read; unless `safe`, an engine may still write to them forever."""
        for page in read.pages:
            if page.outcome is Outcome.TIMEOUT:
                del self._begun[page.key]
                place = place_of(read.component_id, Tier.HOST)
                self._inventory.give_back(place, [page.slot], poisoned=not safe)

    def _private(self) -> Mapping[SlotPlace, list[int]]:
        owned: dict[SlotPlace, list[int]] = {}
        for (component_id, _), read in self._begun.items():
            owned.setdefault(place_of(component_id, Tier.HOST), []).append(read.slot)
        return owned


def _drop(pages: list[int], gone: list[int]) -> Collection[int]:
    """Remove numbers from an ascending list; returns those that were there. Both are ascending."""
    if not gone:
        return ()
    at = bisect_left(pages, gone[0])
    if pages[at : at + len(gone)] == gone:  # nearly always
        del pages[at : at + len(gone)]
        return range(gone[0], gone[-1] + 1) if gone[-1] - gone[0] == len(gone) - 1 else set(gone)
    dropped = set(gone).intersection(pages)
    pages[:] = [page for page in pages if page not in dropped]
    return dropped


def _give_digests(end: Node, digests: Sequence[bytes], pages: int) -> None:
    """Set the digests of the nodes on the path to `end` that end at or before `pages`."""
    for node in end.path():
        if node.digests is None and node.end <= pages:
            node.digests = list(digests[node.end - node.pages : node.end])


def _note_stage(reading: Reading, read: PageRead) -> None:
    """Note that a page which has come for a request came from a farther stage than others."""
    if reading.request is not None and read.outcome is Outcome.HIT:
        reading.request.stage = max(reading.request.stage, read.stage)


def _known_digests(tip: Node) -> list[bytes]:
    """Digests of the pages up to `tip`, as far as they were computed."""
    digests: list[bytes] = []
    for node in reversed([*tip.path()]):
        if node.digests is None:
            break
        digests += node.digests
    return digests


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
