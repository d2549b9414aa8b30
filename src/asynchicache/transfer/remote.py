"""Copies that are handed out: this side knows host slots and numbers of device pages, but no device memory.

A scheduler decides what is copied, and one worker for each device carries it out, in another process or in
this one (`integrations.copy_worker`). Both map the same host memory. A copy has ended when every worker says
so.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import msgspec

from asynchicache.errors import ClosedError, ConfigError, CopyEndedError, TransferError, UsageError
from asynchicache.pools.shared import HostHandle
from asynchicache.ports import Port
from asynchicache.specs import ModelSpec
from asynchicache.streams.base import Event
from asynchicache.transfer.audit import AuditStatistics
from asynchicache.transfer.plan import CacheOperation, Direction, PoolShape, check_slots
from asynchicache.transfer.record import (
    Done,
    OnWait,
    Reads,
    Submission,
    TransferRecord,
    call_done,
    record_elsewhere,
)
from asynchicache.transfer.statistics import CompletionCounters, TransferStatistics
from asynchicache.transfer.ticket import Ticket, done_ticket
from asynchicache.types import PoolTransfer, check_number


class CopyOrder(msgspec.Struct, frozen=True):
    """One copy for the workers; made of plain values, so that any encoding carries it.

    Attributes:
        id: for its `CopyResult`.
        direction: `load` or `backup`.
        transfers: (pool, sources, destinations): a load copies host slots to device pages, a backup the other
            way. Pools that share slots have a transfer each.
    """

    id: int
    direction: Direction
    transfers: tuple[PoolTransfer, ...]


class CopyResult(msgspec.Struct, frozen=True):
    """How a copy ended on one worker.

    Attributes:
        id: of the order.
        error: why it failed; empty if all of its bytes have arrived. In both cases nothing writes to its
            destinations any more.
    """

    id: int
    error: str = ""


@dataclass(slots=True, eq=False)
class _OpenOrder:
    """An order that has not ended.

    Attributes:
        operation, submission, record: what the ticket refers to.
        reported: workers that have reported.
        error: the first error that one of them reported.
        taken: whether `take` has handed it out.
    """

    operation: CacheOperation
    submission: Submission
    record: TransferRecord
    reported: set[int] = field(default_factory=set)
    error: str = ""
    taken: bool = False


class RemoteCopies:
    """Hands the copies of one cache out. For `HybridCache.open(engine=...)`, once; confined to its loop.

    Attributes:
        stray: results of orders that are not open: repeated, or of another cache.
    """

    audit = None
    in_process = False

    def __init__(self, pages: Mapping[str, int], *, workers: int = 1) -> None:
        """
        Args:
            pages: device pages of each pool that owns slots, the same on every worker.
            workers: how many report the end of each copy.

        Raises:
            ConfigError: a number is not above 0.
        """
        check_number("workers", workers)
        for name, count in (("workers", workers), *pages.items()):
            check_number(name, count)
            if count < 1:
                raise ConfigError(f"{name} {count}: 1 at least")
        self.stray = 0
        self._pages = dict(pages)
        self._workers = workers
        self._host: HostHandle | None = None
        self._layers = 1
        self._extents: dict[str, PoolShape] = {}
        self._port: Port | None = None
        self._orders: dict[int, _OpenOrder] = {}
        self._news = asyncio.Event()
        self._idle = asyncio.Event()
        self._idle.set()
        self._number = self._failed = 0
        self._completed = CompletionCounters()
        self._closed = False

    # For the engine

    @property
    def host(self) -> HostHandle:
        """Where workers find the host memory.

        Raises:
            UsageError: the cache is not open yet.
        """
        if self._host is None:
            raise UsageError("there is host memory once the cache is open")
        return self._host

    def take(self) -> list[CopyOrder]:
        """The orders that were not taken yet, in order. A worker begins with each as soon as its sources are
        there: with a load at once, with a backup after the forward that writes the pages."""
        self._news.clear()
        orders = []
        for number, order in self._orders.items():
            if not order.taken:
                order.taken = True
                transfers = [
                    PoolTransfer(pool, list(sources), list(destinations))
                    for pool, sources, destinations in order.operation.transfers
                ]
                orders.append(CopyOrder(number, order.operation.direction, tuple(transfers)))
        return orders

    async def wait(self) -> None:
        """Wait until there are orders to `take`, or the cache is closed."""
        await self._news.wait()

    def finish(self, results: Iterable[CopyResult], *, worker: int = 0) -> None:
        """Take the results of one worker; unknown and repeated ones are counted as `stray`.

        Args:
            results: of orders that `take` returned.
            worker: its number.

        Raises:
            UsageError: there is no such worker.
        """
        if not 0 <= worker < self._workers:
            raise UsageError(f"worker {worker} is none of {self._workers}")
        for result in results:
            order = self._orders.get(result.id)
            if order is None or not order.taken or worker in order.reported:
                self.stray += 1
                continue
            order.reported.add(worker)
            order.error = order.error or result.error
            if len(order.reported) == self._workers:
                self._end(result.id, order.error)

    def abandon(self, reason: str) -> None:
        """Fail every open order: its workers have ended, so nothing writes any more."""
        for number in list(self._orders):
            self._end(number, reason)

    # For the cache

    def pages(self, spec: ModelSpec) -> dict[str, int]:
        """The number of pages of each pool that owns slots.

        Raises:
            ConfigError: the pools are not those of `spec`.
        """
        names = [pool.name for pool in spec.owners]
        if sorted(self._pages) != sorted(names):
            raise ConfigError(
                f"pages of pools {list(self._pages)}; pools with slots of their own are {names}"
            )
        return dict(self._pages)

    def start(self, spec: ModelSpec, host: HostHandle, port: Port) -> None:
        """Begin to hand out the copies of a cache.

        Raises:
            UsageError: it belongs to another cache.
        """
        if self._port is not None:
            raise UsageError("these RemoteCopies belong to a cache already; make new ones for each")
        self._port, self._host, self._layers = port, host, spec.layers
        self._extents = {
            pool.name: PoolShape(
                pool, spec.page_size, self._pages[pool.slots_of or pool.name], host.pools[pool.name].slots
            )
            for pool in spec.pools
        }

    def submit(
        self,
        operation: CacheOperation,
        *,
        after: Sequence[Event] = (),
        reads: Reads = (),
        done: Done,
        on_wait: OnWait | None = None,
    ) -> Ticket:
        """Hand out an operation; an empty one is done at once. Streams of this process order nothing.

        Raises:
            ClosedError: the cache is closed.
            UsageError: an unknown pool or an invalid slot.
        """
        if self._closed:
            raise ClosedError("the cache is closed, and hands out no copies")
        for pool, sources, destinations in operation.transfers:
            check_slots(pool, operation.direction.source, sources, self._extents)
            check_slots(pool, operation.direction.destination, destinations, self._extents)
        if operation.empty:
            call_done(done, None)
            return done_ticket(self._layers, on_wait)
        self._number += 1
        submission = Submission(None, operation, done, (), (), on_wait)
        record = record_elsewhere(self._number, submission, self._layers, self._nbytes(operation))
        self._orders[self._number] = _OpenOrder(operation, submission, record)
        self._idle.clear()
        self._news.set()
        return Ticket(submission, self._layers)

    def _nbytes(self, operation: CacheOperation) -> int:
        return sum(
            len(transfer.sources)
            * self._extents[transfer.pool].spec.slot_bytes(self._extents[transfer.pool].page_size)
            for transfer in operation.transfers
        )

    def _end(self, number: int, error: str) -> None:
        order = self._orders.pop(number)
        if error:
            self._failed += 1
            order.record.fail(CopyEndedError(f"copy {number}: {error}"))
        else:
            order.record.land(0)
            assert order.record.plan is not None, "it was made with one"
            self._completed.nbytes[order.record.direction] += order.record.plan.nbytes
        order.submission.release()
        if not self._orders:
            self._idle.set()

    def statistics(self) -> TransferStatistics:
        return TransferStatistics(
            self._number,
            self._number,
            self._failed,
            len(self._orders),
            dict(self._completed.nbytes),
            {},
            dict.fromkeys((Direction.LOAD, Direction.BACKUP), "handed out"),
            AuditStatistics(),
            self._completed.latencies(),
        )

    def in_flight(self) -> list[CacheOperation]:
        """Operations whose `done` has not been called."""
        return [order.operation for order in self._orders.values()]

    def end_unstarted(self) -> None:
        """Fail orders that were not taken: nobody will."""
        for number in [number for number, order in self._orders.items() if not order.taken]:
            self._end(number, "the cache closed before it was taken")
        self._news.set()

    async def aclose(self, deadline_seconds: float) -> int:
        """Refuse new operations and wait for the workers' results, for `deadline_seconds` at most.

        Returns:
            How many orders were given up. Workers may still read and write their host slots.
        """
        self._closed = True
        self.end_unstarted()
        try:
            async with asyncio.timeout(deadline_seconds):
                await self._idle.wait()
        except TimeoutError:
            given_up = list(self._orders.values())
            self._orders.clear()
            for order in given_up:
                order.record.fail(TransferError(f"given up after {deadline_seconds} s: the cache closed"))
            return len(given_up)
        return 0
