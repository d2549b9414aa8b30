"""Runs cache operations: merges those of one loop tick, orders them by their slots, enqueues them off
the loop, and tells when they have landed.

Everything but `_enqueue` and what it calls runs on the loop. Ordering is the device's: a copy waits
on the streams for the copies that it depends on, and the host never waits to enqueue.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import anyio

from asynchicache.errors import CacheError, ClosedError, RequestStateError, TransferError
from asynchicache.ports import Port
from asynchicache.streams.base import Device, Event, Stream
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.transfer.copies import PageCopier, PoolMemory
from asynchicache.transfer.hazards import HazardTable
from asynchicache.transfer.plan import CacheOperation, Direction, check_slots, merge
from asynchicache.transfer.record import Done, GroupState, TransferRecord, call_done
from asynchicache.transfer.ticket import Ticket, TransferView
from asynchicache.types import Tier

GROUP_BYTES = 8 << 20
"""Bytes of layers that are worth a launch of their own: some 150 microseconds of a PCIe 5 bus."""


@dataclass(frozen=True, slots=True)
class TransferStatistics:
    """Counts since the engine was made.

    Attributes:
        operations: operations submitted, without empty ones.
        launches: transfers that they were merged into.
        failed: transfers that failed, or were given up.
        in_flight: operations whose `done` has not been called.
        nbytes: bytes landed, by direction.
    """

    operations: int
    launches: int
    failed: int
    in_flight: int
    nbytes: Mapping[Direction, int]


class TransferEngine:
    """Moves pages between device and host memory, and on the device.

    Confined to the thread of the loop it is made on. Close it before the reactor, the device and
    the pools.
    """

    def __init__(
        self,
        device: Device,
        memories: Mapping[str, PoolMemory],
        layers: int,
        port: Port,
        reactor: CompletionReactor,
        *,
        group_bytes: int = GROUP_BYTES,
        submit_inline: bool = False,
    ) -> None:
        """
        Args:
            device: whose streams run the copies.
            memories: by pool.
            layers: layers of the model, those without a cache included.
            port: how the submit thread reaches the loop.
            reactor: tells of completion.
            group_bytes: what makes a group of a load's layers worth a launch. Default: 8 MiB.
            submit_inline: enqueue on the loop, for devices that run in virtual time or in their
                caller. Default: False, on a thread of the engine's own.
        """
        self._device = device
        self._layers = layers
        self._port = port
        self._reactor = reactor
        self._group_bytes = group_bytes
        self._copier = PageCopier(memories)
        self._extents = {pool: memory.extent for pool, memory in memories.items()}
        self._hazards = HazardTable(self._extents)
        self._streams = {direction: device.stream(direction.value) for direction in Direction}
        # One thread: what is submitted first is enqueued first, so every event that a transfer
        # waits for has been recorded by then.
        self._submitter = None if submit_inline else port.worker("asynchicache-submit")
        self._pending: dict[Direction, TransferRecord] = {}
        self._live: dict[int, TransferRecord] = {}
        self._idle = asyncio.Event()
        self._idle.set()
        self._closed = False
        self._flush_due = False
        self._number = self._operations = self._launches = self._failed = 0
        self._nbytes = dict.fromkeys(Direction, 0)

    def submit(
        self,
        operation: CacheOperation,
        *,
        after: Sequence[Event] = (),
        reads: Sequence[tuple[str, Sequence[int]]] = (),
        done: Done,
    ) -> Ticket:
        """Start moving; merged with what else of its direction is submitted in this loop tick.

        Copies that touch the same slots run in the order of submission, other directions included.

        Args:
            operation: what to move. An empty one is done at once.
            after: recorded events that the copies wait for on the device, such as the end of the
                forward that writes the sources; not to be recorded again before `Ticket.submitted`.
            reads: (pool, device slots) that the ticket's user will read although this operation
                does not write them: the ticket depends on whatever in flight does.
            done: called on the loop, once, when the operation's bytes have landed, or with the error
                that keeps them from it; before the ticket's waiters run, and also if there are none.
                Here pages are given back. After an error the device may still write to them.

        Raises:
            ClosedError: the engine is closed.
            UsageError: an unknown pool, or a slot that is not there.
            RequestStateError: an event in `after` was never recorded.
        """
        self._check(operation, after, reads)
        views = self._views_of_writers(reads)
        if operation.empty:
            call_done(done, None)
            return Ticket(self._layers, views)
        since = self._oldest
        needs = self._records(self._hazards.writers_of_sources(operation, since))
        follows = self._records(self._hazards.users_of_destinations(operation, since))
        if any(record.plan is None for record in needs | follows):
            self._flush()  # copies of one batch have no order, so a dependent one takes the next
        record = self._open_batch(operation.direction)
        record.after.extend(after)
        record.needs |= needs
        record.follows |= follows
        self._hazards.mark(operation, record.number)
        self._operations += 1
        return Ticket(self._layers, (TransferView(record, record.add(operation, done)), *views))

    def statistics(self) -> TransferStatistics:
        in_flight = sum(record.unfinished for record in self._live.values())
        return TransferStatistics(
            self._operations, self._launches, self._failed, in_flight, dict(self._nbytes)
        )

    async def aclose(self, deadline_seconds: float) -> int:
        """Refuse new operations and wait for those in flight, for `deadline_seconds` at most.

        Returns:
            How many operations were given up; their `done` was called with an error, and the device
            may still write to their pages: leak them.
        """
        self._closed = True
        self._flush()
        with anyio.move_on_after(deadline_seconds):
            await self._idle.wait()
        given_up = self.statistics().in_flight
        for record in list(self._live.values()):
            self._fail(record, TransferError(f"given up after {deadline_seconds} s: the engine closed"))
        if self._submitter is not None and given_up:
            self._submitter.abandon()  # it may hang in the driver: nobody could join it
        elif self._submitter is not None:
            await self._port.run_blocking(self._submitter.close)
        return given_up

    # Before the copies, on the loop.

    def _check(
        self,
        operation: CacheOperation,
        after: Iterable[Event],
        reads: Iterable[tuple[str, Sequence[int]]],
    ) -> None:
        if self._closed:
            raise ClosedError("the transfer engine is closed")
        direction = operation.direction
        for pool, sources, destinations in operation.transfers:
            check_slots(pool, direction.source, sources, self._extents)
            check_slots(pool, direction.destination, destinations, self._extents)
        for pool, slots in reads:
            check_slots(pool, Tier.DEVICE, slots, self._extents)
        if not all(event.recorded for event in after):
            raise RequestStateError("an operation is to start after an event that was never recorded")

    def _views_of_writers(self, reads: Iterable[tuple[str, Sequence[int]]]) -> tuple[TransferView, ...]:
        numbers: set[int] = set()
        for pool, slots in reads:
            numbers |= self._hazards.writers(pool, Tier.DEVICE, slots, self._oldest)
        return tuple(TransferView(record, None) for record in self._records(numbers))

    @property
    def _oldest(self) -> int:
        """The number of the oldest transfer in flight; above all numbers if there is none."""
        return next(iter(self._live), self._number + 1)

    def _records(self, numbers: Iterable[int]) -> set[TransferRecord]:
        return {self._live[number] for number in numbers if number in self._live}

    def _open_batch(self, direction: Direction) -> TransferRecord:
        record = self._pending.get(direction)
        if record is None:
            self._number += 1
            record = self._pending[direction] = TransferRecord(self._number, direction)
            self._live[record.number] = record
            self._idle.clear()
        if not self._flush_due:
            self._flush_due = True
            asyncio.get_running_loop().call_soon(self._flush)
        return record

    def _flush(self) -> None:
        self._flush_due = False
        pending, self._pending = list(self._pending.values()), {}
        # Batches of one flush do not depend on each other, so the most urgent may go first.
        for record in sorted(pending, key=lambda record: (record.priority, record.number)):
            self._start(record)

    def _start(self, record: TransferRecord) -> None:
        group_bytes = self._group_bytes if record.direction is Direction.LOAD else None
        try:
            plan = merge(record.operations, self._extents, self._layers, group_bytes)
        except CacheError as error:
            self._fail(record, error)
            return
        record.start(plan, [GroupState(self._device.event()) for _ in plan.groups])
        self._launches += 1
        if self._submitter is None:
            self._enqueue(record)
        else:
            self._submitter.submit(partial(self._enqueue, record))

    # The copies, on the submit thread.

    def _enqueue(self, record: TransferRecord) -> None:
        """Enqueue a transfer, whatever happens: a failure is told, so that nobody waits for ever."""
        stream = self._streams[record.direction]
        try:
            self._wait_for_dependencies(record, stream)
            self._enqueue_groups(record, stream)
        except Exception as error:  # noqa: BLE001 - the boundary of the thread
            record.error = error
            self._abandon(record, stream, error)
        finally:
            record.forget_dependencies()
            self._tell(record.settled.set)

    def _wait_for_dependencies(self, record: TransferRecord, stream: Stream) -> None:
        for other in record.needs:
            error = other.error or other.failure
            if error is not None:
                raise TransferError("it reads what another was to write, which failed") from error
        for event in record.after:
            stream.wait_event(event)
        for other in sorted(record.needs | record.follows, key=lambda other: other.number):
            if other.last_event is not None:
                stream.wait_event(other.last_event)

    def _enqueue_groups(self, record: TransferRecord, stream: Stream) -> None:
        plan = record.plan
        if plan is None:
            return
        for index, (group, state) in enumerate(zip(plan.groups, record.groups, strict=True)):
            self._copier.enqueue(stream, plan, group)
            stream.record(state.event)
            record.last_event = state.event
            state.submitted = True
            self._reactor.track(self._device, stream, partial(self._reached, record, index))

    def _abandon(self, record: TransferRecord, stream: Stream, error: Exception) -> None:
        """Fail a transfer that could not be enqueued, once what was enqueued of it has run."""
        try:
            record.last_event = self._device.event()
            stream.record(record.last_event)
            self._reactor.track(self._device, stream, lambda _: self._fail(record, error))
        except Exception:  # noqa: BLE001 - nothing can be tracked any more, and the cause is known
            self._tell(partial(self._fail, record, error))

    def _tell(self, call: Callable[[], None]) -> None:
        if self._submitter is None:
            call()
        else:
            self._port.post(call)

    # After the copies, on the loop.

    def _reached(self, record: TransferRecord, index: int, error: BaseException | None) -> None:
        if record.number not in self._live:
            return
        if error is not None:
            self._fail(record, error)
            return
        record.land(index)
        if record.plan is not None and index == len(record.plan.groups) - 1:
            self._nbytes[record.direction] += record.plan.nbytes
            self._retire(record)

    def _fail(self, record: TransferRecord, error: BaseException) -> None:
        if record.number in self._live:
            self._failed += 1
            record.fail(error)
            self._retire(record)

    def _retire(self, record: TransferRecord) -> None:
        del self._live[record.number]
        if not self._live:
            self._idle.set()
