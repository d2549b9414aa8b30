"""The pages of `bench storage`: bytes in host slots, names per round, and the check after reading."""

from __future__ import annotations

import random
from hashlib import sha256

from xxhash import xxh3_64_intdigest

from asynchicache.hashing import NO_NAMESPACE, ObjectKey, naming_page, placed_pages
from asynchicache.pools.host import HostPool
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.storage.binding import SlotBinding
from asynchicache.testing.backends import fingerprint_of


class BenchPages:
    """Host slots full of random bytes; slot `i` holds page `i`.

    Attributes:
        pool: the pool's name.

    Args:
        page_bytes, pages: size and number of the pages.
        seed: seed of the bytes.
        run: part of every name; unique per run, since a store may hold pages of earlier runs.
    """

    pool = "bench"

    def __init__(self, page_bytes: int, pages: int, seed: int, run: str = "") -> None:
        spec = PoolSpec(self.pool, (TensorSpec("bytes", (0,), (page_bytes,), "uint8"),))
        self._slab = HostPool(spec, 1, pages, pin=False)
        self.binding = SlotBinding(self._slab, fingerprint_of(f"bench storage {seed}"))
        self.memory = self._slab.page
        self.count = pages
        self._run = run
        chance = random.Random(seed)
        for index in range(pages):
            self.memory(index)[:] = chance.randbytes(page_bytes)
        self._sums = [xxh3_64_intdigest(self.memory(index)) for index in range(pages)]

    def keys(self, round_number: int, indices: range | list[int]) -> list[ObjectKey]:
        """Names unique to the round, so that every put stores a new page: pages of one prompt."""
        named = {*indices, *map(naming_page, indices)}
        digests = {
            index: NO_NAMESPACE + sha256(f"{self._run} {round_number} {index}".encode()).digest()
            for index in named
        }
        return list(map(self.binding.placed_key, placed_pages(digests, indices)))

    def erase(self) -> None:
        """Overwrite every slot, so that only a read brings the pages back."""
        for index in range(self.count):
            self.memory(index)[:] = bytes(len(self.memory(index)))

    def wrong(self) -> int:
        """Number of slots that do not hold their page."""
        return sum(xxh3_64_intdigest(self.memory(i)) != total for i, total in enumerate(self._sums))
