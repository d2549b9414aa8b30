"""Runs cache operations: accepts them on the loop, enqueues them off it, and reports when they have landed.

On the loop a submission is only checked and appended to a list. When the loop's iteration ends, all of them
go to the submit thread, which merges them, orders them by their slots, and enqueues them. The device keeps
the order: a copy waits on the streams for the copies that it depends on. The host waits only where a large
load would be enqueued far ahead of the device.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial

import anyio

from asynchicache.errors import (
    AuditError,
    ClosedError,
    ConfigError,
    CopyEndedError,
    RequestStateError,
    TransferError,
    UsageError,
)
from asynchicache.kernels.select import FindMethods
from asynchicache.ports import Port
from asynchicache.streams.base import Device, Event, Stream
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.transfer.audit import AuditSample, AuditStatistics, PageAudit
from asynchicache.transfer.copies import PageCopier, PlanCopies, PoolMemory
from asynchicache.transfer.paths import CopyPath, PathTable
from asynchicache.transfer.plan import CacheOperation, Direction, TransferPlan, check_slots, slot_array
from asynchicache.transfer.record import (
    Done,
    InFlightOperations,
    OnWait,
    Reads,
    Submission,
    Tick,
    TransferRecord,
    call_done,
)
from asynchicache.transfer.schedule import Scheduler
from asynchicache.transfer.statistics import CompletionCounters, TransferStatistics
from asynchicache.transfer.ticket import Ticket, done_ticket
from asynchicache.types import Tier

logger = logging.getLogger(__name__)

GROUP_BYTES = 8 << 20
"""Bytes of layers that are worth a launch of their own: about 150 microseconds of a PCIe 5 bus."""

AHEAD_BYTES = 256 << 20
"""Bytes of a load that are enqueued and have not landed, or two groups if these are more. What an engine
copies for itself, such as token ids, waits behind them all, as a copy engine serves in order. Fewer would be
copied before the submit thread, beside busy Python, has the interpreter's lock (5 ms) to enqueue more. All is
enqueued at once where a task waits for that, in `Ticket.submitted()`."""

_NO_POOL = -1, -1  # capacities of an unknown pool: even an empty transfer (highest slot -1) exceeds them


@dataclass(slots=True, eq=False)
class _Enqueueing:
    """A transfer that is being enqueued.

    Attributes:
        groups: enqueues them; None before the first.
        whole: whether to wait for nothing that may be ahead.
    """

    record: TransferRecord
    tick: Tick
    copies: PlanCopies | None = None
    groups: Iterator[Event] | None = None
    whole: bool = False


class LocalTransfers:
    """Moves pages between device and host memory, and on the device.

    Confined to the thread of the loop it is made on, except the methods marked otherwise. Close it before the
    reactor, the device and the pools.

    Attributes:
        audit: compares a sample of the pages; None if there is no audit.
        scheduler: makes transfers of submissions.
    """

    in_process = True

    def __init__(
        self,
        device: Device,
        memories: Mapping[str, PoolMemory],
        layers: int,
        port: Port,
        reactor: CompletionReactor,
        *,
        group_bytes: int = GROUP_BYTES,
        ahead_bytes: int = AHEAD_BYTES,
        submit_inline: bool = False,
        paths: PathTable | None = None,
        copy_path: CopyPath | None = None,
        audit: PageAudit | None = None,
        methods: FindMethods | None = None,
    ) -> None:
        """
        Args:
            device: whose streams run the copies.
            memories: by pool.
            layers: layers of the model, those without a cache included.
            port: how the submit thread reaches the loop.
            group_bytes: bytes that make a group of a load's layers worth a launch. Default: 8 MiB.
            ahead_bytes: see `AHEAD_BYTES`. Default: 256 MiB.
            submit_inline: enqueue on the loop, for devices that run in virtual time or in their caller.
            paths: measured rates of each copy path. Default: rates that a CPU had; plain copies on a GPU.
            copy_path: always use this path.
            audit: compares a sample of what comes back to the device with what had left it.
            methods: finds what can copy a pool. Default: `copy_methods`.

        Raises:
            ConfigError: a pool is on another device, or this device does not have the path.
        """
        for pool, memory in memories.items():
            if str(memory.device.device) != device.name:
                there = memory.device.device
                raise ConfigError(f"pool {pool!r} is on {there}, the streams are {device.name}'s")
        self._device, self._layers = device, layers
        self._port, self._reactor = port, reactor
        self._copier = PageCopier(memories, table=paths, force=copy_path, methods=methods)
        self._extents = {pool: memory.extent for pool, memory in memories.items()}
        self._capacities = {pool: (one.device_slots, one.host_slots) for pool, one in self._extents.items()}
        self.scheduler = Scheduler(self._extents, layers, group_bytes, self._watch)
        self._streams = {
            direction: device.stream(direction.value, urgent=direction is not Direction.BACKUP)
            for direction in Direction
        }
        # One thread, in order: every event that a transfer waits for has been recorded by then.
        self._submitter = None if submit_inline else port.worker("asynchicache-submit")
        self.audit = audit
        self._auditor = None if submit_inline else port.worker("asynchicache-audit")
        self._ahead_bytes = ahead_bytes
        self._paced: _Enqueueing | None = None  # the one load whose other groups are enqueued later
        self._tick: Tick | None = None
        self._in_flight = InFlightOperations()
        self._closed = False
        self._gave_up = False  # every operation was reported as failed: what lands later is not reported
        self._launches = self._failed = 0
        self._completed = CompletionCounters()

    def submit(
        self,
        operation: CacheOperation,
        *,
        after: Sequence[Event] = (),
        reads: Reads = (),
        done: Done,
        on_wait: OnWait | None = None,
    ) -> Ticket:
        """Start an operation; it merges with others of its direction submitted in this iteration of the loop.

        Copies that touch the same slots run in the order of submission, other directions included.

        Args:
            operation: what to move. An empty one is done at once.
            after: recorded events that the copies wait for on the device, such as the end of the
                forward that writes the sources; not to be recorded again before `Ticket.submitted`.
            reads: (pool, device slots) that the ticket's user will read although this operation
                does not write them: the ticket depends on the transfers in flight that do.
            done: called on the loop, once, when the operation's bytes have landed, or with the error
                that prevented it; before the ticket's waiters run, and also if there are none. Pages are
                given back here. After an error the device may still write to them: leak them, do not free
                them.
            on_wait: called, from any thread, with each stream that a fence of the ticket makes wait.
                Default: the caller does not need to know them.

        Raises:
            ClosedError: they are closed.
            UsageError: an unknown pool, an invalid slot, an event of another device.
            RequestStateError: an event in `after` was never recorded.
        """
        if self._closed:
            raise ClosedError("the transfers are closed")
        for pool, device, host in operation.highest_slots:
            device_slots, host_slots = self._capacities.get(pool, _NO_POOL)
            if device >= device_slots or host >= host_slots:
                self._raise_invalid(operation)
        if after or reads:
            # Copied, because the submit thread reads them later and the caller may change its lists.
            after, reads = tuple(after), [(pool, slot_array(slots)) for pool, slots in reads]
            self._check_dependencies(after, reads)
        if not operation.highest_slots:
            return self._submit_reader(operation, after, reads, done, on_wait)
        tick = self._tick or self._open_tick()
        submission = Submission(tick, operation, done, after, reads, on_wait)
        tick.operations.append(submission)
        return Ticket(submission, self._layers)

    def statistics(self) -> TransferStatistics:
        self._in_flight.register(self._tick)
        return TransferStatistics(
            self._in_flight.total,
            self._launches,
            self._failed,
            len(self._in_flight),
            dict(self._completed.nbytes),
            {pool: dict(nbytes) for pool, nbytes in self._copier.nbytes.items()},
            self._copier.choice,
            replace(self.audit.statistics) if self.audit else AuditStatistics(),
            self._completed.latencies(),
        )

    def in_flight(self) -> list[CacheOperation]:
        """Operations whose `done` has not been called."""
        self._in_flight.register(self._tick)
        return [submission.operation for submission in self._in_flight.submissions()]

    def end_unstarted(self) -> None:
        """Nothing: all that was submitted is started by itself."""

    async def aclose(self, deadline_seconds: float) -> int:
        """Refuse new operations and wait for those in flight, for `deadline_seconds` at most.

        Returns:
            How many operations were given up. Their `done` was called with an error, and the device may still
            write to their pages: the caller must leak these, not free them.
        """
        self._closed = True
        if self._tick is not None:
            self._flush(self._tick)
        with anyio.move_on_after(deadline_seconds):
            await self._in_flight.idle.wait()
        given_up = self._in_flight.submissions()
        # If nothing hangs, the submit thread resolves the readers itself.
        readers = self._in_flight.unresolved_readers() if given_up else ()
        error = TransferError(f"given up after {deadline_seconds} s: the transfers closed")
        self._fail_all([*given_up, *readers], error)
        self._gave_up = True
        if self._submitter is not None and given_up:
            self._submitter.abandon()  # it may hang in the driver, so that joining it would hang too
        elif self._submitter is not None:
            await self._port.run_blocking(self._submitter.close)
        if self._auditor is not None:
            await self._port.run_blocking(self._auditor.close)
        return len(given_up)

    # Before the copies, on the loop.

    def _raise_invalid(self, operation: CacheOperation) -> None:
        """Raise the error that fits an operation; does nothing if it is valid."""
        for pool, sources, destinations in operation.transfers:
            check_slots(pool, operation.direction.source, sources, self._extents)
            check_slots(pool, operation.direction.destination, destinations, self._extents)

    def _submit_reader(
        self,
        operation: CacheOperation,
        after: Sequence[Event],
        reads: Reads,
        done: Done,
        on_wait: OnWait | None,
    ) -> Ticket:
        """Submit an operation that moves nothing; transfers in flight may bring what it reads."""
        self._raise_invalid(operation)
        call_done(done, None)
        if not (reads and (self._in_flight or self._tick)):
            return done_ticket(self._layers, on_wait)
        tick = self._tick or self._open_tick()
        submission = Submission(tick, operation, None, after, reads, on_wait)
        self._in_flight.add_reader(tick, submission)
        return Ticket(submission, self._layers)

    def _check_dependencies(self, after: Sequence[Event], reads: Reads) -> None:
        for pool, slots in reads:
            check_slots(pool, Tier.DEVICE, slots, self._extents)
        for event in after:
            if not self._device.owns(event):
                raise UsageError(f"{event!r} is not an event of device {self._device.name}")
            if not event.recorded:
                raise RequestStateError("an operation is to start after an event that was never recorded")

    def _open_tick(self) -> Tick:
        self._tick = tick = Tick(self._port.now())
        asyncio.get_running_loop().call_soon(self._flush, tick)
        return tick

    def _flush(self, tick: Tick) -> None:
        if self._tick is not tick:
            return  # `aclose` flushed it before the iteration ended
        self._in_flight.register(self._tick)
        self._tick = None
        if self._submitter is None:
            self._run_tick(tick)
            return
        try:
            self._submitter.submit(partial(self._run_tick, tick))
        except RuntimeError as error:  # the system starts no more threads
            self._fail_tick(tick, error)

    # The copies, on the submit thread.

    def _run_tick(self, tick: Tick) -> None:
        """Enqueue the operations of one tick. Every failure is reported, so that no waiter hangs."""
        if self._submitter is not None:
            self._device.own_thread()
        try:
            records = self.scheduler.schedule([*tick.operations, *tick.readers])
        except Exception as error:  # noqa: BLE001 - the boundary of the thread
            self._call_on_loop(partial(self._fail_tick, tick, error, self.scheduler.abandon(error)))
            return
        self._launches += len(records)
        for record in records:
            paced = self._paced
            if paced is not None and (record.direction is Direction.LOAD or paced.record in record.earlier):
                self._go_on(paced, whole=True)  # they are on one stream, or this one waits for the last event
            self._go_on(_Enqueueing(record, tick))
        if not records:
            self._call_on_loop(tick.planned.set)
        with suppress(MemoryError):  # the next tick tries again
            self.scheduler.settle()

    def _go_on(self, load: _Enqueueing, *, whole: bool = False) -> None:
        """Enqueue groups of a transfer, up to the last, or as many as may be ahead of the device. The others
        come after what else this thread has to do."""
        record, stream = load.record, self._streams[load.record.direction]
        load.whole = whole
        if self._paced is load:
            self._paced = None
        try:
            if load.groups is None:
                load.groups = self._begin(load, stream)
            with stream.current():
                if next(load.groups, None) is not None and self._submitter is not None:
                    self._paced = load
                    self._submitter.submit(self._go_on_later)
                    return
        except Exception as error:  # noqa: BLE001 - the boundary of the thread
            record.error = error
            self._abandon(record, stream, error)
        if load.copies is not None:
            load.copies.end(record.last_event)
        record.release()
        self._call_on_loop(partial(load.tick.settle, record))

    def _go_on_later(self) -> None:
        if self._paced is not None:
            self._go_on(self._paced)

    def _begin(self, load: _Enqueueing, stream: Stream) -> Iterator[Event]:
        record = load.record
        self._wait_for_dependencies(record, stream)
        if record.plan is None:
            raise record.error or TransferError("there is no plan")
        load.copies = self._copier.prepare(record.plan)
        return self._groups(load, record.plan, load.copies, stream)

    def _wait_for_dependencies(self, record: TransferRecord, stream: Stream) -> None:
        # What a failed transfer should have written must not be read. Overwriting it is harmless, so
        # transfers in `runs_after` may have failed.
        for other in record.reads_from:
            error = other.error or other.failure
            if error is not None:
                raise CopyEndedError("it reads what another was to write, which failed") from error
        for event in record.after:
            stream.wait_event(event)
        for other in sorted(record.earlier, key=lambda other: other.number):
            # The one submit thread enqueues in order of number, so the event of every transfer before this
            # one is recorded by now; None means that all of it has landed (the loop removes the event then).
            last = other.last_event
            # Transfers of the same direction are ahead on the same stream.
            if last is not None and other.direction is not record.direction:
                stream.wait_event(last)

    def _groups(
        self, load: _Enqueueing, plan: TransferPlan, copies: PlanCopies, stream: Stream
    ) -> Iterator[Event]:
        """Enqueues the groups of a transfer; stops, with the event behind which it goes on, where more would
        be too many."""
        record, last = load.record, len(plan.groups) - 1
        ahead = self._groups_ahead(plan)
        sample = self.audit.choose(plan) if self.audit else None  # here: it allocates
        for number, layers in enumerate(plan.groups):
            landed = record.event(number - ahead) if number >= ahead else None
            if landed is not None and not (load.whole or record.whole):
                yield landed
                if not load.whole:
                    landed.synchronize()
            self._copier.enqueue(stream, copies, layers)
            if sample is not None:
                # Before the group's event: a forward that waits for the group may overwrite its pages.
                sample.stage(stream, layers)
            event = self._record_event(stream)
            index = record.enqueue(event)
            if record.has_enqueue_waiter(index):
                self._call_on_loop(partial(record.wake_enqueue_waiters, index))
            if record.is_watched(index):
                of_last = sample if index == last else None
                reached = partial(self._on_group_reached, record, index, of_last)
                self._reactor.track(self._device, stream, reached, event=event)
            if index == 0 < last and self._submitter is not None:
                # A task may wait for the first layers while others are being enqueued.
                self._call_on_loop(load.tick.planned.set)
                self._device.yield_to_streams()

    def _groups_ahead(self, plan: TransferPlan) -> int:
        """How many groups may be enqueued and not have landed. In virtual time nobody could wait for one."""
        if self._submitter is None:
            return len(plan.groups)
        return max(2, self._ahead_bytes // max(1, plan.nbytes // len(plan.groups)))

    def _abandon(self, record: TransferRecord, stream: Stream, error: Exception) -> None:
        """Fail a transfer that could not be enqueued, once what was enqueued of it has run: until then the
        device writes to its pages, and failing it lets their owners give them back."""

        def reached(device_error: BaseException | None) -> None:
            if device_error is not None or isinstance(error, CopyEndedError):
                self._fail(record, error)
                return
            ended = CopyEndedError(str(error))
            ended.__cause__ = error
            self._fail(record, ended)

        try:
            event = record.last_event = self._record_event(stream)
            self._reactor.track(self._device, stream, reached, event=event)
        except Exception:  # noqa: BLE001 - nothing can be tracked any more, and the cause is known
            self._call_on_loop(partial(self._fail, record, error))

    def _record_event(self, stream: Stream) -> Event:
        """One event behind all that was enqueued; fences, later transfers and the reactor share it."""
        event = self._device.event()
        stream.record(event)
        return event

    def _call_on_loop(self, call: Callable[[], object]) -> None:
        if self._submitter is None:
            call()
        else:
            self._port.post(call)

    # After the copies, on the loop.

    def _watch(self, record: TransferRecord, index: int) -> None:
        """A task waits for a group that is enqueued and of which nobody would hear."""
        reached = partial(self._on_group_reached, record, index, None)
        event, stream = record.event(index), self._streams[record.direction]
        self._reactor.track(self._device, stream, reached, event=event, late=True)

    def _on_group_reached(
        self, record: TransferRecord, index: int, sample: AuditSample | None, error: BaseException | None
    ) -> None:
        if record.finished:
            return
        if error is not None:
            self._fail(record, error)
        elif sample is None:
            self._land(record, index)
        elif self._auditor is None:
            self._fingerprint(record, index, sample)
        else:
            self._auditor.submit(partial(self._fingerprint, record, index, sample))

    def _fingerprint(self, record: TransferRecord, index: int, sample: AuditSample) -> None:
        """Hash the pages, which takes milliseconds; on the audit's thread."""
        try:
            self._call_on_loop(partial(self._compare, record, index, sample, sample.digests()))
        except Exception as error:  # noqa: BLE001 - the boundary of the thread
            self._call_on_loop(partial(self._fail, record, error))

    def _compare(
        self, record: TransferRecord, index: int, sample: AuditSample, digests: Sequence[bytes]
    ) -> None:
        if record.finished:
            return
        problems = sample.finish(digests)
        if problems:
            logger.error("audit: %s", "; ".join(problems))
            self._fail(record, AuditError(f"{len(problems)} pages are not what they were: {problems[0]}"))
        else:
            self._land(record, index)

    def _land(self, record: TransferRecord, index: int) -> None:
        if self._gave_up:
            return
        completed = record.land(index)
        self._completed.count(record.direction, completed, self._port.now())
        self._complete(completed)
        if record.finished and record.plan is not None:
            self._completed.nbytes[record.direction] += record.plan.nbytes

    def _fail(self, record: TransferRecord, error: BaseException) -> None:
        if not (record.finished or self._gave_up):
            self._failed += 1
            self._complete(record.fail(error))

    def _fail_tick(self, tick: Tick, error: BaseException, records: Sequence[TransferRecord] = ()) -> None:
        """Fail what a tick submitted, none of which was enqueued, and the transfers that were made of it."""
        tick.planned.set()
        self._fail_all([*tick.operations, *tick.readers], error)
        for record in records:
            self._fail(record, error)

    def _fail_all(self, submissions: Sequence[Submission], error: BaseException) -> None:
        """Fail submissions, whether or not they have transfers."""
        for submission in submissions:
            if submission.own is not None:
                self._fail(submission.own, error)
            submission.fail(error)
            if submission.complete(error):
                self._in_flight.complete(submission)

    def _complete(self, submissions: Sequence[Submission]) -> None:
        for submission in submissions:
            submission.release()
            self._in_flight.complete(submission)
