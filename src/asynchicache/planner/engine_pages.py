"""Plans copies from and to device pages that an engine owns. Pure.

The tree then has no device tier. A load copies host pages to the pages that the engine names. A backup
puts new nodes into the tree at once, as `SAVING`: a match ends before them, a second backup of the same
pages leaves them out, and if the copy fails they are taken back. So no page is visible before its bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from asynchicache.errors import UsageError
from asynchicache.planner.actions import Copy
from asynchicache.planner.backup import BackupPlanner
from asynchicache.planner.inventory import SlotInventory
from asynchicache.planner.request_state import RequestState
from asynchicache.tree import tier_copies
from asynchicache.tree.components import WindowComponent
from asynchicache.tree.node import ABSENT, FULL, FULL_HOST, Locks, Node, place_of
from asynchicache.tree.tier_copies import CopyRequest
from asynchicache.types import Direction, PoolTransfer, Tier

NamedPages = Mapping[str, Sequence[int | None]]
"""By pool that owns slots, the engine's pages for the last pages of a prefix, in order. None skips a page."""


class EnginePlanner:
    """Plans loads to, and backups from, the pages of an engine."""

    def __init__(self, inventory: SlotInventory, backups: BackupPlanner) -> None:
        self._inventory = inventory
        self._tree = inventory.tree
        self._backups = backups
        self._states = [inventory.names[one.id] for one in inventory.tree.components if not one.paged]
        self._loading: set[tuple[str, int]] = set()  # pages that loads in flight write

    def check(self, pages: NamedPages, longest: int, *, written: bool) -> None:
        """Check pages that an engine names for the end of a prefix.

        Args:
            pages: by pool.
            longest: pages of the prefix.
            written: whether a load will write them.

        Raises:
            UsageError: an unknown pool, more pages than the prefix has (for a state: than one), a page that
                does not exist, is named twice, or is being written by another load.
        """
        known = self._inventory.engine_pages or {}
        for pool, numbers in pages.items():
            if pool not in known:
                raise UsageError(f"pool {pool!r} is none of those that own slots: {sorted(known)}")
            per_token = self._inventory.spec.pool(pool).per_token
            # A prefix shorter than a page has no state to load, but the engine has one to name when it ends.
            most = longest if per_token else min(longest, 1) if written else 1
            if len(numbers) > most:
                raise UsageError(f"{len(numbers)} pages of pool {pool!r} for the last {most} of a prefix")
            self._check_numbers(
                pool, [number for number in numbers if number is not None], known[pool], written
            )

    def _check_numbers(self, pool: str, numbers: Sequence[int], count: int, written: bool) -> None:
        seen: set[int] = set()
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int) or not 0 <= number < count:
                raise UsageError(f"pool {pool!r} has no device page {number!r}; it has {count}")
            if number in seen:
                raise UsageError(f"pool {pool!r}: device page {number} is named twice")
            if written and (pool, number) in self._loading:
                raise UsageError(f"pool {pool!r}: another load is still writing device page {number}")
            seen.add(number)

    # To the device

    def load(self, request: RequestState, into: NamedPages) -> list[Copy]:
        """Copy the end of the matched prefix to the engine's pages, as far as it names them.

        The copy keeps the host pages from now on; the request keeps nothing.

        Raises:
            UsageError: as `check`, or the prefix does not need a named page.
        """
        node = request.lease.node
        self.check(into, node.end, written=True)
        transfers, locks = self._from_host(node, into)
        request.loaded = True
        request.hit_pages = node.end
        request.tier = self._tier(request, node, transfers)
        self._count_sources(request, node, transfers)
        copy = Copy(Direction.LOAD, [], self._inventory.begin(Tier.DEVICE, []))
        tier_copies.keep(self._tree, copy.tier_copy, locks)
        for component_id, (sources, destinations) in transfers.items():
            copy.transfers += self._inventory.transfers(component_id, sources, destinations)
            self._loading.update((self._inventory.names[component_id], page) for page in destinations)
        self.unlock_prefix(request)
        return [copy.serve(request)]

    def _from_host(
        self, node: Node, into: NamedPages
    ) -> tuple[dict[int, tuple[list[int], list[int]]], Locks]:
        """By component, the host slots and the engine's pages of a load; and what keeps the host slots."""
        transfers: dict[int, tuple[list[int], list[int]]] = {}
        locks: Locks = []
        for component_id, name in enumerate(self._inventory.names):
            numbers = into.get(name, ())
            wanted = {node.end - len(numbers) + i: n for i, n in enumerate(numbers) if n is not None}
            if not wanted:
                continue
            slots, parts = self._host_slots(node, component_id, min(wanted))
            missing = [page for page in wanted if page not in slots]
            if missing:
                raise UsageError(
                    f"pool {name!r}: page {missing[0]} is named, and the hit of {node.end} pages does not "
                    "need it: None skips a page"
                )
            transfers[component_id] = [slots[page] for page in wanted], list(wanted.values())
            locks += [(part, place_of(component_id, Tier.HOST)) for part in parts]
        if transfers and (node, FULL_HOST) not in locks:  # windows and states go with their full pages
            locks.append((node, FULL_HOST))
        return transfers, locks

    def _host_slots(self, node: Node, component_id: int, first: int) -> tuple[dict[int, int], list[Node]]:
        """By page number from `first` on, the host slots of a component that a prefix ending at `node` needs;
        and their nodes. Of full pages the last node suffices: it keeps those above."""
        if component_id == FULL:
            parts = [*node.path(first)]
            return _slots_of(parts, FULL), parts[:1]
        component = self._tree.components[component_id - 1]
        if not component.paged:
            return {node.end - 1: node.slots_at(place_of(component_id, Tier.HOST))[0]}, [node]
        parts = [part for part in component.needs(node) if part.end > first]
        behind = node.end - (self._inventory.spec.owners[component_id].coverage.pages or 0)
        slots = _slots_of(parts, component_id)
        return {page: slot for page, slot in slots.items() if page >= behind}, parts

    def _tier(self, request: RequestState, node: Node, transfers: Mapping[int, object]) -> Tier:
        if not (node.pages and transfers):
            return Tier.DEVICE
        return Tier.STORAGE if request.prefetched else Tier.HOST

    def _count_sources(
        self, request: RequestState, node: Node, transfers: Mapping[int, tuple[list[int], list[int]]]
    ) -> None:
        """Count by tier the pages and states that the engine gets; it has the others of the prefix."""
        for component_id, name in enumerate(self._inventory.names):
            host = len(transfers[component_id][0]) if component_id in transfers else 0
            stored = min(host, request.prefetched_pages)
            needed = node.end
            if component_id != FULL:
                needed = min(needed, self._inventory.spec.owners[component_id].coverage.pages or 0)
            request.sources[name, Tier.DEVICE] += needed - host
            request.sources[name, Tier.HOST] += host - stored
            request.sources[name, Tier.STORAGE] += stored

    def unlock_prefix(self, request: RequestState) -> None:
        """Release what a request locks: the engine has its own copy, and pages that were published stay as
        long as the policy keeps them."""
        before, root = request.lease, self._tree.root(request.seed)
        request.lease = self._tree.lease(root, before.use)
        before.close()

    def load_ended(self, copy: Copy) -> None:
        """The pages of a load are not written any more."""
        for pool, _, destinations in copy.transfers:
            self._loading.difference_update((pool, page) for page in destinations)

    # From the device

    def backup(
        self, request: RequestState, pages: int, named: NamedPages, *, states: bool, usable: bool
    ) -> list[Copy]:
        """Copy what the host lacks of a prefix of `pages` pages, as far as there is room and as far as the
        engine names its pages without a gap.

        Args:
            pages: whole pages of the prefix.
            named: the engine's pages.
            states: the prefix ends at a page boundary, so that states belong to its last page.
            usable: no copy or device has failed; else nothing is published.

        Raises:
            UsageError: as `check`.
        """
        self.check(named, pages, written=False)
        request.published.lost |= not usable
        if not usable:
            return []
        if not states:
            named = {
                pool: of_pool for pool, of_pool in named.items() if self._inventory.spec.pool(pool).per_token
            }
        inventory, tree = self._inventory, self._tree
        numbers = {
            name: {pages - len(of_pool) + i: n for i, n in enumerate(of_pool) if n is not None}
            for name, of_pool in named.items()
        }
        above = tree.rooted(tree.known_end(request.tokens, request.seed, pages))
        kept: Locks = [(above, FULL_HOST)] if above.pages else []
        inventory.lock(kept)
        try:
            end, batch = self._full_pages(request, above, pages, numbers)
            if end.end == pages and end.pages:
                batch += self._others(end, numbers, kept)
        finally:
            inventory.unlock(kept)
        request.published.pages.add(pages)
        if states and all(pages - 1 in numbers.get(name, ()) for name in self._states):
            request.published.resumable = max(request.published.resumable, pages)
        inventory.bound_hint(request, end.end)
        tree.published(end, request.lease.use, fresh=end is not above)
        inventory.keep(request, end)
        return self._copy(end, batch, numbers)

    def _full_pages(
        self, request: RequestState, above: Node, pages: int, numbers: Mapping[str, Mapping[int, int]]
    ) -> tuple[Node, list[tuple[CopyRequest, list[int]]]]:
        """Grow the path behind `above` by the full pages that are named and have room; returns its end."""
        inventory, tree = self._inventory, self._tree
        named = numbers.get(inventory.names[FULL], {})
        stop = next((page for page in range(above.end, pages) if page not in named), pages)
        if not inventory.make_room(FULL_HOST, stop - above.end):
            room = min(inventory.free[FULL_HOST].available, stop - above.end - 1)
            inventory.counters.host_pressure += stop - above.end - room
            stop = above.end + room
        end = above
        if stop > above.end:
            size = tree.page_bytes
            key = memoryview(request.tokens).cast("B")[above.end * size : stop * size].tobytes()
            end = tree.add_child(above, key)
            for window in tree.windows if stop == pages else ():
                tree.cut_window(end, self._begin(window, end, numbers))
            for part in end.path(above.end):
                part.hits = 1
        self._backups.count_seen(request, stop)
        parts = [*end.path(above.end)][::-1]
        free = inventory.free[FULL_HOST]
        return end, [(CopyRequest(part, FULL), free.allocate(part.pages)) for part in parts]

    def _others(
        self, end: Node, numbers: Mapping[str, Mapping[int, int]], kept: Locks
    ) -> list[tuple[CopyRequest, list[int]]]:
        """The windows and states at `end` that the host lacks and the engine names, where there is room."""
        batch: list[tuple[CopyRequest, list[int]]] = []
        begins = {window.id: self._begin(window, end, numbers) for window in self._tree.windows}
        for begin in begins.values():  # all of them first: a cut divides nodes that have slots by then
            self._tree.cut_window(end, begin)
        for component in self._tree.components:
            place = place_of(component.id, Tier.HOST)
            named = numbers.get(self._inventory.names[component.id], {})
            parts = [*end.path(begins.get(component.id, end.end - 1))]
            missing = [part for part in parts if part.residency[place] == ABSENT]
            if not all(page in named for part in missing for page in _pages(part, component.paged)):
                continue  # a window with a gap is useless
            for part in parts:  # those without slots too: room for the next component must not divide them
                self._tree.lock_for(kept, part, place)
            count = sum(len(_pages(part, component.paged)) for part in missing)
            if not self._inventory.make_room(place, count):
                self._inventory.counters.host_pressure += count
                continue
            for part in reversed(missing):
                slots = self._inventory.free[place].allocate(len(_pages(part, component.paged)))
                batch.append((CopyRequest(part, component.id), slots))
            if not missing:
                self._tree.use(component, end)
        return batch

    def _begin(self, window: WindowComponent, end: Node, numbers: Mapping[str, Mapping[int, int]]) -> int:
        """The first page to keep of a window that ends at `end`: of the page that it need not have, only what
        the engine names or the host has."""
        page, named = window.first_kept(end), numbers.get(self._inventory.names[window.id], {})
        *_, part = window.keeps(end)
        there = part.residency[place_of(window.id, Tier.HOST)] != ABSENT
        return page if there or page in named else window.first(end)

    def _copy(
        self,
        end: Node,
        batch: list[tuple[CopyRequest, list[int]]],
        numbers: Mapping[str, Mapping[int, int]],
    ) -> list[Copy]:
        if not batch:
            return []
        inventory, transfers = self._inventory, list[PoolTransfer]()
        for (part, component_id), slots in batch:
            named = numbers[inventory.names[component_id]]
            paged = component_id == FULL or self._tree.components[component_id - 1].paged
            sources = [named[page] for page in _pages(part, paged)]
            transfers += inventory.transfers(component_id, sources, slots)
        inventory.counters.backed_up += sum(len(slots) for _, slots in batch)
        tier_copy = inventory.begin(Tier.HOST, batch)
        for component in self._tree.components:
            if any(component_id == component.id for (_, component_id), _ in batch):
                self._tree.use(component, end)
                self._tree.supersede(end, component.id)
        publishes = self._backups.last_due(end)
        return [Copy(Direction.BACKUP, transfers, tier_copy, publishes=publishes)]


def _pages(part: Node, paged: bool) -> range:
    """Numbers of the pages that a component has slots for in a node; a state has one, at its end."""
    return range(part.end - (part.pages if paged else 1), part.end)


def _slots_of(parts: Sequence[Node], component_id: int) -> dict[int, int]:
    """Host slots of nodes by page number."""
    place = place_of(component_id, Tier.HOST)
    return {
        page: slot
        for part in reversed(parts)
        for page, slot in zip(_pages(part, True), part.slots_at(place), strict=True)
    }
