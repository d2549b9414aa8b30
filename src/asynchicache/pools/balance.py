"""Find pools that are too small relative to the others and so limit hits."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from asynchicache.pools.sizing import TOKENS_PER_STATE, SizeOptions, pages_per_state, weight, window_pages
from asynchicache.specs import ModelSpec

UNDERSIZED_SHARE = 0.5
"""A pool gets a warning if it can serve less than this share of the tokens that attention pages serve."""


@dataclass(frozen=True, slots=True)
class UndersizedPool:
    """A pool that is too small: pages that other pools hold beyond it can never be a hit.

    Attributes:
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
    spec: ModelSpec, slots: Mapping[str, tuple[int, int]], tokens_per_state: int = TOKENS_PER_STATE
) -> list[UndersizedPool]:
    """The pools that limit the hits of others, if prefixes are resumed every `tokens_per_state` tokens.

    A hit needs every pool, so the pool that can serve the fewest tokens decides. A pool's capacity is that
    of the tier where it has more slots, because the host has copies of what the device has.

    Args:
        slots: by pool, device and host slots, as from `plan_slots`.
        tokens_per_state: cached tokens for each place where a prefix can be resumed.
    """
    full, *others = (pool.name for pool in spec.owners)
    scale = _Scale(spec, slots, pages_per_state(spec, tokens_per_state))
    small = [name for name in others if scale.turns(name) < UNDERSIZED_SHARE * scale.turns(full)]
    useless = [name for name in others if scale.most(name) > scale.most(full)]  # more of them than pages
    return [scale.report(name, full, scale.turns(full) * scale.weights[name]) for name in small] + [
        scale.report(full, name, scale.most(name)) for name in useless
    ]


_FEW = 4
"""Requests below which a pool of states or windows is called small."""


def find_few_slots(spec: ModelSpec, options: SizeOptions, device: Mapping[str, int]) -> list[str]:
    """What to say of pools whose share of the device memory serves few requests, and of a single state.

    Args:
        options: the sizes that were asked for; what `device_slots` names was chosen.
        device: device slots of each pool.
    """
    found = []
    for pool in spec.owners[1:]:
        requests = device[pool.name] // max(window_pages(pool), 1)
        if not pool.per_token and options.device_slots.get(pool.name) == 1:
            found.append(
                f"device_slots[{pool.name!r}] is 1, the state of the one request that runs: none is kept "
                "on the device, and nothing is hit there; set it to 2 or more"
            )
        if requests < _FEW and pool.name not in options.device_slots:
            kind = "window pages" if pool.per_token else "states"
            found.append(
                f"device_bytes leaves pool {pool.name!r} {device[pool.name]} {kind}, enough for {requests} "
                "requests at a time and hardly a hit beside them: raise device_bytes, or set "
                f"device_slots[{pool.name!r}]"
            )
    return found


def find_unstorable(spec: ModelSpec, host: Mapping[str, int]) -> str | None:
    """What to say if storage can never be used: its pages come and go through host slots of every pool.

    Args:
        host: host slots by pool.
    """
    lacking = [pool.name for pool in spec.owners if not host.get(pool.name)]
    if not lacking:
        return None
    raised = " and ".join(f"host_slots[{name!r}]" for name in lacking)
    return (
        f"storage will never be used: pools {lacking} have no host slots, through which their pages come and "
        f"go, and a hit needs every pool. Raise {raised}, or host_ratio"
    )


def advise_split(
    spec: ModelSpec,
    slots: Mapping[str, tuple[int, int]],
    tokens_per_end: int,
    options: SizeOptions,
) -> str | None:
    """What to set if the traffic needs far more, or far fewer, states for its pages than there are slots.

    Args:
        slots: by pool, device and host slots; 0 where pools share their memory, and have no split to choose.
        tokens_per_end: cached tokens for each end of a path, see `CacheStatistics`; 0: unknown.
        options: how the slots were chosen, and so what would change them.
    """
    states = [pool.name for pool in spec.owners if not pool.per_token]
    if not states or not tokens_per_end:
        return None
    full, name = spec.owners[0].name, states[0]
    pages, count = max(slots[full]), max(slots[name])
    if not pages:
        return None
    now = pages * spec.page_size // max(count, 1)
    if UNDERSIZED_SHARE < now / tokens_per_end < 1 / UNDERSIZED_SHARE:
        return None
    on_host = slots[name][1] > slots[name][0]
    chosen = set(options.device_slots) | set(options.host_slots if on_host else ())
    cure = f"tokens_per_state={tokens_per_end}"
    if chosen & {full, name}:  # then the split is not computed
        option = "host_slots" if on_host else "device_slots"
        cure = f"{option}[{name!r}] to {pages * spec.page_size // tokens_per_end:,}"
    return (
        f"the traffic asks for one state for {tokens_per_end:,} tokens, and the pools have one for {now:,}: "
        f"set {cure}"
    )


class _Scale:
    """The pools of one cache, measured in turns: prefixes with a state at their end."""

    def __init__(self, spec: ModelSpec, slots: Mapping[str, tuple[int, int]], pages: int) -> None:
        self.slots = slots
        self.weights = {pool.name: weight(pool, pages) for pool in spec.owners}
        self.turn_tokens = pages * spec.page_size

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
