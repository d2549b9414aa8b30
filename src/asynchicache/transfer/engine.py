"""Runs cache operations: takes them on the loop, enqueues them off it, and tells when they have landed.

On the loop a submission is checked and written down, no more. At the end of the tick all of them go to the
submit thread, which merges them, orders them by their slots, and enqueues them. Ordering is the device's: a
copy waits on the streams for the copies that it depends on, and the host never waits to enqueue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial

import anyio

from asynchicache.errors import (
    AuditError,
    ClosedError,
    ConfigError,
    RequestStateError,
    TransferError,
    UsageError,
)
from asynchicache.ports import Port
from asynchicache.streams.base import Device, Event, Stream
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.transfer.audit import AuditSample, AuditStatistics, PageAudit
from asynchicache.transfer.copies import PageCopier, PoolMemory
from asynchicache.transfer.paths import CopyPath, PathTable
from asynchicache.transfer.plan import CacheOperation, Direction, check_slots, slot_array
from asynchicache.transfer.record import (
    Done,
    GroupState,
    Reads,
    Submission,
    Tick,
    TransferRecord,
    Untold,
    call_done,
)
from asynchicache.transfer.schedule import Batcher
from asynchicache.transfer.statistics import Landed, TransferStatistics
from asynchicache.transfer.ticket import Ticket
from asynchicache.types import Tier

logger = logging.getLogger(__name__)

GROUP_BYTES = 8 << 20
"""Bytes of layers that are worth a launch of their own: some 150 microseconds of a PCIe 5 bus."""

_NO_POOL = -1, -1  # slots of a pool that is not there: below even a transfer of nothing


class TransferEngine:
    """Moves pages between device and host memory, and on the device.

    Confined to the thread of the loop it is made on. Close it before the reactor, the device and
    the pools.

    Attributes:
        audit: what compares a sample of the pages; None if nothing does.
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
        paths: PathTable | None = None,
        copy_path: CopyPath | None = None,
        audit: PageAudit | None = None,
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
            paths: how fast each way of copying is. Default: rates that a CPU had; plain copies on a GPU.
            copy_path: copy this way, however fast it is.
            audit: compares a sample of what comes back to the device with what had left it.

        Raises:
            ConfigError: a pool is on another device, or there is no such way on this one.
        """
        for pool, memory in memories.items():
            if str(memory.device.device) != device.name:
                raise ConfigError(
                    f"pool {pool!r} is on {memory.device.device}, the streams are {device.name}'s"
                )
        self._device = device
        self._layers = layers
        self._port = port
        self._reactor = reactor
        self._copier = PageCopier(memories, table=paths, force=copy_path)
        self._extents = {pool: memory.extent for pool, memory in memories.items()}
        self._capacities = {pool: (one.device_slots, one.host_slots) for pool, one in self._extents.items()}
        self._batcher = Batcher(self._extents, layers, group_bytes, partial(GroupState, reactor.poll))
        self._streams = {direction: device.stream(direction.value) for direction in Direction}
        # One thread, in order: every event that a transfer waits for has been recorded by then.
        self._submitter = None if submit_inline else port.worker("asynchicache-submit")
        self.audit = audit
        self._auditor = None if submit_inline else port.worker("asynchicache-audit")
        self._tick: Tick | None = None
        self._untold = Untold()
        self._closed = self._gave_up = False  # what the submit thread does after giving up is nobody's
        self._launches = self._failed = 0
        self._landed = Landed()

    def submit(
        self,
        operation: CacheOperation,
        *,
        after: Sequence[Event] = (),
        reads: Reads = (),
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
            UsageError: an unknown pool, a slot that is none or not there, an event of another device.
            RequestStateError: an event in `after` was never recorded.
        """
        if self._closed:
            raise ClosedError("the transfer engine is closed")
        for pool, device, host in operation.reach:
            most_device, most_host = self._capacities.get(pool, _NO_POOL)
            if device >= most_device or host >= most_host:
                self._refuse(operation)
        if after or reads:
            # The submit thread looks at them later, and whoever owns these lists may change them.
            after, reads = tuple(after), [(pool, slot_array(slots)) for pool, slots in reads]
            self._check_surroundings(after, reads)
        if not operation.reach:
            return self._look_on(operation, after, reads, done)
        tick = self._tick or self._open_tick()
        ticket = Ticket(self._layers, tick, operation, done, after, reads)
        tick.wishes.append(ticket)
        return ticket

    def statistics(self) -> TransferStatistics:
        self._untold.write_down(self._tick)
        return TransferStatistics(
            self._untold.written,
            self._launches,
            self._failed,
            len(self._untold),
            dict(self._landed.nbytes),
            {pool: dict(nbytes) for pool, nbytes in self._copier.nbytes.items()},
            self._copier.choice,
            replace(self.audit.statistics) if self.audit else AuditStatistics(),
            self._landed.latencies(),
        )

    def live(self) -> list[CacheOperation]:
        """Operations whose end was not told yet."""
        self._untold.write_down(self._tick)
        return [submission.operation for submission in self._untold.submissions()]

    async def aclose(self, deadline_seconds: float) -> int:
        """Refuse new operations and wait for those in flight, for `deadline_seconds` at most.

        Returns:
            How many operations were given up; their `done` was called with an error, and the device
            may still write to their pages: leak them.
        """
        self._closed = True
        if self._tick is not None:
            self._flush(self._tick)
        with anyio.move_on_after(deadline_seconds):
            await self._untold.idle.wait()
        given_up = self._untold.submissions()
        onlookers = self._untold.onlookers() if given_up else ()  # if not, the submit thread gets to them
        error = TransferError(f"given up after {deadline_seconds} s: the engine closed")
        self._disappoint([*given_up, *onlookers], error)
        self._gave_up = True
        if self._submitter is not None and given_up:
            self._submitter.abandon()  # it may hang in the driver: nobody could join it
        elif self._submitter is not None:
            await self._port.run_blocking(self._submitter.close)
        if self._auditor is not None:
            await self._port.run_blocking(self._auditor.close)
        return len(given_up)

    # Before the copies, on the loop.

    def _refuse(self, operation: CacheOperation) -> None:
        """Say what is wrong with an operation, if anything is."""
        for pool, sources, destinations in operation.transfers:
            check_slots(pool, operation.direction.source, sources, self._extents)
            check_slots(pool, operation.direction.destination, destinations, self._extents)

    def _look_on(self, operation: CacheOperation, after: Sequence[Event], reads: Reads, done: Done) -> Ticket:
        """Submit an operation that moves nothing: what is in flight may bring what it reads."""
        self._refuse(operation)
        call_done(done, None)
        if not (reads and (self._untold or self._tick)):
            return Ticket.of_nothing(self._layers)
        tick = self._tick or self._open_tick()
        ticket = Ticket(self._layers, tick, operation, None, after, reads)
        self._untold.look_on(tick, ticket)
        return ticket

    def _check_surroundings(self, after: Sequence[Event], reads: Reads) -> None:
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
            return  # it was flushed ahead of its time
        self._untold.write_down(self._tick)
        self._tick = None
        if self._submitter is None:
            self._carry_out(tick)
            return
        try:
            self._submitter.submit(partial(self._carry_out, tick))
        except RuntimeError as error:  # there is no thread to be had
            self._fail_tick(tick, error)

    # The copies, on the submit thread.

    def _carry_out(self, tick: Tick) -> None:
        """Enqueue what one tick submitted, whatever happens: a failure is told, so nobody waits for ever."""
        try:
            records = self._batcher.batch([*tick.wishes, *tick.onlookers])
        except Exception as error:  # noqa: BLE001 - the boundary of the thread
            self._tell(partial(self._fail_tick, tick, error, self._batcher.withdraw(error)))
            return
        self._launches += len(records)
        for record in records:
            self._enqueue(record, tick.planned.set)
            self._tell(partial(tick.settle, record))
        if not records:
            self._tell(tick.planned.set)

    def _enqueue(self, record: TransferRecord, begun: Callable[[], object]) -> None:
        """`begun`: called on the loop, for those who wait for the first layers while others are enqueued."""
        stream = self._streams[record.direction]
        try:
            self._wait_for_dependencies(record, stream)
            self._enqueue_groups(record, stream, begun)
        except Exception as error:  # noqa: BLE001 - the boundary of the thread
            record.error = error
            self._abandon(record, stream, error)
        finally:
            record.forget()

    def _wait_for_dependencies(self, record: TransferRecord, stream: Stream) -> None:
        for other in record.needs:
            error = other.error or other.failure
            if error is not None:
                raise TransferError("it reads what another was to write, which failed") from error
        for event in record.after:
            stream.wait_event(event)
        for other in sorted(record.needs | record.follows, key=lambda other: other.number):
            last = other.last_event  # which the loop takes away when all has landed
            # Those of the same direction are ahead on the same stream.
            if last is not None and other.direction is not record.direction:
                stream.wait_event(last)

    def _enqueue_groups(self, record: TransferRecord, stream: Stream, begun: Callable[[], object]) -> None:
        plan = record.plan
        if plan is None:
            raise record.error or TransferError("there is no plan")
        copies = self._copier.prepare(plan)
        sample = self.audit.choose(plan) if self.audit else None
        with stream.current():
            for index, (group, state) in enumerate(zip(plan.groups, record.groups, strict=True)):
                copies.enqueue(stream, group)
                if sample is not None:
                    sample.stage(stream, group)
                event = record.last_event = self._recorded(stream)
                state.submit(event)
                if record.asked(state):
                    self._tell(partial(record.tell, state))
                audited = sample if state is record.groups[-1] else None
                reached = partial(self._reached, record, index, audited)
                self._reactor.track(self._device, stream, reached, event=event, urgent=record.urgency(index))
                if index == 0 and len(plan.groups) > 1 and self._submitter is not None:
                    self._tell(begun)  # the first layers are what a forward waits for
                    self._device.yield_to_streams()

    def _abandon(self, record: TransferRecord, stream: Stream, error: Exception) -> None:
        """Fail a transfer that could not be enqueued, once what was enqueued of it has run."""
        try:
            event = record.last_event = self._recorded(stream)
            self._reactor.track(self._device, stream, lambda _: self._fail(record, error), event=event)
        except Exception:  # noqa: BLE001 - nothing can be tracked any more, and the cause is known
            self._tell(partial(self._fail, record, error))

    def _recorded(self, stream: Stream) -> Event:
        """One event behind all that was enqueued: for fences, for transfers to come, and for the reactor."""
        event = self._device.event()
        stream.record(event)
        return event

    def _tell(self, call: Callable[[], object]) -> None:
        if self._submitter is None:
            call()
        else:
            self._port.post(call)

    # After the copies, on the loop.

    def _reached(
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
        """On the audit's thread: hashing takes milliseconds."""
        try:
            self._tell(partial(self._compare, record, index, sample, sample.digests()))
        except Exception as error:  # noqa: BLE001 - the boundary of the thread
            self._tell(partial(self._fail, record, error))

    def _compare(
        self, record: TransferRecord, index: int, sample: AuditSample, digests: Sequence[bytes]
    ) -> None:
        if record.finished:
            return
        problems = sample.settle(digests)
        if problems:
            logger.error("audit: %s", "; ".join(problems))
            self._fail(record, AuditError(f"{len(problems)} pages are not what they were: {problems[0]}"))
        else:
            self._land(record, index)

    def _land(self, record: TransferRecord, index: int) -> None:
        if self._gave_up:
            return
        ended = record.land(index)
        self._landed.count(record.direction, ended, self._port.now())
        self._end(ended)
        if record.finished and record.plan is not None:
            self._landed.nbytes[record.direction] += record.plan.nbytes

    def _fail(self, record: TransferRecord, error: BaseException) -> None:
        if not (record.finished or self._gave_up):
            self._failed += 1
            self._end(record.fail(error))

    def _fail_tick(self, tick: Tick, error: BaseException, records: Sequence[TransferRecord] = ()) -> None:
        """Nothing became of what a tick submitted, nor of the transfers that were made of it."""
        tick.planned.set()
        self._disappoint([*tick.wishes, *tick.onlookers], error)
        for record in records:
            self._fail(record, error)

    def _disappoint(self, submissions: Sequence[Submission], error: BaseException) -> None:
        """Fail these, also those of which no transfer will tell."""
        for submission in submissions:
            for view in submission.views or ():
                if view.position is not None:  # its own transfer, not what others bring
                    self._fail(view.record, error)
            submission.give_up(error)
            if submission.end(error):
                self._untold.strike_out(submission)

    def _end(self, submissions: Sequence[Submission]) -> None:
        for submission in submissions:
            submission.forget()
            self._untold.strike_out(submission)
