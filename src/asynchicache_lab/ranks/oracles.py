"""What holds in a whole group of ranks, beside the bytes: the sizes of memory, and what is marked stored."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from asynchicache.backends.memory import MemoryStore
from asynchicache.cache import BaseCache
from asynchicache.pools.device import DevicePool
from asynchicache.ranks.worker import RankWorker


def wrong_sizes(
    cache: BaseCache[Any],
    workers: Sequence[RankWorker],
    proposed: Sequence[Mapping[str, tuple[int, int]]],
) -> list[str]:
    """Describe memory of another size than the least that the ranks have proposed. The pages of an engine are
    as many as it has.

    Args:
        cache: the leader's.
        workers: the followers, in order.
        proposed: by rank, (device, host) slots by pool.
    """
    found = []
    every = [cache.inspect().memories, *(worker.memories for worker in workers)]
    for name in proposed[0]:
        least = min(one[name][0] for one in proposed), min(one[name][1] for one in proposed)
        for rank, memories in enumerate(every):
            device, host = memories[name].device, memories[name].host
            slots = device.slots if isinstance(device, DevicePool) else least[0], host.slots
            if slots != least:
                found.append(f"rank {rank} has {slots} slots of {name}, and the least of all is {least}")
    return found


def wrongly_marked(cache: BaseCache[Any], stores: Sequence[MemoryStore]) -> list[str]:
    """Describe pages that the leader believes to be stored, and whose part some rank has not stored.

    Args:
        cache: the leader's; its weights have not changed.
        stores: by rank, what it stores into. Several ranks may have the same one.
    """
    there = [
        {(key.pool, key.digest) for key in store if key.shard in ("", f"{rank}/{len(stores)}")}
        for rank, store in enumerate(stores)
    ]
    found = []
    for pool, pages in cache.inspect().marked_stored():
        ranks = [
            rank for rank, known in enumerate(there) if not known.issuperset((pool, one) for one in pages)
        ]
        if ranks:
            found.append(f"pages of {pool} are marked stored, and not on ranks {ranks}")
    return found
