"""One pool's names: what the engine asks of them, and what no store may answer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, TypeVar

from asynchicache.backends.hf3fs.metadata.words import (
    LEASE_SECONDS,
    Claim,
    Located,
    NameStore,
    OpenedNamespace,
    Reserved,
    SlotVersion,
    Verdict,
)
from asynchicache.errors import StorageError

_MAX_FINISHED = 16_384


class MetadataNamespace:
    """One pool's pages: which are there, and in which slots.

    All calls raise StorageError if the store does not answer, or says what cannot be.

    Args:
        opened: the answer of `names` when the namespace was opened.
        frame_bytes: size of one slot.
    """

    def __init__(self, names: NameStore, opened: OpenedNamespace, name: str, frame_bytes: int) -> None:
        self.name = name
        self.slots = opened.slots
        self.lease_seconds = LEASE_SECONDS
        self._names = names
        self._handle = opened.handle
        self._frame_bytes = frame_bytes
        self._finished: list[int] = []

    async def exists(self, keys: Sequence[str]) -> list[bool]:
        """Whether each page exists."""
        found: list[bool] = await self._call("exists", list(keys))
        return _one_each(found, keys)

    async def locate(self, keys: Sequence[str]) -> Located:
        """Locate pages, with a read lease on their slots until `end_read`; the first counts as used last."""
        located: Located = await self._call("locate", list(keys))
        _one_each(located.places, keys)
        await self._check_range(located.places)
        return located

    def end_read(self, located: Located) -> None:
        """End a read. The next call reports it."""
        if located.lease and len(self._finished) < _MAX_FINISHED:
            self._finished.append(located.lease)

    async def reserve(self, token: str, keys: Sequence[str]) -> Reserved:
        """Reserve a slot for each key that does not exist, while there is room. Keys must be distinct. Safe
        to repeat: the same token gets the same slots."""
        reserved: Reserved = await self._call("reserve", token, list(keys))
        _one_each(reserved.existed, keys)
        places = [place.slot for place in _one_each(reserved.places, keys) if place is not None]
        if len(set(places)) != len(places):
            raise StorageError(f"{self.name}: one slot was reserved for two pages")
        await self._check_range(reserved.places)
        return reserved

    async def confirm(self, claims: Sequence[Claim]) -> list[Verdict]:
        """Make written pages visible. Safe to repeat."""
        verdicts: list[Verdict] = await self._call("confirm", list(claims))
        return _one_each(verdicts, claims)

    async def release(self, places: Sequence[SlotVersion]) -> int:
        """Release slots that were reserved but not written; returns their number. Safe to repeat."""
        freed: int = await self._call("release", list(places))
        return freed

    async def forget(self, claims: Sequence[Claim]) -> list[bool]:
        """Drop damaged pages, unless their slots were reused meanwhile."""
        dropped: list[bool] = await self._call("forget", list(claims))
        return _one_each(dropped, claims)

    async def delete(self, keys: Sequence[str]) -> list[bool]:
        """Drop pages by name; a repeated key counts only once."""
        dropped: list[bool] = await self._call("delete", list(keys))
        return _one_each(dropped, keys)

    async def touch(self, keys: Sequence[str]) -> int:
        """Count pages as used now, the last one most recently; returns how many are there."""
        held: int = await self._call("touch", list(keys))
        return held

    async def leaving(self, pages: int) -> list[str]:
        """The pages that make room for so many new ones, the first to go first."""
        keys: list[str] = await self._call("leaving", pages)
        return keys

    async def clear(self) -> int:
        """Drop every page of this namespace; return their number."""
        count: int = await self._call("clear")
        return count

    async def _call(self, verb: str, *given: Any) -> Any:
        # Ended reads are said once; if the call fails, their leases expire.
        finished, self._finished = self._finished, []
        return await self._names.call(self._handle, verb, finished, *given)

    async def _check_range(self, places: Sequence[SlotVersion | None]) -> None:
        slots = [place.slot for place in places if place is not None]
        highest, lowest = max(slots, default=-1), min(slots, default=0)
        if highest >= self.slots:  # another client has enlarged the namespace
            self.slots = (await self._names.open(self.name, self.slots, self._frame_bytes)).slots
        if highest >= self.slots or lowest < 0:
            raise StorageError(f"{self.name}: slot {highest} of {self.slots}")


Many = TypeVar("Many", bound=Sequence[Any])


def _one_each(answers: Many, keys: Sequence[object]) -> Many:
    if len(answers) != len(keys):
        raise StorageError(f"{len(answers)} answers for {len(keys)} keys")
    return answers
