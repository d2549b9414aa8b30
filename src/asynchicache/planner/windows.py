"""Sliding-window pages of requests: allocated as a request grows, published, freed as it moves on.

A request keeps only the pages that the next forward reads, and those to keep at the last page boundary. The
pool size therefore does not depend on the length of sequences (sgl-project/sglang#23391).
"""

from __future__ import annotations

from collections.abc import Mapping

from asynchicache.planner.inventory import SlotInventory
from asynchicache.planner.request_state import RequestState, RetiredPages, Window
from asynchicache.tree.components import WindowComponent
from asynchicache.tree.node import ABSENT, RESIDENT, Node, SlotPlace, place_of
from asynchicache.tree.radix_tree import Inserted, Pages
from asynchicache.types import Tier


class WindowPlanner:
    """Plans the windows of requests. Pure."""

    def __init__(self, inventory: SlotInventory) -> None:
        self._inventory = inventory
        self._tree = inventory.tree
        self._retired: set[RetiredPages] = set()
        inventory.private.append(self._private)

    def start(self, request: RequestState, node: Node, tail: Mapping[int, int]) -> None:
        """Start from `node`: the tree owns all window pages until the request adds its own.

        `tail`: by component id, the request's own page behind them, if its prefix ends inside it.
        """
        for component in self._tree.windows:
            first = component.first(node)
            own = [tail[component.id]] if tail else []
            slots = self._slots(component, node, first) + own
            request.windows[component.id] = Window(first, slots, set(own))

    @staticmethod
    def _slots(component: WindowComponent, node: Node, first: int) -> list[int]:
        place = place_of(component.id, Tier.DEVICE)
        parts = [
            part.slots_at(place)[max(first + part.pages - part.end, 0) :] for part in component.needs(node)
        ]
        return [slot for part in reversed(parts) for slot in part]

    def extend(self, request: RequestState, count: int) -> dict[str, list[int]]:
        """Allocate slots for `count` more pages of each window; the caller has made room."""
        given: dict[str, list[int]] = {}
        for component_id, window in request.windows.items():
            slots = self._inventory.free[place_of(component_id, Tier.DEVICE)].allocate(count)
            window.slots += slots
            window.own.update(slots)
            given |= {name: list(slots) for name in self._inventory.sharing(component_id)}
        return given

    @staticmethod
    def offered(request: RequestState, pages: int) -> dict[int, Pages]:
        """Window pages to offer the tree when publishing `pages` pages, from the first own page on."""
        offers = {}
        for component_id, window in request.windows.items():
            end = max(pages - window.first, 0)
            own = next((i for i, slot in enumerate(window.slots[:end]) if slot in window.own), end)
            if own < end:
                offers[component_id] = Pages(window.first + own, window.slots[own:end])
        return offers

    def handed_over(self, request: RequestState, offers: Mapping[int, Pages], result: Inserted) -> None:
        """Drop ownership of the pages that the tree took."""
        for component_id, offer in offers.items():
            taken = set(offer.slots).difference(result.windows[component_id].values())
            request.windows[component_id].own -= taken
            if taken:
                self._tree.supersede(result.node, component_id)

    def hand_over_tail(self, request: RequestState, tail: Node) -> None:
        """Give the tree the window pages of a tail that it has on the device now, unless it has some."""
        for component in self._tree.windows:
            window, place = request.windows[component.id], place_of(component.id, Tier.DEVICE)
            slot = window.slots[tail.end - 1 - window.first]
            if tail.residency[place] == ABSENT and slot in window.own:
                self._tree.fill_slots(tail, place, [slot], RESIDENT)
                window.own.discard(slot)
                self._tree.lock_for(request.lease.locked, tail, place)  # the forward may be in flight

    def retire(self, request: RequestState, length: int) -> RetiredPages | None:
        """Retire the pages before the window of the last page boundary in `length` computed tokens, or before
        that of a snapshot not yet published. They are kept until `finish`: the forward may be running."""
        pages = min(length // self._inventory.page_size, len(request.pages))
        snapshot = request.snapshot_tokens // self._inventory.page_size
        if request.snapshots and snapshot > request.borrowed:
            pages = min(pages, snapshot)
        retired = RetiredPages()
        for component in self._tree.windows:
            self._retire(request, component, pages - component.kept, retired)
        if not retired.locks and not retired.slots:
            return None
        self._inventory.locked.append(retired.locks)
        self._retired.add(retired)
        return retired

    def _retire(
        self, request: RequestState, component: WindowComponent, first: int, retired: RetiredPages
    ) -> None:
        window = request.windows.get(component.id)
        if window is None or first <= window.first:
            return
        gone = window.slots[: first - window.first]
        del window.slots[: first - window.first]
        window.first = first
        own = window.own.intersection(gone)
        window.own -= own
        if own:
            retired.slots[place_of(component.id, Tier.DEVICE)] = sorted(own)
        self._tree.drop_behind(request.lease, component.id, first, retired.locks)

    def finish(self, retired: RetiredPages, error: BaseException | None = None) -> None:
        """Free retired pages that no forward reads; with `error`, the device may still write to them."""
        self._retired.discard(retired)
        self._inventory.unlock(retired.locks)
        for place, slots in retired.slots.items():
            self._inventory.give_back(place, slots, poisoned=error is not None)

    def _private(self) -> Mapping[SlotPlace, list[int]]:
        owned: dict[SlotPlace, list[int]] = {}
        for retired in self._retired:
            for place, slots in retired.slots.items():
                owned.setdefault(place, []).extend(slots)
        return owned
