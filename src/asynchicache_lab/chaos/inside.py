"""Access to a cache's internals: the holders of slots, and poisoning of freed slots."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from unittest.mock import patch

import numpy as np
import numpy.typing as npt

from asynchicache.cache import HybridCache, Request
from asynchicache.layouts import POISON
from asynchicache.planner.actions import Copy
from asynchicache.planner.state import CacheState
from asynchicache.transfer.engine import TransferEngine
from asynchicache.tree.node import Node, SlotPlace, component_of, place_of, tier_of
from asynchicache.types import Tier


class CacheInternals:
    """The internals of one open cache.

    Attributes:
        state: the cache's state, including the holders of slots.
        costs: what the cache has measured of reading and computing.
        memory: every tensor of every pool in both tiers as bytes, `[layers, slots, ...]`.
        violations: allocations of slots that must never be reused.
    """

    def __init__(self, cache: HybridCache) -> None:
        parts = cache._parts  # noqa: SLF001 - the kit looks inside
        self.state: CacheState = parts.planner.state
        self._parts = parts
        self._engine = parts.transfers
        self.costs = parts.costs
        self._poisons = True
        self._owners = {
            pool: component_id
            for component_id in range(len(self.state.names))
            for pool in self.state.sharing(component_id)
        }
        self._tensors: dict[tuple[str, Tier], list[npt.NDArray[np.uint8]]] = {}
        for pool, memory in parts.memories.items():
            names = [tensor.name for tensor in memory.device.spec.tensors]
            self._tensors[pool, Tier.DEVICE] = [memory.device.items(name).numpy() for name in names]
            host = [memory.host.items(name).numpy() for name in names] if memory.host.slots else []
            self._tensors[pool, Tier.HOST] = host
        self.violations: list[str] = []
        self._spoilt: set[tuple[int, int]] = set()  # place and slot that a failed copy was to write
        self.memory = [tensor for tensors in self._tensors.values() for tensor in tensors]

    @property
    def failed(self) -> bool:
        """Whether the cache knows that copied data cannot be trusted."""
        return self._parts.executor.failure is not None

    def copy_in_groups(self, group_bytes: int) -> None:
        """Load layers in groups of at least `group_bytes`: the library's default would load such a small
        model in one group."""
        if isinstance(self._engine, TransferEngine):
            self._engine._scheduler._group_bytes = group_bytes  # noqa: SLF001

    def poison_freed(self) -> None:
        """From now on, overwrite slots as soon as they are freed, which exposes reads after free."""
        for place, free in zip(self.state.tree.places, self.state.free, strict=True):
            free.on_release = partial(self._left, free.on_release, place)

    @contextmanager
    def watching_failed_copies(self) -> Iterator[None]:
        """During the body, report allocations of slots that a failed copy may still write."""
        planner = self._parts.planner
        settle = planner.copy_finished

        def copied(copy: Copy, error: BaseException | None) -> Node | None:
            tier = copy.direction.destination
            for pool, _, slots in copy.transfers if error is not None else ():
                place = place_of(self._owners[pool], tier)
                self._spoilt.update((place, slot) for slot in slots)
            return settle(copy, error)

        with patch.object(planner, "copy_finished", copied):
            yield

    def stop_poisoning(self) -> None:
        """Stop when the cache closes: forwards in flight may then read freed slots, which are not reused."""
        self._poisons = False

    def _left(
        self, on_take: Callable[[Sequence[int]], object] | None, place: SlotPlace, slots: Sequence[int]
    ) -> None:
        if on_take is not None:
            on_take(slots)
        free = self.state.free[place]
        for slot in slots if self._spoilt else ():
            if (place, slot) in self._spoilt and free.is_free(slot):
                self.violations.append(f"handed out again: {free.name} {slot}, which a failed copy may write")
        for pool in self.state.sharing(component_of(place)) if self._poisons else ():
            for tensor in self._tensors[pool, tier_of(place)]:
                tensor[:, list(slots)] = POISON

    def leftovers(self, may_leak: bool) -> list[str]:
        """Describe what an idle, flushed cache still holds. `may_leak`: slots may be lost for good."""
        state = self.state
        found = [f"leak: {len(held)} {name}" for name, held in self._holders() if held and not may_leak]
        for free in state.free:
            lost = free.held + free.quarantined  # of a shared memory, not all slots can be free at once
            if lost and not may_leak:
                found.append(f"leak: {lost} of {free.capacity} {free.name} ({free.quarantined} quarantined)")
        return found

    def _holders(self) -> list[tuple[str, Sequence[object]]]:
        state = self.state
        return [
            ("requests", list(state.requests)),
            ("copies in flight", state.tier_copies),
            ("lists of locks", state.locked),
        ]


def is_waiting(request: Request) -> bool:
    """Whether a request may still use what is read for it: it is neither loaded nor closed."""
    state = request._state  # noqa: SLF001 - looks inside
    return state is not None and not state.loaded


def marked_stored(cache: HybridCache) -> Iterator[tuple[str, Sequence[bytes]]]:
    """The digests that are marked stored, by node and pool."""
    state = cache._parts.planner.state  # noqa: SLF001 - looks inside
    for node in state.tree.nodes():
        digests = state.tree.digests(node)
        for component in range(len(state.names)):
            if node.stored >> component & 1:
                for pool in state.sharing(component):
                    yield pool, digests if cache.spec.pool(pool).per_token else digests[-1:]
