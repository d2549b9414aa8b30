"""Where the pages of one pool are."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import chain
from math import inf
from operator import attrgetter
from typing import NamedTuple, TypeAlias

import obstore

from asynchicache.backends.object.objects import (
    StoredObject,
    beginning,
    group_name,
    is_claim,
    object_alone,
    page_id,
    pool_folder,
)
from asynchicache.backends.object.requests import Requests, Turns, failed
from asynchicache.backends.object.stores import FAILURES
from asynchicache.hashing import DIGEST_BYTES, ObjectKey, PlacedKey
from asynchicache.storage.protocol import PoolBinding
from asynchicache.types import Outcome

_LISTED = 1000
"""Most objects that stores list in one answer."""
_REMEMBERED_PAGES = 1 << 16


class Found(NamedTuple):
    """A page in an object; `number`: which of its pages."""

    stored: StoredObject
    number: int

    def after(self, pages: int) -> Found:
        """The page of its object that comes so many pages later."""
        return self._replace(number=self.number + pages)


Whereabouts: TypeAlias = "Found | Outcome"
"""Where a page is, or MISS, or FAILED if the store did not answer."""


class PageFinder:
    """What is known, and asked, of where one pool's pages are.

    Attributes:
        folder: the pool's, below the prefix.
    """

    def __init__(
        self, binding: PoolBinding, requests: Requests, now: Callable[[], float], *, alone: bool
    ) -> None:
        """
        Args:
            binding: the pool.
            requests: its requests to the store.
            now: a clock that does not jump, in seconds.
            alone: whether each page has an object of its own.
        """
        self._alone = alone
        key = ObjectKey(binding.fingerprint, bytes(DIGEST_BYTES), binding.pool, binding.shard)
        self.folder = pool_folder(key)
        self._depends_on = binding.depends_on
        self._frame_bytes = binding.header_bytes + binding.page_bytes
        self._requests = requests
        self._now = now
        self._index: defaultdict[str, dict[str, StoredObject]] | None = None  # by group and path
        self._seen: OrderedDict[bytes, tuple[float, Whereabouts]] = OrderedDict()

    async def load_index(self) -> None:
        """List the stored pages.

        Raises:
            BaseError, OSError: the store does not answer, or refuses.
        """
        index: defaultdict[str, dict[str, StoredObject]] = defaultdict(dict)
        async for stored in self.all():
            index[stored.group][stored.path] = stored
        self._index = index

    async def all(self, claims: list[str] | None = None) -> AsyncIterator[StoredObject]:
        """The pool's objects; adds the names of its claims to `claims`."""
        async for found in obstore.list(self._requests.store, prefix=self.folder, chunk_size=_LISTED):
            if claims is not None:
                claims += (entry["path"] for entry in self._claims(found))
            for stored in self._parsed(found):
                if stored.size <= stored.pages * self._frame_bytes:
                    yield stored

    def _claims(self, listed: Iterable[obstore.ObjectMeta]) -> Iterator[obstore.ObjectMeta]:
        return (entry for entry in listed if is_claim(self.folder, entry["path"]))

    def _parsed(self, listed: Iterable[obstore.ObjectMeta]) -> Iterator[StoredObject]:
        for entry in listed:
            stored = StoredObject.of(self.folder, entry["path"], entry["size"], entry["last_modified"])
            if stored is not None:
                yield stored

    def is_alone(self, key: ObjectKey) -> bool:
        """Whether the page has an object of its own, as one has to of which nobody knows the path."""
        return self._alone or not isinstance(key, PlacedKey)

    def may_move(self, found: Whereabouts) -> bool:
        """Whether a page that was not found there may be elsewhere."""
        return isinstance(found, Found) or self._index is not None

    async def locate(
        self,
        keys: Sequence[ObjectKey],
        *,
        turns: Turns | None = None,
        seconds: float = 0,
        assume: bool = False,
        listing: bool = False,
    ) -> list[Whereabouts]:
        """Where pages are best read.

        Args:
            keys: the pages.
            turns: see `_each`.
            seconds: age up to which an earlier answer counts.
            assume: a page that is alone in its object is there.
            listing: list the groups anew, also if there is an index.
        """
        known = [self._recall(key, seconds, only_there=assume) for key in keys]
        if assume:
            known = [
                Found(object_alone(self.folder, key, self._frame_bytes), 0) if self.is_alone(key) else one
                for key, one in zip(keys, known, strict=True)
            ]
        asked = [key for key, one in zip(keys, known, strict=True) if one is None]
        fresh = iter(await self.everywhere(asked, turns or self._requests.turns.pages, listing=listing))
        answers: list[Whereabouts] = []
        for key, one in zip(keys, known, strict=True):
            if one is None:
                one = self._best(key, next(fresh))
            answers.append(one)
        return answers

    async def with_claims(
        self, keys: Sequence[ObjectKey]
    ) -> tuple[list[Whereabouts], list[obstore.ObjectMeta]]:
        """Where pages are best read, none of which is alone, and the claims in their groups, listed anew."""
        claims: list[obstore.ObjectMeta] = []
        places = await self.everywhere(keys, self._requests.turns.pages, claims=claims)
        return list(map(self._best, keys, places)), claims

    def _best(self, key: ObjectKey, places: list[Found] | None) -> Whereabouts:
        if places is None:
            return Outcome.FAILED
        best = max(places, key=self._worth, default=Outcome.MISS)
        self.remember(key, best)
        return best

    def _worth(self, found: Found) -> tuple[bool, int]:
        """Read whole pages, in as few requests as possible."""
        return self.is_whole(found), found.stored.pages - found.number

    def is_whole(self, found: Whereabouts) -> bool:
        return isinstance(found, Found) and found.stored.has_whole(found.number, self._frame_bytes)

    def _recall(self, key: ObjectKey, seconds: float, *, only_there: bool) -> Whereabouts | None:
        when, found = self._seen.get(key.digest, (-inf, Outcome.MISS))
        if self._now() - when > seconds or (only_there and found is Outcome.MISS):
            return None
        return found

    def remember(self, key: ObjectKey, found: Whereabouts) -> None:
        if self._index is None and not self.is_alone(key):
            self._seen[key.digest] = (self._now(), found)
            self._seen.move_to_end(key.digest)
            if len(self._seen) > _REMEMBERED_PAGES:
                self._seen.popitem(last=False)

    def forget(self, keys: Iterable[ObjectKey]) -> None:
        for key in keys:
            self._seen.pop(key.digest, None)

    def forget_all(self) -> None:
        self._seen.clear()

    async def everywhere(
        self,
        keys: Sequence[ObjectKey],
        turns: Turns,
        *,
        listing: bool = False,
        claims: list[obstore.ObjectMeta] | None = None,
    ) -> list[list[Found] | None]:
        """All places of each page; None where the store does not answer. Adds what is claimed to `claims`."""
        groups: defaultdict[tuple[bool, str], list[int]] = defaultdict(list)
        for number, key in enumerate(keys):
            groups[self.is_alone(key), self._group(key)].append(number)
        asked = [[keys[number] for number in numbers] for numbers in groups.values()]
        answers = await self._requests.each(partial(self._look_up, listing, claims), asked, turns=turns)
        found: list[list[Found] | None] = [None] * len(keys)
        for number, places in zip(chain(*groups.values()), chain(*answers), strict=True):
            found[number] = places
        return found

    async def _look_up(
        self, listing: bool, claims: list[obstore.ObjectMeta] | None, keys: Sequence[ObjectKey]
    ) -> Sequence[list[Found] | None]:
        """All places of pages of one group."""
        try:
            if self._index is not None and not listing:
                objects = list(self._index.get(self._group(keys[0]), {}).values())
            elif self.is_alone(keys[0]):
                objects = await self._ask(keys[0])
            else:
                objects = await self._list_group(keys, claims)
                if self._index is not None:
                    self._index[self._group(keys[0])] = {stored.path: stored for stored in objects}
        except FAILURES as error:
            failed(error)
            return [None] * len(keys)
        return [self._places(key, objects) for key in keys]

    def _group(self, key: ObjectKey) -> str:
        return group_name(key.digest if self.is_alone(key) else key.group)

    def _places(self, key: ObjectKey, objects: Iterable[StoredObject]) -> list[Found]:
        if self.is_alone(key):
            path = object_alone(self.folder, key, 0).path
            return [Found(stored, 0) for stored in objects if stored.path == path]
        one = page_id(key.digest)
        places = [(stored, stored.find(key.place, one)) for stored in objects]
        return [Found(stored, index) for stored, index in places if index is not None]

    async def _ask(self, key: ObjectKey) -> list[StoredObject]:
        """The object of a page that is alone."""
        alone = object_alone(self.folder, key, 0)
        try:
            found = await self._requests.send(lambda: obstore.head_async(self._requests.store, alone.path))
        except FileNotFoundError:
            return []
        return [alone._replace(size=found["size"])]

    async def _list_group(
        self, keys: Sequence[ObjectKey], claims: list[obstore.ObjectMeta] | None = None
    ) -> list[StoredObject]:
        """The objects of a group. If one answer does not list all: the first ones, and those that begin with
        one of the pages."""
        group = group_name(keys[0].group)
        objects, complete = await self._list(f"{self.folder}/{group}", claims)
        if complete:
            return objects
        path = len({key.place for key in keys}) == len(keys)
        for key in sorted(keys, key=attrgetter("place")):
            if self._places(key, objects):
                continue
            folder = beginning(self.folder, group, key.place, page_id(key.digest))
            more, _ = await self._list(folder)
            objects += more
            if path and not more and self._depends_on is None:
                break  # what comes after it is of no use
        return objects

    async def _list(
        self, folder: str, claims: list[obstore.ObjectMeta] | None = None
    ) -> tuple[list[StoredObject], bool]:
        """The first objects below a folder, by one request, and whether these are all."""
        listed: Sequence[obstore.ObjectMeta] = await self._requests.send(
            lambda: anext(obstore.list(self._requests.store, prefix=folder, chunk_size=_LISTED), [])
        )
        if claims is not None:
            claims += self._claims(listed)
        return list(self._parsed(listed)), len(listed) < _LISTED

    def remove(self, found: Iterable[Whereabouts]) -> None:
        for one in found:
            if self._index is not None and isinstance(one, Found):
                self._index[one.stored.group].pop(one.stored.path, None)

    def add(self, stored: StoredObject) -> None:
        if self._index is not None:
            self._index[stored.group][stored.path] = stored
