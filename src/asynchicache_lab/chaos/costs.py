"""Detect redundant storage calls of a cache: repeated reads, writes and queries of a page."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Container, Iterable, Sequence
from typing import TypeAlias

from asynchicache.types import Outcome
from asynchicache_lab.chaos.calls import Call
from asynchicache_lab.chaos.ledger import Ledger

PageName: TypeAlias = tuple[str, bytes]
"""Pool and digest."""

KINDS = (
    *("asked", "asked_twice", "read", "read_twice", "read_needlessly", "read_in_vain", "read_for_nobody"),
    *("written", "written_twice"),
)
"""What is counted, in pages: `asked`, `read` and `written` are all that were."""

_CHECK_SECONDS = 0.002
"""Until the bytes of a read are checked, and those who share it know that it fell short."""

_THERE = (Outcome.HIT, Outcome.STORED, Outcome.EXISTS)


class CostOracle:
    """Counts the storage calls of one cache by page, and reports redundant ones.

    - The cache reads no page that it is already reading, or that was in memory when queried and still is.
      Pages published between the query and the read are only counted.
    - The cache writes no page twice, unless storage or memory lost the page in between.
    - The cache queries no page that is not in memory while a query for it is in flight, nor again for
      requests that all waited during that query. Who shares a read that fell short asks anew. A query for
      what is in memory asks whether storage still has it, and its answer is for nobody else.

    If storage has failed, calls are retried, so redundant calls are not violations.
    """

    def __init__(
        self,
        pools: Sequence[str],
        ledger: Ledger,
        calm: Callable[[], bool],
        waiting: Callable[[bytes, float], bool],
        there: Callable[[str], Container[bytes]],
        confirmed: Container[bytes] = (),
    ) -> None:
        """
        Args:
            pools: the cache's pools; first the one that covers every page.
            ledger: receives counts and violations.
            calm: returns whether storage never failed, so that no call is a retry.
            waiting: returns whether a request that began to wait after a given time wants a page.
            there: returns a pool's pages in memory.
            confirmed: pages that `durable` asks for, whatever others ask.
        """
        self._pools = pools
        self._ledger = ledger
        self._calm = calm
        self._waiting = waiting
        self._there = there
        self._confirmed = confirmed
        self._known: set[PageName] = set()
        self._written: set[PageName] = set()
        self._gaps = 0
        self._gaps_before: dict[Call, int] = {}  # by write in flight, the gaps when it began
        self._kept: set[bytes] = set()  # in memory when the first pool was last queried for them
        self._sought: dict[Call, set[bytes]] = {}  # by query in flight, pages that were not
        self._answered: dict[PageName, float] = {}
        self._had: set[PageName] = set()
        self._read_ended = -1.0

    def knows(self, pool: str, digest: bytes) -> bool:
        """Whether the cache has read or written a page, and neither storage nor memory lost it since."""
        return (pool, digest) in self._known

    def lost(self, digest: bytes, pool: str) -> None:
        """Storage or memory has lost a page."""
        for pages in (self._known, self._written, self._had):
            pages.discard((pool, digest))
        self._answered.pop((pool, digest), None)

    def gap(self) -> None:
        """Storage has lost pages: their neighbours may be rewritten along with them, also those that are
        being written now."""
        self._written.clear()
        self._gaps += 1

    def forget(self) -> None:
        """The cache was told that storage was replaced or cleared."""
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
                self._gaps_before[call] = self._gaps
                self._bound("written_twice", [page for page in pages if page in self._written])
            case "exists":
                self._count("asked", len(pages))
                self._asked(call, pages, [other for other in running if _same(call, other)])

    def ended(self, call: Call, answer: Sequence[bool] | Sequence[Outcome]) -> None:
        pages = [(call.pool, digest) for digest in call.digests]
        if call.verb == "exists":
            sought = self._sought.pop(call, set())
            told = [page for page in pages if page[1] in sought and page[1] not in self._confirmed]
            self._answered.update(dict.fromkeys(told, call.ended))
            return
        came = {page for page, outcome in zip(pages, answer, strict=True) if outcome in _THERE}
        if call.verb == "get":
            self._read_ended = call.ended
            came.difference_update(self._held(pages))  # another request computed it
        elif self._gaps_before.pop(call) == self._gaps:
            self._written |= came
        self._known |= came

    def _asked(self, call: Call, pages: Sequence[PageName], others: Iterable[Call]) -> None:
        there = self._there(self._pools[0])
        if call.pool == self._pools[0]:  # queries of other pools follow from its answer
            self._kept.difference_update(call.digests)
            self._kept.update(digest for digest in call.digests if digest in there)
            self._look(call.digests)
        asked = {digest for other in others for digest in self._sought.get(other, ())}
        sought = [page for page in pages if page[1] not in there and page[1] not in self._kept]
        self._bound("asked_twice", self._needless(sought, asked))
        self._sought[call] = {digest for _, digest in sought}

    def _look(self, digests: Sequence[bytes]) -> None:
        """Record which of the queried pages are in memory."""
        for pool in self._pools:
            pages = [(pool, digest) for digest in digests]
            self._had.difference_update(pages)
            self._had.update(self._held(pages))

    def _held(self, pages: Sequence[PageName]) -> list[PageName]:
        """The pages, all of one pool, that are in memory."""
        there = self._there(pages[0][0]) if pages else ()
        return [page for page in pages if page[1] in there]

    def _needless(self, sought: Sequence[PageName], asked: Container[bytes]) -> list[PageName]:
        """Pages with another query in flight, or whose interested requests all waited during the last one."""
        others = [page for page in sought if page[1] not in self._confirmed]
        return [page for page in others if page[1] in asked or self._knew(page)]

    def _knew(self, page: PageName) -> bool:
        moment = self._answered.get(page)
        if moment is None or moment < self._read_ended + _CHECK_SECONDS:
            return False
        return not self._waiting(page[1], moment)

    def _count(self, kind: str, pages: int) -> None:
        self._ledger.costs[kind] += pages

    def _bound(self, kind: str, pages: Sequence[PageName]) -> None:
        if not pages or not self._calm():
            return
        self._ledger.costs[kind] += len(pages)
        words = ", ".join(
            f"{count} of {pool!r}" for pool, count in Counter(pool for pool, _ in pages).items()
        )
        self._ledger.violations.append(f"{kind.replace('_', ' ')}: pages, {words}")


def _same(call: Call, other: Call) -> bool:
    return (call.verb, call.pool) == (other.verb, other.pool)
