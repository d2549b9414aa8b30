"""Publishes ends of sequences inside a page. Pure."""

from __future__ import annotations

from asynchicache.planner.actions import Copy
from asynchicache.planner.inventory import SlotInventory
from asynchicache.planner.request_state import RequestState
from asynchicache.planner.windows import WindowPlanner
from asynchicache.tree import tails, tier_copies
from asynchicache.tree.node import ABSENT, FULL, FULL_DEVICE, FULL_HOST, RESIDENT, Node
from asynchicache.tree.tails import Tail
from asynchicache.tree.tier_copies import remove_if_dead
from asynchicache.types import Direction


class TailPlanner:
    """Plans the tails of requests."""

    def __init__(self, inventory: SlotInventory, windows: WindowPlanner) -> None:
        self._inventory = inventory
        self._tree = inventory.tree
        self._windows = windows
        self._states = sum(not component.paged for component in inventory.tree.components)

    @property
    def keeps_states_inside(self) -> bool:
        """Whether a request that goes on can leave a state inside a page."""
        return self._inventory.tails and not self._tree.windows

    def publish(
        self, request: RequestState, node: Node, length: int, *, final: bool
    ) -> tuple[Node | None, Copy | None]:
        """Publish the tokens behind `node`, the end of the whole pages, as a tail, if there are any.

        The page of a finished request goes to the tree. Any other request goes on to fill its page, so the
        tail is a copy of it. With windows, only the end of a finished request is kept; with states, also the
        lengths up to which later prompts repeat this one (`CacheHint.repeats`). Elsewhere prompts resume
        better where whole pages end.

        Returns:
            The tail where the sequence ends now, whose states are missing yet; and the copy of its page.
        """
        count = length % self._inventory.page_size
        if not count:
            return None, None
        if self._tree.components:
            complete = len(request.states) == self._states and not (
                self._states and request.snapshot_tokens == length
            )
            if final or not complete:
                return (self._hand_over(request, node, length) if final and complete else None), None
            if not self._repeats(request, length):
                return None, None
        found = tails.find(self._tree, node, request.tokens, length)
        known = found if found is not None and found.tokens == count else None
        if final:
            tail = self._hand_over(request, node, length)
            if known is not None and known.node is not tail:
                # A page that goes on serves as well, in memory. Storage is asked for the end itself.
                tails.supersede(self._tree, tail)
            return tail, None
        if known is not None:
            tails.use(self._tree, known, request.lease.use)
            return (known.node if known.node.tail == count else None), None
        return self._fork(request, node, length)

    def stores(self, request: RequestState, length: int, tail: Node | None, *, final: bool) -> bool:
        """Whether storage is to have the end of a checkpoint that gave `tail`: that of a finished request, or
        one with states, whether there was room for it or not."""
        if final or not self._states:
            return final and tail is not None
        return bool(length % self._inventory.page_size) and self._repeats(request, length)

    def _repeats(self, request: RequestState, length: int) -> bool:
        return length in request.hint.repeats and self.keeps_states_inside

    def _hand_over(self, request: RequestState, node: Node, length: int) -> Node:
        """Give the last page of a request to the tree, unless it has one with the same tokens there."""
        tokens, slot = request.tokens[:length], request.pages[node.end]
        tail = tails.get(self._tree, node, tokens)
        if tail is None:
            tail = tails.add(self._tree, node, tokens, slot, arriving=False)
        elif tail.residency[FULL_DEVICE] == ABSENT:
            self._tree.fill_slots(tail, FULL_DEVICE, [slot], RESIDENT)
        if tail.slots_at(FULL_DEVICE) == [slot]:
            request.borrowed = node.end + 1
        # The forward that writes it may be in flight, until the request is released.
        self._tree.lock_for(request.lease.locked, tail, FULL_DEVICE)
        self._windows.hand_over_tail(request, tail)
        tails.use(self._tree, Tail(tail, tail.tail), request.lease.use)
        return tail

    def _fork(self, request: RequestState, node: Node, length: int) -> tuple[Node | None, Copy | None]:
        """Copy the last page of a request to one of the tree's; nothing if there is no room."""
        inventory = self._inventory
        if not inventory.make_room(FULL_DEVICE, 1):
            return None, None
        slots = inventory.free[FULL_DEVICE].allocate(1)
        tail = tails.add(self._tree, node, request.tokens[:length], slots[0], arriving=True)
        tails.use(self._tree, Tail(tail, tail.tail), request.lease.use)
        tier_copy = tier_copies.begin_arrival(self._tree, tail, [FULL])
        inventory.tier_copies.append(tier_copy)
        transfers = inventory.transfers(FULL, [request.pages[node.end]], slots)
        return tail, Copy(Direction.FORK, transfers, tier_copy).serve(request)

    def set_last_tail(self, request: RequestState, node: Node, tail: Node | None) -> None:
        """A sequence ends at `node` now, or at `tail` behind it; the tail where it ended before serves only
        sequences that branch off there."""
        before = request.last_tail
        if tail is not None:
            request.last_tail = tail
        if before is None or before.parent is None or before is tail:
            return
        if (tail is None and node.end < before.end) or not self._tree.restorable(tail or node):
            return
        tails.supersede(self._tree, before)
        if not self._tree.components and not self._drop(before):  # a page that begins with all of it is there
            request.superseded_tails.append(before)

    def release(self, request: RequestState) -> None:
        """Drop the tails that a request left behind, unless somebody used them since."""
        for tail in request.superseded_tails:
            if not tail.worth[FULL]:
                self._drop(tail)

    def _drop(self, tail: Node) -> bool:
        """Free the page of a tail; False if it is in use in one of the tiers."""
        if tail.parent is None:
            return True
        places = [place for place in (FULL_DEVICE, FULL_HOST) if tail.residency[place] != ABSENT]
        if not all(self._tree.evictable(tail, place) for place in places):
            return False
        for place in places:
            self._inventory.free[place].release(self._tree.clear_slots(tail, place))
        return remove_if_dead(self._tree, tail)
