"""Slots for which all ranks of a host have memory. Pure.

Each rank proposes as many as fit if it were alone. Ranks on one host divide its memory, and replicated pools
lie there once for the ranks that share them (`ranks.sharing`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import msgspec

from asynchicache.errors import RankError
from asynchicache.pools.sizing import HOST_SHARE, FreeMemory, SizeOptions, slot_cost, window_pages
from asynchicache.ranks.sharing import host_of
from asynchicache.specs import ModelSpec

SlotCounts = Mapping[str, tuple[int, int]]
"""By pool that owns slots, its (device, host) slots."""


class HostNeed(msgspec.Struct, frozen=True, array_like=True):
    """What the slots of one rank cost, in bytes of the memory of its host.

    Attributes:
        host: equal for ranks that use the same memory; empty: nobody else's is known to be the same.
        free: memory that is free, before anything is allocated.
        device: of a device slot, by pool that owns slots; 0 where devices have memory of their own.
        own: of a host slot, what each rank has.
        common: of a host slot, what ranks that share host memory have once.
        least: host slots below which a pool is of no use, because a window does not fit.
        chosen: pools whose host slots the user has chosen, so that they are not lowered.
    """

    host: str = ""
    free: int = 0
    device: dict[str, int] = {}
    own: dict[str, int] = {}
    common: dict[str, int] = {}
    least: dict[str, int] = {}
    chosen: list[str] = []


def need_of(spec: ModelSpec, options: SizeOptions, memory: FreeMemory, *, engine: bool) -> HostNeed:
    """What slots of one rank cost. `engine`: an engine has allocated the device slots already."""
    names = [pool.name for pool in spec.owners]
    device, own, common = (dict.fromkeys(names, 0) for _ in range(3))
    for pool in spec.pools:
        owner = pool.slots_of or pool.name
        kind = common if pool.replicated else own
        kind[owner] += slot_cost(pool, spec.page_size, host=True)
        if memory.shared and not engine:
            device[owner] += slot_cost(pool, spec.page_size, host=False)
    least = {pool.name: window_pages(pool) for pool in spec.owners}
    chosen = sorted(options.host_slots) if options.host_bytes is None else names
    return HostNeed(host_of(), memory.host, device, own, common, least, chosen)


def fitted(
    slots: SlotCounts, needs: Mapping[int, HostNeed], sharing: Mapping[int, Sequence[int]]
) -> dict[str, tuple[int, int]]:
    """Lower the host slots that nobody has chosen until the memory of each host suffices for all its ranks.

    Args:
        slots: the least that any rank proposes.
        needs: by rank.
        sharing: by rank, the ranks that share host memory with it, itself included, the owner first.

    Raises:
        RankError: the memory of a host does not suffice for what was chosen; names its ranks.
    """
    hosts: dict[str, list[int]] = {}
    for rank, need in needs.items():
        hosts.setdefault(need.host or f"of rank {rank}", []).append(rank)
    share = min((_share(slots, ranks, needs, sharing) for ranks in hosts.values()), default=1.0)
    chosen = {name for need in needs.values() for name in need.chosen}
    lowered = {name: host if name in chosen else int(host * share) for name, (_, host) in slots.items()}
    least = {name: max(need.least.get(name, 0) for need in needs.values()) for name in slots}
    return {
        name: (device, lowered[name] if lowered[name] >= least[name] else 0)
        for name, (device, _) in slots.items()
    }


def _share(
    slots: SlotCounts,
    ranks: Sequence[int],
    needs: Mapping[int, HostNeed],
    sharing: Mapping[int, Sequence[int]],
) -> float:
    """The share of the slots that nobody has chosen for which the memory of one host suffices."""
    device = sum(needs[rank].device.get(name, 0) * n for rank in ranks for name, (n, _) in slots.items())
    fixed = lowered = 0
    for rank in ranks:
        need, others = needs[rank], sharing.get(rank, ())
        owns = not others or others[0] == rank
        for name, (_, count) in slots.items():
            size = count * (need.own.get(name, 0) + (need.common.get(name, 0) if owns else 0))
            if name in need.chosen:
                fixed += size
            else:
                lowered += size
    free = min(needs[rank].free for rank in ranks)
    room = int((free - device) * HOST_SHARE)
    if device > free or fixed > max(room, 0):
        raise RankError(
            f"ranks {list(ranks)} are on one host with {free} bytes of free memory: their device slots need "
            f"{device} of it, and host slots {fixed} of the {max(room, 0)} then left for them: lower "
            "device_slots, device_bytes, host_slots or host_bytes"
        )
    return min(1.0, (room - fixed) / lowered) if lowered else 1.0
