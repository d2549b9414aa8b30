"""The names that pages have in the search, apart from the library's: a key that forgets a part is seen.

A page is what its tokens, all before them, the request's namespace and salt, and the options of its cache
make it. The library says so with digests and fingerprints. Here the same is said independently of them: bytes
follow from names of this module, and no digest or key of the library may stand for two of them.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable
from hashlib import sha256
from typing import NamedTuple

from asynchicache.hashing import ObjectKey, namespace_seed, page_digests
from asynchicache.testing.oracle import HostOracle
from asynchicache_lab.chaos.ledger import Ledger
from asynchicache_lab.chaos.script import ClientTurn, Life, ModelShape


class PageNames:
    """The names of all pages of a run."""

    def __init__(self, page_size: int, ledger: Ledger) -> None:
        self._page_size = page_size
        self._ledger = ledger
        self._names: dict[bytes, bytes] = {}
        self._stored: dict[ObjectKey, tuple[str, bytes]] = {}

    def of(self, tokens: array[int], turn: ClientTurn) -> list[bytes]:
        """The names of the whole pages of a sequence, as long as digests; notes what digests they have."""
        name, step = sha256(repr((turn.tenant, turn.salt)).encode()), self._page_size * tokens.itemsize
        words, names = memoryview(tokens).cast("B"), []
        for start in range(0, len(tokens) // self._page_size * step, step):
            name.update(words[start : start + step])
            names.append(name.digest())
        for digest, own in zip(page_digests(tokens, self._page_size, seed_of(turn)), names, strict=True):
            if self._names.setdefault(digest, own) != own:
                self._ledger.violations.append("identity: one digest for two pages")
        return names

    def of_digest(self, digest: bytes) -> bytes:
        """The name of the page of a digest; the digest itself if no request has computed such a page."""
        return self._names.get(digest, digest)

    def stored(self, key: ObjectKey, identity: str) -> None:
        """A page is put into storage, of a cache with this `identity`."""
        page = (identity, self.of_digest(key.digest))
        if self._stored.setdefault(key, page) != page:
            self._ledger.violations.append(f"identity: one key of {key.pool!r} for two pages")


class HostPages(NamedTuple):
    """What belongs in the host pages of a cache under one weight version."""

    oracle: HostOracle
    identity: Callable[[str], str]
    names: PageNames

    def put(self, pool: str, page: memoryview, key: ObjectKey) -> bool:
        """A page is put into storage; whether its bytes are those of its key."""
        self.names.stored(key, self.identity(pool))
        return self.oracle.holds(pool, page, self.names.of_digest(key.digest))

    def page(self, key: ObjectKey, size: int) -> bytearray:
        """The bytes of a page, as another replica would store them."""
        page = bytearray(size)
        self.oracle.fill(key.pool, memoryview(page), self.names.of_digest(key.digest))
        return page


def seed_of(turn: ClientTurn) -> bytes:
    """The library's digest of a request's namespace and salt."""
    return namespace_seed(turn.tenant, turn.salt)


def page_identity(life: Life, model: ModelShape, weights: str | None) -> Callable[[str], str]:
    """Return a function of the pool that tells a cache's pages from those of other caches.

    `weights`: its weight version, which a life may change.
    """
    replicated = {pool.name for pool in model.spec().pools if pool.replicated}

    def identity(pool: str) -> str:
        shard = "all" if pool in replicated else f"{life.rank} of {life.ranks}"
        return f"{weights}/{life.salt}/{shard}/{life.layout.value}/{life.dtype}/"

    return identity
