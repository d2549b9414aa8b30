"""Compute each pool's slots as a share of the trace's working set."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from asynchicache.bench.replay.survey import Survey
from asynchicache.bench.replay.trace import Trace
from asynchicache.specs import ModelSpec

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
        spec: the pools.
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
            device += pool.coverage.pages + 1
        slots[pool.name] = device + _AT_WORK, host
    return Sizes(needs, slots)
