"""Rounds in which several things are measured beside each other."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

T = TypeVar("T")


def rotated(items: Sequence[T], turn: int) -> list[T]:
    """All of `items`, from another one on each turn: none always comes after the same, or at an interval at
    which the machine does something else."""
    first = turn % len(items)
    return [*items[first:], *items[:first]]


def there_and_back(items: Sequence[T]) -> list[T]:
    """All of `items`, then all again from the last to the first.

    What comes after another may find the machine in another state than what comes after itself, a disk that
    has just been read, say. So each is first as often as last, and a drift in speed falls on all alike.
    """
    return [*items, *reversed(items)]
