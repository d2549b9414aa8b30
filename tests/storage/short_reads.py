"""Reads of the kernel that bring less than they were asked for."""

from __future__ import annotations

import os
from collections.abc import Sequence


def parts(views: Sequence[memoryview], most: int) -> list[memoryview]:
    """The first `most` bytes of `views`."""
    cut = []
    for view in views:
        cut.append(view[:most])
        most -= len(cut[-1])
    return [view for view in cut if len(view)]


class Cuts:
    """`preadv` that brings no more than so many bytes, of what lies from `first` to before `last`.

    Args:
        most: bytes of one call.
        times: calls that are cut; then they are whole.
    """

    def __init__(self, most: int, *, first: int = 0, last: int = 1 << 60, times: int = 1 << 30) -> None:
        self.cut = 0
        self._most = most
        self._range = range(first, last)
        self._times = times
        self._preadv = os.preadv

    def __call__(self, descriptor: int, views: Sequence[memoryview], offset: int) -> int:
        if offset not in self._range or self.cut == self._times or sum(map(len, views)) <= self._most:
            return self._preadv(descriptor, views, offset)
        self.cut += 1
        some = parts(views, self._most)
        return self._preadv(descriptor, some, offset) if some else 0
