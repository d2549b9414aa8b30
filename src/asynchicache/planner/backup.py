"""Plans backups from device to host and writes from host to storage. Pure."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import takewhile

from asynchicache.hashing import PlacedPage
from asynchicache.planner.actions import Copy, StorageWrite, StoredSpan
from asynchicache.planner.activity import Activity
from asynchicache.planner.inventory import SlotInventory
from asynchicache.planner.request_state import RequestState
from asynchicache.tree import tier_copies
from asynchicache.tree.node import (
    ABSENT,
    FULL,
    FULL_DEVICE,
    FULL_HOST,
    LOADING,
    RESIDENT,
    SAVING,
    Locks,
    Node,
    SlotPlace,
    component_of,
    place_of,
)
from asynchicache.tree.tier_copies import CopyRequest
from asynchicache.types import Direction, Tier, WritePolicy

_SELECTIVE_HITS = 2

_MAX_POSTPONED = 256
"""The most postponed backups. Beyond it the oldest is dropped."""

_MAX_REMEMBERED = 1 << 16
"""The most stored pages remembered of partly lost nodes. Beyond it all of them are written again."""


class BackupPlanner:
    """Plans write-through, write-back and storage writes.

    Attributes:
        postponed: backups that found no free host slot, in order, with their period of `Activity`. They are
            retried as storage writes end, as long as the data is on the device. An entry is one node and
            component, not a path: states of one path that do not fit together would evict each other forever.
        urgent: ends of paths that a caller waits for and that found no host slots, first come, first served.
            While there are any, no backup but that of the first gets host slots, except free ones that none
            of these paths needs.
        failures: by end of an urgent path, how many writes of its pages alone have failed since it is urgent.
        preparing: ends of paths that are written to storage soon: once their digests are computed, or after
            a moment in which another process may send them. Nothing of the latter is kept meanwhile.
        forgotten: how many times all knowledge of storage was dropped.
    """

    def __init__(self, inventory: SlotInventory, activity: Activity) -> None:
        self._inventory = inventory
        self._tree = inventory.tree
        self._activity = activity
        self.postponed: dict[CopyRequest, int] = {}
        self.urgent: list[Node] = []
        self.failures: Counter[Node] = Counter()
        self.preparing: list[Node] = []
        self._noted: list[set[Node]] = []
        self.forgotten = 0
        self._writes: set[StorageWrite] = set()
        self._there: set[tuple[int, bytes]] = set()  # by component, pages of nodes that storage lost in part
        self._states = {component.id for component in inventory.tree.components if not component.paged}
        self._clean_target = int(inventory.free[FULL_DEVICE].capacity * inventory.options.clean_share)

    def due(self, node: Node) -> bool:
        """Whether the write policy requires a host copy of this node now."""
        policy = self._inventory.options.write_policy
        if policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            return node.hits >= _SELECTIVE_HITS
        return policy is WritePolicy.WRITE_THROUGH

    def last_due(self, node: Node) -> Node | None:
        """The last node of the path to `node` that is due; None if there is none."""
        if self._inventory.options.write_policy is WritePolicy.WRITE_BACK:
            return None
        current: Node | None = node
        while current is not None and current.parent is not None and not self.due(current):
            current = current.parent
        return current if current is not None and current.parent is not None else None

    def count_seen(self, request: RequestState, pages: int) -> None:
        """Count the request's first `pages` pages that the tree had when it came, in whatever tier or only
        lately, as asked for twice. They were not hit, because they or their states had been evicted."""
        if self._inventory.options.write_policy is not WritePolicy.WRITE_THROUGH_SELECTIVE:
            return
        end = self._tree.known_end(request.tokens, request.seed, min(pages, request.known_pages))
        for node in takewhile(lambda one: one.hits < _SELECTIVE_HITS, end.path()):
            node.hits = _SELECTIVE_HITS

    def backup(self, node: Node, *, period: int | None = None) -> list[Copy]:
        """Copy to the host what the path to `node` has only on the device, as far as there is room.

        Args:
            period: the `Activity` period of the work that this follows from. Default: the current period.
        """
        plan = self._plan_path(node, self._activity.period if period is None else period)
        for observer in self._inventory.observers if self.urgent and not plan else ():
            observer.held_back(node)
        return plan

    def _plan_path(self, node: Node, period: int) -> list[Copy]:
        self._cut_at_host(node)
        wanted = self._missing(node)
        if not self.urgent:
            return self._copy(node, wanted, period)
        if node is not self.urgent[0]:
            if self._is_spare(wanted):
                return self._copy(node, wanted, period)
            self._postpone(wanted, period)
            return []
        # Stored states are skipped: they would evict each other from the last host slot forever.
        needed = [want for want in wanted if want.component_id == FULL or not _is_stored(want)]
        return self._copy(node, needed, period)

    def _is_spare(self, wanted: list[CopyRequest]) -> bool:
        """Whether free host slots do for `wanted`, and no urgent path lacks any. Nothing may be evicted for
        it: paths that are copied but not stored yet could evict each other for ever."""
        if any(self.lacks_room(node) for node in self.urgent):
            return False
        counts: Counter[SlotPlace] = Counter()
        for want in wanted:
            counts[place_of(want.component_id, Tier.HOST)] += want.size
        return self._inventory.has_room(counts)

    def _cut_at_host(self, node: Node) -> None:
        """Split the path to `node` where the host ends, because a node is copied whole or not at all. With
        states or windows only a forward that ends there (`Planner.cuts`) makes its beginning of use."""
        most = self._inventory.host_pages
        if not most or self._tree.components:
            return
        while node.parent is not None and node.end - node.pages >= most:
            node = node.parent
        if node.end > most:
            self._tree.split(node, most - (node.end - node.pages))

    def part_on_host(self, node: Node) -> Node:
        """The end of what the host holds of the path to `node`; the root, if no part of it ends there."""
        self._cut_at_host(node)
        while node.parent is not None and node.end > self._inventory.host_pages:
            node = node.parent
        return node

    def _missing(self, node: Node) -> list[CopyRequest]:
        """What the path to `node` lacks on the host, of components that have host slots."""
        free = self._inventory.free
        if not free[FULL_HOST].capacity:
            return []  # windows and states need the full pages on the host too
        missing = tier_copies.missing_on_host(self._tree, node)
        return [want for want in missing if free[place_of(want.component_id, Tier.HOST)].capacity]

    def lacks_room(self, node: Node) -> bool:
        """Whether something on the path to `node` still needs host room: it is on the device, but neither on
        the host nor in storage. A path that is longer than the host waits for no room."""
        fits = node.end <= self._inventory.host_pages
        return fits and any(not _is_stored(want) for want in self._missing(node))

    def _copy(self, node: Node, wanted: list[CopyRequest], period: int) -> list[Copy]:
        """Copy `wanted`, on the path to `node`, to the host, as far as there is room; postpone the rest."""
        inventory = self._inventory
        if not wanted:
            return []
        with self._locked(node, wanted):
            batch = self._host_slots(wanted)
        begun = {want for want, _ in batch}
        self._postpone([want for want in wanted if want not in begun], period)
        if not batch:
            return []
        transfers = [
            transfer
            for (below, component_id), slots in batch
            for transfer in inventory.transfers(
                component_id, below.slots_at(place_of(component_id, Tier.DEVICE)), slots
            )
        ]
        inventory.counters.backed_up += sum(want.size for want, _ in batch)
        tier_copy = inventory.begin(Tier.HOST, batch)
        return [Copy(Direction.BACKUP, transfers, tier_copy, publishes=batch[-1][0].node, period=period)]

    def _postpone(self, wanted: list[CopyRequest], period: int) -> None:
        for want in wanted:
            self.postponed[want] = period
            if len(self.postponed) > _MAX_POSTPONED:
                del self.postponed[next(iter(self.postponed))]

    def retry(self) -> list[Copy]:
        """Retry postponed backups; call it when host slots may have been freed."""
        if self.urgent:
            return self.backup(self.urgent[0])
        postponed, self.postponed = self.postponed, {}
        return [copy for want, period in postponed.items() for copy in self._retry_one(want, period)]

    def _retry_one(self, want: CopyRequest, period: int) -> list[Copy]:
        """Retry one postponed backup together with its unsaved ancestors, all or nothing.

        Backing up only the ancestors could make two paths evict each other's forever.
        """
        if want.node.parent is None or not tier_copies.is_unsaved(want.node, want.component_id):
            return []
        wanted = self._with_unsaved_ancestors(want)
        if self._have_room(wanted):
            return self._copy(want.node, wanted, period)
        self._postpone([want], period)
        return []

    @staticmethod
    def _with_unsaved_ancestors(want: CopyRequest) -> list[CopyRequest]:
        """`want`, preceded by the unsaved full pages above it. A node that is split while it waits leaves an
        upper half without a host copy, and a host copy needs its ancestors on the host."""
        parts = [want]
        above = want.node.parent if want.component_id == FULL else want.node
        while above is not None and above.parent is not None and tier_copies.is_unsaved(above, FULL):
            parts.append(CopyRequest(above, FULL))
            above = above.parent
        return parts[::-1]

    def _have_room(self, wanted: list[CopyRequest]) -> bool:
        """Free host slots for all of `wanted` (one path, parents first); False if they do not fit, or the
        page before them is not on the host."""
        first = wanted[0]
        host_parent = first.node.parent if first.component_id == FULL else first.node
        if host_parent is None or host_parent.residency[FULL_HOST] == ABSENT:
            return False
        counts: Counter[SlotPlace] = Counter()
        for want in wanted:
            counts[place_of(want.component_id, Tier.HOST)] += want.size
        with self._locked(wanted[-1].node, wanted):
            return self._inventory.make_room_for_all(counts) is None

    @contextmanager
    def _locked(self, node: Node, wanted: list[CopyRequest]) -> Iterator[None]:
        """During the body, keep what copies of `wanted`, on the path to `node`, need: what they read, and the
        last host copy above them. It must not be evicted to make room for them."""
        locks: Locks = [(want.node, place_of(want.component_id, Tier.DEVICE)) for want in wanted]
        while node.parent is not None and node.residency[FULL_HOST] == ABSENT:
            node = node.parent
        if node.parent is not None:
            locks.append((node, FULL_HOST))
        self._inventory.lock(locks)
        try:
            yield
        finally:
            self._inventory.unlock(locks)

    def _host_slots(self, wanted: list[CopyRequest]) -> list[tuple[CopyRequest, list[int]]]:
        """Allocate host slots for `wanted`, parents first, as far as there is room."""
        batch: list[tuple[CopyRequest, list[int]]] = []
        for want in wanted:
            place = place_of(want.component_id, Tier.HOST)
            if self._inventory.make_room(place, want.size):
                batch.append((want, self._inventory.free[place].allocate(want.size)))
                continue
            self._inventory.counters.host_pressure += want.size
            if want.component_id == FULL:
                break  # later entries need this one on the host
        return batch

    def clean(self) -> list[Copy]:
        """Under write-back: back up the next pages to be evicted, ahead of need."""
        if self._inventory.options.write_policy is not WritePolicy.WRITE_BACK:
            return []
        queue = self._tree.queues[FULL_DEVICE]
        short = self._clean_target - self._inventory.free[FULL_DEVICE].available
        seen: list[Node] = []
        plan: list[Copy] = []
        while (
            short > 0 and (node := queue.pop(self._tree.clock, self._tree.step, self._tree.now)) is not None
        ):
            seen.append(node)
            short -= node.pages
            plan += self.backup(node)
        for node in seen:
            self._tree.refresh(node, FULL_DEVICE)
        return plan

    def store(self, node: Node) -> StorageWrite | None:
        """Begin a write of what the path to `node` has on the host and not in storage; None if nothing."""
        work = StorageWrite(self.forgotten)
        if not self._inventory.tree.is_current(node):
            return None  # its pages are of weights whose keys are not in use any more
        for below in reversed([*node.path()]):
            if below.tail and not below.hits:
                break  # the end of a prompt, of which no request has gone on yet: its answer follows it
            for component_id in range(len(self._inventory.names)):
                resident = below.residency[place_of(component_id, Tier.HOST)] == RESIDENT
                if resident and not below.stored >> component_id & 1:
                    self._add(work, below, component_id)
        if not work.marks:
            return None
        self._inventory.lock(work.locks)
        self._writes.add(work)
        return work

    def _add(self, work: StorageWrite, node: Node, component_id: int) -> None:
        place = place_of(component_id, Tier.HOST)
        held = node.slots_at(place)
        pages = self._tree.placed(node)[-len(held) :]  # all of its pages; for a state, the last one
        if self._there:
            left = [
                pair
                for pair in zip(pages, held, strict=True)
                if (component_id, pair[0].digest) not in self._there
            ]
            self._there.difference_update((component_id, page.digest) for page in pages)
            pages, held = [page for page, _ in left], [slot for _, slot in left]
        for pool in self._inventory.sharing(component_id):
            before, slots = work.pages.setdefault(pool, ([], []))
            before += pages
            slots += held
        node.stored |= 1 << component_id
        work.marks.append(StoredSpan(node, component_id, node.count_slots(place)))
        work.locks += [(node, place)] if component_id == FULL else [(node, place), (node, FULL_HOST)]

    def storing(self) -> set[Node]:
        """Nodes with a storage write in flight."""
        return {node for work in self._writes for mark in work.marks for node in mark.nodes()}

    def writes_in_flight(self) -> set[tuple[Node, int]]:
        """Nodes and components with a storage write in flight."""
        marks = [mark for work in self._writes for mark in work.marks]
        return {(node, mark.component_id) for mark in marks for node in mark.nodes()}

    def slots_in_flight(self, component_id: int) -> set[int]:
        """Host slots of a component that a storage write in flight reads, whoever owns them by now."""
        pool = self._inventory.names[component_id]
        return {slot for work in self._writes for slot in work.pages.get(pool, ((), ()))[1]}

    def in_flight(self, node: Node) -> bool:
        """Whether a copy or write in flight brings part of the path to `node` closer to storage."""
        storing = self.storing().union(self.preparing)
        return any(part in storing or (~part.stored and self._is_moving(part)) for part in node.path())

    def _is_moving(self, node: Node) -> bool:
        """Whether a component of `node` that is not stored is being copied to the host, or is still arriving
        on the device."""
        for component_id in range(len(self._inventory.names)):
            if node.stored >> component_id & 1:
                continue
            device = node.residency[place_of(component_id, Tier.DEVICE)]
            host = node.residency[place_of(component_id, Tier.HOST)]
            if host == SAVING or (device == LOADING and host == ABSENT):
                return True
        return False

    def is_stored(self, node: Node) -> bool:
        """Whether everything that the path to `node` has in memory is in storage too. Of windows, only the
        pages count that are kept for a prefix ending at `node`."""
        kept = {component.id: set(component.keeps(node)) for component in self._tree.windows}
        storing = self.storing()
        while node.parent is not None:
            held = 0
            for component_id in range(len(self._inventory.names)):
                slots = (
                    node.slots[place_of(component_id, Tier.DEVICE)]
                    or node.slots[place_of(component_id, Tier.HOST)]
                )
                if slots and node in kept.get(component_id, (node,)):
                    held |= 1 << component_id
            if held & ~node.stored or node in storing:
                return False
            node = node.parent
        return not node.pages  # a node cut off by eviction: unknown

    def unstored_ends(self) -> list[Node]:
        """The ends of paths that storage lacks a part of, or is being sent, the hottest first. Linear in the
        tree.

        Windows inside a path are no part of its end's, so what can be resumed is an end too.
        """
        storing = self.storing()
        lacking: dict[Node, bool] = {}  # by node, whether no node below it is lacking
        for node in self._tree.nodes(current=True):
            if node.tail and not node.hits:
                continue  # storage gets no end of a prompt, see `store`
            if node.parent in lacking or node in storing or self._is_unstored(node):
                lacking[node] = True
                if node.parent is not None and not node.tail:
                    lacking[node.parent] = False
        ends = [
            node
            for node, last in lacking.items()
            if node.pages and (last or (self._tree.windows and self._tree.restorable(node)))
        ]
        return sorted(ends, key=_worth, reverse=True)

    def _is_unstored(self, node: Node) -> bool:
        """Whether a component of `node` is in memory and not in storage."""
        return any(
            node.slots[place] is not None and not node.stored >> component_of(place) & 1
            for place in self._tree.places
        )

    def marked_stored(self, pages: int) -> Iterator[tuple[int, list[Node]]]:
        """Components, and some nodes with slots of it that are marked stored: of about `pages` pages at a
        time. The tree may change meanwhile: nodes that have left it are left out."""
        for component_id in range(len(self._inventory.names)):
            marked = [node for node in self._tree.nodes(current=True) if node.stored >> component_id & 1]
            while marked:
                some, count = list[Node](), 0
                while marked and count < pages:
                    some.append(marked.pop())
                    count += some[-1].pages
                yield component_id, [node for node in some if node.parent and node.stored >> component_id & 1]

    def stored_pages(self, node: Node, component_id: int) -> dict[int, PlacedPage]:
        """The pages under whose names storage has a component of `node`, by number: of a state, the last."""
        placed = self._placed(node, component_id)
        return dict(zip(range(node.end - len(placed), node.end), placed, strict=True))

    def _placed(self, node: Node, component_id: int) -> list[PlacedPage]:
        return self._tree.placed(node)[-(1 if component_id in self._states else node.pages) :]

    def beginnings(self, ends: Iterable[Node]) -> dict[PlacedPage, list[Node]]:
        """The first pages of the paths to `ends` that are marked stored, and whose they are.

        A store that evicts gives up the end of a path first: one without a beginning has lost all of it.
        """
        found, storing = dict[PlacedPage, list[Node]](), self.storing()
        for end in ends:
            top = next((node for node in end.path() if node.end == node.pages), None)
            if top is None or top in storing or not self._tree.is_current(top):
                continue
            if top.stored >> FULL & 1:
                found.setdefault(self._tree.placed(top)[0], []).append(end)
        return found

    def pages_to_touch(self, ends: Iterable[Node]) -> dict[int, list[PlacedPage]]:
        """Stored pages on the used paths, in the order in which an engine should touch them.

        Args:
            ends: the ends of the paths, the last used one last.

        Returns:
            By component, pages, the least recently used first. The end of a path comes before its
            beginning, so that an LRU engine keeps beginnings.
        """
        seen: set[tuple[Node, int]] = set()
        newest: dict[int, list[PlacedPage]] = {}
        for end in reversed(list(ends)):
            parts = {FULL: [*end.path()]}
            for component in self._tree.components:
                parts[component.id] = list(component.keeps(end)) if end.parent is not None else []
            for component_id, nodes in parts.items():
                fresh = [n for n in nodes if n.stored >> component_id & 1 and (n, component_id) not in seen]
                seen.update((node, component_id) for node in fresh)
                found = newest.setdefault(component_id, [])
                for node in reversed(fresh):
                    found += self._placed(node, component_id)
        for pages in newest.values():
            pages.reverse()
        return {component_id: pages for component_id, pages in newest.items() if pages}

    def pages_marked_stored(
        self, node: Node, earlier: Sequence[Node] = ()
    ) -> tuple[list[bytes], dict[int, Sequence[int]]]:
        """Pages on the path to `node` that are marked stored.

        Args:
            earlier: nodes of the path whose windows count too, besides that of its end.

        Returns:
            The digests of all pages of the path; and by component, the numbers of the marked pages (for a
            state, of the last page before it). For full pages, the range of all of them.
        """
        ends = (node, *earlier)
        kept = {
            window.id: {part for end in ends for part in window.keeps(end)} for window in self._tree.windows
        }
        parts = [*node.path()]
        marked: dict[int, Sequence[int]] = {FULL: range(parts[0].end if parts else 0)}
        for component in self._tree.components:
            pages = [
                page
                for part in reversed(parts)
                if part.stored >> component.id & 1 and part in kept.get(component.id, (part,))
                for page in range(part.end - (part.pages if component.paged else 1), part.end)
            ]
            if pages:
                marked[component.id] = pages
        return [digest for part in reversed(parts) for digest in self._tree.digests(part)], marked

    def unmark(
        self, node: Node, component_id: int, answers: Mapping[int, bool], *, written: Collection[Node]
    ) -> None:
        """Clear the stored mark of nodes whose pages storage turned out not to have, so that they are
        written again.

        Args:
            answers: by page number, ascending, whether storage has the page.
            written: nodes with a write in flight since storage was asked (`noting_writes`). They keep their
                mark.
        """
        storing = self.storing().union(written)
        lost = [page for page, there in answers.items() if not there]
        for part in node.path():
            begin = part.end - (part.pages if component_id not in self._states else 1)
            if part not in storing and bisect_left(lost, begin) < bisect_left(lost, part.end):
                part.stored &= ~(1 << component_id)
                self._remember(
                    part, component_id, [page for page in range(begin, part.end) if answers.get(page)]
                )

    def _remember(self, node: Node, component_id: int, pages: Sequence[int]) -> None:
        """Remember pages of an unmarked node that storage still has; its next write leaves them out."""
        if len(self._there) + len(pages) > _MAX_REMEMBERED:
            self._there.clear()
        digests, first = self._tree.digests(node), node.end - node.pages
        self._there.update((component_id, digests[page - first]) for page in pages)

    def forget_stored(self) -> None:
        """Clear all stored marks, after storage was detached or emptied. Linear in the tree."""
        self.forgotten += 1
        self._there.clear()
        for node in self._tree.nodes():
            node.stored = 0
        if self._tree.watcher is not None:
            self._tree.watcher.on_clear(Tier.STORAGE)

    @contextmanager
    def noting_writes(self) -> Iterator[set[Node]]:
        """Collect the nodes with a write in flight now, and those whose write ends inside the block.

        An answer of storage to a question from before says nothing about them.
        """
        noted = self.storing()
        self._noted.append(noted)
        try:
            yield noted
        finally:
            self._noted[:] = [other for other in self._noted if other is not noted]

    def write_finished(
        self, work: StorageWrite, *, stored: bool, late: bool = False, again: bool = False
    ) -> None:
        """Take the result of a storage write. If it failed, its pages may be written again.

        Args:
            stored: whether all of its pages are in storage.
            late: the engine may still read the slots; the caller calls `finish` later.
            again: no failure: another process is sending pages, and the caller looks again.
        """
        self._writes.discard(work)
        for noted in self._noted:
            noted.update(node for mark in work.marks for node in mark.nodes())
        if not stored:
            if not again:
                self._count_failure(work)
            for mark in work.marks:
                for node in mark.nodes():
                    node.stored &= ~(1 << mark.component_id)
        elif (watcher := self._tree.watcher) is not None and work.forgotten == self.forgotten:
            for mark in work.marks:
                for node in reversed(mark.nodes()):
                    watcher.on_store(node, mark.component_id)
        if not late:
            self.finish(work)

    def _count_failure(self, work: StorageWrite) -> None:
        nodes = {node for mark in work.marks for node in mark.nodes()}
        # A write that goes beyond an urgent path may have failed for what lies there.
        self.failures.update(end for end in set(self.urgent) if nodes.issubset(end.path()))

    def finish(self, work: StorageWrite) -> None:
        """Release the locks of a write: the engine no longer reads its slots."""
        self._inventory.unlock(work.locks)


def _is_stored(want: CopyRequest) -> bool:
    return bool(want.node.stored >> want.component_id & 1)


def _worth(node: Node) -> float:
    return node.worth[FULL]
