"""New objects, each stored by one of several writers where the store knows conditions."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from functools import partial
from typing import Any, TypeVar

import obstore
from obstore.exceptions import AlreadyExistsError, PreconditionError

from asynchicache.backends.object.conditions import Conditions
from asynchicache.backends.object.objects import StoredObject
from asynchicache.backends.object.requests import Requests
from asynchicache.backends.object.stores import FAILURES, ignores_conditions, refuses
from asynchicache.types import Outcome

T = TypeVar("T")


class NewObjects:
    """The new objects of one batch.

    What is refused on the condition that nothing is there is stored without it. A store that refuses every
    write must not cost twice the requests, so this is done for one object after another, and not after one
    that could not be stored so either.

    Args:
        requests: the pool's requests to the store.
        conditions: whether its conditional writes can be believed.
    """

    def __init__(self, requests: Requests, conditions: Conditions) -> None:
        self._requests = requests
        self._conditions = conditions
        self._turn = asyncio.Lock()
        self._error: Exception | None = None  # of a write without condition

    async def store(self, stored: StoredObject, parts: list[memoryview]) -> Outcome:
        """STORED, or EXISTS: it is there, in that size.

        Raises:
            BaseError, OSError: it cannot be stored.
        """
        write = partial(self._send, obstore.put_async, stored.path, parts, use_multipart=False)
        if not self._conditions.useful:
            await write()
            return Outcome.STORED
        try:
            await write(mode="create")
        except (AlreadyExistsError, PreconditionError, FileNotFoundError):
            size = await self._size(stored.path)
            if size is None:
                await self._store_plainly(write)
                return Outcome.STORED
            self._conditions.kept()
            if size == stored.size:
                return Outcome.EXISTS
            await write()
        except FAILURES as error:
            if ignores_conditions(error):
                self._conditions.unknown()
                await write()
            elif refuses(error):
                await self._store_plainly(write)
            else:
                raise
        else:
            self._conditions.kept()
        return Outcome.STORED

    async def _store_plainly(self, write: Callable[[], Awaitable[object]]) -> None:
        """Do a write without condition that was refused with one."""
        async with self._turn:
            if self._error is not None:
                raise self._error
            try:
                await write()
            except FAILURES as error:
                self._error = error
                raise
        self._conditions.broken()

    async def _size(self, path: str) -> int | None:
        """Bytes of an object; None if it is not there."""
        try:
            found = await self._send(obstore.head_async, path)
        except FileNotFoundError:
            return None
        return found["size"]

    async def _send(self, request: Callable[..., Awaitable[T]], *given: Any, **named: Any) -> T:
        return await self._requests.send(partial(request, self._requests.store, *given, **named))
