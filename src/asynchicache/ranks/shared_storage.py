"""Storage of one rank that shares host memory with others: a page is read by the rank that fills its slot."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from asynchicache.controller.storage_pools import Presence, StoragePools
from asynchicache.hashing import PlacedPage
from asynchicache.ranks.sharing import HostShare
from asynchicache.storage.limits import BatchResult
from asynchicache.types import Outcome


class SharedStorage(StoragePools):
    """The calls of one rank. What others of its host do is answered with the best outcome, so that theirs
    counts (rule R4)."""

    def __init__(self, sharing: Callable[[int], Iterable[str]], share: HostShare) -> None:
        """
        Args:
            sharing: returns the pools that share the slots of a component.
            share: the part of this rank in filling host memory.
        """
        super().__init__(sharing)
        self._share = share

    def _left_to_owner(self, name: str) -> bool:
        return self._share.place > 0 and name in self._share.pools

    async def exists_in_all(
        self, names: Iterable[str], pages: Sequence[PlacedPage], *, fresh: bool, everywhere: bool
    ) -> Presence:
        asked = [name for name in names if not self._left_to_owner(name)]
        return await super().exists_in_all(asked, pages, fresh=fresh, everywhere=everywhere)

    async def touch_pool(self, name: str, pages: Sequence[PlacedPage]) -> None:
        if not self._left_to_owner(name):
            await super().touch_pool(name, pages)

    async def move(
        self, name: str, pages: Sequence[PlacedPage], slots: Sequence[int], *, put: bool
    ) -> BatchResult:
        # Without storage nothing is there, whoever fills the slot.
        if put or name not in self._share.pools or name not in self._pools:
            return await super().move(name, pages, slots, put=put)
        own = [index for index, slot in enumerate(slots) if self._share.fills(slot)]
        outcomes = [Outcome.HIT] * len(slots)
        if not own:
            return BatchResult(outcomes)
        batch = await super().move(
            name, [pages[index] for index in own], [slots[index] for index in own], put=False
        )
        for index, outcome in zip(own, batch.outcomes, strict=True):
            outcomes[index] = outcome
        return BatchResult(outcomes, batch.lingering)
