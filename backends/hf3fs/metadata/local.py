"""Names in SQLite, opened directly: for the processes of one host."""

from __future__ import annotations

import asyncio
import sqlite3
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypeVar

from asynchicache.backends.closing import off_the_loop
from asynchicache.backends.hf3fs.metadata.store import MetadataStore
from asynchicache.backends.hf3fs.metadata.words import OpenedNamespace
from asynchicache.errors import CacheError, StorageError
from asynchicache.ports import Port

T = TypeVar("T")


class LocalNames:
    """A store in a thread of its own; calls take their turns.

    Args:
        folder: of the database, on a local disk.
        port: threads, and the clock of leases.
        seconds: deadline of a call.
    """

    def __init__(self, folder: Path, port: Port, seconds: float) -> None:
        self.where = str(folder)
        self._folder = folder
        self._port = port
        self._seconds = seconds
        self._worker = port.worker("asynchicache-hf3fs-names")
        self._store: MetadataStore | None = None

    async def open(self, name: str, slots: int, frame_bytes: int) -> OpenedNamespace:
        return await self._in_thread(lambda store: store.open(name, slots, frame_bytes))

    async def call(self, handle: str, verb: str, finished: Sequence[int], *given: Any) -> Any:
        return await self._in_thread(partial(_answer, handle, verb, finished, given))

    async def time(self) -> float:
        return time.time()

    async def aclose(self) -> None:
        await off_the_loop(self._port, self._worker.close, self._worker.abandon)
        if self._store is not None:
            self._store.close()
            self._store = None

    async def _in_thread(self, work: Callable[[MetadataStore], T]) -> T:
        """A call that is late or cancelled is done nevertheless, in its turn."""
        ended: asyncio.Future[T] = asyncio.get_running_loop().create_future()

        def end(result: T | None, error: Exception | None) -> None:
            if not ended.done():
                ended.set_result(result) if error is None else ended.set_exception(error)  # type: ignore[arg-type]

        def run() -> None:
            try:
                found = work(self._opened())
            except (CacheError, OSError) as error:
                self._port.post(partial(end, None, error))
            except sqlite3.Error as error:  # it was rolled back: a full disk, say, or others that are at it
                self._port.post(partial(end, None, StorageError(f"{self.where}: {error}")))
            else:
                self._port.post(partial(end, found, None))

        self._worker.submit(run)
        try:
            async with asyncio.timeout(self._seconds):
                return await ended
        except TimeoutError:
            raise StorageError(f"{self.where}: no answer in {self._seconds:g} s") from None

    def _opened(self) -> MetadataStore:
        if self._store is None:
            self._store = MetadataStore(self._folder, now=self._port.now, seconds=self._seconds)
        return self._store


def _answer(
    handle: str, verb: str, finished: Sequence[int], given: Sequence[Any], store: MetadataStore
) -> Any:
    number = store.number(handle)
    if finished:
        store.end_reads(finished)
    return getattr(store, verb)(number, *given)
