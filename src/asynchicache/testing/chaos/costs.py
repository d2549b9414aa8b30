"""What a cache asks of storage that it need not: pages read or written twice, questions asked twice."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TypeAlias

from asynchicache.testing.chaos.calls import Call
from asynchicache.testing.chaos.ledger import Ledger
from asynchicache.types import Outcome

Page: TypeAlias = tuple[str, bytes]
"""Pool and digest."""

KINDS = (
    *("asked", "asked_twice", "read", "read_twice", "read_needlessly", "read_in_vain"),
    *("written", "written_twice"),
)
"""What is counted, in pages: `asked`, `read` and `written` are all that were."""

_THERE = (Outcome.HIT, Outcome.STORED, Outcome.EXISTS)


class CostOracle:
    """Counts the calls of one cache by page, and bounds what is done twice.

    - No page is read while the same cache reads it already, or that was in memory when it was asked for and
      still is. What others publish between the question and the read is counted only.
    - No page is written that was written before, unless storage lost it or memory did in between.
    - No page that is not in memory is asked for while it is being asked for, or again by requests that
      waited, all of them, while it was.

    Where storage went wrong calls are repeated, and nothing is bounded.
    """

    def __init__(
        self,
        pools: Sequence[str],
        ledger: Ledger,
        calm: Callable[[], bool],
        waiting: Callable[[bytes, float], bool],
        there: Callable[[str], Container[bytes]],
    ) -> None:
        """
        Args:
            pools: of the cache, the one that covers every page first.
            ledger: where it is counted.
            calm: whether nothing ever went wrong with storage, so that nothing is tried again.
            waiting: whether a request that began to wait after a moment wants a page.
            there: the pages of a pool that are in memory.
        """
        self._pools = pools
        self._ledger = ledger
        self._calm = calm
        self._waiting = waiting
        self._there = there
        self._known: set[Page] = set()
        self._written: set[Page] = set()
        self._answered: dict[Page, float] = {}
        self._had: set[Page] = set()

    def knows(self, pool: str, digest: bytes) -> bool:
        """Whether the cache has read or written a page, and it was lost nowhere since."""
        return (pool, digest) in self._known

    def lost(self, digest: bytes, pool: str) -> None:
        """Storage, or memory, has a page no more."""
        for pages in (self._known, self._written, self._had):
            pages.discard((pool, digest))
        self._answered.pop((pool, digest), None)

    def gap(self) -> None:
        """Storage has lost something: what lies around it may be written along with it."""
        self._written.clear()

    def forget(self) -> None:
        """The cache was told that storage is another one, or empty."""
        for pages in (self._known, self._written, self._answered, self._had):
            pages.clear()

    # As a `calls.Listener`

    def began(self, call: Call, running: Iterable[Call]) -> None:
        pages = [(call.pool, digest) for digest in call.digests]
        match call.verb:
            case "get":
                others = {digest for other in running if _same(call, other) for digest in other.digests}
                self._count("read", len(pages))
                self._bound("read_twice", [page for page in pages if page[1] in others])
                there = self._held(pages)
                self._count("read_in_vain", len(there))
                self._bound("read_needlessly", [page for page in there if page in self._had])
            case "put":
                self._count("written", len(pages))
                self._bound("written_twice", [page for page in pages if page in self._written])
            case "exists":
                self._count("asked", len(pages))
                others = {digest for other in running if _same(call, other) for digest in other.digests}
                self._bound("asked_twice", self._needless(pages, others))
                if call.pool == self._pools[0]:  # what is asked of others follows from the answer
                    self._look(call.digests)

    def ended(self, call: Call, answer: Sequence[bool] | Sequence[Outcome]) -> None:
        pages = [(call.pool, digest) for digest in call.digests]
        if call.verb == "exists":
            self._answered.update(dict.fromkeys(pages, call.ended))
            return
        came = {page for page, outcome in zip(pages, answer, strict=True) if outcome in _THERE}
        if call.verb == "get":
            came.difference_update(self._held(pages))  # somebody computed it, who knows of no storage
        else:
            self._written |= came
        self._known |= came

    def _look(self, digests: Sequence[bytes]) -> None:
        """Note which pages are in memory as they are asked for."""
        for pool in self._pools:
            pages = [(pool, digest) for digest in digests]
            self._had.difference_update(pages)
            self._had.update(self._held(pages))

    def _held(self, pages: Sequence[Page]) -> list[Page]:
        """Those of some pages of one pool that are in memory."""
        there = self._there(pages[0][0]) if pages else ()
        return [page for page in pages if page[1] in there]

    def _needless(self, pages: Sequence[Page], asked: Container[bytes]) -> list[Page]:
        """Pages that are asked for by others, or that everybody who wants them waited for already when they
        were asked for last. To ask whether storage still has what is in memory, or has it by now, is another
        question.
        """
        again = [page for page in pages if page[1] in asked or self._knew(page)]
        there = self._there(self._pools[0]) if again else ()
        return [page for page in again if page[1] not in there]

    def _knew(self, page: Page) -> bool:
        moment = self._answered.get(page)
        return moment is not None and not self._waiting(page[1], moment)

    def _count(self, kind: str, pages: int) -> None:
        self._ledger.costs[kind] += pages

    def _bound(self, kind: str, pages: Sequence[Page]) -> None:
        if not pages or not self._calm():
            return
        self._ledger.costs[kind] += len(pages)
        words = ", ".join(
            f"{count} of {pool!r}" for pool, count in Counter(pool for pool, _ in pages).items()
        )
        self._ledger.violations.append(f"{kind.replace('_', ' ')}: pages, {words}")


def _same(call: Call, other: Call) -> bool:
    return (call.verb, call.pool) == (other.verb, other.pool)
