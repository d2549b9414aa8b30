"""Which pages to read from storage: what to ask for, what to read, what to do with what came.

Pure, as the planner. A read runs through three steps with storage calls between them: `ask`, `choose`,
`commit`. Host slots are taken for what storage has, not for what was hoped for; a failure costs what
failed and nothing before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby

from asynchicache.controller.actions import Copy
from asynchicache.controller.books import Books
from asynchicache.controller.writing import Writer
from asynchicache.hashing import page_digests
from asynchicache.storage import hits
from asynchicache.tree.components import Component, pins
from asynchicache.tree.copies import missing_on_host
from asynchicache.tree.node import ABSENT, FULL, FULL_DEVICE, FULL_HOST, Node, Pins, place
from asynchicache.tree.tree import Pages, device_end
from asynchicache.types import ALL_PAGES, MissReason, Outcome, Tier

Outcomes = Mapping[int, Sequence[tuple[int, Outcome]]]
"""By component, what became of each slot that was read into, in the order of the pages."""


@dataclass(slots=True, eq=False)
class Query:
    """A prefix that may be in storage, and what of it is here.

    Attributes:
        tokens, seed: the sequence and its namespace.
        pages: how many pages could be restored at most.
        base: pages that are restorable without storage.
        here: pages whose full component is here.
        digests: of all `pages`.
        local: by component beside the full one, bit p set if page number p, or the state behind it, is here.
        pins: what is kept until the read is committed.
        forgotten: `Writer.forgotten` when it was made; what it brings is in storage only if that still holds.
    """

    tokens: array[int]
    seed: bytes
    pages: int
    base: int
    here: int
    digests: list[bytes]
    local: dict[int, int]
    pins: Pins
    forgotten: int


@dataclass(slots=True, eq=False)
class Read:
    """Pages to read: by pool, digests and the host slots that they go to.

    Attributes:
        query: what it answers.
        target: pages of the prefix that would be restorable.
        pages: by component, the numbers of the pages to read: of the full component from `query.here` on,
            of the others what is not here of what the end of the prefix needs.
        slots: by component, host slots taken for these pages.
    """

    query: Query
    target: int
    pages: dict[int, list[int]]
    slots: dict[int, list[int]] = field(default_factory=dict)

    def digests(self, number: int) -> list[bytes]:
        """Digests of the pages that are read for a component."""
        return [self.query.digests[page] for page in self.pages[number]]


@dataclass(frozen=True, slots=True)
class Choice:
    """What to read, or why nothing; `backups` are to be carried out either way."""

    read: Read | None
    reason: MissReason
    backups: list[Copy]


@dataclass(frozen=True, slots=True)
class Gained:
    """What a read brought: pages that are restorable now, pages and states that came, and why it was
    not all that was asked."""

    pages: int
    read: int
    reason: MissReason


_REASONS = (
    (Outcome.CORRUPT, MissReason.CORRUPT),
    (Outcome.TIMEOUT, MissReason.DEADLINE),
    (Outcome.FAILED, MissReason.STORAGE_FAILED),
    (Outcome.REJECTED, MissReason.STORAGE_FAILED),
    (Outcome.MISS, MissReason.COLD),
)
"""What a read that fell short is put down to, the worst first."""


class Reader:
    """Plans reads from storage."""

    def __init__(self, books: Books, writer: Writer) -> None:
        self._books = books
        self._writer = writer
        self._tree = books.tree
        self._reads: set[Read] = set()
        books.private.append(self._private)

    def asks(self, number: int) -> bool:
        """Whether storage can serve a component: its pages need host slots to arrive in."""
        return self._books.free[place(number, Tier.HOST)].capacity > 0

    def ask(self, tokens: array[int], seed: bytes) -> Query | None:
        """What to look for beyond what is here; None if there is nothing more to find."""
        pages = (len(tokens) - 1) // self._tree.page_size
        match = self._tree.match(tokens, seed, limit=pages)
        if match.pages >= pages or not self.asks(FULL):
            return None
        tip = match.node
        here = match.full_pages
        while tip.end < here:
            child = self._tree.child(tip, tokens)
            if child is None:
                break
            tip = child
        digests = self._digests(tip, here, tokens, seed, pages)
        local = self._local(tip, here)
        kept = self._ends(tip)
        for aux in self._tree.windows:
            kept += pins(aux, tip)  # a read completes them; it should not make room at their cost
        query = Query(tokens, seed, pages, match.pages, here, digests, local, kept, self._writer.forgotten)
        self._books.keep(query.pins)
        return query

    def _digests(self, tip: Node, here: int, tokens: array[int], seed: bytes, pages: int) -> list[bytes]:
        known: list[bytes] = []
        node = tip
        parts = []
        while node.parent is not None:
            parts.append(self._tree.digests(node))
            node = node.parent
        for part in reversed(parts):
            known += part
        known = known[:here]
        size = self._tree.page_size
        rest = memoryview(tokens)[here * size : pages * size]
        return known + page_digests(rest, size, known[-1] if known else seed)

    def _local(self, tip: Node, here: int) -> dict[int, int]:
        """By component, the pages before `here` that it has on the path to `tip`."""
        known = (1 << here) - 1
        return {aux.number: self._present(aux, tip) & known for aux in self._tree.components}

    @staticmethod
    def _present(aux: Component, node: Node) -> int:
        found = 0
        while node.parent is not None:
            if aux.nearest(node) is not None:
                count = node.pages if aux.paged else 1
                found |= ((1 << count) - 1) << (node.end - count)
            node = node.parent
        return found

    @staticmethod
    def _ends(tip: Node) -> Pins:
        """Keeps every full page of the path to `tip` where it is."""
        if tip.parent is None:
            return []
        if tip.residency[FULL_DEVICE] != ABSENT:
            return [(tip, FULL_DEVICE)]
        above = device_end(tip)
        return [(tip, FULL_HOST)] + ([(above, FULL_DEVICE)] if above.parent is not None else [])

    def drop(self, query: Query) -> None:
        """Let go of what a query keeps; `commit` does it by itself."""
        self._books.drop(query.pins)

    def first_page(self, query: Query, number: int) -> int:
        """The first page of a component that any prefix longer than what is here may need."""
        pages = self._books.spec.owners[number].coverage.pages or 0
        return max(query.base + 1 - pages, 0)

    def choose(self, query: Query, present: Mapping[int, int]) -> Choice:
        """The longest prefix that storage and memory restore together, with host slots for the rest.

        Args:
            query: what was asked.
            present: by component, bit p set if storage has its page number p.
        """
        full = hits.restorable(ALL_PAGES, present.get(FULL, 0) | (1 << query.here) - 1, query.pages)
        sets = [full]
        for aux in self._tree.components:
            there = present.get(aux.number, 0) | query.local[aux.number]
            sets.append(self._restorable(aux, there, query.pages))
        lengths = hits.intersect(sets)
        if hits.longest(lengths) <= query.base:
            return Choice(None, self._held_back(sets, query), [])
        stands, backups = self._stand_on_host(query)
        while stands and (target := hits.longest(lengths)) > query.base:
            room = self._take_slots(query, target)
            if isinstance(room, Read):
                return Choice(room, MissReason.NONE, backups)
            lengths = hits.clamp(lengths, room)
        return Choice(None, MissReason.HOST_CAPACITY, backups)

    def _restorable(self, aux: Component, there: int, pages: int) -> int:
        return hits.restorable(self._books.spec.owners[aux.number].coverage, there, pages)

    def _held_back(self, sets: Sequence[int], query: Query) -> MissReason:
        """Why nothing is gained, though storage may have pages: by component, `sets` says what it allows."""
        full, *others = sets
        if hits.longest(full) <= query.base:
            return MissReason.COLD
        reaches = [hits.longest(hits.clamp(lengths, hits.longest(full))) for lengths in others]
        aux = self._tree.components[reaches.index(min(reaches))]
        return MissReason.WINDOW if aux.paged else MissReason.STATE

    def _stand_on_host(self, query: Query) -> tuple[bool, list[Copy]]:
        """Whether the path before the read is on the host, where the read's pages will stand on it, and
        is kept there; and the copies that this takes."""
        if not query.pins:
            return True, []
        tip = query.pins[0][0]
        backups = self._writer.backup(tip) if missing_on_host(self._tree, tip) else []
        if tip.residency[FULL_HOST] == ABSENT:
            return False, backups
        self._tree.pin_for(query.pins, tip, FULL_HOST)
        return True, backups

    def _take_slots(self, query: Query, target: int) -> Read | int:
        """Host slots for a read up to `target`, or the longest prefix that there would be room for."""
        read = Read(query, target, self._missing(query, target))
        if not self._books.make_room(FULL_HOST, len(read.pages[FULL])):
            return query.here + self._books.free[FULL_HOST].available
        for number, pages in read.pages.items():
            if not self._books.make_room(place(number, Tier.HOST), len(pages)):
                return 0
        for number, pages in read.pages.items():
            read.slots[number] = self._books.free[place(number, Tier.HOST)].allocate(len(pages))
        self._reads.add(read)
        return read

    def _missing(self, query: Query, target: int) -> dict[int, list[int]]:
        """By component, the pages that a prefix of `target` pages needs and that are not here."""
        wanted = {FULL: list(range(query.here, target))}
        for aux in self._tree.components:
            first = max(target - (self._books.spec.owners[aux.number].coverage.pages or target), 0)
            local = query.local[aux.number]
            missing = [page for page in range(first, target) if not local >> page & 1]
            if missing:
                wanted[aux.number] = missing
        return wanted

    def commit(self, read: Read, outcomes: Outcomes) -> Gained:
        """Put what arrived into the tree, up to the longest prefix that is restorable now.

        Slots whose read timed out stay with `read`, because the engine may still write to them;
        `finish` gives them back.
        """
        query = read.query
        arrived = self._arrived(read, outcomes)
        pages = hits.longest(arrived)
        gained = query.base
        if pages > query.base and self._insert(read, pages, outcomes):
            gained = pages
        self._release(read, outcomes)
        self.drop(query)
        # A list, not a set: it compares identities in C, and an Enum's hash is Python code.
        seen = [outcome for results in outcomes.values() for _, outcome in results]
        reason = next((why for outcome, why in _REASONS if outcome in seen), MissReason.NONE)
        return Gained(gained, seen.count(Outcome.HIT), reason)

    def _arrived(self, read: Read, outcomes: Outcomes) -> int:
        """Prefix lengths that are restorable with what arrived."""
        query = read.query
        came = {number: self._came(read, number, results) for number, results in outcomes.items()}
        full = came.get(FULL, 0) | (1 << query.here) - 1
        sets = [hits.restorable(ALL_PAGES, full, query.pages)]
        for aux in self._tree.components:
            there = came.get(aux.number, 0) | query.local[aux.number]
            sets.append(self._restorable(aux, there, query.pages))
        return hits.intersect(sets)

    @staticmethod
    def _came(read: Read, number: int, results: Sequence[tuple[int, Outcome]]) -> int:
        arrived = zip(read.pages[number], results, strict=True)
        return sum(1 << page for page, (_, outcome) in arrived if outcome is Outcome.HIT)

    def _insert(self, read: Read, pages: int, outcomes: Outcomes) -> bool:
        query = read.query
        node = self._tree.reach(query.tokens, query.seed, min(query.here, pages))
        if node is None or node.residency[FULL_HOST] == ABSENT:
            return False  # the device failed meanwhile, and what the read stood on is gone
        count = max(pages - query.here, 0)
        taken, rest = read.slots[FULL][:count], read.slots[FULL][count:]
        result = self._tree.insert_host(node, query.tokens, taken)
        read.slots[FULL] = result.duplicates + rest
        for fresh in result.fresh if query.forgotten == self._writer.forgotten else ():
            self._mark_stored(fresh, FULL)
        for window in self._tree.windows:
            self._tree.cut_window(result.node, window.number)
        for aux in self._tree.components:
            if aux.number in read.slots:
                read.slots[aux.number] = self._attach(read, aux, result.node, outcomes[aux.number])
                self._tree.use(aux, result.node)
        return True

    def _attach(
        self, read: Read, aux: Component, end: Node, results: Sequence[tuple[int, Outcome]]
    ) -> list[int]:
        """Put what came for one component, and what a prefix that ends at `end` needs of it, into the
        tree; returns the slots that were not taken."""
        needed = range(end.end - (self._books.spec.owners[aux.number].coverage.pages or 0), end.end)
        arrived: dict[int, int] = {}
        left: list[int] = []
        for page, (slot, outcome) in zip(read.pages[aux.number], results, strict=True):
            if outcome is Outcome.HIT and page in needed:
                arrived[page] = slot
            else:
                left.append(slot)
        for run in _runs(arrived):
            left += self._take(read.query, aux, Pages(run[0], [arrived[page] for page in run]))
        return left

    def _take(self, query: Query, aux: Component, pages: Pages) -> list[int]:
        """Put a run of pages, or one state, into the tree; returns the slots that were not taken."""
        node = self._tree.reach(query.tokens, query.seed, pages.first + len(pages.slots))
        if node is None:
            return list(pages.slots)
        if aux.paged:
            refused = self._tree.take_pages(node, aux.number, Tier.HOST, pages)
        else:
            taken = self._tree.take_state(node, aux.number, Tier.HOST, pages.slots[0])
            refused = {} if taken else {pages.first: pages.slots[0]}
        if not refused and query.forgotten == self._writer.forgotten:
            self._mark_run_stored(node, aux.number, pages.first)
        return list(refused.values())

    def _mark_run_stored(self, node: Node, number: int, first: int) -> None:
        while node.end > first and node.parent is not None:
            self._mark_stored(node, number)
            node = node.parent

    def _mark_stored(self, node: Node, number: int) -> None:
        """What was read need not be written again."""
        node.stored |= 1 << number
        if self._tree.watcher is not None:
            self._tree.watcher.stored(node, number)

    def _release(self, read: Read, outcomes: Outcomes) -> None:
        """Give back what is left, but for slots that a late read may still write to."""
        for number, slots in read.slots.items():
            late = {slot for slot, outcome in outcomes[number] if outcome is Outcome.TIMEOUT}
            gone = [slot for slot in slots if slot not in late]
            self._books.free[place(number, Tier.HOST)].release(gone)
            read.slots[number] = [slot for slot in slots if slot in late]

    def finish(self, read: Read, *, safe: bool = True) -> None:
        """No engine writes to the read's slots any more; or, unless `safe`, that will never be known."""
        for number, slots in read.slots.items():
            self._books.give_back(place(number, Tier.HOST), slots, poisoned=not safe)
        self._reads.discard(read)

    def _private(self) -> Mapping[int, list[int]]:
        owned: dict[int, list[int]] = {}
        for read in self._reads:
            for number, slots in read.slots.items():
                owned.setdefault(place(number, Tier.HOST), []).extend(slots)
        return owned


def _runs(pages: Iterable[int]) -> Iterator[list[int]]:
    """Consecutive numbers of an ascending series, together."""
    for _, run in groupby(enumerate(pages), key=lambda item: item[1] - item[0]):
        yield [page for _, page in run]
