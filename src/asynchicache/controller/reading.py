"""Which pages to read from storage: what to ask for, what to read, what to do with what came.

Pure, as the planner. A read runs through three steps with storage calls between them: `ask`, `choose`,
`commit`. Host slots are taken for what storage has, not for what was hoped for; a failure costs what
failed and nothing before it.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from asynchicache.controller.actions import Copy, Pins
from asynchicache.controller.books import Books
from asynchicache.controller.writing import Writer
from asynchicache.hashing import page_digests
from asynchicache.storage import hits
from asynchicache.tree.copies import missing_on_host
from asynchicache.tree.node import ABSENT, FULL, FULL_DEVICE, FULL_HOST, Node, place
from asynchicache.tree.tree import device_end
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
        local: by component beside the full one, bit p set if a prefix of p pages could end here.
        pins: what is kept until the read is committed.
    """

    tokens: array[int]
    seed: bytes
    pages: int
    base: int
    here: int
    digests: list[bytes]
    local: dict[int, int]
    pins: Pins


@dataclass(slots=True, eq=False)
class Read:
    """Pages to read: by pool, digests and the host slots that they go to.

    Attributes:
        query: what it answers.
        target: pages of the prefix that would be restorable.
        slots: by component, host slots taken for the read: the full component's from page `query.here`
            on, the others' for the end of the prefix.
    """

    query: Query
    target: int
    slots: dict[int, list[int]] = field(default_factory=dict)

    def digests(self, number: int) -> list[bytes]:
        """Digests of the pages that are read for a component."""
        if number == FULL:
            return self.query.digests[self.query.here : self.target]
        return self.query.digests[self.target - 1 : self.target]


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
        query = Query(tokens, seed, pages, match.pages, here, digests, local, self._ends(tip))
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
        """By component, where a prefix could end; what `tip` has beyond `here` is another sequence's."""
        found = {}
        for aux in self._tree.components:
            lengths, node = 0, tip
            while node.parent is not None:
                if node.end <= here and aux.tier(node) is not None:
                    lengths |= 1 << node.end
                node = node.parent
            found[aux.number] = lengths
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

    def choose(self, query: Query, present: Mapping[int, int]) -> Choice:
        """The longest prefix that storage and memory restore together, with host slots for the rest.

        Args:
            query: what was asked.
            present: by component, bit p set if storage has its page number p.
        """
        full = hits.restorable(ALL_PAGES, present.get(FULL, 0) | (1 << query.here) - 1, query.pages)
        sets = [full]
        for aux in self._tree.components:
            coverage = self._books.spec.owners[aux.number].coverage
            sets.append(hits.restorable(coverage, present.get(aux.number, 0), query.pages))
            sets[-1] |= query.local[aux.number]
        lengths = hits.intersect(sets)
        if hits.longest(lengths) <= query.base:
            return Choice(None, self._held_back(full, query), [])
        stands, backups = self._stand_on_host(query)
        while stands and (target := hits.longest(lengths)) > query.base:
            room = self._take_slots(query, target)
            if isinstance(room, Read):
                return Choice(room, MissReason.NONE, backups)
            lengths = hits.clamp(lengths, room)
        return Choice(None, MissReason.HOST_CAPACITY, backups)

    @staticmethod
    def _held_back(full: int, query: Query) -> MissReason:
        return MissReason.STATE if hits.longest(full) > query.base else MissReason.COLD

    def _stand_on_host(self, query: Query) -> tuple[bool, list[Copy]]:
        """Whether the path before the read is on the host, where the read's pages will stand on it, and
        is kept there; and the copies that this takes."""
        if not query.pins:
            return True, []
        tip = query.pins[0][0]
        backups = self._writer.backup(tip) if missing_on_host(self._tree, tip) else []
        if tip.residency[FULL_HOST] == ABSENT:
            return False, backups
        query.pins.append((tip, FULL_HOST))
        self._tree.pin_place(tip, FULL_HOST)
        return True, backups

    def _take_slots(self, query: Query, target: int) -> Read | int:
        """Host slots for a read up to `target`, or the longest prefix that there would be room for."""
        read = Read(query, target)
        count = max(target - query.here, 0)
        if not self._books.make_room(FULL_HOST, count):
            return query.here + self._books.free[FULL_HOST].available
        for aux in self._tree.components:
            if query.local[aux.number] >> target & 1:
                continue
            if not self._books.make_room(place(aux.number, Tier.HOST), 1):
                return 0
            read.slots[aux.number] = []
        for number in (FULL, *read.slots):
            read.slots[number] = self._books.free[place(number, Tier.HOST)].allocate(
                count if number == FULL else 1
            )
        self._reads.add(read)
        return read

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
        run = query.here
        for _, outcome in outcomes.get(FULL, ()):
            if outcome is not Outcome.HIT:
                break
            run += 1
        sets = [(1 << run + 1) - 1]
        for aux in self._tree.components:
            came = outcomes.get(aux.number, ())
            here = 1 << read.target if came and came[0][1] is Outcome.HIT else 0
            sets.append(1 | query.local[aux.number] | here)
        return hits.intersect(sets)

    def _insert(self, read: Read, pages: int, outcomes: Outcomes) -> bool:
        query = read.query
        node = self._tree.reach(query.tokens, query.seed, min(query.here, pages))
        if node is None or node.residency[FULL_HOST] == ABSENT:
            return False  # the device failed meanwhile, and what the read stood on is gone
        taken = read.slots[FULL][: max(pages - query.here, 0)]
        came = {
            number: slots[0]
            for number, slots in read.slots.items()
            if number != FULL and pages == read.target and outcomes[number][0][1] is Outcome.HIT
        }
        result = self._tree.insert_host(node, query.tokens, taken, states=came)
        read.slots[FULL] = result.duplicates + read.slots[FULL][len(taken) :]
        for fresh in result.fresh:
            fresh.stored |= 1 << FULL
        for number, is_taken in result.states.items():
            if is_taken:
                result.node.stored |= 1 << number
                read.slots[number] = []
        return True

    def _release(self, read: Read, outcomes: Outcomes) -> None:
        """Give back what is left, but for slots that a late read may still write to."""
        for number, slots in read.slots.items():
            late = {slot for slot, outcome in outcomes[number] if outcome is Outcome.TIMEOUT}
            gone = [slot for slot in slots if slot not in late]
            self._books.free[place(number, Tier.HOST)].release(gone)
            read.slots[number] = [slot for slot in slots if slot in late]

    def finish(self, read: Read) -> None:
        """No engine writes to the read's slots any more."""
        for number, slots in read.slots.items():
            self._books.free[place(number, Tier.HOST)].release(slots)
        self._reads.discard(read)

    def _private(self) -> Mapping[int, list[int]]:
        owned: dict[int, list[int]] = {}
        for read in self._reads:
            for number, slots in read.slots.items():
                owned.setdefault(place(number, Tier.HOST), []).extend(slots)
        return owned
