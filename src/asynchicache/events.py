"""Typed events for changes of pages, in the order of the cache's decisions.

`HybridCache.events` reports changes, `HybridCache.snapshot` the current pages. Digests are those of
`asynchicache.hashing`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TypeAlias

from asynchicache.types import Tier


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Pages of one pool that became readable in a tier; for a pool of states, the state after a page.

    Events may repeat; handling one twice must be harmless.

    Attributes:
        pool: the pool; pools that share its slots move with it.
        digests: of the pages, 40 bytes each: the namespace, and the hash, in order.
        parent: digest of the page before the first of them; None if the first begins its sequence.
        tokens: their token ids, `page_size` per page.
        page_size: tokens per page.
        namespace, salt: as given to `HybridCache.request`.
    """

    pool: str
    tier: Tier
    digests: tuple[bytes, ...]
    parent: bytes | None
    tokens: array[int]
    page_size: int
    namespace: str | None = None
    salt: str | None = None


@dataclass(frozen=True, slots=True)
class PagesRemoved:
    """Pages of one pool that left a tier. Losses inside storage are not reported."""

    pool: str
    tier: Tier
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TiersCleared:
    """These tiers are empty, except for pages that later events report."""

    tiers: tuple[Tier, ...]


@dataclass(frozen=True, slots=True)
class EventsDropped:
    """The subscriber was too slow for its queue: `count` events before the next one were dropped.

    Its picture of the cache may be wrong from here on; take a snapshot to correct it.
    """

    count: int


CacheEvent: TypeAlias = PagesStored | PagesRemoved | TiersCleared | EventsDropped
