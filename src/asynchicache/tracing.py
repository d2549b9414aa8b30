"""The protocol of a tracer. The core imports no tracing package; `integrations.otel` implements it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol


class Span(Protocol):
    """An operation that has begun."""

    def finish(self, error: BaseException | None = None, **attributes: str | int) -> None:
        """The operation has ended; `attributes` describe the result."""
        ...


class Tracer(Protocol):
    """Begins spans. It is called on the cache's loop and never raises."""

    def copying(self, kind: str, slots: Mapping[str, int], hit_pages: int, tier: str) -> Span:
        """A copy is submitted.

        Args:
            kind: `load`, `backup` or `fork` (within the device).
            slots: by pool, how many slots are copied.
            hit_pages: pages of the prefix that a request's load restores.
            tier: the lowest tier that this prefix comes from; empty if no request loads it.
        """
        ...

    def storing(self, slots: Mapping[str, int]) -> Span:
        """A write to storage begins; `slots`: by pool, how many pages or states."""
        ...

    def evicting(self, pool: str, tier: str, slots: int) -> Span:
        """An eviction begins that should free `slots` slots of a pool in a tier."""
        ...
