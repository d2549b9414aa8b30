"""Find pools that are too small relative to the others and so limit hits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from asynchicache.pools.sizing import PAGES_PER_STATE, weight
from asynchicache.specs import ModelSpec

UNDERSIZED_SHARE = 0.5
"""A pool gets a warning if it can serve less than this share of the tokens that attention pages serve."""


@dataclass(frozen=True, slots=True)
class UndersizedPool:
    """A pool that is too small: pages that other pools hold beyond it can never be a hit.

    Attributes:
        pool: its name.
        tokens: tokens of prefixes that it can serve.
        against, against_tokens: the pool that it is compared with, and the tokens that one can serve.
        slots: its slots, in the tier where it has more.
        wanted: the slots with which it would serve as many tokens as `against`.
        option: the option to raise: the slots of the tier where `against` has more.
    """

    pool: str
    tokens: int
    against: str
    against_tokens: int
    slots: int
    wanted: int
    option: str

    def __str__(self) -> str:
        return (
            f"pool {self.pool!r} can serve about {self.tokens:,} tokens with {self.slots:,} slots, "
            f"{self.against!r} {self.against_tokens:,}: most of what {self.against!r} holds will be no hit. "
            f"Raise {self.option}[{self.pool!r}] to {self.wanted:,}"
        )


def find_undersized_pools(
    spec: ModelSpec, slots: Mapping[str, tuple[int, int]], pages_per_state: int = PAGES_PER_STATE
) -> list[UndersizedPool]:
    """The pools that limit the hits of others, if prefixes are resumed every `pages_per_state` pages.

    A hit needs every pool, so the pool that can serve the fewest tokens decides. A pool's capacity is that
    of the tier where it has more slots, because the host has copies of what the device has.

    Args:
        spec: the model's pools.
        slots: by pool, device and host slots, as from `plan_slots`.
        pages_per_state: pages between two places where a prefix can be resumed.
    """
    full, *others = (pool.name for pool in spec.owners)
    scale = _Scale(spec, slots, pages_per_state)
    small = [name for name in others if scale.turns(name) < UNDERSIZED_SHARE * scale.turns(full)]
    useless = [name for name in others if scale.most(name) > scale.most(full)]  # more of them than pages
    return [scale.report(name, full, scale.turns(full) * scale.weights[name]) for name in small] + [
        scale.report(full, name, scale.most(name)) for name in useless
    ]


class _Scale:
    """The pools of one cache, measured in turns: prefixes of `pages_per_state` pages."""

    def __init__(self, spec: ModelSpec, slots: Mapping[str, tuple[int, int]], pages_per_state: int) -> None:
        self.slots = slots
        self.weights = {pool.name: weight(pool, pages_per_state) for pool in spec.owners}
        self.turn_tokens = pages_per_state * spec.page_size

    def most(self, name: str) -> int:
        return max(self.slots[name])

    def turns(self, name: str) -> float:
        return self.most(name) / self.weights[name]

    def report(self, name: str, against: str, wanted: float) -> UndersizedPool:
        device, host = self.slots[against]
        return UndersizedPool(
            name,
            int(self.turns(name) * self.turn_tokens),
            against,
            int(self.turns(against) * self.turn_tokens),
            self.most(name),
            math.ceil(wanted),
            "host_slots" if host > device else "device_slots",
        )
