"""What became of pages, as typed events, in the order in which the cache decided it.

`HybridCache.events` tells of changes, `HybridCache.snapshot` of what is there now. Digests are those of
`asynchicache.hashing`.
"""

from __future__ import annotations

from array import array
from dataclasses import dataclass
from typing import TypeAlias

from asynchicache.types import Tier


@dataclass(frozen=True, slots=True)
class PagesStored:
    """Pages of one pool that may be read in a tier from now on; of a pool of states, the state behind a page.

    An event may repeat what was told before: to be told twice changes nothing.

    Attributes:
        pool: which; pools that share its slots go where it goes.
        tier: where.
        digests: of the pages, 32 bytes each, in order.
        parent: digest of the page before the first of them; None if that is the first of its sequence.
        tokens: their token ids, `page_size` for each.
        page_size: tokens of a page.
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
    """Pages of one pool that a tier has no more. What storage loses by itself is not told."""

    pool: str
    tier: Tier
    digests: tuple[bytes, ...]


@dataclass(frozen=True, slots=True)
class TiersCleared:
    """Nothing is in these tiers any more, but for what the events that follow say."""

    tiers: tuple[Tier, ...]


@dataclass(frozen=True, slots=True)
class EventsDropped:
    """The listener was too slow for its queue: so many events before the next one are lost to it.

    What it knows may be wrong from here on; a snapshot makes it right again.
    """

    count: int


CacheEvent: TypeAlias = PagesStored | PagesRemoved | TiersCleared | EventsDropped
