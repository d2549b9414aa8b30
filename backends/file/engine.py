"""The file engine: one thread hop per batch, one system call per run of neighbouring slots."""

from __future__ import annotations

import asyncio
import errno
import logging
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import NamedTuple, Self, TypeVar

from asynchicache.backends.closing import off_the_loop
from asynchicache.backends.file.folder import StoreFolder
from asynchicache.backends.file.index import StoredPage
from asynchicache.backends.file.store import PoolStore
from asynchicache.backends.file.writer import PageMove, SlotRun, WriteBatch, contiguous_moves
from asynchicache.errors import ClosedError, UsageError
from asynchicache.failure_log import FailureLog
from asynchicache.hashing import ObjectKey
from asynchicache.ports import Port
from asynchicache.storage.protocol import Capabilities, PoolBinding
from asynchicache.types import Outcome


class SlotClaim(NamedTuple):
    """The slots that one hop of a put writes to.

    Attributes:
        slots: store slots, by the position of the page in the call.
        refused: positions of pages that get no slot.
    """

    slots: dict[int, int]
    refused: list[int]
    refusal: Outcome


class PathCall:
    """One get or put. Its hops run in threads, in any order.

    Args:
        digests: digests of the pages, in path order.
        hops: number of hops; each calls `end` once.
    """

    def __init__(self, store: PoolStore, digests: Sequence[bytes], hops: int) -> None:
        self.own = frozenset(digests)
        """Digests of the call's pages, which are not evicted to make room for each other."""
        self._store = store
        self._digests = digests
        self._hops = hops
        self._lock = threading.Lock()
        self._slots: dict[int, int] | None = None
        self._refused: set[int] = set()
        self._refusal = Outcome.REJECTED

    def claim(self, places: range) -> SlotClaim:
        """Claim slots for the pages at `places` that the store does not have.

        The first hop takes slots for the whole call, so that a shortage always hits the end of the path.
        """
        with self._lock:
            if self._slots is None:
                self._slots = self._take()
            slots = {place: self._slots.pop(place) for place in places if place in self._slots}
            return SlotClaim(slots, [place for place in places if place in self._refused], self._refusal)

    def end(self) -> None:
        """End a hop. The last one counts the call's pages as used, the first page most recently."""
        with self._lock:
            self._hops -= 1
            if self._hops:
                return
            unused, self._slots = self._slots or {}, {}
        self._store.release(unused.values())
        self._store.use(self._digests[::-1])

    def _take(self) -> dict[int, int]:
        fresh, taken = self._store.missing(self._digests), []
        try:
            taken = self._store.take(len(fresh), self.own)
        except OSError as error:
            self._store.failures.warning(
                "slots", "no slots for %d pages: %s", len(fresh), error, pages=len(fresh)
            )
            self._refusal = Outcome.FAILED
        self._refused = set(fresh[len(taken) :])
        return dict(zip(fresh, taken, strict=False))


logger = logging.getLogger(__name__)

T = TypeVar("T")

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS})

_HOP_BYTES = 16 << 20
"""Most bytes of pages in one hop. A hop costs the loop and a thread a few hundred microseconds, as much as
the checksums of a few MiB."""
_FINE_BYTES = 4 << 20
"""The same for a lone read: smaller hops read concurrently and use more than one core for checksums."""
_BUSY_HOPS = 3
"""Number of hops that keeps the disk and two cores busy."""
_MAX_PUTS = 4
_MAX_SEALS = 4

Mover = Callable[[int, Sequence[memoryview]], int]


class WriteLimits(NamedTuple):
    """Concurrency limits of writes, shared by all pools of one backend.

    Attributes:
        puts: hops that write. The limit leaves threads and disk time to reads, which requests wait for; more
            concurrent writes are not faster.
        seals: threads that compute checksums of pages being written. One core seals faster than most disks
            write. Each page releases the GIL, so more threads on few cores would wait for each other
            after every page.
    """

    puts: asyncio.Semaphore
    seals: threading.Semaphore

    @classmethod
    def of(cls, processors: int) -> Self:
        """The limits for a machine with that many processors."""
        return cls(
            asyncio.Semaphore(_MAX_PUTS), threading.Semaphore(max(1, min(_MAX_SEALS, processors // 2)))
        )


class _FilePages(NamedTuple):
    keys: Sequence[ObjectKey]
    slots: Sequence[int]  # of the binding
    outcomes: list[Outcome]
    errors: list[OSError]  # of pages that were not moved

    def digest(self, move: PageMove) -> bytes:
        return self.keys[move.place].digest

    def end(self, moves: Sequence[PageMove], outcome: Outcome) -> None:
        for move in moves:
            self.outcomes[move.place] = outcome


class FileEngine:
    """One pool in one `PoolStore`.

    A put is acknowledged, and its pages are visible, after `fdatasync` has returned for the pages and their
    entries.

    Args:
        limits: shared by all engines of the backend.
    """

    capabilities = Capabilities(durable=True, checks=True, batch_keys=4096, concurrency=5)

    def __init__(
        self, binding: PoolBinding, port: Port, folder: StoreFolder, store: PoolStore, limits: WriteLimits
    ) -> None:
        self.closed = False
        self.corrupt = 0
        """Number of pages found damaged and dropped."""
        self._binding = binding
        self._port = port
        self._folder = folder
        self._store = store
        self._limits = limits
        self._there = True
        self._failures = FailureLog(logger)
        self._running: set[asyncio.Task[object]] = set()
        self._closing: asyncio.Future[None] | None = None

    @property
    def full(self) -> bool:
        """The disk refuses to let the pool grow; the pool tries again after a while."""
        return self._store.full

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        self._check_open()
        index = self._store.index  # a dictionary lookup needs no lock, so the loop never waits
        return bytearray([key.digest in index for key in keys])

    async def confirm(self, keys: Sequence[ObjectKey]) -> bytearray:
        """As `exists`, once the files were seen to be whole, where a restart looks for them."""
        self._check_open()
        if keys and not await self._in_thread(self._in_place):
            return bytearray(len(keys))
        return await self.exists(keys)

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        self._check_open()
        cuts = self._reads(len(keys))
        call = self._path_call(keys, cuts)
        return await _all([self._in_thread(partial(self._get, call, keys[cut], slots[cut])) for cut in cuts])

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        self._check_open()
        cuts = self._cuts(len(keys), _HOP_BYTES)
        call = self._path_call(keys, cuts)
        hops = [partial(self._put, call, cut.start, keys[cut], slots[cut]) for cut in cuts]
        outcomes = await _all([self._in_thread(hop, writes=True) for hop in hops])
        if len(call.own) < len(keys):
            _repeat(keys, outcomes)
        return outcomes

    async def touch(self, keys: Sequence[ObjectKey]) -> None:
        """Count pages as used now, the last one most recently; the order is stored on `close`."""
        self._check_open()
        self._store.touch([key.digest for key in keys])  # memory only: a thread would queue behind puts

    async def leaving(self, pages: int) -> list[ObjectKey]:
        self._check_open()
        return await self._in_thread(partial(self._store.leaving, pages))

    async def label(self, label: bytes) -> None:
        if not self._store.read_only:
            await self._in_thread(partial(self._store.label, label))

    async def delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        return await self._in_thread(partial(self._delete, keys))

    async def clear(self) -> int:
        """Delete every page of this pool and no other; returns how many there were.

        Raises:
            OSError: the disk reported an error; the pages may come back when the pool is reopened.
            UsageError: the store is read-only.
        """
        self._check_open()
        if self._store.read_only:
            raise UsageError(f"pool {self._binding.pool!r} is open for reading only; it cannot be cleared")
        return await self._in_thread(self._store.clear)

    async def aclose(self) -> None:
        """Close the engine after its running calls have ended.

        A second call waits too; a cancelled caller does not stop the closing. In a forked child it only
        closes file descriptors: calls in the parent continue.
        """
        self.closed = True
        if self._folder.forked:
            self._store.segments.close()
            return
        self._closing = self._closing or asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        while self._running:
            await asyncio.wait(self._running)
        await off_the_loop(self._port, self._store.close, self._store.close)  # at worst on the loop

    def _check_open(self) -> None:
        self._folder.check_process()
        if self.closed:
            raise ClosedError(f"file engine of pool {self._binding.pool!r} is closed")

    def _reads(self, count: int) -> list[slice]:
        """Split a read into hops: smaller ones if few calls are running."""
        cuts = self._cuts(count, _HOP_BYTES)
        return cuts if len(self._running) + len(cuts) >= _BUSY_HOPS else self._cuts(count, _FINE_BYTES)

    def _cuts(self, count: int, nbytes: int) -> list[slice]:
        """Split a call into hops of `nbytes`: while one waits for the disk, another computes checksums."""
        step = max(1, nbytes // self._binding.slot_bytes)
        return [slice(start, start + step) for start in range(0, count, step)]

    def _path_call(self, keys: Sequence[ObjectKey], cuts: Sequence[slice]) -> PathCall:
        return PathCall(self._store, [key.digest for key in keys], len(cuts))

    def _in_thread(self, work: Callable[[], T], *, writes: bool = False) -> asyncio.Future[T]:
        """Run `work` in a thread to its end; `aclose` waits for it, even if the caller is cancelled."""
        self._check_open()
        task = asyncio.create_task(self._in_write_turn(work) if writes else self._port.run_blocking(work))
        self._running.add(task)
        task.add_done_callback(self._running.discard)
        return asyncio.shield(task)

    async def _in_write_turn(self, work: Callable[[], T]) -> T:
        async with self._limits.puts:
            return await self._port.run_blocking(work)

    def _get(self, call: PathCall, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        batch = _FilePages(keys, slots, [Outcome.MISS] * len(keys), [])
        found = {place: page for place, page in enumerate(self._store.pin(k.digest for k in keys)) if page}
        moves = sorted(PageMove(page.slot, place) for place, page in found.items())
        try:
            for run in self._runs(moves, batch):
                for _, place in self._move(self._store.segments.read, batch, run):
                    checksum = found[place].checksum
                    batch.outcomes[place] = self._binding.restore(slots[place], keys[place], checksum)
            self._drop([move for move in moves if batch.outcomes[move.place] is Outcome.CORRUPT], batch)
        finally:
            self._store.unpin(move.slot for move in moves)
            call.end()
        self._tell("read", batch)
        return batch.outcomes

    def _drop(self, damaged: Sequence[PageMove], batch: _FilePages) -> None:
        if not damaged:
            return
        dropped = self._store.drop([(batch.digest(move), move.slot) for move in damaged])
        for move, there in zip(damaged, dropped, strict=True):
            if there:
                self.corrupt += 1
            else:  # deleted during the read, not damaged
                batch.outcomes[move.place] = Outcome.MISS

    def _in_place(self) -> bool:
        """Whether a restart would find the files. A change is logged; pages of files that were cut are
        dropped."""
        pool, there = self._binding.pool, self._folder.in_place() and self._store.in_place()
        if there != self._there:
            self._there = there
            if there:
                logger.warning("pool %s: the files in %s are back", pool, self._folder.path)
            else:
                logger.error(
                    "pool %s: the files in %s were moved, removed or replaced; nothing is stored until they "
                    "are back, or storage is detached and attached anew",
                    pool,
                    self._folder.path,
                )
        if there and (lost := self._store.drop_cut()):
            logger.error(
                "pool %s: files in %s were cut, and %d pages are lost", pool, self._folder.path, lost
            )
        return there

    def _put(
        self, call: PathCall, start: int, keys: Sequence[ObjectKey], slots: Sequence[int]
    ) -> list[Outcome]:
        """Write one hop of a put, whose first page is page `start` of the call, and make it durable."""
        try:
            batch, moves = self._begin(call, start, keys, slots)
            if moves:
                self._write(moves, batch, call.own)
        finally:
            call.end()
        return batch.outcomes

    def _begin(
        self, call: PathCall, start: int, keys: Sequence[ObjectKey], slots: Sequence[int]
    ) -> tuple[_FilePages, list[PageMove]]:
        """Claim slots for the pages that are not stored yet, and set the outcomes of the others."""
        if self._store.read_only or self._store.broken or not self._in_place():
            return _FilePages(keys, slots, [Outcome.REJECTED] * len(keys), []), []
        claim = call.claim(range(start, start + len(keys)))
        batch = _FilePages(keys, slots, [Outcome.EXISTS] * len(keys), [])
        for place in claim.refused:
            batch.outcomes[place - start] = claim.refusal
        return batch, [PageMove(slot, place - start) for place, slot in claim.slots.items()]

    def _write(self, moves: Sequence[PageMove], batch: _FilePages, own: Collection[bytes]) -> None:
        """Write and seal pages, and make them visible."""
        batch.end(moves, Outcome.FAILED)  # until they are stored, or fail for a known reason
        write = WriteBatch(
            partial(self._move, self._store.segments.write, batch), partial(self._seal, moves, batch)
        )
        try:
            write.runs += self._runs(moves, batch)
            first = self._store.write(write, own)
            if not self._in_place():
                return
        except OSError as error:
            self._warn("not durable", len(moves), error)
        else:
            for move, new in zip(write.written, first, strict=True):
                batch.outcomes[move.place] = Outcome.STORED if new else Outcome.EXISTS
        finally:
            self._tell("written", batch)
            kept = {move.slot for move in write.written} if write.may_be_named else set()
            self._store.release(move.slot for move in moves if move.slot not in kept)

    def _seal(self, moves: Sequence[PageMove], batch: _FilePages) -> dict[int, StoredPage]:
        with self._limits.seals:
            return {slot: self._stored(slot, batch.slots[place], batch.keys[place]) for slot, place in moves}

    def _stored(self, slot: int, memory: int, key: ObjectKey) -> StoredPage:
        return StoredPage(key.digest, slot, self._binding.seal(memory, key))

    def _delete(self, keys: Sequence[ObjectKey]) -> list[Outcome]:
        if self._store.read_only or self._store.broken:
            return [Outcome.REJECTED] * len(keys)  # a refusal, not a failure: pages can still be read
        try:
            there = self._store.remove([key.digest for key in keys])
        except OSError as error:
            self._warn("not deleted", len(keys), error)
            return [Outcome.FAILED] * len(keys)
        return [Outcome.HIT if was else Outcome.MISS for was in there]

    def _runs(self, moves: Sequence[PageMove], batch: _FilePages) -> Iterator[SlotRun]:
        """Group moves into runs of neighbouring store slots, with their views of memory."""
        for run in contiguous_moves(moves, self._store.segments.most_slots):
            yield SlotRun(run, [self._binding.page(batch.slots[move.place]) for move in run])

    def _move(self, mover: Mover, batch: _FilePages, run: SlotRun) -> list[PageMove]:
        """Read or write a run in as few system calls as possible.

        Returns:
            The pages that were moved whole; the outcomes of the others are set.
        """
        moved: list[PageMove] = []
        while run.moves:
            done, error = _try(mover, run)
            if error is not None and len(run.moves) > 1:  # find the page that fails
                done, error = _try(mover, run.cut(0, 1))
            moved += run.moves[:done]
            if error is not None:
                batch.outcomes[run.moves[0].place] = _outcome(error)
                batch.errors.append(error)
            run = run.cut(max(done, 1), len(run.moves))
        return moved

    def _tell(self, participle: str, batch: _FilePages) -> None:
        """Log the errors of a hop, in one line."""
        if batch.errors:
            self._warn(f"not {participle}", len(batch.errors), batch.errors[0])

    def _warn(self, what: str, count: int, error: OSError) -> None:
        kind, message = (what, error.errno), "pool %s: %d pages are %s: %s"
        self._failures.warning(kind, message, self._binding.pool, count, what, error, pages=count)

    def __repr__(self) -> str:
        index = self._store.index
        return (
            f"<FileEngine {self._binding.pool}: {len(index)} pages, {index.slots} slots, "
            f"{index.evicted} evicted, {self.corrupt} corrupt>"
        )


def _try(mover: Mover, run: SlotRun) -> tuple[int, OSError | None]:
    """How many pages of a run were moved; if none was, the error."""
    try:
        return mover(run.slot, run.views), None
    except OSError as error:
        return 0, error.with_traceback(None)  # its frames hold views of slots


async def _all(hops: Sequence[asyncio.Future[list[Outcome]]]) -> list[Outcome]:
    """The outcomes of all hops. If one fails, wait for the others first: they use slots of the same call."""
    await asyncio.gather(*hops, return_exceptions=True)
    return [outcome for hop in hops for outcome in hop.result()]


def _repeat(keys: Sequence[ObjectKey], outcomes: list[Outcome]) -> None:
    """Give a repeated key the outcome of its first position; EXISTS instead of STORED."""
    first: dict[bytes, int] = {}
    for place, key in enumerate(keys):
        end = outcomes[first.setdefault(key.digest, place)]
        if first[key.digest] < place:
            outcomes[place] = Outcome.EXISTS if end is Outcome.STORED else end


def _outcome(error: OSError) -> Outcome:
    if error.errno == errno.ENODATA:
        return Outcome.CORRUPT  # the file was cut while it was open
    return Outcome.REJECTED if error.errno in _FULL else Outcome.FAILED
