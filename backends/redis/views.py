"""Runs of memory that are sent or received, one behind the other."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeAlias

Bytes: TypeAlias = "bytes | bytearray | memoryview"


def first(count: int, views: Iterable[memoryview]) -> Iterator[memoryview]:
    """The first `count` bytes of `views`."""
    for view in views:
        if count > 0:
            yield view[:count]
        count -= len(view)


def drop_first(count: int, views: list[memoryview]) -> None:
    """Take the first `count` bytes out of `views`."""
    while views and count >= len(views[0]):
        count -= len(views.pop(0))
    if views:
        views[0] = views[0][count:]
