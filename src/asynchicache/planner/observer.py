"""What an observer of one cache is told, at the moment when it happens; for tests that search for bugs."""

from __future__ import annotations

from collections.abc import Mapping

from asynchicache.planner.actions import Copy
from asynchicache.planner.readings import StorageRead
from asynchicache.tree.node import Node, SlotPlace


class Observer:
    """Override what is of interest. Only `may_take` has a say; nothing may change the cache or raise.

    What can be seen at any time is read from an `Inspection`; these are the moments between two looks.
    """

    def may_take(self, counts: Mapping[SlotPlace, int]) -> bool:
        """So many slots are wanted by place. False: they are refused, as if all slots were in use."""
        return True

    def no_room(self, counts: Mapping[SlotPlace, int], *, shared: bool) -> None:
        """So many slots stay short, whatever was evicted. `shared`: they are of memory that pools share."""

    def held_back(self, node: Node) -> None:
        """The path to `node` got no host slot, while a client waits for another path to get some."""

    def leaving(self, node: Node, place: SlotPlace, pages: int) -> None:
        """The last `pages` pages of a node, or its state, are about to leave a place."""

    def read_chosen(self, read: StorageRead | None) -> None:
        """The next read from storage has begun; None: none can begin now."""

    def copy_ended(self, copy: Copy, error: BaseException | None) -> None:
        """A copy has ended, and is about to be settled or undone."""

    def hint_weighed(self, pages: int, clock: float, until: float, *, counts: bool) -> None:
        """A hint would favour so many pages from `clock` to `until`, ticks of the tree; whether it counts."""
