"""Replicated pools once a host: ranks whose pages of such a pool are the same bytes share its host memory.

One of them, the owner, has the slab, and the others map it. The slots are the same on all. Each slot is
filled by one of the ranks, chosen by its number so that the load spreads: that rank copies the page from its
device, or reads it from storage. All ranks load it. A page is there once every rank has answered (rule R3),
also those that had nothing to do.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

from asynchicache.layouts import HostLayout, SlotLayout
from asynchicache.specs import ModelSpec, PoolSpec
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.types import PoolTransfer

_BOOT = Path("/proc/sys/kernel/random/boot_id")
_NAMESPACE = Path("/proc/self/ns/pid")


@dataclass(frozen=True, slots=True)
class HostShare:
    """The part of one rank in filling shared host memory.

    Attributes:
        pools: the pools that lie in shared memory.
        place: of this rank among those that share it; 0 is the owner.
        size: how many share it.
    """

    pools: frozenset[str] = frozenset()
    place: int = 0
    size: int = 1

    def fills(self, slot: int) -> bool:
        """Whether this rank fills a host slot of a shared pool."""
        return slot % self.size == self.place

    def own_part(self, operation: CacheOperation) -> CacheOperation:
        """What this rank copies: all of a load, and of a backup what it fills."""
        if not self.pools or operation.direction is not Direction.BACKUP:
            return operation
        return CacheOperation(operation.direction, tuple(map(self._own_transfer, operation.transfers)))

    def _own_transfer(self, transfer: PoolTransfer) -> PoolTransfer:
        pool, sources, destinations = transfer
        if pool not in self.pools:
            return transfer
        own = [pair for pair in zip(sources, destinations, strict=True) if self.fills(pair[1])]
        return PoolTransfer(pool, [source for source, _ in own], [slot for _, slot in own])


def replicated_pools(spec: ModelSpec) -> list[PoolSpec]:
    return [pool for pool in spec.pools if pool.replicated]


def host_of() -> str:
    """What processes have in common that use the same host memory; empty if that is not known."""
    try:
        return f"{_BOOT.read_text().strip()} {_NAMESPACE.readlink()}"
    except OSError:  # no /proc
        return ""


def sharing_key(spec: ModelSpec, layout: HostLayout) -> str:
    """What ranks have in common that can share host memory: the host, the user, and the bytes of replicated
    pools, which other pipeline stages and other context-parallel ranks do not have. Empty if there is nothing
    to share."""
    pools, host = replicated_pools(spec), host_of()
    if not host:  # there is no /proc, through which the memory is found
        return ""
    place = [host, str(os.getuid())]
    bytes_of = [f"{SlotLayout.of(pool, spec.page_size, layout).signature()} {pool.shard}" for pool in pools]
    return sha256("\n".join(place + bytes_of).encode()).hexdigest() if pools else ""


def sharing_ranks(keys: Mapping[int, str]) -> dict[int, list[int]]:
    """By rank, the ranks that share host memory with it, itself included, the owner first; none if it shares
    with no other.

    Args:
        keys: by rank, its `sharing_key`.
    """
    found: dict[int, list[int]] = {}
    for rank, key in keys.items():
        others = sorted(other for other, its in keys.items() if key and its == key)
        found[rank] = others if len(others) > 1 else []
    return found


def share_of(spec: ModelSpec, rank: int, ranks: Sequence[int]) -> HostShare:
    """The part of `rank` if it shares host memory with `ranks`."""
    if not ranks:
        return HostShare()
    return HostShare(frozenset(pool.name for pool in replicated_pools(spec)), ranks.index(rank), len(ranks))
