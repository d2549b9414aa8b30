"""What the tree must do, said as simply as possible: pages only, no nodes, no splits, no queues.

The model is a dictionary from (namespace, whole prefix) to what stands there. It is slow, and right
by being read.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field

from asynchicache.tree.node import (
    ABSENT,
    FULL,
    FULL_DEVICE,
    FULL_HOST,
    LOADING,
    RESIDENT,
    SAVING,
    TIERS,
    component_of,
    is_full,
    other_tier,
    place_of,
    tier_of,
)
from asynchicache.types import Tier

PAGE = 2

Key = tuple[bytes, tuple[int, ...]]
"""A namespace's seed, and the tokens of a prefix."""

Slots = dict[int, list[int]]
"""Slots by place."""


@dataclass(frozen=True)
class Lock:
    """Pages that are kept at one place: of a window several, else the last one of a node."""

    pages: tuple[Page, ...]
    at: int


@dataclass(eq=False)
class Page:
    """What stands at the end of one prefix: by place a slot and its residency, and locks."""

    slots: dict[int, int] = field(default_factory=dict)
    residency: dict[int, int] = field(default_factory=dict)
    locks: Counter[int] = field(default_factory=Counter)

    def at(self, where: int) -> int:
        return self.residency.get(where, ABSENT)


@dataclass(eq=False)
class Copy:
    """A flight, page by page."""

    filled: list[tuple[Key, int]] = field(default_factory=list)
    locks: list[Lock] = field(default_factory=list)
    orphans: Slots = field(default_factory=dict)


class Model:
    """Rules of residency, one page at a time."""

    def __init__(self, width: int, windows: dict[int, int]) -> None:
        """`windows`: by component, trailing pages; the other components have states."""
        self.width = width
        self.windows = windows
        self.paged = {
            place_of(component_id, tier)
            for component_id in (FULL, *windows)
            for tier in (Tier.DEVICE, Tier.HOST)
        }
        self.pages: dict[Key, Page] = {}
        self.copies: list[Copy] = []
        self.root = Page(residency=dict.fromkeys(range(TIERS * width), RESIDENT))

    def page(self, key: Key) -> Page:
        return self.pages.get(key, self.root) if not key[1] else self.pages[key]

    @staticmethod
    def path(key: Key, begin: int = 0) -> list[Key]:
        seed, tokens = key
        return [(seed, tokens[: end * PAGE]) for end in range(begin + 1, len(tokens) // PAGE + 1)]

    @staticmethod
    def parent(key: Key) -> Key:
        return key[0], key[1][:-PAGE]

    def below(self, key: Key) -> list[Key]:
        """The pages at and below a prefix, the longest first."""
        seed, tokens = key
        found = [k for k in self.pages if k[0] == seed and k[1][: len(tokens)] == tokens]
        return sorted(found, key=lambda k: len(k[1]), reverse=True)

    def nearest(self, page: Page, component_id: int) -> Tier | None:
        if page.at(place_of(component_id, Tier.DEVICE)) in (RESIDENT, LOADING):
            return Tier.DEVICE
        return Tier.HOST if page.at(place_of(component_id, Tier.HOST)) == RESIDENT else None

    def needs(self, key: Key, component_id: int) -> list[Key]:
        """The pages, or the one with the state, that a prefix needs of a component."""
        return self.path(key)[-self.windows.get(component_id, 1) :]

    def keeps(self, key: Key, component_id: int) -> list[Key]:
        """The pages of a window that are kept for a prefix: one more than it needs."""
        return self.path(key)[-self.windows[component_id] - 1 :]

    def restorable(self, key: Key) -> bool:
        return all(
            self.nearest(self.page(prefix), component_id) is not None
            for component_id in range(1, self.width)
            for prefix in self.needs(key, component_id)
        )

    def match(self, key: Key, limit: int) -> tuple[int, int]:
        """Restorable pages and full pages of a sequence."""
        full = 0
        for prefix in self.path(key)[:limit]:
            if prefix not in self.pages:
                break
            full += 1
        path = self.path(key)[:full]
        pages = max((n for n, prefix in enumerate(path, 1) if self.restorable(prefix)), default=0)
        return pages, full

    # Locks

    def anchors(self, key: Key) -> list[Lock]:
        page = self.page(key)
        if page.at(FULL_DEVICE) != ABSENT:
            return [Lock((page,), FULL_DEVICE)]
        above = self.parent(key)
        while self.page(above).at(FULL_DEVICE) == ABSENT:
            above = self.parent(above)
        return [Lock((page,), FULL_HOST)] + ([Lock((self.page(above),), FULL_DEVICE)] if above[1] else [])

    def state_locks(self, key: Key) -> list[Lock]:
        locks = []
        for component_id in range(1, self.width) if key[1] else ():
            for prefix in self.needs(key, component_id) if component_id not in self.windows else ():
                nearest = self.nearest(self.page(prefix), component_id)
                tier = Tier.HOST if nearest is None else nearest
                locks += [
                    Lock((self.page(prefix),), at)
                    for at in (place_of(component_id, tier), place_of(FULL, tier))
                ]
        return locks

    @staticmethod
    def lock(locks: list[Lock], by: int = 1) -> None:
        for lock in locks:
            for page in lock.pages:
                page.locks[lock.at] += by

    # Slots

    def offer(self, key: Key, at: int, slot: int, residency: int = RESIDENT) -> bool:
        """Give a page a slot unless it has one; whether it was taken."""
        page = self.pages.setdefault(key, Page())
        if page.at(at) != ABSENT:
            return False
        page.slots[at], page.residency[at] = slot, residency
        return True

    def clear_slots(self, key: Key, at: int) -> int:
        page = self.pages[key]
        del page.residency[at]
        if not page.at(FULL_DEVICE) and not page.at(FULL_HOST) and not self.is_parent(key):
            del self.pages[key]
        return page.slots.pop(at)

    def is_parent(self, key: Key) -> bool:
        return any(self.parent(other) == key for other in self.pages)

    def evictable(self, key: Key, at: int, *, dirty: bool) -> bool:
        page = self.pages[key]
        if page.at(at) != RESIDENT or page.locks[at]:
            return False
        clean = tier_of(at) is Tier.HOST or page.at(at + 1) == RESIDENT
        if not (dirty or clean):
            return False
        children = [p for k, p in self.pages.items() if self.parent(k) == key]
        return not is_full(at) or all(child.at(at) == ABSENT for child in children)

    # Copies

    def end(self, copy: Copy, *, arrived: bool) -> Slots:
        self.copies.remove(copy)
        self.lock(copy.locks, -1)
        lost = copy.orphans
        for key, at in copy.filled:
            if arrived:
                self.pages[key].residency[at] = RESIDENT
            else:
                self.take_back(key, at, lost)
        return lost

    def take_back(self, key: Key, at: int, lost: Slots) -> None:
        for below in self.below(key) if is_full(at) else [key]:
            for component_id in reversed(range(self.width)) if is_full(at) else [component_of(at)]:
                self.drop(below, place_of(component_id, tier_of(at)), lost)

    def drop(self, key: Key, at: int, lost: Slots) -> None:
        page = self.pages.get(key)
        if page is None or page.at(at) == ABSENT:
            return
        owner, saved = lost, other_tier(at)
        for copy in self.copies:
            if (key, at) in copy.filled:
                copy.filled.remove((key, at))
                owner = copy.orphans
            elif (key, saved) in copy.filled:
                owner = copy.orphans
        owner.setdefault(at, []).append(self.clear_slots(key, at))
        if page.at(saved) == SAVING:
            self.take_back(key, saved, lost)
