"""Who is sending which pages: small objects beside the pages, each of which one process can make."""

from __future__ import annotations

import os
import secrets
import socket
from collections import OrderedDict, defaultdict
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from datetime import datetime
from functools import partial
from itertools import chain
from typing import Any, NamedTuple, TypeVar

import msgspec
import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError

from asynchicache.backends.object.clock import SKEW_SECONDS, ObjectClock
from asynchicache.backends.object.conditions import Conditions
from asynchicache.backends.object.finder import PageFinder
from asynchicache.backends.object.objects import claim_name
from asynchicache.backends.object.requests import Requests, failed
from asynchicache.backends.object.stores import FAILURES, delete_all, ignores_conditions
from asynchicache.hashing import ObjectKey
from asynchicache.types import Outcome

T = TypeVar("T")

_MOST_SEEN = 1024


class PageClaim(msgspec.Struct, frozen=True):
    """What is in a claim.

    Attributes:
        owner: who sends the pages.
        seconds: for how long others leave them to it.
        pages: their places and ids, as in the claim's name.
    """

    owner: str
    seconds: float
    pages: list[str]


class _Seen(NamedTuple):
    """A claim of somebody else; `since`: when we saw it first; `version`: to replace exactly this one."""

    claim: PageClaim
    since: float
    version: Mapping[str, str]


class PageClaims:
    """The claims of one pool: ours, and those of others.

    A claim ends when whoever sees it has seen it for the seconds that are in it: no two clocks are compared.
    One that is older than that by `SKEW_SECONDS`, by the store's clock, has ended for those too who see it
    first.

    Args:
        finder: of the pool.
        requests: its requests to the store.
        conditions: whether its conditional writes can be believed; without them there are no claims.
        clock: the store's.
        now: a clock that does not jump, in seconds.
    """

    def __init__(
        self,
        finder: PageFinder,
        requests: Requests,
        conditions: Conditions,
        clock: ObjectClock,
        now: Callable[[], float],
    ) -> None:
        self._finder = finder
        self._requests = requests
        self._conditions = conditions
        self._clock = clock
        self._now = now
        self._owner = f"{socket.gethostname()}:{os.getpid()}:{secrets.token_hex(8)}"
        self._mine: dict[str, frozenset[str]] = {}  # pages by claim, both as `claim_name`
        self._seen: OrderedDict[tuple[object, ...], _Seen] = OrderedDict()

    async def take(self, keys: Sequence[ObjectKey], seconds: float) -> list[Outcome]:
        """EXISTS, CLAIMED, or MISS: ours to send now. One claim is for the pages of a group."""
        answers = [Outcome.MISS] * len(keys)
        asked = [number for number, key in enumerate(keys) if not self._finder.is_alone(key)]
        if not (asked and self._conditions.useful):
            return answers
        found, listed = await self._finder.with_claims([keys[number] for number in asked])
        taken, ended = await self._read(listed)
        mine = set(chain(*self._mine.values()))
        free: defaultdict[bytes, list[int]] = defaultdict(list)
        for number, one in zip(asked, found, strict=True):
            name = self._name(keys[number])
            if self._finder.is_whole(one):
                answers[number] = Outcome.EXISTS
            elif name in taken or f"{name.rpartition('/')[0]}/" in taken:
                answers[number] = Outcome.CLAIMED
            elif one is not Outcome.FAILED and name not in mine:  # else `put` finds out why
                free[keys[number].group].append(number)
        runs = list(free.values())
        replies = await self._requests.each(partial(self._take, keys, seconds, ended), runs)
        for run, reply in zip(runs, replies, strict=True):
            for number in run:
                answers[number] = reply
        await self._remove(ended.keys() - self._mine.keys())
        return answers

    async def release(self, keys: Iterable[ObjectKey]) -> None:
        """End our claims for these pages."""
        if self._mine:
            names = set(map(self._name, keys))
            done = [path for path, pages in self._mine.items() if not names.isdisjoint(pages)]
            await self._remove(done)
            for path in done:
                self._mine.pop(path, None)

    def _name(self, key: ObjectKey) -> str:
        return claim_name(self._finder.folder, key)

    async def _read(
        self, listed: Iterable[obstore.ObjectMeta]
    ) -> tuple[set[str], dict[str, Mapping[str, str]]]:
        """The pages that others are sending, as `claim_name`, and the versions of claims that have ended."""
        others = [entry for entry in listed if entry["path"] not in self._mine]
        taken, ended = set[str](), dict[str, Mapping[str, str]]()
        for entry, seen in zip(others, await self._requests.each(self._look, others), strict=True):
            path = entry["path"]
            folder = path.rpartition("/")[0]
            if seen is None:  # it has just ended: the pages may be there by now
                taken.add(f"{folder}/")
            elif await self._holds(seen, entry["last_modified"]):
                taken.update(f"{folder}/{page}" for page in seen.claim.pages)
            elif path not in self._mine:
                ended[path] = seen.version
        return taken, ended

    async def _holds(self, seen: _Seen, made: datetime) -> bool:
        if seen.claim.owner == self._owner:  # the store's answer was lost, and we do not know that it is ours
            return False
        seconds = seen.claim.seconds
        if self._now() - seen.since >= seconds:
            return False
        return not await self._clock.is_past(made.timestamp() + seconds + SKEW_SECONDS)

    async def _look(self, entry: obstore.ObjectMeta) -> _Seen | None:
        """What a claim says; None if it is no longer there."""
        known = (entry["path"], entry["e_tag"], entry["last_modified"])
        if known not in self._seen:
            try:
                answer = await self._send(obstore.get_async, entry["path"])
                content = bytes(await answer.bytes_async())
            except FileNotFoundError:
                return None
            except FAILURES as error:
                failed(error)
                return None
            self._seen[known] = _Seen(_parsed(content), self._now(), _version(answer.meta))
            if len(self._seen) > _MOST_SEEN:
                self._seen.popitem(last=False)
        return self._seen[known]

    async def _take(
        self,
        keys: Sequence[ObjectKey],
        seconds: float,
        ended: dict[str, Mapping[str, str]],
        run: Sequence[int],
    ) -> Outcome:
        """Claim pages of one group."""
        names = [self._name(keys[number]) for number in run]
        if names[0] in self._mine:  # another call of ours was quicker
            return Outcome.CLAIMED
        pages = [name.rpartition("/")[2] for name in names]
        content = msgspec.json.encode(PageClaim(self._owner, seconds, pages))
        self._mine[names[0]] = frozenset(names)  # now: no other call of ours takes it for dead
        try:
            await self._write(names[0], content, ended.get(names[0]))
        except (AlreadyExistsError, PreconditionError, FileNotFoundError):
            outcome = await self._refused(names[0], ended)
        except FAILURES as error:
            outcome = Outcome.MISS
            if ignores_conditions(error):
                self._conditions.unknown()
            else:
                failed(error)
        else:
            self._conditions.kept()
            return Outcome.MISS
        self._mine.pop(names[0], None)
        return outcome

    async def _refused(self, path: str, ended: dict[str, Mapping[str, str]]) -> Outcome:
        """Leave the pages to whoever was quicker, if the store does not refuse every claim."""
        try:
            there = _version(await self._send(obstore.head_async, path))
        except FileNotFoundError:
            self._conditions.broken()
        except FAILURES as error:
            failed(error)
        else:
            if there == ended.get(path):
                self._conditions.broken()
            else:
                ended.pop(path, None)  # it is no longer the one that has ended
                self._conditions.kept()
        return Outcome.CLAIMED if self._conditions.useful else Outcome.MISS

    async def _write(self, path: str, content: bytes, old: Mapping[str, str] | None) -> None:
        """Make a claim where there is none, or exactly that old one."""
        if old is not None:
            try:
                await self._send(obstore.put_async, path, content, mode=dict(old), use_multipart=False)
            except (PreconditionError, FileNotFoundError):
                raise
            except (*FAILURES, RuntimeError):  # a store without versions, such as a folder
                await self._remove([path])
            else:
                return
        await self._send(obstore.put_async, path, content, mode="create", use_multipart=False)

    async def _remove(self, paths: Collection[str]) -> None:
        if not paths:
            return
        try:
            await self._send(delete_all, list(paths))
        except FAILURES as error:
            failed(error)

    async def _send(self, request: Callable[..., Awaitable[T]], *given: Any, **named: Any) -> T:
        return await self._requests.send(partial(request, self._requests.store, *given, **named))


def _version(found: obstore.ObjectMeta) -> dict[str, str]:
    """What names exactly this content of an object."""
    marks = {"e_tag": found["e_tag"], "version": found["version"]}
    return {name: text for name, text in marks.items() if text is not None}


def _parsed(content: bytes) -> PageClaim:
    """One that says nothing we understand has ended."""
    try:
        return msgspec.json.decode(content, type=PageClaim)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return PageClaim("", 0, [])
