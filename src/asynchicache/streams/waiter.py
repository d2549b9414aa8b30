"""Threads that block on events and report when they are reached."""

from __future__ import annotations

import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeAlias

from asynchicache.errors import DeviceError
from asynchicache.streams.base import Event

Reached: TypeAlias = Callable[[BaseException | None], None]


class EventWaiter:
    """The recorded events of one stream, first in first out, and a thread that blocks on the head.

    Each stream has its own, so that a slow stream does not delay the events of others.
    """

    def __init__(self, name: str, start: Callable[[], object]) -> None:
        """
        Args:
            name: of the stream.
            start: called by the thread before it asks for events.
        """
        self._start = start
        self._inbox: SimpleQueue[tuple[Event, Reached] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"waiter-{name}", daemon=True)
        self._thread.start()

    def put(self, event: Event, reached: Reached) -> None:
        """Call `reached` once, when the latest record of `event` is reached, or with the error."""
        self._inbox.put((event, reached))

    def close(self) -> None:
        """Join the thread, after it has handled what was put; may be called twice."""
        self._inbox.put(None)
        self._thread.join()

    def _serve(self) -> None:
        self._start()
        while (item := self._inbox.get()) is not None:
            event, reached = item
            reached(self._block(event))
            del item, event, reached  # an idle stream must not keep the leases of its last transfer

    @staticmethod
    def _block(event: Event) -> DeviceError | None:
        try:
            if not event.query():
                event.synchronize()
        except DeviceError as error:
            return error
        return None
