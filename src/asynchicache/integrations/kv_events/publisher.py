"""Publish a cache's events over ZeroMQ, in the engines' protocol, extended with snapshots.

A PUB socket sends `[topic, sequence number, batch]`. A ROUTER socket answers requests: for a sequence number
it replays the batches from there on, as vLLM's and SGLang's `ZmqEventPublisher` do; for `SNAPSHOT_REQUEST`
it sends the current blocks.
"""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager, suppress
from itertools import chain

import zmq
import zmq.asyncio

from asynchicache.cache import EngineCache, HybridCache
from asynchicache.controller.tasks import OwnedTasks
from asynchicache.errors import ClosedError, ConfigError
from asynchicache.events import CacheEvent, EventsDropped, PagesRemoved, PagesStored, TiersCleared
from asynchicache.integrations.kv_events.config import KvEventsConfig, at_rank
from asynchicache.integrations.kv_events.encoding import EventEncoder
from asynchicache.integrations.kv_events.wire import (
    END_OF_REPLY,
    SEQUENCE_BYTES,
    SNAPSHOT_REQUEST,
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    KvEvent,
    encode,
)

_Socket = zmq.asyncio.Socket

_log = logging.getLogger(__name__)

_BATCH_BLOCKS = 1024
"""Blocks per message (more if a single event has more): encoding then takes a few milliseconds."""

_MAX_REQUEST_BYTES = 1024

_REPLY_SECONDS = 5.0
"""How long a client may leave a reply unread before the reply is abandoned."""


class _Buffer:
    """The latest batches, for replay; bounded in number and bytes."""

    def __init__(self, most: int, most_bytes: int) -> None:
        self._batches: deque[tuple[int, bytes]] = deque()
        self._most = most
        self._most_bytes = most_bytes
        self._bytes = 0

    def append(self, sequence: int, payload: bytes) -> None:
        self._batches.append((sequence, payload))
        self._bytes += len(payload)
        while len(self._batches) > self._most or (self._bytes > self._most_bytes and len(self._batches) > 1):
            self._bytes -= len(self._batches.popleft()[1])

    def since(self, sequence: int) -> list[tuple[int, bytes]]:
        return [batch for batch in self._batches if batch[0] >= sequence]


class KvEventPublisher:
    """Publishes the events of one cache until closed; created by `open`.

    Attributes:
        endpoint, replay_endpoint: addresses of the sockets, with the actual port if the system chose it.
        epoch: identifies this publisher in every batch; unique per publisher.
        sequence: number of the next batch.
        resynchronised: how often the stream restarted because events arrived faster than they were sent.
        refused: number of malformed requests, and of replies that a client left unread.
    """

    def __init__(
        self,
        cache: HybridCache | EngineCache,
        config: KvEventsConfig,
        pub: _Socket,
        replay: _Socket | None,
    ) -> None:
        """`pub`, `replay`: open sockets; the caller closes them."""
        self.endpoint = _address(pub)
        self.replay_endpoint = None if replay is None else _address(replay)
        self.epoch = uuid.uuid4().hex
        self.sequence = 0
        self.resynchronised = 0
        self.refused = 0
        self._cache = cache
        self._config = config
        self._pub = pub
        self._topic = config.topic.encode()
        self._encoder = EventEncoder(cache.spec, config)
        self._buffer = _Buffer(config.buffer_steps, config.buffer_bytes)
        self._events = cache.events(limit=config.max_queue_size)
        self._sending = asyncio.Lock()

    @classmethod
    @asynccontextmanager
    async def open(
        cls, cache: HybridCache | EngineCache, config: KvEventsConfig | None = None
    ) -> AsyncIterator[KvEventPublisher]:
        """Publish for the duration of an `async with`, inside that of the cache.

        Raises:
            ConfigError: an endpoint is malformed or in use, or the cache has no such pool.
        """
        config = config or KvEventsConfig()
        unknown = set(config.pools or ()) - {pool.name for pool in cache.spec.owners}
        if unknown:
            known = [pool.name for pool in cache.spec.owners]
            raise ConfigError(f"pools {sorted(unknown)} are none of those with slots of their own: {known}")
        async with AsyncExitStack() as stack:
            context = zmq.asyncio.Context()
            stack.callback(context.destroy, linger=0)
            pub, replay = _open_sockets(context, config)
            tasks = OwnedTasks()
            stack.push_async_callback(tasks.aclose)
            await tasks.ready()
            publisher = cls(cache, config, pub, replay)
            stack.callback(publisher._events.close)
            await publisher._begin()
            tasks.spawn(publisher._publish())
            if replay is not None:
                tasks.spawn(publisher._answer(replay))
            yield publisher

    async def _begin(self) -> None:
        """Send the current blocks first, so that clients without snapshots get them by replay."""
        await self._send(self._encoder.encode(await self._cache.snapshot()))

    async def flush(self) -> None:
        """Send all events so far."""
        async with self._sending:
            await self._send_all(self._events.take())

    async def _publish(self) -> None:
        with suppress(ClosedError):  # the cache was closed before the publisher
            while await self._events.wait():
                await self.flush()

    async def _send_all(self, events: Iterable[CacheEvent]) -> None:
        run: list[PagesStored | PagesRemoved] = []
        for event in events:
            if isinstance(event, EventsDropped | TiersCleared):
                await self._send(self._encoder.encode(run))
                run = []
                await self._start_anew(event)
            else:
                run.append(event)
        await self._send(self._encoder.encode(run))

    async def _start_anew(self, event: EventsDropped | TiersCleared) -> None:
        """Clear the consumers' state, and send a snapshot.

        Consumers of the engines' events do not support clearing single tiers, so the snapshot always covers
        all tiers.
        """
        media = None
        if isinstance(event, TiersCleared):
            media = [self._encoder.media[tier] for tier in event.tiers]
        else:
            self.resynchronised += 1
            _log.warning("%d events were not published in time: the stream begins anew", event.count)
        snapshot = await self._cache.snapshot()
        await self._send(chain([AllBlocksCleared(media)], self._encoder.encode(snapshot)))

    async def _send(self, events: Iterable[KvEvent]) -> None:
        for payload in self._payloads(events):
            sequence, self.sequence = self.sequence, self.sequence + 1
            self._buffer.append(sequence, payload)
            await self._pub.send_multipart([self._topic, _frame(sequence), payload])
            await asyncio.sleep(0)  # sending never suspends, so yield to other tasks

    def _payloads(self, events: Iterable[KvEvent]) -> Iterator[bytes]:
        batch: list[KvEvent] = []
        blocks = 0
        for event in events:
            batch.append(event)
            blocks += len(event.block_hashes) if isinstance(event, BlockStored | BlockRemoved) else 1
            if blocks >= _BATCH_BLOCKS:
                yield self._payload(batch)
                batch, blocks = [], 0
        if batch:
            yield self._payload(batch)

    def _payload(self, events: list[KvEvent]) -> bytes:
        return encode(time.time(), events, self._config.data_parallel_rank, self.epoch)

    # Replays and snapshots

    async def _answer(self, socket: _Socket) -> None:
        while True:
            frames = await socket.recv_multipart()
            try:
                await self._reply(socket, frames)
            except (TimeoutError, zmq.ZMQError, ClosedError) as error:
                self.refused += 1
                _log.warning("a client of KV events had no reply: %r", error)

    async def _reply(self, socket: _Socket, frames: list[bytes]) -> None:
        """Answer one request, `[client, empty, request]`."""
        request = frames[-1] if len(frames) == 3 and not frames[1] else b""
        if request == SNAPSHOT_REQUEST:
            batches = await self._snapshot()
        elif len(request) == SEQUENCE_BYTES:
            batches = self._buffer.since(int.from_bytes(request, "big"))
        else:
            self.refused += 1
            _log.warning("a request of %d frames for KV events is none: %r", len(frames), request[:40])
            return
        replies = [(self._topic, _frame(sequence), payload) for sequence, payload in batches]
        for reply in [*replies, (b"", END_OF_REPLY, b"")]:
            async with asyncio.timeout(_REPLY_SECONDS):
                await socket.send_multipart([frames[0], b"", *reply])

    async def _snapshot(self) -> list[tuple[int, bytes]]:
        """Return the current blocks as batches, each with the number of the next batch to be sent."""
        snapshot = await self._cache.snapshot()
        following = self.sequence
        batches = []
        for payload in self._payloads(chain([AllBlocksCleared()], self._encoder.encode(snapshot))):
            batches.append((following, payload))
            await asyncio.sleep(0)
        return batches


def _frame(sequence: int) -> bytes:
    return sequence.to_bytes(SEQUENCE_BYTES, "big")


def _open_sockets(context: zmq.asyncio.Context, config: KvEventsConfig) -> tuple[_Socket, _Socket | None]:
    endpoint = at_rank(config.endpoint, config.data_parallel_rank)
    pub = context.socket(zmq.PUB)
    pub.setsockopt(zmq.SNDHWM, config.hwm)
    with _refused(endpoint):
        if _binds(endpoint):
            pub.bind(endpoint)
        else:
            pub.connect(endpoint)
    if config.replay_endpoint is None:
        return pub, None
    endpoint = at_rank(config.replay_endpoint, config.data_parallel_rank)
    replay = context.socket(zmq.ROUTER)
    replay.setsockopt(zmq.ROUTER_MANDATORY, 1)  # wait for a slow client instead of dropping parts
    replay.setsockopt(zmq.MAXMSGSIZE, _MAX_REQUEST_BYTES)
    with _refused(endpoint):
        replay.bind(endpoint)
    return pub, replay


def _binds(endpoint: str) -> bool:
    """Apply the engines' rule: a publisher with many subscribers binds; one behind a proxy connects."""
    return "*" in endpoint or "::" in endpoint or endpoint.startswith(("ipc://", "inproc://"))


@contextmanager
def _refused(endpoint: str) -> Iterator[None]:
    try:
        yield
    except zmq.ZMQError as error:
        hint = "; choose another port" if error.errno == zmq.EADDRINUSE else ""
        raise ConfigError(f"KV events cannot use endpoint {endpoint!r}: {error}{hint}") from error


def _address(socket: _Socket) -> str:
    """Return a socket's address; the loopback address if it is bound to all interfaces."""
    address = socket.getsockopt(zmq.LAST_ENDPOINT)
    assert isinstance(address, bytes), "an endpoint is text"
    return address.rstrip(b"\x00").decode().replace("0.0.0.0", "127.0.0.1")  # noqa: S104
