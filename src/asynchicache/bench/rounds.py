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
