"""What holds in a whole group of ranks, beside the bytes: the sizes of memory, and what is marked stored."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from asynchicache.backends.memory import MemoryStore
from asynchicache.cache import HybridCache
from asynchicache.pools.device import DevicePool
from asynchicache.ranks.worker import RankWorker


def wrong_sizes(
    cache: HybridCache, workers: Sequence[RankWorker], proposed: Sequence[Mapping[str, tuple[int, int]]]
) -> list[str]:
    """Describe memory of another size than the least that the ranks have proposed. The pages of an engine are
    as many as it has.

    Args:
        cache: the leader's.
        workers: the followers, in order.
        proposed: by rank, (device, host) slots by pool.
    """
    found = []
    every = [cache._parts.memories, *(worker._memories for worker in workers)]  # noqa: SLF001 - looks inside
    for name in proposed[0]:
        least = min(one[name][0] for one in proposed), min(one[name][1] for one in proposed)
        for rank, memories in enumerate(every):
            device, host = memories[name].device, memories[name].host
            slots = device.slots if isinstance(device, DevicePool) else least[0], host.slots
            if slots != least:
                found.append(f"rank {rank} has {slots} slots of {name}, and the least of all is {least}")
    return found


def wrongly_marked(cache: HybridCache, stores: Sequence[MemoryStore]) -> list[str]:
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
    for pool, pages in _marked(cache):
        ranks = [
            rank for rank, known in enumerate(there) if not known.issuperset((pool, one) for one in pages)
        ]
        if ranks:
            found.append(f"pages of {pool} are marked stored, and not on ranks {ranks}")
    return found


def _marked(cache: HybridCache) -> Iterator[tuple[str, Sequence[bytes]]]:
    """The digests that are marked stored, by node and pool."""
    state = cache._controller.planner.state  # noqa: SLF001 - looks inside
    for node in state.tree.nodes():
        digests = state.tree.digests(node)
        for component in range(len(state.names)):
            if node.stored >> component & 1:
                for pool in state.sharing(component):
                    yield pool, digests if cache.spec.pool(pool).per_token else digests[-1:]
