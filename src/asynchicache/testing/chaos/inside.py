"""What the search has to see of a cache from within: who holds what, and memory that nobody may read."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import numpy.typing as npt

from asynchicache.cache import HybridCache
from asynchicache.controller.books import Books
from asynchicache.testing.oracle import POISON
from asynchicache.tree.node import place
from asynchicache.types import Tier


class Inside:
    """One open cache, opened further.

    Attributes:
        books: who holds which slot.
        memory: every tensor of every pool in both tiers as bytes, `[layers, slots, ...]`.
    """

    def __init__(self, cache: HybridCache) -> None:
        controller, rooms = cache._controller, cache._rooms  # noqa: SLF001 - the kit looks inside
        self.books: Books = controller.planner.books
        self._controller = controller
        self._poisons = True
        self._tensors: dict[tuple[str, Tier], list[npt.NDArray[np.uint8]]] = {}
        for pool, memory in rooms.memories.items():
            names = [tensor.name for tensor in memory.device.spec.tensors]
            self._tensors[pool, Tier.DEVICE] = [memory.device.items(name).numpy() for name in names]
            host = [memory.host.items(name).numpy() for name in names] if memory.host.slots else []
            self._tensors[pool, Tier.HOST] = host
        self.memory = [tensor for tensors in self._tensors.values() for tensor in tensors]

    @property
    def failed(self) -> bool:
        """Whether the cache knows that what copies brought is not to be trusted."""
        return self._controller.failure is not None

    def poison_freed(self) -> None:
        """From now on, overwrite what slots hold as soon as they are given back: whoever still reads
        them is seen."""
        for number in range(len(self.books.names)):
            for tier in (Tier.DEVICE, Tier.HOST):
                free = self.books.free[place(number, tier)]
                free.left = partial(self._left, free.left, self.books.sharing(number), tier)

    def stop_poisoning(self) -> None:
        """The cache closes: forwards that still run may read what requests gave back, as nobody gets it."""
        self._poisons = False

    def _left(
        self,
        told: Callable[[Sequence[int]], object] | None,
        pools: Sequence[str],
        tier: Tier,
        slots: Sequence[int],
    ) -> None:
        if told is not None:
            told(slots)
        for pool in pools if self._poisons else ():
            for tensor in self._tensors[pool, tier]:
                tensor[:, list(slots)] = POISON

    def leftovers(self, may_leak: bool) -> list[str]:
        """What an idle, flushed cache still holds, in words; slots may be lost for good if `may_leak`."""
        books = self.books
        found = [f"leak: {len(held)} {name}" for name, held in self._holders() if held and not may_leak]
        for free in books.free:
            lost = free.capacity - free.available
            if lost and not may_leak:
                found.append(f"leak: {lost} of {free.capacity} {free.name} ({free.quarantined} quarantined)")
        return found

    def _holders(self) -> list[tuple[str, Sequence[object]]]:
        books = self.books
        return [
            ("requests", list(books.sequences)),
            ("copies in flight", books.flights),
            ("lists of pins", books.pinned),
        ]
