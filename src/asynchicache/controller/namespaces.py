"""Namespaces by seed: the tree itself knows only digests."""

from __future__ import annotations

from collections.abc import Container
from typing import NamedTuple

from asynchicache.hashing import namespace_seed

_SPARE = 1024
"""Unneeded names that may accumulate before they are cleaned up."""


class Namespace(NamedTuple):
    """Isolates prefixes: the caller's name and a salt."""

    name: str | None = None
    salt: str | None = None


PLAIN = Namespace()


class Namespaces:
    """Remembers the names of seeds for as long as the tree has a root for them.

    There may be one per request, so names without a root are removed from time to time.
    """

    def __init__(self, roots: Container[bytes]) -> None:
        self._roots = roots
        self._names: dict[bytes, Namespace] = {}
        self._look_at = _SPARE

    def seed(self, name: str | None, salt: str | None) -> bytes:
        """The digest before page 0.

        Raises:
            ConfigError: `name` or `salt` is neither a string nor None.
        """
        seed = namespace_seed(name, salt)
        self.remember(seed, Namespace(name, salt))
        return seed

    def remember(self, seed: bytes, namespace: Namespace) -> None:
        """Remember a seed when its request begins, perhaps long after `seed` was called."""
        if seed:
            self._names[seed] = namespace
            if len(self._names) > self._look_at:
                self._forget(seed)

    def _forget(self, newest: bytes) -> None:
        self._names = {s: n for s, n in self._names.items() if s in self._roots or s == newest}
        self._look_at = 2 * len(self._names) + _SPARE

    def named(self, seed: bytes) -> Namespace:
        """The namespace of a seed that has a root in the tree or was just used for a request."""
        return self._names.get(seed, PLAIN)
