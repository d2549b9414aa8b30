"""What goes down: from the device to the host, and from the host to storage. Pure, as the planner."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

from asynchicache.planner.actions import Copy, StorageWrite, StoredSpan
from asynchicache.planner.activity import Activity
from asynchicache.planner.state import CacheState
from asynchicache.tree import copies
from asynchicache.tree.copies import CopyRequest
from asynchicache.tree.node import (
    ABSENT,
    FULL,
    FULL_DEVICE,
    FULL_HOST,
    LOADING,
    RESIDENT,
    SAVING,
    Node,
    Pins,
    SlotPlace,
    place_of,
)
from asynchicache.types import Direction, Tier, WritePolicy

_SELECTIVE_HITS = 2

_MAX_POSTPONED = 256
"""Paths that wait for host slots; what comes beyond is given up, the oldest first."""

_MOST_REMEMBERED = 1 << 16
"""Pages that storage has of nodes that it lost in part; beyond it all are written again."""


class BackupPlanner:
    """Plans write-through, write-back and storage writes.

    Attributes:
        postponed: what a backup left out because every host slot was in use, in order, with its period of
            `Activity`; tried again as writes to storage end, for as long as the device still has it. Only
            that and not its whole path: states of one path that do not fit together would take each
            other's slots for ever.
        urgent: ends of paths that somebody waits for and that found no host slots, first come, first served.
            While there are any, nothing else is given host slots for a backup.
        preparing: ends of paths that are written as soon as their digests are computed.
        forgotten: how often all that was known of storage was forgotten.
    """

    def __init__(self, state: CacheState, activity: Activity, *, clean_share: float) -> None:
        """`clean_share`: under write-back, the share of device pages kept free or clean ahead of need."""
        self._state = state
        self._tree = state.tree
        self._activity = activity
        self.postponed: dict[CopyRequest, int] = {}
        self.urgent: list[Node] = []
        self.preparing: list[Node] = []
        self._noted: list[set[Node]] = []
        self.forgotten = 0
        self._under_way: set[StorageWrite] = set()
        self._there: set[tuple[int, bytes]] = set()  # by component, pages of nodes that storage lost in part
        self._states = {component.id for component in state.tree.components if not component.paged}
        self._clean_target = int(state.free[FULL_DEVICE].capacity * clean_share)

    def due(self, node: Node) -> bool:
        """Whether the write policy wants this node on the host now."""
        policy = self._state.write_policy
        if policy is WritePolicy.WRITE_THROUGH_SELECTIVE:
            return node.hits >= _SELECTIVE_HITS
        return policy is WritePolicy.WRITE_THROUGH

    def backup(self, node: Node, *, period: int | None = None) -> list[Copy]:
        """Copy to the host what the path to `node` has on the device only, as far as there is room.

        Args:
            node: where the path ends.
            period: of the work that this follows from (`Activity`). Default: the current one.
        """
        period = self._activity.period if period is None else period
        wanted = self._missing(node)
        if not self.urgent:
            return self._copy(node, wanted, period)
        if node not in self.urgent:
            self._postpone(wanted, period)
            return []
        # States that are stored would take each other's last host slot for ever, and look like progress.
        needed = [want for want in wanted if want.component_id == FULL or not _is_stored(want)]
        return self._copy(node, needed, period)

    def _missing(self, node: Node) -> list[CopyRequest]:
        """What of the path to `node` is not on the host, and may be."""
        free = self._state.free
        if not free[FULL_HOST].capacity:
            return []  # nothing else may be there without full pages
        missing = copies.missing_on_host(self._tree, node)
        return [want for want in missing if free[place_of(want.component_id, Tier.HOST)].capacity]

    def lacks_room(self, node: Node) -> bool:
        """Whether the path to `node` has something on the device that could be on the host, and is not there
        nor in storage."""
        return any(not _is_stored(want) for want in self._missing(node))

    def _copy(self, node: Node, wanted: list[CopyRequest], period: int) -> list[Copy]:
        """Copy to the host what is `wanted` of the path to `node`, as far as there is room."""
        state = self._state
        if not wanted:
            return []
        anchor = self._host_anchor(node)
        anchor += [(want.node, place_of(want.component_id, Tier.DEVICE)) for want in wanted]
        state.pin(anchor)
        batch = self._host_slots(wanted)
        state.unpin(anchor)
        begun = {want for want, _ in batch}
        self._postpone([want for want in wanted if want not in begun], period)
        if not batch:
            return []
        transfers = [
            transfer
            for (below, component_id), slots in batch
            for transfer in state.transfers(
                component_id, below.slots_at(place_of(component_id, Tier.DEVICE)), slots
            )
        ]
        state.counters.backed_up += sum(want.size for want, _ in batch)
        tier_copy = state.begin(Tier.HOST, batch)
        return [Copy(Direction.BACKUP, transfers, tier_copy, publishes=batch[-1][0].node, period=period)]

    def _postpone(self, wanted: list[CopyRequest], period: int) -> None:
        for want in wanted:
            self.postponed[want] = period
            if len(self.postponed) > _MAX_POSTPONED:
                del self.postponed[next(iter(self.postponed))]

    def retry(self) -> list[Copy]:
        """Back up what was postponed, now that something may have been given back."""
        if self.urgent:
            return [copy for node in self.urgent for copy in self.backup(node)]
        postponed, self.postponed = self.postponed, {}
        return [copy for want, period in postponed.items() for copy in self._retry_one(want, period)]

    def _retry_one(self, want: CopyRequest, period: int) -> list[Copy]:
        """Back up what was postponed together with what it stands on, or nothing of it.

        With the ground alone, two paths that do not fit on the host together would take it from each
        other for ever, and neither would ever be postponed less.
        """
        if want.node.parent is None or not copies.is_unsaved(want.node, want.component_id):
            return []
        wanted = self._with_unsaved_ancestors(want)
        if self._have_room(wanted):
            return self._copy(want.node, wanted, period)
        self._postpone([want], period)
        return []

    @staticmethod
    def _with_unsaved_ancestors(want: CopyRequest) -> list[CopyRequest]:
        """What is postponed, after the full pages above it that are not saved either: a node that is split
        while it waits leaves its upper half behind, and nothing stands without that."""
        parts = [want]
        above = want.node.parent if want.component_id == FULL else want.node
        while above is not None and above.parent is not None and copies.is_unsaved(above, FULL):
            parts.append(CopyRequest(above, FULL))
            above = above.parent
        return parts[::-1]

    def _have_room(self, wanted: list[CopyRequest]) -> bool:
        """Have host slots free for all of a path's `wanted`, parents first, if they can stand there."""
        first = wanted[0]
        ground = first.node.parent if first.component_id == FULL else first.node
        if ground is None or ground.residency[FULL_HOST] == ABSENT:
            return False
        counts: Counter[SlotPlace] = Counter()
        for want in wanted:
            counts[place_of(want.component_id, Tier.HOST)] += want.size
        kept = self._host_anchor(wanted[-1].node)
        self._state.pin(kept)
        short = self._state.make_room_for_all(counts)
        self._state.unpin(kept)
        return short is None

    @staticmethod
    def _host_anchor(node: Node) -> Pins:
        """The last host copy on the path, which the new ones will stand on: it must not go to make room."""
        while node.parent is not None and node.residency[FULL_HOST] == ABSENT:
            node = node.parent
        return [(node, FULL_HOST)] if node.parent is not None else []

    def _host_slots(self, wanted: list[CopyRequest]) -> list[tuple[CopyRequest, list[int]]]:
        """Host slots for as many of `wanted` as there is room for, parents before children."""
        batch: list[tuple[CopyRequest, list[int]]] = []
        for want in wanted:
            place = place_of(want.component_id, Tier.HOST)
            if self._state.make_room(place, want.size):
                batch.append((want, self._state.free[place].allocate(want.size)))
                continue
            self._state.counters.host_pressure += want.size
            if want.component_id == FULL:
                break  # what follows stands on this
        return batch

    def clean(self) -> list[Copy]:
        """Under write-back: back up the pages that would go next, ahead of need."""
        if self._state.write_policy is not WritePolicy.WRITE_BACK:
            return []
        queue = self._tree.queues[FULL_DEVICE]
        short = self._clean_target - self._state.free[FULL_DEVICE].available
        seen: list[Node] = []
        plan: list[Copy] = []
        while short > 0 and (node := queue.pop()) is not None:
            seen.append(node)
            short -= node.pages
            plan += self.backup(node)
        for node in seen:
            self._tree.refresh(node, FULL_DEVICE)
        return plan

    def store(self, node: Node) -> StorageWrite | None:
        """What of the path to `node` is on the host and not known to be in storage."""
        work = StorageWrite(self.forgotten)
        path = []
        while node.parent is not None:
            path.append(node)
            node = node.parent
        for below in reversed(path):
            for component_id in range(len(self._state.names)):
                resident = below.residency[place_of(component_id, Tier.HOST)] == RESIDENT
                if resident and not below.stored >> component_id & 1:
                    self._add(work, below, component_id)
        if not work.marks:
            return None
        self._state.pin(work.pins)
        self._under_way.add(work)
        return work

    def _add(self, work: StorageWrite, node: Node, component_id: int) -> None:
        place = place_of(component_id, Tier.HOST)
        held = node.slots_at(place)
        digests = self._tree.digests(node)[-len(held) :]  # of all its pages, or of the last one for a state
        if self._there:
            left = [
                pair for pair in zip(digests, held, strict=True) if (component_id, pair[0]) not in self._there
            ]
            self._there.difference_update((component_id, digest) for digest in digests)
            digests, held = [digest for digest, _ in left], [slot for _, slot in left]
        for pool in self._state.sharing(component_id):
            keys, slots = work.pages.setdefault(pool, ([], []))
            keys += digests
            slots += held
        node.stored |= 1 << component_id
        work.marks.append(StoredSpan(node, component_id, len(node.slots_at(place))))
        work.pins += [(node, place)] if component_id == FULL else [(node, place), (node, FULL_HOST)]

    def storing(self) -> set[Node]:
        """The nodes that a write to storage is under way for."""
        return {node for work in self._under_way for mark in work.marks for node in mark.nodes()}

    def writes_in_flight(self) -> set[tuple[Node, int]]:
        """Nodes and components that a write to storage is under way for."""
        marks = [mark for work in self._under_way for mark in work.marks]
        return {(node, mark.component_id) for mark in marks for node in mark.nodes()}

    def in_flight(self, node: Node) -> bool:
        """Whether a copy or a write is in flight that brings something of the path to `node` nearer to
        storage."""
        storing = self.storing().union(self.preparing)
        while node.parent is not None:
            if node in storing or (~node.stored and self._is_moving(node)):
                return True
            node = node.parent
        return False

    def _is_moving(self, node: Node) -> bool:
        """Whether a component of a node that is not stored is being copied to the host, or will be, once it
        has arrived on the device."""
        for component_id in range(len(self._state.names)):
            if node.stored >> component_id & 1:
                continue
            device = node.residency[place_of(component_id, Tier.DEVICE)]
            host = node.residency[place_of(component_id, Tier.HOST)]
            if host == SAVING or (device == LOADING and host == ABSENT):
                return True
        return False

    def is_stored(self, node: Node) -> bool:
        """Whether everything that the path to `node` has in memory is in storage as well; of windows,
        what a prefix that ends there needs."""
        needed = {component.id: set(component.needs(node)) for component in self._tree.windows}
        storing = self.storing()
        while node.parent is not None:
            held = 0
            for component_id in range(len(self._state.names)):
                slots = (
                    node.slots[place_of(component_id, Tier.DEVICE)]
                    or node.slots[place_of(component_id, Tier.HOST)]
                )
                if slots and node in needed.get(component_id, (node,)):
                    held |= 1 << component_id
            if held & ~node.stored or node in storing:
                return False
            node = node.parent
        return not node.pages  # else it was evicted meanwhile, and who knows

    def digests_to_touch(self, ends: Iterable[Node]) -> dict[int, list[bytes]]:
        """What storage has of paths that were used, in the order in which an engine is to count it as used.

        Args:
            ends: where the paths end, the one that was used last comes last.

        Returns:
            By component, digests, the least recently used first: of a path the end comes before its
            beginning, so that an engine that evicts what is used least keeps beginnings.
        """
        seen: set[tuple[Node, int]] = set()
        newest: dict[int, list[bytes]] = {}
        for end in reversed(list(ends)):
            parts = {FULL: _path(end)}
            for component in self._tree.components:
                parts[component.id] = list(component.needs(end)) if end.parent is not None else []
            for component_id, nodes in parts.items():
                fresh = [n for n in nodes if n.stored >> component_id & 1 and (n, component_id) not in seen]
                seen.update((node, component_id) for node in fresh)
                found = newest.setdefault(component_id, [])
                for node in reversed(fresh):
                    found += self._tree.digests(node)[-(1 if component_id in self._states else node.pages) :]
        for digests in newest.values():
            digests.reverse()
        return {component_id: digests for component_id, digests in newest.items() if digests}

    def pages_marked_stored(self, node: Node) -> tuple[list[bytes], dict[int, Sequence[int]]]:
        """What the marks say that storage has of the path to `node`, of what is in memory.

        Returns:
            The digests of all pages of the path, and by component the numbers of the pages, or of the last
            pages before states: a range where it is all of them.
        """
        needed = {component.id: set(component.needs(node)) for component in self._tree.windows}
        parts = _path(node)
        marked: dict[int, Sequence[int]] = {FULL: range(parts[0].end if parts else 0)}
        for component in self._tree.components:
            pages = [
                page
                for part in reversed(parts)
                if part.stored >> component.id & 1 and part in needed.get(component.id, (part,))
                for page in range(part.end - (part.pages if component.paged else 1), part.end)
            ]
            if pages:
                marked[component.id] = pages
        return [digest for part in reversed(parts) for digest in self._tree.digests(part)], marked

    def unmark(
        self, node: Node, component_id: int, answers: Mapping[int, bool], *, written: Collection[Node]
    ) -> None:
        """Storage does not have all pages of a component of the path to `node` that it was said to have:
        those that it lost are written anew.

        Args:
            node: where the path ends.
            component_id: the component.
            answers: by page number, ascending, whether storage has the page.
            written: nodes that were written, at least in part, since storage was asked (`noting_writes`).
        """
        storing = self.storing().union(written)
        lost = [page for page, there in answers.items() if not there]
        for part in _path(node):
            begin = part.end - (part.pages if component_id not in self._states else 1)
            if part not in storing and bisect_left(lost, begin) < bisect_left(lost, part.end):
                part.stored &= ~(1 << component_id)
                self._remember(
                    part, component_id, [page for page in range(begin, part.end) if answers.get(page)]
                )

    def _remember(self, node: Node, component_id: int, pages: Sequence[int]) -> None:
        """Storage has these pages of a node that is to be written: they are left out then."""
        if len(self._there) + len(pages) > _MOST_REMEMBERED:
            self._there.clear()
        digests, first = self._tree.digests(node), node.end - node.pages
        self._there.update((component_id, digests[page - first]) for page in pages)

    def forget_stored(self) -> None:
        """Storage is gone, or empty: nothing is known to be there. Linear in the tree."""
        self.forgotten += 1
        self._there.clear()
        for node in self._tree.nodes():
            node.stored = 0
        if self._tree.watcher is not None:
            self._tree.watcher.on_clear(Tier.STORAGE)

    @contextmanager
    def noting_writes(self) -> Iterator[set[Node]]:
        """The nodes that are being written, and in the body those whose writes end too: an older answer of
        storage says nothing of them."""
        noted = self.storing()
        self._noted.append(noted)
        try:
            yield noted
        finally:
            self._noted[:] = [other for other in self._noted if other is not noted]

    def write_finished(self, work: StorageWrite, *, stored: bool, late: bool = False) -> None:
        """A write to storage was answered; what is not there may be tried again.

        Args:
            work: the write.
            stored: whether all of it is there.
            late: the engine may still read the slots; `finish` is called when it does not.
        """
        self._under_way.discard(work)
        for noted in self._noted:
            noted.update(node for mark in work.marks for node in mark.nodes())
        if not stored:
            for mark in work.marks:
                for node in mark.nodes():
                    node.stored &= ~(1 << mark.component_id)
        elif (watcher := self._tree.watcher) is not None and work.forgotten == self.forgotten:
            for mark in work.marks:
                for node in reversed(mark.nodes()):
                    watcher.on_store(node, mark.component_id)
        if not late:
            self.finish(work)

    def finish(self, work: StorageWrite) -> None:
        """No engine reads the write's slots any more."""
        self._state.unpin(work.pins)


def _is_stored(want: CopyRequest) -> bool:
    return bool(want.node.stored >> want.component_id & 1)


def _path(node: Node) -> list[Node]:
    """The nodes from `node` up to the root, which is left out."""
    found = []
    while node.parent is not None:
        found.append(node)
        node = node.parent
    return found
