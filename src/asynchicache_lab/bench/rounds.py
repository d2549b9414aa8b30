"""Rounds of a measurement: in which order they measure several items, and what they keep out."""

from __future__ import annotations

import gc
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TypeVar

T = TypeVar("T")


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """`items` rotated by `turn`, so that no item always follows the same one, or coincides with periodic work
    of the machine."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


def there_and_back(items: Sequence[T]) -> list[T]:
    """`items`, followed by `items` reversed.

    A measurement can depend on the one before it (for example, on a disk that was just read). In this order
    each item runs first as often as last, and a drift in speed affects all equally.
    """
    return [*items, *reversed(items)]


@contextmanager
def no_garbage_collection() -> Iterator[None]:
    """Disable garbage collection, so that a round's times do not include it."""
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()
