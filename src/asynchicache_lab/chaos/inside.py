"""Looks for slots that are lost, or used after they were freed, which it poisons."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from asynchicache.cache import BaseCache
from asynchicache.layouts import POISON
from asynchicache.planner.actions import Copy
from asynchicache.planner.observer import Observer
from asynchicache.transfer.local import LocalTransfers
from asynchicache.tree.node import SlotPlace, component_of, place_of, tier_of
from asynchicache.types import Tier


class SlotOracle(Observer):
    """Watches the slots of one open cache.

    Attributes:
        memory: every tensor of every pool in both tiers as bytes, `[layers, slots, ...]`.
        violations: allocations of slots that must never be reused.
    """

    def __init__(self, cache: BaseCache[Any]) -> None:
        self._inside = inside = cache.inspect()
        self._state = state = inside.planner.inventory
        self._poisons = True
        self._owners = {
            pool: component_id
            for component_id in range(len(state.names))
            for pool in state.sharing(component_id)
        }
        self._tensors: dict[tuple[str, Tier], list[npt.NDArray[np.uint8]]] = {}
        for pool, memory in inside.memories.items():
            names = [tensor.name for tensor in memory.device.spec.tensors]
            self._tensors[pool, Tier.DEVICE] = [memory.device.items(name).numpy() for name in names]
            host = [memory.host.items(name).numpy() for name in names] if memory.host.slots else []
            self._tensors[pool, Tier.HOST] = host
        self.violations: list[str] = []
        self._spoilt: set[tuple[int, int]] = set()  # place and slot that a failed copy was to write
        self.memory = [tensor for tensors in self._tensors.values() for tensor in tensors]

    def copy_in_groups(self, group_bytes: int) -> None:
        """Load layers in groups of at least `group_bytes`: the library's default would load such a small
        model in one group."""
        if isinstance(self._inside.transfers, LocalTransfers):
            self._inside.transfers.scheduler.group_bytes = group_bytes

    def poison_freed(self) -> None:
        """From now on, overwrite slots as soon as they are freed, which exposes reads after free."""
        for place, free in zip(self._state.tree.places, self._state.free, strict=True):
            free.on_release = partial(self._left, free.on_release, place)

    def copy_ended(self, copy: Copy, error: BaseException | None) -> None:
        """A failed copy may still write its slots, so that they must not be allocated any more."""
        tier = copy.direction.destination
        for pool, _, slots in copy.transfers if error is not None else ():
            place = place_of(self._owners[pool], tier)
            self._spoilt.update((place, slot) for slot in slots)

    def stop_poisoning(self) -> None:
        """Stop when the cache closes: forwards in flight may then read freed slots, which are not reused."""
        self._poisons = False

    def _left(
        self, on_take: Callable[[Sequence[int]], object] | None, place: SlotPlace, slots: Sequence[int]
    ) -> None:
        if on_take is not None:
            on_take(slots)
        free = self._state.free[place]
        for slot in slots if self._spoilt else ():
            if (place, slot) in self._spoilt and free.is_free(slot):
                self.violations.append(f"handed out again: {free.name} {slot}, which a failed copy may write")
        for pool in self._state.sharing(component_of(place)) if self._poisons else ():
            for tensor in self._tensors[pool, tier_of(place)]:
                tensor[:, list(slots)] = POISON

    def leftovers(self, may_leak: bool) -> list[str]:
        """Describe what an idle, flushed cache still holds. `may_leak`: slots may be lost for good."""
        state = self._state
        found = [f"leak: {len(held)} {name}" for name, held in self._holders() if held and not may_leak]
        for free in state.free:
            lost = free.held + free.quarantined  # of a shared memory, not all slots can be free at once
            if lost and not may_leak:
                found.append(f"leak: {lost} of {free.capacity} {free.name} ({free.quarantined} quarantined)")
        return found

    def _holders(self) -> list[tuple[str, Sequence[object]]]:
        state = self._state
        return [
            ("requests", list(state.requests)),
            ("copies in flight", state.tier_copies),
            ("lists of locks", state.locked),
        ]
