"""Assertions for the tests of those who embed a cache."""

from __future__ import annotations

from asynchicache.cache import HybridCache


def assert_clean(cache: HybridCache) -> None:
    """A cache that nobody uses holds nothing but what it may forget: to be called after `cache.drain()`.

    Raises:
        AssertionError: an invariant is broken, a request is open, a copy, read or write is under way, or
            slots are lost; with all of that in words.
    """
    found = cache.verify(idle=True)
    assert not found, "\n".join(["the cache is not clean:", *found])
