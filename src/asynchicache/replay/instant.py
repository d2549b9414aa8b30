"""Carry out what a planner decides at once and in order, without bytes.

The tree, the allocators, eviction and all decisions are the library's. So the same requests give the same
figures on every machine, at thousands a second.
"""

from __future__ import annotations

from collections.abc import Iterable

from asynchicache.planner.actions import Copy
from asynchicache.planner.planner import Planner
from asynchicache.planner.request_state import RequestState
from asynchicache.tree.node import Node
from asynchicache.types import Direction


class InstantCache:
    """A planner whose copies complete immediately and move nothing; it only tracks locations."""

    def __init__(self, planner: Planner) -> None:
        self.planner = planner

    def carry_out(self, copies: Iterable[Copy]) -> None:
        for copy in copies:
            self.move(copy)
            self.finish(copy)

    def finish(self, copy: Copy, error: Exception | None = None) -> None:
        """A copy has ended: carry out what follows from it."""
        node = self.planner.copy_finished(copy, error)
        if node is None:
            return
        if copy.direction is Direction.BACKUP:
            self.store(node)
        else:
            self.carry_out(self.planner.backups.backup(node))

    def advance(self, request: RequestState, length: int) -> None:
        """Release a request's pages that precede its windows."""
        retired = self.planner.windows.retire(request, length)
        if retired is not None:
            self.planner.windows.finish(retired)

    def move(self, copy: Copy) -> None:
        """Hook: move the stamps that represent bytes."""

    def store(self, node: Node) -> None:
        """Hook: the path to `node` was backed up to the host; write it to storage if there is one."""

    def prefetch(self, request: RequestState) -> None:
        """Hook: read what storage has of the request's prefix, if there is one."""
