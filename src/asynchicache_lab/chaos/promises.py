"""Checks `durable()`: the prefix is in the store when it returns True, and the next cache can restore it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import NamedTuple

from asynchicache_lab.chaos.ledger import Ledger
from asynchicache_lab.chaos.recency import StoredPath
from asynchicache_lab.chaos.script import ClientTurn
from asynchicache_lab.chaos.store import ChaosStore

_ASKED = 3
"""The newest durable prefixes, which are requested from the next cache."""


class DurablePrefix(NamedTuple):
    """A prefix that `durable()` reported to be in storage.

    Attributes:
        identity: the cache options that keep its pages apart from those of other caches.
        tenant, salt, tokens: namespace, salt and tokens of the prefix.
        least: pages that the next cache must find, if storage loses nothing.
    """

    identity: object
    tenant: str | None
    salt: str | None
    tokens: tuple[int, ...]
    least: int = 0


class DurabilityOracle:
    """The durable prefixes of all caches over one store."""

    def __init__(self, store: ChaosStore, ledger: Ledger, *, loses_nothing: bool = False) -> None:
        self._store = store
        self._loses_nothing = loses_nothing
        self._ledger = ledger
        self._made: list[DurablePrefix] = []

    @contextmanager
    def waiting(self) -> Iterator[set[tuple[bytes, str]]]:
        """Collect pages (digest and pool) that the store loses during the body; they need not be durable."""
        gone: set[tuple[bytes, str]] = set()
        with self._store.watched(lambda digest, pool: gone.add((digest, pool))):
            yield gone

    def made(self, promise: DurablePrefix, path: StoredPath, gone: set[tuple[bytes, str]]) -> None:
        """`durable` just returned True; the store lost the pages `gone` since the call."""
        keys = [key for key in path.every_key() if (key.digest, key.pool) not in gone]
        missing = [key for key in keys if key not in self._store]
        if missing:
            pools = ", ".join(sorted({key.pool for key in missing}))
            self._ledger.violations.append(
                f"not durable: {len(missing)} of {len(keys)} pages are not in storage, of {pools}"
            )
        if path.digests:
            self._made = [other for other in self._made if other != promise]
            self._made.append(promise)

    def asked(self, identity: object, *, patient: bool) -> Sequence[ClientTurn]:
        """Requests that the next cache with the same pages must serve first, judged by the hit oracle.

        `patient`: it waits for storage until all is there.
        """
        certain = self._loses_nothing and patient
        mine = [promise for promise in self._made if promise.identity == identity]
        return [
            ClientTurn(
                prompt=(*promise.tokens, 1),
                tenant=promise.tenant,
                salt=promise.salt,
                patience=None,
                least=promise.least if certain else 0,
            )
            for promise in mine[-_ASKED:]
        ]
