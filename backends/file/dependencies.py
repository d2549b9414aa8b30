"""Which pools' pages are useless without a page of another pool, as a state is without its tokens' page."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol


class DependentPool(Protocol):
    """An open pool."""

    @property
    def pool(self) -> str: ...

    @property
    def depends_on(self) -> str | None:
        """The pool whose page of the same digest each of its pages needs."""
        ...

    def digests(self) -> list[bytes]:
        """Of its pages, the least recently used first."""
        ...

    def has(self, digest: bytes) -> bool: ...

    def demote(self, digests: Sequence[bytes]) -> None:
        """These are the first to be evicted, in this order."""
        ...


class PoolDependencies:
    """The open pools of a folder. Methods may be called from any thread, but not with a pool's lock held.

    Pools are known by their names. Where several of one name are open, of two models say, a page is useless
    only if none of them has what it needs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: tuple[DependentPool, ...] = ()

    def join(self, member: DependentPool) -> None:
        """A pool was opened; what nothing can be restored from, in it and in those that stand on it, goes
        first."""
        with self._lock:
            self._members = (*self._members, member)
        for dependent in self._members:
            if dependent is member or dependent.depends_on == member.pool:
                dependent.demote(
                    [digest for digest in dependent.digests() if not self.useful(dependent, digest)]
                )

    def leave(self, member: DependentPool) -> None:
        """A pool was closed; twice is harmless."""
        with self._lock:
            self._members = tuple(one for one in self._members if one is not member)

    def pages_removed(self, member: DependentPool, digests: Sequence[bytes]) -> None:
        """Pages have left a pool, for whatever reason."""
        for dependent in self._members if digests else ():
            if dependent.depends_on == member.pool:
                dependent.demote([digest for digest in digests if not self.useful(dependent, digest)])

    def useful(self, member: DependentPool, digest: bytes) -> bool:
        """Whether what a page stands on is there, or is of no pool that is open."""
        needed = [one for one in self._members if one.pool == member.depends_on]
        return not needed or any(one.has(digest) for one in needed)
