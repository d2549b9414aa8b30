"""Model of a soak's hits as an LRU of paths. It shares no code with the cache.

A *prefix* is a number of whole pages from the beginning of a conversation. A *thing* is one pool's data of
one page: the page itself, or the state after it. Each pool's coverage determines the things that a prefix of
`n` pages needs: all `n` pages, the last `w` of them, or the state after page `n`.

Memory and the store below it are each an LRU of things, in one or several parts with separate bounds. The
model has four rules:

- **Request.** A request of `t` tokens hits its longest prefix of at most `(t - 1) // page_size` pages for
  which memory or the store has every needed thing. The hit is a use of that prefix.
- **Publication.** Publishing `n` pages adds the pages computed since the last publication, and a state if one
  was saved there. It is a use of the prefix of `n` pages.
- **Use.** A use makes the prefix's things the most recent. It touches the end of the path before its
  beginning, and at each page, states and windows before the pages of pools that cover everything. Missing
  things are added: a hit from storage is loaded into memory.
- **Eviction.** A part over its bound evicts its least recent thing. Evicting a page that every prefix needs
  also evicts all other things of that page, in all parts, because nothing can be restored from them.

The model has no time: publications are stored immediately, and things in use can be evicted. The cache takes
time to write, protects things in use, and can lose a write to a deadline. The two hit rates are therefore
close but not equal.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from asynchicache.specs import ModelSpec


class CachedItem(NamedTuple):
    """One pool's data of one page."""

    pool: str
    page: bytes


@dataclass(frozen=True, slots=True)
class SharedBound:
    """Pools that share one bound.

    Attributes:
        costs: cost of one thing, by pool.
        capacity: maximum total cost of all things.
    """

    costs: Mapping[str, int]
    capacity: int


class ModelTier:
    """An LRU of things."""

    def __init__(self, parts: Sequence[SharedBound], full: Sequence[str]) -> None:
        """`full`: pools that cover every page."""
        self._parts = parts
        self._full = full
        self._pools = [pool for part in parts for pool in part.costs]
        self._part = {pool: number for number, part in enumerate(parts) for pool in part.costs}
        self._items: list[OrderedDict[CachedItem, None]] = [OrderedDict() for _ in parts]
        self._cost = [0] * len(parts)

    def __contains__(self, item: CachedItem) -> bool:
        return item in self._items[self._part[item.pool]]

    def use(self, items: Sequence[CachedItem]) -> None:
        """Add things or make them recent; the last one becomes the most recent."""
        for item in items:
            number = self._part[item.pool]
            part = self._items[number]
            if item not in part:
                self._cost[number] += self._parts[number].costs[item.pool]
                part[item] = None
            part.move_to_end(item)
        for number, bound in enumerate(self._parts):
            while self._cost[number] > bound.capacity:
                self._lose(next(iter(self._items[number])))

    def _lose(self, item: CachedItem) -> None:
        pools = self._pools if item.pool in self._full else [item.pool]
        for pool in pools:
            number, gone = self._part[pool], CachedItem(pool, item.page)
            if gone in self._items[number]:
                del self._items[number][gone]
                self._cost[number] -= self._parts[number].costs[pool]

    def count(self) -> Counter[str]:
        """Number of things by pool."""
        return Counter(item.pool for part in self._items for item in part)

    def clear(self) -> None:
        for part in self._items:
            part.clear()
        self._cost = [0] * len(self._parts)


class HitModel:
    """The model of one cache and its storage; see the module's docstring.

    Attributes:
        hit_tokens: hit tokens of all requests so far.
        memory_tokens: hit tokens that memory alone would have served.
    """

    def __init__(self, spec: ModelSpec, memory: Sequence[SharedBound], store: Sequence[SharedBound]) -> None:
        """
        Args:
            spec: defines the things that a prefix needs.
            memory: parts with bounds in slots; each pool of `spec` is in exactly one.
            store: parts with bounds in bytes, likewise.
        """
        self.hit_tokens = self.memory_tokens = 0
        self._page_size = spec.page_size
        self._full = [pool.name for pool in spec.pools if pool.coverage.pages is None]
        self._windows = {
            pool.name: pool.coverage.pages
            for pool in spec.pools
            if pool.coverage.pages is not None and pool.per_token
        }
        self._states = [pool.name for pool in spec.pools if not pool.per_token]
        self.memory = ModelTier(memory, self._full)
        self.store = ModelTier(store, self._full)

    def request(self, namespace: str, tokens: array[int]) -> int:
        """Look up a request; return the tokens of its hit."""
        pages = self._pages(namespace, tokens, (len(tokens) - 1) // self._page_size)
        length = self._longest(pages, (self.memory, self.store))
        self.memory_tokens += self._longest(pages, (self.memory,)) * self._page_size
        self._use(self._needs(pages[:length]))
        self.hit_tokens += length * self._page_size
        return length * self._page_size

    def publish(self, namespace: str, tokens: array[int], start: int, end: int, *, state: bool) -> None:
        """A request has published its first `end` tokens.

        Args:
            namespace: the namespace of the tokens.
            tokens: the request's tokens.
            start: number of tokens that were hits or already published.
            end: number of tokens published now.
            state: whether a state was saved at `end`.
        """
        pages = self._pages(namespace, tokens, end // self._page_size)
        fresh = pages[start // self._page_size :]
        brought = [
            CachedItem(pool, page) for page in reversed(fresh) for pool in (*self._windows, *self._full)
        ]
        needed = self._needs(pages)
        self._use(brought + [item for item in needed if state or item.pool not in self._states])

    def forget_memory(self) -> None:
        """The cache was closed; another one opens the store."""
        self.memory.clear()

    def _pages(self, namespace: str, tokens: array[int], count: int) -> list[bytes]:
        """Names of the first pages. Each name identifies all tokens up to the page's end."""
        names, name, data = [], namespace.encode(), memoryview(tokens)
        for page in range(count):
            part = data[page * self._page_size : (page + 1) * self._page_size]
            name = blake2b(name + part.tobytes(), digest_size=12).digest()
            names.append(name)
        return names

    def _needs(self, pages: Sequence[bytes]) -> list[CachedItem]:
        """The things that a prefix of these pages needs, from the end of the path."""
        items = [CachedItem(pool, page) for page in pages[-1:] for pool in self._states]
        for back, page in enumerate(reversed(pages)):
            items += [CachedItem(pool, page) for pool, width in self._windows.items() if back < width]
            items += [CachedItem(pool, page) for pool in self._full]
        return items

    def _longest(self, pages: Sequence[bytes], tiers: Sequence[ModelTier]) -> int:
        """Length, in pages, of the longest prefix whose things are all in these tiers together."""

        def there(pool: str, page: bytes) -> bool:
            return any(CachedItem(pool, page) in tier for tier in tiers)

        reach = 0
        while reach < len(pages) and all(there(pool, pages[reach]) for pool in self._full):
            reach += 1
        for length in range(reach, 0, -1):
            if all(there(pool, page) for pool, page in self._ends(pages[:length])):
                return length
        return 0

    def _ends(self, pages: Sequence[bytes]) -> list[CachedItem]:
        """The things that a prefix needs in pools that do not cover every page."""
        states = [CachedItem(pool, page) for page in pages[-1:] for pool in self._states]
        windows = self._windows.items()
        return states + [CachedItem(pool, page) for pool, width in windows for page in pages[-width:]]

    def _use(self, items: Sequence[CachedItem]) -> None:
        for tier in (self.memory, self.store):
            tier.use(items)
