"""What the requests of a soak would hit in an LRU of paths: a model that shares no code with the cache.

A *prefix* is a number of whole pages from the beginning of a conversation. A *thing* is what one pool has of
one page: the page itself, or the state after it. What a prefix of `n` pages needs follows from each pool's
coverage: all `n` pages, the last `w` of them, or the state after page `n`.

Memory, and the store below it, are an LRU of things each, in one or several parts with a bound of their own.
Four rules say all that happens:

- **A request** of `t` tokens looks for its longest prefix of at most `(t - 1) // page_size` pages of which
  memory or the store has each thing that it needs. That is its hit, and a use of that prefix.
- **A publication** of `n` pages brings the pages that were computed since the last one, and a state if one
  was saved there, and is a use of the prefix of `n` pages.
- **A use** makes what the prefix needs the most recent, the end of the path before its beginning, and at one
  page states and windows before the pages of pools that cover all. What is not there is brought: a hit from
  storage comes to memory.
- **Over its bound** a part gives up the least recent thing. With a page that every prefix needs go all things
  of that page, in other parts too: nothing can be restored from them.

Time does not pass in the model: what is published is stored at once, and what is in use may be given up. The
cache needs time to write, keeps what is in use, and may lose a write to a deadline. So the two hit rates are
near each other, and not the same.
"""

from __future__ import annotations

from array import array
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import NamedTuple

from asynchicache.specs import ModelSpec


class Thing(NamedTuple):
    """What one pool has of one page."""

    pool: str
    page: bytes


@dataclass(frozen=True, slots=True)
class SharedBound:
    """Pools that share one bound.

    Attributes:
        costs: of one thing, by pool.
        capacity: what all things may cost.
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
        self._things: list[OrderedDict[Thing, None]] = [OrderedDict() for _ in parts]
        self._cost = [0] * len(parts)

    def __contains__(self, thing: Thing) -> bool:
        return thing in self._things[self._part[thing.pool]]

    def use(self, things: Sequence[Thing]) -> None:
        """Bring things, or make them recent; the last one is the most recent."""
        for thing in things:
            number = self._part[thing.pool]
            part = self._things[number]
            if thing not in part:
                self._cost[number] += self._parts[number].costs[thing.pool]
                part[thing] = None
            part.move_to_end(thing)
        for number, bound in enumerate(self._parts):
            while self._cost[number] > bound.capacity:
                self._give_up(next(iter(self._things[number])))

    def _give_up(self, thing: Thing) -> None:
        pools = self._pools if thing.pool in self._full else [thing.pool]
        for pool in pools:
            number, gone = self._part[pool], Thing(pool, thing.page)
            if gone in self._things[number]:
                del self._things[number][gone]
                self._cost[number] -= self._parts[number].costs[pool]

    def count(self) -> Counter[str]:
        """How many things there are, by pool."""
        return Counter(thing.pool for part in self._things for thing in part)

    def clear(self) -> None:
        for part in self._things:
            part.clear()
        self._cost = [0] * len(self._parts)


class HitModel:
    """The model of one cache and its storage; see the top of this file.

    Attributes:
        hit_tokens: of all requests so far.
        memory_tokens: what memory alone would have given of them.
    """

    def __init__(self, spec: ModelSpec, memory: Sequence[SharedBound], store: Sequence[SharedBound]) -> None:
        """
        Args:
            spec: says what a prefix needs.
            memory: bounds in slots; all of `spec`'s pools are in one part each.
            store: bounds in bytes, likewise.
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
        """Tokens of a request's hit."""
        pages = self._pages(namespace, tokens, (len(tokens) - 1) // self._page_size)
        length = self._longest(pages, (self.memory, self.store))
        self.memory_tokens += self._longest(pages, (self.memory,)) * self._page_size
        self._use(self._needs(pages[:length]))
        self.hit_tokens += length * self._page_size
        return length * self._page_size

    def publish(self, namespace: str, tokens: array[int], start: int, end: int, *, state: bool) -> None:
        """A request has published its first `end` tokens.

        Args:
            namespace: whose tokens they are.
            tokens: of the request.
            start: how many of them it was given, or had published before.
            end: how many it has published now.
            state: whether a state was saved there.
        """
        pages = self._pages(namespace, tokens, end // self._page_size)
        fresh = pages[start // self._page_size :]
        brought = [Thing(pool, page) for page in reversed(fresh) for pool in (*self._windows, *self._full)]
        needed = self._needs(pages)
        self._use(brought + [thing for thing in needed if state or thing.pool not in self._states])

    def forget_memory(self) -> None:
        """The cache was closed, and another one opens the store."""
        self.memory.clear()

    def _pages(self, namespace: str, tokens: array[int], count: int) -> list[bytes]:
        """The names of the first pages: each says what all tokens up to its end are."""
        names, name, data = [], namespace.encode(), memoryview(tokens)
        for page in range(count):
            part = data[page * self._page_size : (page + 1) * self._page_size]
            name = blake2b(name + part.tobytes(), digest_size=12).digest()
            names.append(name)
        return names

    def _needs(self, pages: Sequence[bytes]) -> list[Thing]:
        """What a prefix of these pages needs, the end of the path first."""
        things = [Thing(pool, page) for page in pages[-1:] for pool in self._states]
        for back, page in enumerate(reversed(pages)):
            things += [Thing(pool, page) for pool, width in self._windows.items() if back < width]
            things += [Thing(pool, page) for pool in self._full]
        return things

    def _longest(self, pages: Sequence[bytes], tiers: Sequence[ModelTier]) -> int:
        """Pages of the longest prefix of which these tiers together have all."""

        def there(pool: str, page: bytes) -> bool:
            return any(Thing(pool, page) in tier for tier in tiers)

        reach = 0
        while reach < len(pages) and all(there(pool, pages[reach]) for pool in self._full):
            reach += 1
        for length in range(reach, 0, -1):
            if all(there(pool, page) for pool, page in self._ends(pages[:length])):
                return length
        return 0

    def _ends(self, pages: Sequence[bytes]) -> list[Thing]:
        """What a prefix needs of pools that do not cover every page."""
        states = [Thing(pool, page) for page in pages[-1:] for pool in self._states]
        windows = self._windows.items()
        return states + [Thing(pool, page) for pool, width in windows for page in pages[-width:]]

    def _use(self, things: Sequence[Thing]) -> None:
        for tier in (self.memory, self.store):
            tier.use(things)
