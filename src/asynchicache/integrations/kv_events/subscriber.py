"""Follow a publisher of KV events, of this package or of an engine; repair gaps by replay or snapshot."""

from __future__ import annotations

import asyncio
import logging
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from enum import Enum
from typing import NamedTuple, Self

import zmq
import zmq.asyncio

from asynchicache.errors import ConfigError, WireFormatError
from asynchicache.integrations.kv_events.decoding import MAX_PAYLOAD_BYTES, decode
from asynchicache.integrations.kv_events.wire import (
    END_OF_REPLY,
    SEQUENCE_BYTES,
    SNAPSHOT_REQUEST,
    AllBlocksCleared,
    EventBatch,
)

_Socket = zmq.asyncio.Socket

_log = logging.getLogger(__name__)

_EPOCHS = 16
"""Earlier publishers whose late messages are recognised."""

_MAX_REPLY_BYTES = 1 << 30
"""Most bytes of a replay or snapshot; a snapshot of a million pages of 16 tokens takes a tenth of it."""


class Origin(Enum):
    """How an update arrived."""

    LIVE = "live"  # received when published
    REPLAY = "replay"  # missed, then replayed
    SNAPSHOT = "snapshot"  # the current blocks; begins with AllBlocksCleared
    LOST = "lost"  # batches are lost for good: clear the index; later updates start from empty


class Update(NamedTuple):
    """One update, to be applied in order.

    Attributes:
        origin: how it arrived.
        sequence: number of the batch. For a snapshot or a loss, the number of the first batch after it, or -1
            if unknown.
        batch: the events; for a loss, a single event that clears everything.
    """

    origin: Origin
    sequence: int
    batch: EventBatch


_NOTHING = EventBatch(0.0, [AllBlocksCleared()])


class KvEventSubscriber:
    """Updates of one publisher, as an async iterator that ends on close; created by `open`.

    Applied in order, the updates give the publisher's blocks. Missing batches are requested as a replay. If
    the publisher no longer has them, was restarted, or had begun before its first message got here, a
    snapshot is requested. Engines have no snapshots: then an update of origin `LOST` clears everything, and
    later updates start from empty.

    Attributes:
        gaps: how often batches were missing, or the publisher was restarted.
        replayed, snapshots: number of replayed batches, and of snapshots.
        rejected: number of messages that were not batches, or not of the publisher that is followed.
    """

    def __init__(
        self, context: zmq.asyncio.Context, sub: _Socket, replay_endpoint: str | None, patience: float
    ) -> None:
        self.gaps = self.replayed = self.snapshots = self.rejected = 0
        self._context = context
        self._sub = sub
        self._replay_endpoint = replay_endpoint
        self._patience = patience
        self._ready: deque[Update] = deque()
        self._expected: int | None = 0  # who has sent another number first was not heard from the beginning
        self._last_live = -1
        self._last: tuple[int, float] | None = None  # number and time of the last batch
        self._epoch: str | None = None
        self._strange = 0  # messages of others than the publisher that is followed
        self._ended: deque[str] = deque(maxlen=_EPOCHS)  # of publishers that another one has replaced

    @classmethod
    @asynccontextmanager
    async def open(
        cls, endpoint: str, *, replay_endpoint: str | None = None, topic: str = "", patience: float = 2.0
    ) -> AsyncIterator[KvEventSubscriber]:
        """Follow a publisher for the duration of an `async with`.

        Args:
            endpoint: address of its PUB socket.
            replay_endpoint: address of its ROUTER socket; without one, every gap is a loss.
            topic: prefix of its messages' topics.
            patience: seconds to wait for each part of a replay or snapshot.

        Raises:
            ConfigError: an endpoint is malformed. An endpoint that does not answer is not an error, because
                publishers may start later.
        """
        context = zmq.asyncio.Context()
        try:
            sub = context.socket(zmq.SUB)
            sub.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
            sub.setsockopt(zmq.RCVHWM, 100_000)
            sub.subscribe(topic)
            _connect(sub, endpoint)
            subscriber = cls(context, sub, replay_endpoint, patience)
            if replay_endpoint is not None:
                await subscriber._join()
            yield subscriber
        finally:
            context.destroy(linger=0)

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> Update:
        while not self._ready:
            if self._sub.closed:
                raise StopAsyncIteration
            try:
                frames = await self._sub.recv_multipart()
            except asyncio.CancelledError:
                task = asyncio.current_task()
                if not self._sub.closed or (task is not None and task.cancelling()):
                    raise
                raise StopAsyncIteration from None  # closing the socket cancelled the wait
            await self._receive(frames)
        return self._ready.popleft()

    def take(self) -> list[Update]:
        """Return all updates that are ready, without waiting."""
        updates = list(self._ready)
        self._ready.clear()
        return updates

    async def catch_up(self) -> None:
        """Request batches that were sent but not received.

        A gap shows only with the next message; if messages are rare, call this periodically.
        """
        if not self._expected:
            await self._join()
        else:  # include the last known batch: a publisher that does not have it was restarted
            await self._mend(max(self._expected - 1, 0), self._expected)

    async def _join(self) -> None:
        """Get earlier blocks: by a snapshot, or else by replaying all batches."""
        if not await self._take_snapshot():
            await self._take_rest()

    async def _receive(self, frames: list[bytes]) -> None:
        """Process one live message."""
        try:
            sequence, batch = _read(frames)
        except WireFormatError as error:
            self.rejected += 1
            _log.warning("a message of KV events was rejected: %s", error)
            await self._restart(-1)
            return
        if batch.epoch in self._ended or self._is_strange(batch):
            self._reject(batch.epoch)
            return
        if batch.epoch is None and (sequence, batch.ts) == self._last:
            return  # sent twice
        foreign = self._is_foreign(batch, sequence)
        self._last_live = sequence
        if foreign:
            _log.warning("the publisher of KV events was started anew")
            await self._restart(sequence)
        elif self._expected is not None and sequence > self._expected:
            await self._fill_gap(sequence)
        if self._epoch is not None and batch.epoch != self._epoch:
            self._reject(batch.epoch)
            return
        if self._expected is not None and sequence > self._expected:
            self._lose(sequence)  # the repair did not get this far
        self._accept(Origin.LIVE, sequence, batch)

    def _reject(self, epoch: str | None) -> None:
        """Count a message of another publisher: its blocks and those of the one followed do not mix."""
        self.rejected += 1
        self._strange += 1
        if self._strange == 1:
            words = "a message of KV events is of publisher %s, not of %s: one endpoint has one publisher"
            _log.warning(words, epoch, self._epoch)

    def _is_strange(self, batch: EventBatch) -> bool:
        """Return whether a batch is of a publisher that did not answer when it was asked for its blocks.

        After 2, 4, 8 messages and so on it is asked again: it may have taken the place of the one that did.
        """
        asked_again = self._strange & (self._strange - 1) == 0
        return self._strange > 0 and not asked_again and batch.epoch != self._epoch

    def _is_foreign(self, batch: EventBatch, sequence: int | None = None) -> bool:
        """Return whether a batch comes from another publisher than earlier ones.

        Engines send no epoch: if the numbers of live batches go back, the engine was restarted.
        """
        if batch.epoch is None and sequence is not None and sequence <= self._last_live:
            return True
        return self._epoch is not None and batch.epoch != self._epoch

    async def _fill_gap(self, sequence: int) -> None:
        """Get what is missing before a live message."""
        if self._expected:
            self.gaps += 1
            await self._mend(self._expected, sequence)
        else:
            await self._restart(sequence, known=False)

    async def _restart(self, sequence: int, *, known: bool = True) -> None:
        """Begin anew, because the publisher was restarted, or its beginning was missed.

        `known`: there is something to discard.
        """
        self.gaps += 1
        before = self._epoch
        self._expected = self._epoch = self._last = None
        if not await self._take_snapshot():
            if known:
                self._lose(sequence)
            if not await self._take_rest() and not known:
                self._lose(sequence)
        if before is not None and self._epoch != before:
            self._ended.append(before)
            self._strange = 0

    async def _mend(self, first: int, end: int) -> None:
        """Get the batches from `first` to at least `end`, or a snapshot; else report the loss."""
        if not await self._take_replay(first, end) and not await self._take_snapshot():
            self._lose(end)

    def _accept(self, origin: Origin, sequence: int, batch: EventBatch) -> None:
        """Queue a batch unless it is known already."""
        if self._expected is not None and sequence < self._expected:
            return
        self._expected, self._last = sequence + 1, (sequence, batch.ts)
        self._epoch = batch.epoch
        self.replayed += origin is Origin.REPLAY
        self._ready.append(Update(origin, sequence, batch))

    def _lose(self, sequence: int) -> None:
        self._ready.append(Update(Origin.LOST, sequence, _NOTHING))
        self._expected = None

    # Replays and snapshots

    async def _take_replay(self, first: int, end: int) -> bool:
        """Replay batches from `first` on; return whether all up to `end` were received."""
        batches = await self._ask(
            _frame(max(first - 1, 0))
        )  # one is known: who sent another is another engine
        if batches is None or any(self._is_foreign(batch) for _, batch in batches):
            return False
        if self._last is not None:
            known, sent = self._last
            if any(sequence == known and batch.ts != sent for sequence, batch in batches):
                return False
        batches = [(sequence, batch) for sequence, batch in batches if sequence >= first]
        numbers = [sequence for sequence, _ in batches]
        if numbers != list(range(first, first + len(numbers))) or first + len(numbers) < end:
            return False
        for sequence, batch in batches:
            self._accept(Origin.REPLAY, sequence, batch)
        return True

    async def _take_rest(self) -> bool:
        """Start with what can be replayed; if that is not everything, clear the index first. False if that is
        nothing."""
        batches = await self._ask(_frame(0))
        if batches is None:
            return False
        self._expected = batches[0][0] if batches else 0
        if self._expected:
            self._ready.append(Update(Origin.LOST, batches[0][0], _NOTHING))
        for sequence, batch in batches:
            self._accept(Origin.REPLAY, sequence, batch)
        return bool(batches)

    async def _take_snapshot(self) -> bool:
        """Request a snapshot; False if the publisher has none, as engines do not."""
        batches = await self._ask(SNAPSHOT_REQUEST)
        if not batches:
            return False
        self.snapshots += 1
        self._ready.clear()  # the snapshot covers updates that were not taken yet
        self._ready += [Update(Origin.SNAPSHOT, sequence, batch) for sequence, batch in batches]
        self._expected, last = batches[-1]
        self._epoch, self._last = last.epoch, None
        return True

    async def _ask(self, request: bytes) -> list[tuple[int, EventBatch]] | None:
        """Send a request and return the batches; None if the reply is missing, incomplete or malformed."""
        if self._replay_endpoint is None:
            return None
        socket = self._context.socket(zmq.DEALER)  # a new socket has no late parts of an earlier reply
        try:
            socket.setsockopt(zmq.MAXMSGSIZE, MAX_PAYLOAD_BYTES)
            _connect(socket, self._replay_endpoint)
            await socket.send_multipart([b"", request])
            return await self._collect(socket)
        except (TimeoutError, WireFormatError) as error:
            _log.warning("%s gave no reply: %r", self._replay_endpoint, error)
            return None
        finally:
            socket.close(linger=0)

    async def _collect(self, socket: _Socket) -> list[tuple[int, EventBatch]]:
        """
        Raises:
            TimeoutError: a part did not arrive in time.
            WireFormatError: a part is not a batch, or the reply is too long.
        """
        batches: list[tuple[int, EventBatch]] = []
        left = _MAX_REPLY_BYTES
        while left > 0:
            async with asyncio.timeout(self._patience):
                frames = (await socket.recv_multipart())[1:]  # the first is the empty delimiter
            if len(frames) == 2:
                frames = [b"", *frames]  # engines before vLLM #45177 send no topic
            if len(frames) == 3 and frames[1] == END_OF_REPLY:
                return batches
            batches.append(_read(frames))
            left -= len(frames[2])
        raise WireFormatError(f"a reply of more than {_MAX_REPLY_BYTES} bytes")


def _frame(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def _read(frames: list[bytes]) -> tuple[int, EventBatch]:
    """
    Raises:
        WireFormatError: the frames are not topic, sequence number and batch.
    """
    if len(frames) != 3 or len(frames[1]) != SEQUENCE_BYTES:
        raise WireFormatError(f"{len(frames)} frames are not topic, sequence number and batch")
    return int.from_bytes(frames[1], "big"), decode(frames[2])


def _connect(socket: _Socket, endpoint: str) -> None:
    try:
        socket.connect(endpoint)
    except zmq.ZMQError as error:
        raise ConfigError(f"KV events cannot be followed at {endpoint!r}: {error}") from error
