"""One pool's pages in one file: plans under a lock, moves bytes without it, one thread hop a batch."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import NamedTuple, TypeVar

from asynchicache.backends.file.index import PageIndex
from asynchicache.backends.file.pages import PageFile
from asynchicache.errors import ClosedError
from asynchicache.hashing import ObjectKey
from asynchicache.ports import Port
from asynchicache.storage.protocol import Capabilities, PoolBinding
from asynchicache.types import Outcome

logger = logging.getLogger(__name__)

T = TypeVar("T")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})

Mover = Callable[[int, Sequence[memoryview]], int]


class Move(NamedTuple):
    """A page on its way: the file's slot, and the page's place in its batch."""

    slot: int
    place: int


class _Batch(NamedTuple):
    keys: Sequence[ObjectKey]
    slots: Sequence[int]  # of the binding
    outcomes: list[Outcome]


def runs(moves: Sequence[Move], most: int) -> Iterator[list[Move]]:
    """Moves in ascending order of file slots, cut where a slot does not follow, and after `most`."""
    run: list[Move] = []
    for move in moves:
        if run and (move.slot != run[-1].slot + 1 or len(run) == most):
            yield run
            run = []
        run.append(move)
    if run:
        yield run


class FileEngine:
    """One pool in one `PageFile`.

    A put is acknowledged, and visible, after its header and page are written and `fdatasync` has
    returned. A page that was torn by a crash is still found by its header when the file is reopened;
    its checksum does not match when it is read, and it is a miss.

    Args:
        binding: the pool's slots in host memory.
        port: threads.
        file: the pool's file, scanned already into `index`.
        index: what is in it.
        capacity_bytes: most bytes of the file; None for as many as the disk has.
        read_only: puts are rejected.
    """

    capabilities = Capabilities(durable=True, checks=True)

    def __init__(
        self,
        binding: PoolBinding,
        port: Port,
        file: PageFile,
        index: PageIndex,
        *,
        capacity_bytes: int | None,
        read_only: bool,
    ) -> None:
        self.closed = False
        self.corrupt = 0
        """Pages that were found damaged, and dropped."""
        self._binding = binding
        self._port = port
        self._file = file
        self._index = index
        self._limit = None if capacity_bytes is None else capacity_bytes // file.frame_bytes
        self._read_only = read_only
        self._broken = False
        self._lock = threading.Lock()
        self._hops: set[asyncio.Task[list[Outcome]]] = set()

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        self._check_open()
        index = self._index  # a look into a dictionary needs no lock, and the loop waits for none
        return bytearray([key.digest in index for key in keys])

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return await self._hop(partial(self._get, keys, slots))

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        return await self._hop(partial(self._put, keys, slots))

    async def delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        return await self._hop(partial(self._delete, keys))

    async def aclose(self) -> None:
        self.closed = True
        while self._hops:
            await asyncio.wait(self._hops)
        self._file.close()

    def _check_open(self) -> None:
        if self.closed:
            raise ClosedError(f"file engine of pool {self._binding.pool!r} is closed")

    async def _hop(self, work: Callable[[], list[Outcome]]) -> list[Outcome]:
        """Run `work` in a thread; it runs to its end, and is waited for, whatever its caller does."""
        self._check_open()
        task = asyncio.create_task(self._port.run_blocking(work))
        self._hops.add(task)
        task.add_done_callback(self._hops.discard)
        return await asyncio.shield(task)

    def _get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        batch = _Batch(keys, slots, [Outcome.MISS] * len(keys))
        moves = self._pin(keys)
        try:
            for run in runs(moves, self._file.most_frames):
                for move in self._move(self._file.read, run, batch):
                    slot, key = slots[move.place], keys[move.place]
                    batch.outcomes[move.place] = self._binding.check(slot, key)
        finally:
            self._unpin(moves, batch)
        return batch.outcomes

    def _pin(self, keys: Sequence[ObjectKey]) -> list[Move]:
        with self._lock:
            found = ((self._index.pin(key.digest), place) for place, key in enumerate(keys))
            return sorted(Move(slot, place) for slot, place in found if slot is not None)

    def _unpin(self, moves: Sequence[Move], batch: _Batch) -> None:
        with self._lock:
            for move in moves:
                if batch.outcomes[move.place] is Outcome.CORRUPT:
                    if self._index.forget(batch.keys[move.place].digest, move.slot):
                        self.corrupt += 1
                    else:  # deleted while it was read: nothing is damaged
                        batch.outcomes[move.place] = Outcome.MISS
                self._index.unpin(move.slot)

    def _put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        if self._read_only or self._broken:
            return [Outcome.REJECTED if self._read_only else Outcome.FAILED] * len(keys)
        batch = _Batch(keys, slots, [Outcome.EXISTS] * len(keys))
        fresh = self._missing(keys)
        for place in fresh:
            self._binding.seal(slots[place], keys[place])
        moves = self._take(fresh, batch)
        durable: list[Move] = []
        try:
            for run in runs(moves, self._file.most_frames):
                durable += self._move(self._file.write, run, batch)
            durable = self._sync(durable, batch)
        finally:
            self._commit(moves, frozenset(durable), batch)
        return batch.outcomes

    def _missing(self, keys: Sequence[ObjectKey]) -> list[int]:
        with self._lock:
            return [place for place, key in enumerate(keys) if not self._index.touch(key.digest)]

    def _take(self, fresh: Sequence[int], batch: _Batch) -> list[Move]:
        """A file slot for each page, new ones first, then those of pages that were not used for long."""
        with self._lock:
            short = len(fresh) - self._index.free
            if short > 0:
                self._index.grow(self._file.grow(short, self._limit))
            taken = self._index.take(len(fresh))
        for place in fresh[len(taken) :]:
            batch.outcomes[place] = Outcome.REJECTED
        return [Move(slot, place) for slot, place in zip(taken, fresh, strict=False)]

    def _sync(self, written: list[Move], batch: _Batch) -> list[Move]:
        """The pages that are durable: all, or, if the disk says no, none."""
        try:
            if written:
                self._file.sync()
        except OSError:
            # The kernel reports lost writes once; the next fdatasync may succeed without them.
            logger.exception("%s: nothing is written any more until it is reopened", self._file.path)
            self._broken = True
            for move in written:
                batch.outcomes[move.place] = Outcome.FAILED
            return []
        return written

    def _commit(self, moves: Sequence[Move], durable: frozenset[Move], batch: _Batch) -> None:
        """Make durable pages visible, and give the other slots back."""
        with self._lock:
            for move in moves:
                digest = batch.keys[move.place].digest
                if move in durable and self._index.hold(move.slot, digest):
                    batch.outcomes[move.place] = Outcome.STORED
                else:  # failed, or another put of the same page came first
                    self._index.release(move.slot)

    def _delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        if self._read_only:
            return [Outcome.FAILED] * len(keys)
        with self._lock:
            slots = [self._index.remove(key.digest) for key in keys]
        gone = [slot for slot in slots if slot is not None]
        done = Outcome.HIT
        try:
            self._clear(gone)
        except OSError as error:
            logger.warning("%s: deleting %d pages: %s", self._file.path, len(gone), error)
            done = Outcome.FAILED
        finally:
            with self._lock:
                for slot in gone:
                    self._index.release(slot)
        return [Outcome.MISS if slot is None else done for slot in slots]

    def _clear(self, slots: Sequence[int]) -> None:
        for slot in slots:
            self._file.clear(slot)
        if slots:
            self._file.sync()

    def _move(self, mover: Mover, run: list[Move], batch: _Batch) -> list[Move]:
        """Move a run in as few calls as it takes.

        Returns:
            The pages that were moved whole; the others have their outcome.
        """
        moved: list[Move] = []
        while run:
            done, outcome = self._try(mover, run, batch)
            if not done and len(run) > 1:  # which page is it?
                done, outcome = self._try(mover, run[:1], batch)
            moved += run[:done]
            if not done:
                batch.outcomes[run[0].place] = outcome
            run = run[max(done, 1) :]
        return moved

    def _try(self, mover: Mover, run: list[Move], batch: _Batch) -> tuple[int, Outcome]:
        try:
            return mover(run[0].slot, self._views(run, batch)), Outcome.HIT
        except OSError as error:
            logger.warning("%s: %d pages from slot %d: %s", self._file.path, len(run), run[0].slot, error)
            return 0, _outcome(error)

    def _views(self, run: list[Move], batch: _Batch) -> list[memoryview]:
        slots = (batch.slots[move.place] for move in run)
        return [view for slot in slots for view in (self._binding.header(slot), self._binding.page(slot))]

    def __repr__(self) -> str:
        index = self._index
        return (
            f"<FileEngine {self._binding.pool}: {len(index)} pages, {index.slots} slots, "
            f"{index.evicted} evicted, {self.corrupt} corrupt>"
        )


def _outcome(error: OSError) -> Outcome:
    if error.errno == errno.ENODATA:
        return Outcome.CORRUPT  # the file was cut while it was open
    return Outcome.REJECTED if error.errno in _FULL else Outcome.FAILED
