"""Compute the slots of each pool in each tier, from counts, bytes, a ratio, or free memory."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Annotated

from msgspec import Meta

from asynchicache.errors import CapacityError, ConfigError
from asynchicache.layouts import ALIGNMENT, SlotLayout
from asynchicache.options import LARGEST_FLOAT, Given, Natural, Options, Positive, default
from asynchicache.pools.extents import ExtentPlan, choose_extent_bytes
from asynchicache.specs import ModelSpec, PoolSpec

TOKENS_PER_STATE = 4096
"""Measured on three traces: the best is one state for 2,000 tokens on tool calls, 8,000 on chats, and 16,000
to 32,000 on coding agents. Too many tokens a state cost little, too few cost tens of points."""

_AUTO_DEVICE_SHARE = 0.3
_FEW_STATES = 4
HOST_SHARE = 0.8
"""The share of the free host memory that host slots may take."""


class SizeOptions(Options, frozen=True, kw_only=True):
    """Sizes chosen by the caller; missing sizes follow from the others.

    Attributes:
        device_slots, host_slots: slots by pool name; 0 host slots keep a pool on the device.
        device_bytes, host_bytes: divided among the pools that `*_slots` do not name. More than is free is
            refused, not lowered.
        host_ratio: host slots per device slot, if not set otherwise. Default: 2.
        share_host: the pools that `host_slots` does not name share one host memory, as large as their slots
            would be; what it is used for changes with the traffic. Default: True.
        tokens_per_state: cached tokens for each place where a prefix can be resumed; determines the share of
            states and windows. `statistics().tokens_per_end` says what the traffic asks for. Default: 4,096.
    """

    device_slots: Mapping[str, Positive] = {}
    host_slots: Mapping[str, Natural] = {}
    device_bytes: Given[Natural | None, str] = default(None)
    host_bytes: Given[Natural | None, str] = default(None)
    host_ratio: Annotated[float, Meta(ge=0, le=LARGEST_FLOAT)] = 2.0
    share_host: bool = True
    tokens_per_state: Positive = TOKENS_PER_STATE


@dataclass(frozen=True, slots=True)
class FreeMemory:
    """Bytes available on the device and on the host; `shared` if the device is a CPU."""

    device: int
    host: int
    shared: bool


def plan_slots(spec: ModelSpec, options: SizeOptions, memory: FreeMemory) -> dict[str, tuple[int, int]]:
    """Device and host slots of every pool that owns slots.

    Raises:
        ConfigError: an unknown pool name, a negative number, or no device slots for a pool.
        CapacityError: not enough memory; says how much is needed.
    """
    _check(spec, options)
    device = _device_slots(spec, options, memory)
    need = _total(spec, device, host=False)
    if need > memory.device:
        raise _too_much("device", need, memory.device, "device_slots or device_bytes")
    room = int((memory.host - need if memory.shared else memory.host) * HOST_SHARE)
    host = _host_slots(spec, options, device, room)
    need = _total(spec, host, host=True)
    if need > room:
        raise _too_much("host", need, room, "host_slots, host_bytes or host_ratio")
    return {name: (device[name], host[name]) for name in device}


def plan_host_slots(
    spec: ModelSpec,
    options: SizeOptions,
    pages: Mapping[str, int],
    memory: FreeMemory,
    shared: ExtentPlan | None = None,
) -> dict[str, int]:
    """Host slots of every pool that owns slots, if an engine owns the device memory.

    Args:
        options: those of the host apply.
        pages: the engine's pages of each pool, for `host_ratio`.
        shared: the memory that pools share, which have as many slots as fit into all of it.

    Raises:
        ConfigError: an unknown pool name, options for device memory, or a pool without host slots.
        CapacityError: not enough memory; says how much is needed.
    """
    _check(spec, options)
    if options.device_slots or options.device_bytes is not None:
        raise ConfigError("device_slots and device_bytes do not apply: an engine owns the device memory")
    room = int(memory.host * HOST_SHARE)
    host = _host_slots(spec, options, pages, room)
    need = _total(spec, host, host=True)
    if need > room:
        raise _too_much("host", need, room, "host_slots, host_bytes or host_ratio")
    if shared is not None:
        host |= {name: shared.slots(name) for name in shared.slot_bytes}
    for name, count in host.items():
        least = max(window_pages(spec.pool(name)), 1)
        if count < least:
            raise ConfigError(
                f"pool {name!r} has {count} host slots; one request needs {least} at least, and without them "
                "nothing can be kept: raise host_slots or host_bytes"
            )
    return host


def _check(spec: ModelSpec, options: SizeOptions) -> None:
    names = [pool.name for pool in spec.owners]
    for option, slots in (("device_slots", options.device_slots), ("host_slots", options.host_slots)):
        for name in slots:
            if name not in names:
                raise ConfigError(f"{option} names {name!r}; pools with slots of their own are {names}")


def _device_slots(spec: ModelSpec, options: SizeOptions, memory: FreeMemory) -> dict[str, int]:
    rest = [pool for pool in spec.owners if pool.name not in options.device_slots]
    slots = dict(options.device_slots)
    if rest:
        named = _total(spec, slots, host=False)
        budget = options.device_bytes
        if budget is None:
            if named > memory.device:  # nothing is left for the others, and nobody set `device_bytes`
                raise _too_much("device", named, memory.device, "device_slots")
            budget = int(memory.device * _AUTO_DEVICE_SHARE)
        slots |= _divide(spec, rest, budget - named, pages_per_state(spec, options.tokens_per_state))
    chosen = {pool.name: slots[pool.name] for pool in spec.owners}
    return _no_more_than_pages(spec, chosen) | dict(options.device_slots)


def _host_slots(
    spec: ModelSpec, options: SizeOptions, device: Mapping[str, int], room: int
) -> dict[str, int]:
    wanted, share = _wanted_slots(spec, options, device, room)
    return dict(options.host_slots) | {
        name: _whole_windows(spec.pool(name), int(count * share)) for name, count in wanted.items()
    }


def _wanted_slots(
    spec: ModelSpec, options: SizeOptions, device: Mapping[str, int], room: int
) -> tuple[dict[str, int], float]:
    """By pool that `host_slots` does not name, the slots by the ratio; and the share of them that fits.

    Raises:
        CapacityError: `host_bytes` is more than there is: what was chosen is not lowered.
    """
    rest = [pool for pool in spec.owners if pool.name not in options.host_slots]
    named = _total(spec, options.host_slots, host=True)
    wanted = {pool.name: _wanted_on_host(pool, device[pool.name], options.host_ratio) for pool in rest}
    need = _total(spec, wanted, host=True)
    budget = room - named
    if options.host_bytes is not None:
        if options.host_bytes > max(room, 0):
            raise _too_much("host", options.host_bytes, room, "host_bytes")
        budget = options.host_bytes - named
    elif need <= budget:
        return wanted, 1.0  # the ratio is a target: lowered if host memory is smaller
    return wanted, max(budget, 0) / need if need else 1.0


def plan_shared_host(
    spec: ModelSpec, options: SizeOptions, device: Mapping[str, int], memory: FreeMemory, *, engine: bool
) -> ExtentPlan | None:
    """The host memory that pools share; None if each has its own.

    They share if there are several that `host_slots` does not name, and room for one request of all.

    Args:
        options: those of the host apply.
        device: device slots of each pool that owns slots, or an engine's pages.
        engine: an engine owns the device slots, which are allocated already.
    """
    taken = _total(spec, device, host=False) if memory.shared and not engine else 0
    wanted, share = _wanted_slots(spec, options, device, int((memory.host - taken) * HOST_SHARE))
    names = [name for name, count in wanted.items() if count]
    if not options.share_host or len(names) < 2:
        return None
    nbytes = int(_total(spec, wanted, host=True) * share)
    slot_bytes = {name: SlotLayout.of(spec.pool(name), spec.page_size).slot_bytes for name in names}
    if nbytes < max(slot_bytes.values()):
        return None
    extent_bytes = choose_extent_bytes(slot_bytes.values(), nbytes)
    # Headers, and pools that share the slots of another, have memory of their own, enough for a pool that has
    # every extent. It is paid for, though most of it is never touched.
    beside = sum(
        -(-extent_bytes // slot_bytes[pool.slots_of or pool.name])
        * (slot_cost(pool, spec.page_size, host=True) - (0 if pool.slots_of else slot_bytes[pool.name]))
        for pool in spec.pools
        if (pool.slots_of or pool.name) in slot_bytes
    )
    plan = ExtentPlan(slot_bytes, extent_bytes, nbytes // (extent_bytes + beside), beside)
    least = sum(plan.extents_for(name, _least(spec.pool(name))) for name in names)
    return plan if plan.extents >= least else None


def _wanted_on_host(pool: PoolSpec, device: int, ratio: float) -> int:
    """Host slots by the ratio; at least one window, unless the ratio is 0."""
    return max(math.ceil(device * ratio), window_pages(pool)) if ratio else 0


def _whole_windows(pool: PoolSpec, count: int) -> int:
    """`count`, or 0 if it is less than one window and so useless: the pool then stays on the device."""
    return count if count >= window_pages(pool) else 0


def pages_per_state(spec: ModelSpec, tokens: int) -> int:
    """Whole pages for `tokens` tokens, at least one."""
    return max(tokens // spec.page_size, 1)


def weight(pool: PoolSpec, pages_per_state: int) -> int:
    """Slots of a pool for `pages_per_state` pages that can be resumed only at their end."""
    if not pool.per_token:
        return 1
    return min(window_pages(pool) or pages_per_state, pages_per_state)


def window_pages(pool: PoolSpec) -> int:
    """Pages that the pool keeps of a window; 0 without a window."""
    return pool.coverage.kept if pool.per_token else 0


def _least(pool: PoolSpec) -> int:
    """Slots that one request needs: one slot, or a window and the page being written."""
    return window_pages(pool) + 1


def _divide(spec: ModelSpec, pools: list[PoolSpec], budget: int, pages_per_state: int) -> dict[str, int]:
    """Fill `budget` bytes with units of `pages_per_state` pages, their state and their window.

    A pool whose share is less than its minimum gets that; the others divide the rest.
    """
    least = _least_of_all(spec, pools, budget)
    weights = {pool.name: weight(pool, pages_per_state) for pool in pools}
    fixed: dict[str, int] = {}
    while weights:
        units = (budget - _total(spec, fixed, host=False)) / _total(spec, weights, host=False)
        short = [name for name, count in weights.items() if int(units * count) < least[name]]
        if not short:
            break
        fixed |= {name: least[name] for name in short}
        weights = {name: count for name, count in weights.items() if name not in short}
    return fixed | {name: int(units * count) for name, count in weights.items()}


def _least_of_all(spec: ModelSpec, pools: list[PoolSpec], budget: int) -> dict[str, int]:
    """Slots for one request. More states, if there is room: with one, that of the request that runs, nothing
    that is repeated is ever hit; with a few, they may take a quarter of a small budget.
    """
    for states, share in ((_FEW_STATES, 0.25), (2, 1.0), (1, 1.0)):
        least = {pool.name: _least(pool) if pool.per_token else states for pool in pools}
        of_states = {pool.name: states for pool in pools if not pool.per_token}
        need = _total(spec, least, host=False)
        if need <= budget and _total(spec, of_states, host=False) <= share * budget:
            return least
    raise CapacityError(
        f"device_bytes leaves {max(budget, 0)} bytes for {list(least)}; one request needs {need}, "
        f"for slots {least}: raise device_bytes"
    )


def _no_more_than_pages(spec: ModelSpec, slots: Mapping[str, int]) -> dict[str, int]:
    """Limit states and windows to the number of full pages: each belongs to one, so more is never used."""
    pages = slots[spec.owners[0].name]
    return {name: min(count, max(pages, _least(spec.pool(name)))) for name, count in slots.items()}


def _total(spec: ModelSpec, slots: Mapping[str, int], *, host: bool) -> int:
    """Bytes of these slots, including pools that share them."""
    return sum(
        slots[pool.slots_of or pool.name] * slot_cost(pool, spec.page_size, host=host)
        for pool in spec.pools
        if (pool.slots_of or pool.name) in slots
    )


def pool_bytes(spec: ModelSpec, pool: str, slots: int, *, host: bool = False) -> int:
    """Bytes of `slots` slots of a pool, with those of the pools that share them."""
    return _total(spec, {pool: slots}, host=host)


def slot_cost(pool: PoolSpec, page_size: int, *, host: bool) -> int:
    """Bytes per slot; on the host including padding and header."""
    return SlotLayout.of(pool, page_size).slot_bytes + ALIGNMENT if host else pool.slot_bytes(page_size)


def _too_much(tier: str, need: int, have: int, options: str) -> CapacityError:
    limit = f", {HOST_SHARE:.0%} of what is free," if tier == "host" else ""
    return CapacityError(
        f"the {tier} pools need {need} bytes ({need / 2**30:.2f} GiB), of which {max(have, 0)} "
        f"({max(have, 0) / 2**30:.2f} GiB){limit} may be used: lower {options}"
    )
