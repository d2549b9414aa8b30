"""Threads that block on events, and tell when these are reached."""

from __future__ import annotations

import threading
from collections.abc import Callable
from contextlib import AbstractContextManager
from queue import SimpleQueue
from typing import TypeAlias

from asynchicache.errors import DeviceError
from asynchicache.streams.base import Event

Reached: TypeAlias = Callable[[BaseException | None], None]


class Waiter:
    """The recorded events of one stream, first in first out, and a thread that blocks on the head.

    One queue a stream: events of a slow stream do not hold up those of others. Behind a head that
    was waited for, events that are complete by then are passed on without blocking again.
    """

    def __init__(self, name: str, asking: Callable[[], AbstractContextManager[object]]) -> None:
        """`asking`: entered by the thread that asks the events."""
        self._asking = asking
        self._inbox: SimpleQueue[tuple[Event, Reached] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._serve, name=f"waiter-{name}", daemon=True)
        self._thread.start()

    def put(self, event: Event, reached: Reached) -> None:
        """Call `reached` once, when the latest record of `event` is reached, or with the error."""
        self._inbox.put((event, reached))

    def close(self) -> None:
        """Join the thread, after what was put; twice is harmless."""
        self._inbox.put(None)
        self._thread.join()

    def _serve(self) -> None:
        with self._asking():
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
