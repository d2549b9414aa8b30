"""Devices with injected faults."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial

from asynchicache.errors import DeviceError
from asynchicache.streams.base import Device, Event, Graph, Stream


class LossyDevice:
    """A device that loses notifications. Its events stay correct.

    Attributes:
        withheld: the lost notifications. Call them to make them late instead.
    """

    def __init__(self, inner: Device, lost: Callable[[], bool] = lambda: True) -> None:
        """
        Args:
            lost: called per notification; True loses it. Default: all are lost.
        """
        self._inner = inner
        self._lost = lost
        self.withheld: list[Callable[[], None]] = []

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def error(self) -> BaseException | None:
        return self._inner.error

    def stream(self, name: str, *, urgent: bool = False) -> Stream:
        return self._inner.stream(name, urgent=urgent)

    def event(self, *, external: bool = False) -> Event:
        return self._inner.event(external=external)

    def owns(self, part: Event | Stream) -> bool:
        return self._inner.owns(part)

    def capture(self, stream: Stream) -> AbstractContextManager[Graph]:
        return self._inner.capture(stream)

    def own_thread(self) -> None:
        self._inner.own_thread()

    def yield_to_streams(self) -> None:
        self._inner.yield_to_streams()

    def notify(
        self,
        stream: Stream,
        event: Event,
        reached: Callable[[BaseException | None], None],
        *,
        late: bool = False,
    ) -> None:
        if self._lost():
            self.withheld.append(partial(reached, None))
        else:
            self._inner.notify(stream, event, reached, late=late)

    def close(self) -> None:
        self._inner.close()


def break_device(device: Device) -> None:
    """Make the device fail when one of its streams next runs, as a faulty kernel would."""
    device.stream("broken").launch(_raise)


def _raise() -> None:
    raise DeviceError("made to fail")
