"""What was evicted from the last tier lately, by name only, so that a prompt that returns is no new one."""

from __future__ import annotations

from array import array

_SHARE = 4
"""Remembered are about this many times the pages of the larger tier."""
_MOST = 1 << 17


class Ghosts:
    """Runs of evicted pages, named by the number and the tokens of their first page.

    The name covers neither the pages before it nor the other pages of the run, so a prompt that only begins
    with the same page may count as returned. That costs a wrong guess.
    """

    __slots__ = ("_most_pages", "_page_size", "_pages", "_runs")

    def __init__(self, capacity: int, page_size: int) -> None:
        """
        Args:
            capacity: pages that the larger tier holds.
            page_size: tokens of a page.
        """
        self._page_size = page_size
        self._most_pages = _SHARE * capacity
        self._runs: dict[tuple[int, int], int] = {}  # first page and hash of its tokens -> end, oldest first
        self._pages = 0

    def add(self, first: int, head: bytes, end: int) -> None:
        """Remember pages from number `first` up to `end`; `head` is the key of the first one."""
        runs, name = self._runs, (first, hash(head))
        self._pages += end - first
        if name in runs:
            self._pages -= runs.pop(name) - first
        runs[name] = end
        while self._pages > self._most_pages or len(runs) > _MOST:
            oldest = next(iter(runs))
            self._pages -= runs.pop(oldest) - oldest[0]

    def reach(self, prompt: array[int], pages: int) -> int:
        """How many pages of a prompt were here, if its first `pages` still are."""
        runs, size = self._runs, self._page_size
        most = len(prompt) // size
        while runs and pages < most:
            head = prompt[pages * size : (pages + 1) * size].tobytes()
            if (end := runs.get((pages, hash(head)))) is None:
                break
            pages = end
        return pages if pages < most else most
