"""Assertions for tests of applications that embed a cache."""

from __future__ import annotations

from asynchicache.cache import EngineCache, HybridCache


def assert_clean(cache: HybridCache | EngineCache) -> None:
    """Check that an idle cache holds only evictable data. Call it after `cache.drain()`.

    Raises:
        AssertionError: an invariant is broken, a request is open, a copy, read or write is in flight, or
            slots are lost; the message lists all findings.
    """
    found = cache.verify(idle=True)
    assert not found, "\n".join(["the cache is not clean:", *found])
