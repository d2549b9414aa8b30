"""An engine with nothing but the verbs that every engine has."""

from __future__ import annotations

from collections.abc import Sequence

from asynchicache.hashing import ObjectKey
from asynchicache.storage.protocol import Capabilities
from asynchicache.types import Outcome


class PlainEngine:
    """Has every page, and the verbs that every engine has."""

    def __init__(self, **capabilities: object) -> None:
        self.capabilities = Capabilities(
            **{"durable": False, "checks": True, "batch_keys": 4, "concurrency": 2, **capabilities}
        )

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        return bytearray([1] * len(keys))

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return [Outcome.HIT] * len(keys)

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return [Outcome.STORED] * len(keys)

    async def delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        return [Outcome.HIT] * len(keys)

    async def clear(self) -> int:
        return 0

    async def aclose(self) -> None:
        pass
