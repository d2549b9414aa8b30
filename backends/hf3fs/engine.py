"""One pool on 3FS: locate or reserve slots in the store of names, move pages, report the results."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine, Sequence
from functools import partial
from pathlib import Path
from uuid import uuid4

from asynchicache.backends.closing import off_the_loop
from asynchicache.backends.hf3fs.datafile import DataPath, Frame
from asynchicache.backends.hf3fs.folder import replace_file
from asynchicache.backends.hf3fs.metadata.namespace import MetadataNamespace
from asynchicache.backends.hf3fs.metadata.words import Claim, SlotVersion
from asynchicache.errors import ClosedError, StorageError
from asynchicache.failure_log import FailureLog
from asynchicache.hashing import ObjectKey
from asynchicache.ports import Port
from asynchicache.storage.protocol import Capabilities, PoolBinding
from asynchicache.types import Outcome

logger = logging.getLogger(__name__)

_MAGIC_BYTES = 8


class Hf3fsEngine:
    """One pool in one file.

    A page becomes visible once it is written, durable and confirmed. A read holds a lease on its slots. If
    the lease expires and a slot is reused, the seal does not match and the slot's generation has changed,
    so the outcome is MISS.

    Args:
        namespace: the pool's pages in the store of names.
        data: moves bytes; closed by `aclose`.
        writes: whether this rank writes; otherwise puts return EXISTS or REJECTED.
    """

    def __init__(
        self,
        binding: PoolBinding,
        port: Port,
        namespace: MetadataNamespace,
        data: DataPath,
        *,
        label: Path,
        writes: bool,
        concurrency: int,
    ) -> None:
        self.capabilities = Capabilities(durable=True, checks=True, shared=True, concurrency=concurrency)
        self.closed = False
        self.corrupt = 0
        """Pages that were found damaged, and dropped."""
        self._binding = binding
        self._port = port
        self._namespace = namespace
        self._data = data
        self._label = label
        self._writes = writes
        self._failures = FailureLog(logger)
        self._calls: set[asyncio.Task[list[Outcome]]] = set()

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        """
        Raises:
            StorageError: the store of names does not answer.
        """
        self._check_open()
        return bytearray(await self._namespace.exists(_names(keys))) if keys else bytearray()

    async def confirm(self, keys: Sequence[ObjectKey]) -> bytearray:
        """As `exists`, if the file of the pages is where a restart looks for it."""
        self._check_open()
        if keys and not await self._port.run_blocking(self._data.in_place):
            message = "%s: its file was moved, removed or replaced; no page is durable"
            self._failures.warning("moved", message, self._namespace.name, pages=len(keys))
            return bytearray(len(keys))
        return await self.exists(keys)

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return await self._run(partial(self._get, keys, slots), keys)

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return await self._run(partial(self._put if self._writes else self._leave, keys, slots), keys)

    async def delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        return await self._run(partial(self._delete, keys), keys)

    async def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Report uses to the store, oldest first.

        Raises:
            StorageError: the store of names does not answer.
        """
        self._check_open()
        if keys:
            await self._namespace.touch(_names(keys))

    async def leaving(self, pages: int) -> list[ObjectKey]:
        """What makes room for `pages` more, the first to go first.

        Raises:
            StorageError: the store of names does not answer.
        """
        self._check_open()
        names = await self._namespace.leaving(pages)
        own = self._binding
        return [ObjectKey(own.fingerprint, bytes.fromhex(name), own.pool, own.shard) for name in names]

    async def label(self, label: bytes) -> None:
        """
        Raises:
            StorageError: the folder cannot be written.
        """
        self._check_open()
        try:
            await self._port.run_blocking(partial(replace_file, self._label, label))
        except OSError as error:
            raise StorageError(f"{self._label} cannot be written: {error.strerror}") from error

    async def clear(self) -> int:
        """Drop all pages of this pool, shard and fingerprint only. Returns their number.

        Raises:
            StorageError: the store of names does not answer.
        """
        self._check_open()
        return await self._namespace.clear()

    async def aclose(self) -> None:
        self.closed = True
        self._data.stop()
        while self._calls:
            await asyncio.wait(self._calls)
        await off_the_loop(self._port, self._data.close, self._data.close)  # on the loop if no thread is left

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"hf3fs engine of pool {self._binding.pool!r} is closed")

    async def _run(
        self, call: Callable[[], Coroutine[object, object, list[Outcome]]], keys: Sequence[ObjectKey]
    ) -> list[Outcome]:
        """Run a call to its end even if its caller is cancelled. FAILED if the store does not answer."""
        self._check_open()
        if not keys:
            return []
        task = asyncio.create_task(self._answered(call, len(keys)))
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)
        return await asyncio.shield(task)

    async def _answered(
        self, call: Callable[[], Coroutine[object, object, list[Outcome]]], count: int
    ) -> list[Outcome]:
        try:
            return await call()
        except StorageError as error:
            self._failures.warning(type(error), "%s: %s", self._namespace.name, error, pages=count)
            return [Outcome.FAILED] * count

    async def _get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        located = await self._namespace.locate(_names(keys))
        places = {place: at for place, at in enumerate(located.places) if at is not None}
        frames = [Frame(at.slot, slots[place]) for place, at in places.items()]
        try:
            found = await self._port.run_blocking(
                partial(self._read, frames, [keys[place] for place in places])
            )
        finally:
            self._namespace.end_read(located)
        outcomes = [Outcome.MISS] * len(keys)
        for place, outcome in zip(places, found, strict=True):
            outcomes[place] = outcome
        await self._drop_unfit(keys, places, outcomes)
        return outcomes

    def _read(self, frames: Sequence[Frame], keys: Sequence[ObjectKey]) -> list[Outcome]:
        outcomes = self._data.read(frames)
        for index, (frame, key) in enumerate(zip(frames, keys, strict=True)):
            if outcomes[index] is Outcome.HIT:
                outcomes[index] = self._check(frame.memory, key)
        return outcomes

    def _check(self, slot: int, key: ObjectKey) -> Outcome:
        outcome = self._binding.check(slot, key)
        if outcome is not Outcome.HIT and not any(self._binding.header(slot)[:_MAGIC_BYTES]):
            return Outcome.MISS  # a hole in the file, which reads as zeros
        return outcome

    async def _drop_unfit(
        self, keys: Sequence[ObjectKey], places: dict[int, SlotVersion], outcomes: list[Outcome]
    ) -> None:
        """Forget damaged or missing pages. If the store rejects a claim, the page was evicted during the
        read: it is a MISS, not damaged."""
        unfit = [place for place in places if outcomes[place] in (Outcome.CORRUPT, Outcome.MISS)]
        if not unfit:
            return
        claims = [_claim(keys[place], places[place]) for place in unfit]
        try:
            dropped = await self._namespace.forget(claims)
        except StorageError as error:
            message, count = "%s: %d pages are unfit: %s", len(unfit)
            self._failures.warning("unfit", message, self._namespace.name, count, error, pages=count)
            return
        for place, gone in zip(unfit, dropped, strict=True):
            if outcomes[place] is Outcome.CORRUPT and not gone:
                outcomes[place] = Outcome.MISS
        self.corrupt += sum(outcomes[place] is Outcome.CORRUPT for place in unfit)

    async def _put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        outcomes = [Outcome.EXISTS] * len(keys)
        asked = self._port.now()
        places = await self._reserve(keys, outcomes)
        fresh = [(Frame(at.slot, slots[place]), keys[place]) for place, at in places.items()]
        written = await self._port.run_blocking(partial(self._write, fresh, asked))
        for place, outcome in zip(places, written, strict=True):
            outcomes[place] = outcome
        await self._settle(keys, places, outcomes)
        return [Outcome.FAILED if outcome is Outcome.TIMEOUT else outcome for outcome in outcomes]

    async def _reserve(self, keys: Sequence[ObjectKey], outcomes: list[Outcome]) -> dict[int, SlotVersion]:
        """Reserve slots for keys that are not stored. Keys without a free slot are REJECTED."""
        first: dict[ObjectKey, int] = {}
        for place, key in enumerate(keys):
            first.setdefault(key, place)  # a repeated key is EXISTS
        # Not the port's randomness: two ranks with the same seed would share tokens, and so slots.
        reserved = await self._namespace.reserve(uuid4().hex, _names(list(first)))
        places: dict[int, SlotVersion] = {}
        for place, existed, at in zip(first.values(), reserved.existed, reserved.places, strict=True):
            if at is not None:
                places[place] = at
            elif not existed:
                outcomes[place] = Outcome.REJECTED
        return places

    def _write(self, fresh: Sequence[tuple[Frame, ObjectKey]], asked: float) -> list[Outcome]:
        if self._port.now() - asked > self._namespace.lease_seconds / 2:
            # The thread started late: the lease may end, and our write could damage the slots' next pages.
            return [Outcome.FAILED] * len(fresh)
        for frame, key in fresh:
            self._binding.seal(frame.memory, key)
        return self._data.write([frame for frame, _ in fresh])

    async def _settle(
        self, keys: Sequence[ObjectKey], places: dict[int, SlotVersion], outcomes: list[Outcome]
    ) -> None:
        """Confirm written slots and release unwritten ones. Slots whose write may still happen (TIMEOUT)
        stay reserved until their lease ends."""
        stored = [place for place in places if outcomes[place] is Outcome.STORED]
        unused = [places[place] for place in places if outcomes[place] in (Outcome.FAILED, Outcome.REJECTED)]
        if stored:
            claims = [_claim(keys[place], places[place]) for place in stored]
            verdicts = await self._confirm(claims)
            for place, verdict in zip(stored, verdicts, strict=True):
                outcomes[place] = _OUTCOME_OF[verdict]
        if unused:
            await self._release(unused)

    async def _confirm(self, claims: Sequence[Claim]) -> Sequence[str]:
        try:
            return await self._namespace.confirm(claims)
        except StorageError as error:
            message, count = "%s: %d pages were written, but not shown: %s", len(claims)
            self._failures.warning("not shown", message, self._namespace.name, count, error, pages=count)
            return ["lost"] * len(claims)

    async def _release(self, places: Sequence[SlotVersion]) -> None:
        try:
            await self._namespace.release(places)
        except StorageError as error:
            message, count = "%s: %d slots stay reserved for a while: %s", len(places)
            self._failures.warning("reserved", message, self._namespace.name, count, error, pages=count)

    async def _leave(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        """Put on a rank that does not write: another rank writes these pages."""
        present = await self._namespace.exists(_names(keys))
        return [Outcome.EXISTS if there else Outcome.REJECTED for there in present]

    async def _delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        dropped = await self._namespace.delete(_names(keys))
        return [Outcome.HIT if gone else Outcome.MISS for gone in dropped]

    def __repr__(self) -> str:
        return f"<Hf3fsEngine {self._namespace.name}: {self._namespace.slots} slots, {self.corrupt} corrupt>"


_OUTCOME_OF = {"stored": Outcome.STORED, "existed": Outcome.EXISTS, "lost": Outcome.FAILED}


def _names(keys: Sequence[ObjectKey]) -> list[str]:
    """Names of keys inside their namespace."""
    return [key.digest.hex() for key in keys]


def _claim(key: ObjectKey, at: SlotVersion) -> Claim:
    return Claim(key.digest.hex(), at.slot, at.generation)
