"""What a tracer is told, if there is one. The library knows no tracing package; `integrations.otel` does."""

from __future__ import annotations

from array import array
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from asynchicache.controller.actions import Copy, Store
    from asynchicache.controller.controller import HybridCacheController
    from asynchicache.controller.request import Request


class Span(Protocol):
    """Something that takes time, begun."""

    def finish(self, error: BaseException | None = None, **attributes: str | int) -> None:
        """It has ended; `attributes` say what became of it."""
        ...


class Tracer(Protocol):
    """Begins spans; on the cache's loop, and never raises."""

    def request(
        self, controller: HybridCacheController, tokens: array[int], seed: bytes, traceparent: str | None
    ) -> Request:
        """A request that tells of its phases, beneath the span that `traceparent` (W3C) names."""
        ...

    def copying(self, copy: Copy) -> Span:
        """A copy between device and host, or within the device, is submitted."""
        ...

    def storing(self, work: Store) -> Span:
        """A write to storage begins."""
        ...

    def evicting(self, pool: str, tier: str, slots: int) -> Span:
        """So many slots are wanted of a pool in a tier."""
        ...
