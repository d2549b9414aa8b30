"""What becomes of a request: match, load, room, publication. Decided here, carried out elsewhere.

Pure and synchronous: each method changes the tree and the allocators at one point and returns the
copies to carry out; `copied` takes back how one ended. What goes down to host and storage is planned in
`controller.writing`, what comes up from storage in `controller.reading`.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping

from asynchicache.controller.actions import Copy, Transfers
from asynchicache.controller.books import Books
from asynchicache.controller.checkpoints import DEFAULT_CHECKPOINTS, CheckpointPolicy
from asynchicache.controller.reading import Reader
from asynchicache.controller.sequence import Sequence
from asynchicache.controller.writing import Writer
from asynchicache.errors import CapacityError
from asynchicache.specs import ModelSpec
from asynchicache.transfer.plan import Direction
from asynchicache.tree import copies
from asynchicache.tree.copies import Wanted
from asynchicache.tree.node import ABSENT, FULL, FULL_DEVICE, FULL_HOST, RESIDENT, Node, place
from asynchicache.tree.tree import device_end
from asynchicache.types import MissReason, Tier, WritePolicy


class Planner:
    """Decides for one model's cache.

    Attributes:
        books: who holds which slot.
        reader, writer: what comes from storage, what goes down.
        checkpoints: where states are worth keeping.
    """

    def __init__(
        self,
        spec: ModelSpec,
        slots: Mapping[str, tuple[int, int]],
        *,
        write_policy: WritePolicy = WritePolicy.WRITE_THROUGH,
        eviction_policy: str = "lru",
        clean_share: float = 0.125,
        checkpoints: CheckpointPolicy = DEFAULT_CHECKPOINTS,
    ) -> None:
        """`slots`: device and host slots of each pool that owns slots; 0 on the host keeps a pool off it."""
        checkpoints.check(spec.page_size)
        self.checkpoints = checkpoints
        self.books = Books(spec, slots, write_policy=write_policy, eviction_policy=eviction_policy)
        self.writer = Writer(self.books, clean_share=clean_share)
        self.reader = Reader(self.books, self.writer)
        self._tree = self.books.tree
        self._states = range(1, len(self.books.names))

    # Requests

    def open(self, tokens: array[int], seed: bytes) -> Sequence:
        """Match and pin; at least one token is left to compute, so that there are logits.

        Raises:
            CapacityError: the device could not hold the tokens even if it were empty.
        """
        pages = -(-len(tokens) // self.books.page_size)
        capacity = self.books.free[FULL_DEVICE].capacity
        if pages > capacity:
            raise CapacityError(
                f"{len(tokens)} tokens need {pages} pages of {self.books.page_size}; "
                f"the device holds {capacity}: raise the device pages of {self.books.names[FULL]!r}"
            )
        match = self._tree.match(tokens, seed, limit=(len(tokens) - 1) // self.books.page_size)
        sequence = Sequence(tokens, seed, self._tree.pin(match), prompt=len(tokens))
        sequence.matched_pages, sequence.branching_pages = match.pages, match.branching_pages
        self.books.sequences.add(sequence)
        return sequence

    def rematch(self, sequence: Sequence) -> None:
        """Match again, after a prefetch; the old prefix is kept until the new one is."""
        limit = (len(sequence.tokens) - 1) // self.books.page_size
        match = self._tree.match(sequence.tokens, sequence.seed, limit=limit)
        before = sequence.lease
        sequence.lease = self._tree.pin(match)
        before.close()
        sequence.matched_pages, sequence.branching_pages = match.pages, match.branching_pages

    def meet(self, sequence: Sequence) -> list[Copy]:
        """Count one more request on the matched path; copies of what is due for the host by that."""
        selective = self.books.write_policy is WritePolicy.WRITE_THROUGH_SELECTIVE
        if not (self._tree.counts_hits or selective):
            return []
        path = self._tree.count_hit(sequence.lease.node)
        due = [node for node in path if self.writer.due(node)]
        return self.writer.backup(due[-1]) if selective and due else []

    def release(self, sequence: Sequence) -> None:
        """The request, or a copy for it, is done with its slots."""
        sequence.users -= 1
        if sequence.users:
            return
        books, poisoned = self.books, sequence.poisoned
        books.sequences.discard(sequence)
        sequence.lease.close()
        books.give_back(FULL_DEVICE, sequence.own_pages(), poisoned=poisoned)
        for slots in (sequence.states, sequence.snapshots):
            for number, slot in slots.items():
                books.give_back(place(number, Tier.DEVICE), [slot], poisoned=poisoned)

    # Load

    def start_cold(self, sequence: Sequence) -> list[Copy]:
        """Serve a request without the cache, after the device failed: one copy of nothing."""
        sequence.loaded = True
        self._shorten(sequence, self._tree.root(sequence.seed))
        sequence.reason = MissReason.TRANSFER_FAILED
        return [self._use(sequence, Copy(Direction.LOAD, [], self.books.begin(Tier.DEVICE, [])))]

    def reason(self, sequence: Sequence) -> MissReason:
        """Why a request is not given all but the last page of its prompt."""
        pages = sequence.hit_pages if sequence.loaded else sequence.matched_pages
        if pages >= (sequence.prompt - 1) // self.books.page_size:
            return MissReason.NONE
        if sequence.reason is not MissReason.NONE:
            return sequence.reason
        return MissReason.STATE if sequence.branching_pages else MissReason.COLD

    def cuts(self, sequence: Sequence) -> tuple[int, ...]:
        """Where the prefill of a prompt should end a forward; see `Request.cuts`."""
        if len(self.books.names) == 1:
            return ()
        size = self.books.page_size
        start = sequence.hit_pages if sequence.loaded else sequence.matched_pages
        branch = (sequence.branching_pages or 0) * size
        return self.checkpoints.cuts(start * size, sequence.prompt // size * size, branch)

    def load(self, sequence: Sequence) -> list[Copy]:
        """Bring the matched prefix to the device, with working states of the request's own.

        Falls back to what is on the device if there is no room for the rest. The last copy's ticket
        covers all of them.
        """
        sequence.loaded = True
        node = sequence.lease.node
        wanted = copies.missing_on_device(node)
        has_states = self._take_states(sequence)
        if not has_states:
            node, wanted = self._shorten(sequence, self._tree.root(sequence.seed)), []
        elif not self.books.make_room(FULL_DEVICE, sum(want.size for want in wanted)):
            node, wanted = self._shorten(sequence, self._on_device(node)), []
        sequence.tier = self.tier(sequence, node)
        plan = self._load_copies(sequence, node, wanted)
        sequence.hit_pages = sequence.borrowed = node.end
        sequence.pages = _path_slots(node)
        sequence.reserved = node.end * self.books.page_size
        return plan

    def _on_device(self, node: Node) -> Node:
        """The longest restorable prefix of the path to `node` whose pages are on the device."""
        node = device_end(node)
        while node.parent is not None and not self._tree.restorable(node):
            node = node.parent
        return node

    def _shorten(self, sequence: Sequence, node: Node) -> Node:
        if node is not sequence.lease.node:
            sequence.reason = MissReason.DEVICE_CAPACITY
            before = sequence.lease
            sequence.lease = self._tree.lease(node)
            before.close()
        return node

    def tier(self, sequence: Sequence, node: Node | None = None) -> Tier:
        """The farthest tier that a pool of the prefix comes from."""
        node = node or sequence.lease.node
        if node.parent is None:
            return Tier.DEVICE
        if sequence.prefetched and sequence.reason is not MissReason.DEVICE_CAPACITY:
            return Tier.STORAGE
        pages = Tier.HOST if node.residency[FULL_DEVICE] == ABSENT else Tier.DEVICE
        return max([pages, *(aux.tier(node) or Tier.DEVICE for aux in self._tree.components)])

    def _load_copies(self, sequence: Sequence, node: Node, wanted: list[Wanted]) -> list[Copy]:
        """One copy from the host, and one within the device if a state is there already.

        The first is made even if it is empty: it reads what the second, and other requests' loads,
        write, so that its ticket covers everything.
        """
        books = self.books
        reads = self._arriving(node)
        batch = [(want, books.free[FULL_DEVICE].allocate(want.size)) for want in wanted]
        load = Copy(Direction.LOAD, [], books.begin(Tier.DEVICE, batch), reads=reads)
        for want, slots in batch:
            load.transfers += books.transfers(FULL, want.node.held(FULL_HOST), slots)
        fork = Copy(Direction.FORK, [], copies.Flight(Tier.DEVICE))
        for number, slot in sequence.states.items() if node.parent is not None else ():
            self._load_state(node, number, slot, load, fork)
            reads.append((books.names[number], [slot]))
        self._keep_on_device(sequence, node)
        if not fork.transfers:
            return [self._use(sequence, load)]
        books.flights.append(fork.flight)
        return [self._use(sequence, fork), self._use(sequence, load)]

    def _load_state(self, node: Node, number: int, slot: int, load: Copy, fork: Copy) -> None:
        """Add a copy of one state at `node` into the request's own slot, and keep its source."""
        tier = Tier.DEVICE if node.residency[place(number, Tier.DEVICE)] != ABSENT else Tier.HOST
        copy = fork if tier is Tier.DEVICE else load
        copy.transfers += self.books.transfers(number, node.held(place(number, tier)), [slot])
        copies.keep(self._tree, copy.flight, [(node, place(number, tier)), (node, place(FULL, tier))])

    def _keep_on_device(self, sequence: Sequence, node: Node) -> None:
        """The request reads its pages on the device from now on, so its lease keeps them there."""
        pinned = sequence.lease.pinned
        if node.parent is not None and (node, FULL_DEVICE) not in pinned:
            pinned.append((node, FULL_DEVICE))
            self._tree.pin_place(node, FULL_DEVICE)

    def _arriving(self, node: Node) -> list[tuple[str, list[int]]]:
        """Slots of the path that another request's load is still filling."""
        reads = []
        while node.parent is not None:
            if node.residency[FULL_DEVICE] not in (ABSENT, RESIDENT):
                reads.append((self.books.names[FULL], node.held(FULL_DEVICE)))
            node = node.parent
        return reads

    # Room

    def extend(self, sequence: Sequence, tokens: int) -> dict[str, list[int]]:
        """Slots for `tokens` more tokens, and working states if the request has none yet.

        Raises:
            CapacityError: even evicting all that may go leaves too few.
        """
        books = self.books
        target = sequence.reserved + tokens
        count = max(-(-target // books.page_size) - len(sequence.pages), 0)
        self._need(sequence, count)
        slots = books.free[FULL_DEVICE].allocate(count)
        sequence.pages += slots
        sequence.reserved = target
        return {name: list(slots) for name in books.sharing(FULL)}

    def admit(self, sequence: Sequence) -> None:
        """Have what `load` takes of the device: working states, and room for the pages that are not there.

        Raises:
            CapacityError: there is not enough that may be evicted.
        """
        wanted = copies.missing_on_device(sequence.lease.node)
        self._need(sequence, sum(want.size for want in wanted))

    def _need(self, sequence: Sequence, pages: int) -> None:
        if not self._take_states(sequence):
            missing = next(number for number in self._states if number not in sequence.states)
            raise self._short(1, place(missing, Tier.DEVICE))
        if not self.books.make_room(FULL_DEVICE, pages):
            raise self._short(pages, FULL_DEVICE)

    def _short(self, count: int, at: int) -> CapacityError:
        free = self.books.free[at]
        return CapacityError(
            f"{count} more {free.name} wanted, {free.available} of {free.capacity} are free and the rest "
            "in use: wait for them (reserve), admit fewer requests, or raise the device slots"
        )

    def _take_states(self, sequence: Sequence) -> bool:
        for number in self._states:
            at = place(number, Tier.DEVICE)
            if number not in sequence.states:
                if not self.books.make_room(at, 1):
                    return False
                sequence.states[number] = self.books.free[at].allocate(1)[0]
        return True

    # Publication

    def snapshot(self, sequence: Sequence, length: int) -> list[Copy]:
        """Keep the working states of now, at `length` tokens, in slots of the request's own."""
        # Also if there is no room: the working state moves on and must not pass for this length's.
        sequence.snapshot_tokens = length
        if not self._take_snapshots(sequence):
            self.books.counters.states_skipped += 1
            return []
        forks: Transfers = []
        for number, slot in sequence.snapshots.items():
            forks += self.books.transfers(number, [sequence.states[number]], [slot])
        if not forks:
            return []
        return [self._use(sequence, Copy(Direction.FORK, forks, self.books.begin(Tier.DEVICE, [])))]

    def _take_snapshots(self, sequence: Sequence) -> bool:
        """Slots for a snapshot of every working state, all or none."""
        new = [number for number in sequence.states if number not in sequence.snapshots]
        if not all(self.books.make_room(place(number, Tier.DEVICE), 1) for number in new):
            return False
        for number in new:
            sequence.snapshots[number] = self.books.free[place(number, Tier.DEVICE)].allocate(1)[0]
        return True

    def publish(self, sequence: Sequence, length: int, *, final: bool = False) -> list[Copy]:
        """Put the whole pages up to `length` tokens into the tree, and a state if one is known there.

        The state is the snapshot taken at that length, or the working state if `length` is a whole
        number of pages: it is the caller's word that a forward ended there. `final`: the request computes
        nothing more, so the tree takes the working state itself, and no copy or further slot is needed.
        """
        if sequence.lease.node.residency[FULL_DEVICE] == ABSENT:
            return []  # a failed load took the prefix away
        pages = length // self.books.page_size
        if pages < sequence.borrowed:
            return []
        result = self._tree.insert(sequence.lease, sequence.tokens, sequence.pages[sequence.borrowed : pages])
        sequence.duplicates += result.duplicates
        sequence.borrowed = pages
        for node in result.fresh:
            node.hits = 1
        sequence.finished = final
        if final and sequence.snapshot_tokens != length:
            self._give_states(sequence, result.node, length)
        elif (copy := self._publish_states(sequence, result.node, length)) is not None:
            return [copy]
        return self.writer.backup(result.node) if self.writer.due(result.node) else []

    def _give_states(self, sequence: Sequence, node: Node, length: int) -> None:
        """Hand the working states over to `node`, where it has none yet."""
        if length % self.books.page_size or node.parent is None:
            return
        for number, slot in list(sequence.states.items()):
            if self._tree.take_state(node, number, Tier.DEVICE, slot):
                del sequence.states[number]
                self._tree.supersede(node, number)
            else:
                self._tree.touch(node, number)

    def _publish_states(self, sequence: Sequence, node: Node, length: int) -> Copy | None:
        kept = sequence.snapshots if sequence.snapshot_tokens == length else sequence.states
        if length % self.books.page_size or node.parent is None:
            return None
        forks: Transfers = []
        taken = []
        for number, source in kept.items():
            slot = self._state_slot(node, number)
            if slot is not None:
                forks += self.books.transfers(number, [source], [slot])
                taken.append(number)
        if not taken:
            return None
        flight = copies.begin_arrival(self._tree, node, taken)
        self.books.flights.append(flight)
        publishes = node if self.writer.due(node) else None
        return self._use(sequence, Copy(Direction.FORK, forks, flight, publishes=publishes))

    def _state_slot(self, node: Node, number: int) -> int | None:
        """A slot, the tree's from now on, for a state at `node`; None if it has one, or for want of room."""
        at = place(number, Tier.DEVICE)
        if node.residency[at] != ABSENT:
            self._tree.touch(node, number)
            return None
        if not self.books.make_room(at, 1):
            self.books.counters.states_skipped += 1
            return None
        slot = self.books.free[at].allocate(1)[0]
        self._tree.take_state(node, number, Tier.DEVICE, slot, arriving=True)
        self._tree.supersede(node, number)
        return slot

    # How copies ended

    def copied(self, copy: Copy, error: BaseException | None) -> Node | None:
        """Settle a copy, or take it back; the node whose path is due for the next tier, or None."""
        self.books.flights.remove(copy.flight)
        lost = copies.finish(self._tree, copy.flight, arrived=error is None)
        for at, slots in lost.items():
            self.books.free[at].quarantine(slots)
        if copy.user is not None:
            copy.user.poisoned |= error is not None
            self.release(copy.user)
        return copy.publishes if error is None else None

    def _use(self, sequence: Sequence, copy: Copy) -> Copy:
        sequence.users += 1
        copy.user = sequence
        return copy

    def flush(self) -> None:
        """Forget everything that nobody holds, in both tiers."""
        for at, free in enumerate(self.books.free):
            self.books.evict(at, free.capacity, dirty=True)


def _path_slots(node: Node) -> list[int]:
    """Device slots of every page of the path to `node`, in order."""
    parts = []
    while node.parent is not None:
        parts.append(node.held(FULL_DEVICE))
        node = node.parent
    return [slot for part in reversed(parts) for slot in part]
