"""An engine's own device memory, for tests: paged tensors, a free list for each pool, and a byte oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

import torch

from asynchicache.errors import CapacityError
from asynchicache.pools.device import DevicePool
from asynchicache.pools.engine import EngineMemory, EnginePages
from asynchicache.specs import ModelSpec
from asynchicache.testing.oracle import ByteOracle


class PagedMemory:
    """Pages of every pool on the CPU, which the caller allocates, writes and frees.

    Attributes:
        memory: for `HybridCache.open(engine=...)`.
        oracle: writes and checks the bytes that belong in a page.
    """

    def __init__(
        self,
        spec: ModelSpec,
        pages: Mapping[str, int],
        identity: Callable[[str], str] | None = None,
        *,
        poison: bool = True,
    ) -> None:
        """
        Args:
            pages: pages of each pool that owns slots.
            identity: see `ByteOracle`. Default: nothing.
            poison: fill pages with bytes that no page has when they are taken.
        """
        counts = {pool.name: pages[pool.slots_of or pool.name] for pool in spec.pools}
        self._pools = {pool.name: DevicePool(pool, spec.page_size, counts[pool.name]) for pool in spec.pools}
        self.memory = EngineMemory(
            {
                pool.name: EnginePages.of_tensors(
                    pool,
                    spec.page_size,
                    {tensor.name: self.tensor(pool.name, tensor.name) for tensor in pool.tensors},
                )
                for pool in spec.pools
            }
        )
        self.oracle = ByteOracle(spec, self.tensor, identity or (lambda _: ""))
        self._sharing = {
            owner.name: [pool.name for pool in spec.pools if owner.name in (pool.name, pool.slots_of)]
            for owner in spec.owners
        }
        self._free = {owner.name: list(range(counts[owner.name])) for owner in spec.owners}
        self._poison = poison

    def tensor(self, pool: str, name: str) -> torch.Tensor:
        """One tensor of one pool, `[layers, pages, ...]`."""
        return self._pools[pool].tensor(name)

    def take(self, pool: str, count: int) -> list[int]:
        """Allocate pages of a pool.

        Raises:
            CapacityError: too few are free.
        """
        free = self._free[pool]
        if count > len(free):
            raise CapacityError(f"{count} pages of {pool!r} wanted, {len(free)} are free")
        taken, free[:count] = free[:count], []
        for name in self._sharing[pool] if self._poison else ():
            self.oracle.write(name, taken, [b"\xdd" * 32] * count)
        return taken

    def give(self, pool: str, pages: Iterable[int]) -> None:
        """Free pages of a pool. They are the next to be taken, so that a late copy is seen."""
        self._free[pool][:0] = pages

    def compute(self, pool: str, pages: Sequence[int], digests: Sequence[bytes]) -> None:
        """Write what belongs in pages of a pool and of those that share its slots."""
        for name in self._sharing[pool]:
            self.oracle.write(name, pages, digests)

    def count_wrong(self, pool: str, pages: Sequence[int], digests: Sequence[bytes]) -> int:
        """Count the pages, of a pool and of those that share its slots, that hold other bytes."""
        return sum(self.oracle.count_wrong(name, pages, digests) for name in self._sharing[pool])
