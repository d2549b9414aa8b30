"""Compute each pool's slots as a share of the trace's working set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from asynchicache.replay.survey import Survey
from asynchicache.replay.trace import Trace
from asynchicache.specs import ModelSpec
from asynchicache.types import Tier

_AT_WORK = 1
"""Device slots of a running request beside what the tree may keep: its working state, or the page
that is not whole yet. A window's pool has room for the window and a page of the next chunk as well."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Slots of a replay.

    Attributes:
        working_set: by pool, slots for everything in the trace.
        slots: by pool, device and host slots.
    """

    working_set: Mapping[str, int]
    slots: Mapping[str, tuple[int, int]]


def plan_sizes(
    spec: ModelSpec, shares: Mapping[str, tuple[float, float]], trace: Trace, found: Survey
) -> Sizes:
    """Convert shares to slots.

    With a share of 1 nothing is evicted. A whole prompt fits in addition to the working set, because a
    request may recompute pages that the tree holds if their state is missing.

    Args:
        shares: by pool, the shares of device and host.
        trace, found: the trace and its survey.
    """
    needs = {pool.name: trace.blocks if pool.per_token else found.states for pool in spec.owners}
    slots = {}
    for pool in spec.owners:
        device, host = (math.ceil(share * needs[pool.name]) for share in shares[pool.name])
        if pool.per_token and shares[pool.name][0] == 1:
            device += found.longest
        if pool.per_token and pool.coverage.pages is not None:
            device += pool.coverage.kept + 1
        slots[pool.name] = device + _AT_WORK, host
    return Sizes(needs, slots)


def share_memory(spec: ModelSpec, share: float, sizes: Sizes) -> tuple[Sizes, dict[Tier, int]]:
    """One device memory for all pools: a share of what the trace's attention pages take, and beside it what
    a running request has at work.

    Returns:
        The sizes, with as many slots for each pool as it could have alone; and the bytes of the memory.
    """
    costs = {pool.name: 0 for pool in spec.owners}
    for pool in spec.pools:
        costs[pool.slots_of or pool.name] += pool.slot_bytes(spec.page_size)
    full, *_ = spec.owners
    memory = math.ceil(share * sizes.working_set[full.name]) * costs[full.name] + _AT_WORK * sum(
        costs.values()
    )
    slots = {name: (memory // cost, 0) for name, cost in costs.items()}
    return Sizes(sizes.working_set, slots), {Tier.DEVICE: memory}
