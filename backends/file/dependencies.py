"""Track pools whose pages need a page of another pool, as a state needs the KV page of its tokens."""

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
        """The pool whose page of the same digest each page of this pool needs."""
        ...

    def digests(self) -> list[bytes]:
        """Digests of all pages, the least recently used first."""
        ...

    def has(self, digest: bytes) -> bool: ...

    def demote(self, digests: Sequence[bytes]) -> None:
        """Make these pages the first to be evicted, in this order."""
        ...


class PoolDependencies:
    """The open pools of a folder. Methods may be called from any thread, but not with a pool's lock held.

    Pools are matched by name. If several pools of one name are open, e.g. of two models, a page is useless
    only if none of them has the page that it needs.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._members: tuple[DependentPool, ...] = ()

    def join(self, member: DependentPool) -> None:
        """Add an opened pool. Useless pages, in it and in the pools that depend on it, are evicted first."""
        with self._lock:
            self._members = (*self._members, member)
        for dependent in self._members:
            if dependent is member or dependent.depends_on == member.pool:
                dependent.demote(
                    [digest for digest in dependent.digests() if not self.useful(dependent, digest)]
                )

    def leave(self, member: DependentPool) -> None:
        """Remove a closed pool; calling twice is harmless."""
        with self._lock:
            self._members = tuple(one for one in self._members if one is not member)

    def pages_removed(self, member: DependentPool, digests: Sequence[bytes]) -> None:
        """Demote the pages that depended on pages removed from a pool."""
        for dependent in self._members if digests else ():
            if dependent.depends_on == member.pool:
                dependent.demote([digest for digest in digests if not self.useful(dependent, digest)])

    def useful(self, member: DependentPool, digest: bytes) -> bool:
        """Whether the page that `digest` depends on exists, or its pool is not open."""
        needed = [one for one in self._members if one.pool == member.depends_on]
        return not needed or any(one.has(digest) for one in needed)
