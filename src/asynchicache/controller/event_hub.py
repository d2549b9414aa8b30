"""Subscribers to cache events, each with a bounded queue. The tree is watched only while there are any."""

from __future__ import annotations

import asyncio
from collections import deque
from typing import Self
from weakref import WeakSet

from asynchicache.controller.namespaces import Namespaces
from asynchicache.controller.tasks import OneLoop
from asynchicache.controller.tree_events import TreeEvents
from asynchicache.errors import ConfigError
from asynchicache.events import CacheEvent, EventsDropped, PagesStored
from asynchicache.planner.planner import Planner
from asynchicache.types import check_number

_NODES_A_TURN = 256
"""Nodes that a snapshot processes before it yields to other tasks."""


class EventSubscription:
    """Events of one cache from now on, as an async iterator; ends when the cache closes.

    Confined to the cache's loop. Close it, or leave it as a context manager, to unsubscribe. The cache holds
    only a weak reference. When more than `limit` events wait, the oldest are dropped, and an `EventsDropped`
    with their number takes their place.

    Attributes:
        dropped: events dropped since the start.
    """

    def __init__(self, limit: int) -> None:
        self.dropped = 0
        self._limit = limit
        self._queue: deque[CacheEvent] = deque()
        self._lost = 0
        self._news = asyncio.Event()
        self._loop = OneLoop("the subscription")
        self._closed = False

    @property
    def open(self) -> bool:
        """Whether it still receives events."""
        return not self._closed

    def put(self, event: CacheEvent) -> None:
        """Add an event; called by the cache."""
        if self._closed:
            return
        if len(self._queue) == self._limit:
            self._queue.popleft()
            self._lost += 1
            self.dropped += 1
        self._queue.append(event)
        self._news.set()

    def take(self) -> list[CacheEvent]:
        """Remove and return all waiting events, without waiting."""
        events: list[CacheEvent] = [EventsDropped(self._lost)] if self._lost else []
        events += self._queue
        self._queue.clear()
        self._lost = 0
        return events

    async def wait(self) -> bool:
        """Wait until there is something to `take`; False if closed and empty."""
        self._loop.check()
        while not self._queue and not self._closed:
            self._news.clear()
            await self._news.wait()
        return bool(self._queue)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> CacheEvent:
        if not await self.wait():
            raise StopAsyncIteration
        if self._lost:
            lost, self._lost = self._lost, 0
            return EventsDropped(lost)
        return self._queue.popleft()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Unsubscribe; waiting events may still be read. Idempotent."""
        self._closed = True
        self._news.set()


class EventHub:
    """The subscribers of one cache."""

    def __init__(self, planner: Planner, namespaces: Namespaces) -> None:
        inventory = planner.inventory
        self._tree = inventory.tree
        self._writer = planner.backups
        self._announcer = TreeEvents(inventory.tree, inventory.spec.owners, namespaces, self._tell)
        self._subscriptions: WeakSet[EventSubscription] = WeakSet()

    def subscribe(self, limit: int) -> EventSubscription:
        """
        Raises:
            ConfigError: the limit is below 1 or not an integer.
        """
        check_number("limit", limit)
        if limit < 1:
            raise ConfigError(f"limit {limit} of waiting events must be 1 or more")
        subscription = EventSubscription(limit)
        self._subscriptions.add(subscription)
        self._tree.watcher = self._announcer
        return subscription

    def _tell(self, event: CacheEvent) -> None:
        heard = False
        for subscription in self._subscriptions:
            heard |= subscription.open
            subscription.put(event)
        if not heard:
            self._tree.watcher = None

    async def snapshot(self) -> list[PagesStored]:
        """Events for all that the cache has now, parents before children.

        Missing digests are computed first, in turns with other tasks. The tree is then read in one loop
        iteration, so the snapshot is consistent. Linear in the tree.
        """
        for turn, node in enumerate(list(self._tree.nodes(current=True))):
            if node.digests is None and node.parent is not None:
                self._tree.digests(node)
            if turn % _NODES_A_TURN == _NODES_A_TURN - 1:
                await asyncio.sleep(0)
        writing = self._writer.writes_in_flight()
        return [
            event
            for node in self._tree.nodes(current=True)
            for event in self._announcer.present(node, writing)
        ]

    def close(self) -> None:
        """Close all subscriptions."""
        for subscription in self._subscriptions:
            subscription.close()
