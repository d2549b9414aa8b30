"""KV events over real sockets: who follows knows what is there, whatever was lost on the way.

More than 400 lines: publisher, subscriber and sockets are set up once, and each case loses something else.
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator, Iterable
from contextlib import AsyncExitStack, asynccontextmanager
from itertools import count
from pathlib import Path
from typing import Any

import msgspec
import pytest
import zmq
import zmq.asyncio

from asynchicache import ConfigError, HybridCache, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.integrations.kv_events.config import KvEventsConfig
from asynchicache.integrations.kv_events.decoding import decode
from asynchicache.integrations.kv_events.encoding import EventEncoder
from asynchicache.integrations.kv_events.index import BlockIndex
from asynchicache.integrations.kv_events.publisher import KvEventPublisher
from asynchicache.integrations.kv_events.subscriber import KvEventSubscriber, Origin, Update
from asynchicache.integrations.kv_events.wire import END_OF_REPLY, SNAPSHOT_REQUEST
from cache.engine import SPEC, Engine, config

pytestmark = pytest.mark.asyncio

LOCAL = KvEventsConfig(endpoint="tcp://*:*", replay_endpoint="tcp://127.0.0.1:*", topic="kv@pod")
PROMPT = range(100, 121)
MEDIA = ("GPU", "CPU")


class Router:
    """Follows one publisher with an index."""

    def __init__(self, subscriber: KvEventSubscriber) -> None:
        self.subscriber = subscriber
        self.index = BlockIndex()
        self.origins: list[Origin] = []

    async def catch_up(self) -> None:
        await self.subscriber.catch_up()
        self.apply(self.subscriber.take())

    def apply(self, updates: Iterable[Update]) -> None:
        for update in updates:
            self.origins.append(update.origin)
            self.index.apply(update.batch.events)

    def known(self) -> dict[Any, set[Any]]:
        return {place: blocks for place, blocks in self.index.locations.items() if place.medium in MEDIA}


async def truth(cache: HybridCache) -> dict[Any, set[Any]]:
    """What the cache has in memory, as an index has it."""
    index = BlockIndex()
    encoder = EventEncoder(cache.spec, LOCAL)
    index.apply(encoder.encode(event for event in await cache.snapshot() if event.tier is not Tier.STORAGE))
    return index.locations


def follow(publisher: KvEventPublisher, **options: Any) -> Any:
    return KvEventSubscriber.open(
        publisher.endpoint, replay_endpoint=publisher.replay_endpoint, topic="kv@pod", patience=60, **options
    )


async def churn(cache: HybridCache, rng: random.Random) -> None:
    start = rng.randrange(6) * 100
    await Engine(cache).serve([*range(start, start + rng.randrange(5, 40)), rng.randrange(3)])
    if not rng.randrange(8):
        await cache.flush()
    if not rng.randrange(8):
        await cache.clear_storage()


async def test_routers_know_what_is_there_whenever_they_joined():
    rng = random.Random(1)
    options = config(device_slots={"kv": 16, "mamba": 4}, host_ratio=1.5)
    async with AsyncExitStack() as stack:
        storage = MemoryBackend(MemoryStore())
        cache = await stack.enter_async_context(HybridCache.open(SPEC, options, storage=storage))
        publisher = await stack.enter_async_context(KvEventPublisher.open(cache, LOCAL))
        routers = [Router(await stack.enter_async_context(follow(publisher)))]
        for step in range(16):
            await churn(cache, rng)
            await publisher.flush()
            if step == 8:
                late = Router(await stack.enter_async_context(follow(publisher)))
                late.apply(late.subscriber.take())
                assert late.origins == [Origin.SNAPSHOT]
                assert late.known() == await truth(cache) != {}
                routers.append(late)
            for router in routers:
                await router.catch_up()
                assert router.known() == await truth(cache)
        assert [router.subscriber.rejected for router in routers] == [0, 0]
        assert all(Origin.LOST not in router.origins for router in routers)


async def until_live(router: Router, cache: HybridCache) -> None:
    """Serve prompts until one is heard of live: the sockets have found each other by then."""
    hearing: asyncio.Task[Update] | None = None
    for start in count(0, 100):
        await Engine(cache).serve(range(start, start + 9))
        hearing = hearing or asyncio.create_task(anext(router.subscriber))
        await asyncio.wait([hearing], timeout=0.1)  # nothing tells when sockets have found each other
        if hearing.done():
            router.apply([hearing.result()])
            hearing = None
        if Origin.LIVE in router.origins:
            return


async def test_events_come_as_they_happen():
    async with (
        HybridCache.open(SPEC, config()) as cache,
        KvEventPublisher.open(cache, LOCAL) as publisher,
        follow(publisher) as subscriber,
    ):
        router = Router(subscriber)
        await until_live(router, cache)
        await publisher.flush()
        await router.catch_up()
        assert router.known() == await truth(cache)


async def test_events_faster_than_they_are_sent_begin_the_stream_anew():
    options = KvEventsConfig(endpoint="tcp://*:*", replay_endpoint="tcp://127.0.0.1:*", max_queue_size=2)
    async with (
        HybridCache.open(SPEC, config(inline=True)) as cache,
        KvEventPublisher.open(cache, options) as publisher,
        KvEventSubscriber.open(
            publisher.endpoint, replay_endpoint=publisher.replay_endpoint, patience=60
        ) as subscriber,
    ):
        router = Router(subscriber)
        for start in (0, 100, 200):
            async with cache.request(range(start, start + 21)) as request:
                await request.load()
                request.extend(21)
                request.checkpoint(4)  # at once: the publisher has no turn
                request.checkpoint(8)
                request.checkpoint(20)
        await cache.drain()
        await publisher.flush()
        await router.catch_up()
        assert publisher.resynchronised > 0
        assert router.known() == await truth(cache) != {}


async def test_a_snapshot_comes_in_batches_of_bounded_size(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("asynchicache.integrations.kv_events.publisher._BATCH_BLOCKS", 8)
    async with HybridCache.open(SPEC, config()) as cache, KvEventPublisher.open(cache, LOCAL) as publisher:
        for start in range(0, 500, 100):
            await Engine(cache).serve(range(start, start + 21))
        await publisher.flush()
        async with follow(publisher) as subscriber:
            router = Router(subscriber)
            updates = subscriber.take()
            router.apply(updates)
            sizes = [
                sum(len(getattr(event, "block_hashes", [1])) for event in update.batch.events)
                for update in updates
            ]
            assert len(sizes) > 4
            assert max(sizes) < 8 + 5  # and what is left of a node
            assert len({update.sequence for update in updates}) == 1
            assert router.known() == await truth(cache) != {}


async def test_a_publisher_that_was_started_anew_is_noticed(tmp_path: Path):
    """Its numbers begin at 0 again, and may be as many: the epoch tells it from the one before."""
    options = KvEventsConfig(
        endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay", topic="kv@pod"
    )
    async with HybridCache.open(SPEC, config()) as cache, AsyncExitStack() as first:
        publisher = await first.enter_async_context(KvEventPublisher.open(cache, options))
        async with follow(publisher) as subscriber:
            router = Router(subscriber)
            await Engine(cache).serve(PROMPT)
            await publisher.flush()
            await router.catch_up()
            assert router.known() == await truth(cache)
            await first.aclose()
            await cache.flush()
            for rounds in range(3):
                async with KvEventPublisher.open(cache, options) as again:
                    for start in range(rounds):  # none, as many, or more than before
                        await Engine(cache).serve(range(start * 100, start * 100 + 21))
                        await again.flush()
                    await router.catch_up()
                    assert router.origins[-1] is Origin.SNAPSHOT
                    assert router.known() == await truth(cache)


async def test_messages_that_a_snapshot_overtook_are_passed_over(tmp_path: Path):
    """They wait in the socket, and their numbers are below what is expected: no sign of another publisher."""
    options = KvEventsConfig(
        endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay", topic="kv@pod"
    )
    async with (
        HybridCache.open(SPEC, config()) as cache,
        KvEventPublisher.open(cache, options) as publisher,
        follow(publisher) as subscriber,
    ):
        router = Router(subscriber)
        await until_live(router, cache)
        await Engine(cache).serve(range(5000, 5009))
        await publisher.flush()
        assert await subscriber._take_snapshot()
        before = (subscriber.snapshots, subscriber.gaps)
        await Engine(cache).serve(range(6000, 6009))
        await publisher.flush()
        while subscriber._last_live < publisher.sequence - 1:
            router.apply([await anext(subscriber)])
        assert (subscriber.snapshots, subscriber.gaps) == before
        assert router.known() == await truth(cache) != {}


async def test_bad_requests_leave_the_publisher_in_service():
    async with (
        HybridCache.open(SPEC, config()) as cache,
        KvEventPublisher.open(cache, LOCAL) as publisher,
        sockets() as context,
    ):
        assert publisher.replay_endpoint is not None
        bad = context.socket(zmq.DEALER)
        bad.connect(publisher.replay_endpoint)
        for request in ([b"", b"short"], [b"x"], [b"a", b"b", b"c"], [b"", b"x" * 100]):
            await bad.send_multipart(request)
        hog = context.socket(zmq.DEALER)
        hog.connect(publisher.replay_endpoint)
        await hog.send_multipart([b"", b"x" * 100_000])  # more than a request may have: it is disconnected
        await Engine(cache).serve(PROMPT)
        await publisher.flush()
        assert await ask(bad, SNAPSHOT_REQUEST)
        assert publisher.refused == 4


async def test_what_was_there_before_the_publisher_can_be_replayed():
    """For routers that know the engines' protocol only."""
    async with HybridCache.open(SPEC, config()) as cache, sockets() as context:
        await Engine(cache).serve(PROMPT)
        async with KvEventPublisher.open(cache, LOCAL) as publisher:
            await Engine(cache).serve(range(500, 521))
            await publisher.flush()
            assert publisher.replay_endpoint is not None
            client = context.socket(zmq.DEALER)
            client.connect(publisher.replay_endpoint)
            index = BlockIndex()
            for _, _, payload in await ask(client, (0).to_bytes(8, "big")):
                index.apply(decode(payload).events)
            assert index.locations == await truth(cache) != {}


async def test_replay_is_bounded_in_batches():
    options = msgspec.structs.replace(LOCAL, buffer_steps=3)
    async with (
        HybridCache.open(SPEC, config()) as cache,
        KvEventPublisher.open(cache, options) as publisher,
        sockets() as context,
    ):
        for start in range(0, 800, 100):
            await Engine(cache).serve(range(start, start + 9))
            await publisher.flush()
        assert publisher.replay_endpoint is not None
        client = context.socket(zmq.DEALER)
        client.connect(publisher.replay_endpoint)
        replies = await ask(client, (0).to_bytes(8, "big"))
        numbers = [int.from_bytes(sequence, "big") for _, sequence, _ in replies]
        assert numbers == list(range(publisher.sequence - 3, publisher.sequence))
        assert {topic for topic, _, _ in replies} == {b"kv@pod"}


async def test_endpoints_that_cannot_be_used_are_refused_in_words():
    async with HybridCache.open(SPEC, config()) as cache, KvEventPublisher.open(cache, LOCAL) as publisher:
        taken = publisher.replay_endpoint
        assert taken is not None
        for options, words in (
            (KvEventsConfig(endpoint="tcp://*:*", replay_endpoint=taken), "in use .*; choose another port"),
            (KvEventsConfig(endpoint="udp://*:1"), r"cannot use endpoint 'udp://\*:1'"),
            (KvEventsConfig(endpoint="tcp://*:*", replay_endpoint="ipc:///no/such/folder/x"), "cannot use"),
            (KvEventsConfig(endpoint="tcp://*:*", pools=("kv", "dsa")), r"\['dsa'\] are none of those"),
        ):
            with pytest.raises(ConfigError, match=words):
                async with KvEventPublisher.open(cache, options):
                    pass
        with pytest.raises(ConfigError, match="cannot be followed at 'nonsense'"):
            async with KvEventSubscriber.open("nonsense"):
                pass


async def test_publishing_ends_with_the_cache():
    async with AsyncExitStack() as stack:
        async with HybridCache.open(SPEC, config()) as cache:
            publisher = await stack.enter_async_context(KvEventPublisher.open(cache, LOCAL))
            await Engine(cache).serve(PROMPT)
        await publisher.flush()
        assert publisher.sequence > 0


# Publishers of engines, which have no snapshots


@asynccontextmanager
async def sockets() -> AsyncIterator[zmq.asyncio.Context]:
    context = zmq.asyncio.Context()
    try:
        yield context
    finally:
        context.destroy(linger=0)


async def ask(client: zmq.asyncio.Socket, request: bytes) -> list[list[bytes]]:
    """A reply's messages, without the end."""
    await client.send_multipart([b"", request])
    replies = []
    while True:
        frames = (await client.recv_multipart())[1:]
        if frames[1] == END_OF_REPLY:
            return replies
        replies.append(frames)


class EnginePublisher:
    """Sends and replays as `ZmqEventPublisher` of vLLM 0.33 does, and loses what it is told to.

    Attributes:
        buffer: by number, what it can replay.
        topics: whether replies have one, which they do since vLLM #45177.
        mute: it leaves every request without an end.
        snapshot: the batch of its snapshots, if it has any.
    """

    def __init__(self, context: zmq.asyncio.Context) -> None:
        self.buffer: dict[int, bytes] = {}
        self.topics = True
        self.mute = False
        self.snapshot = b""
        self._pub = context.socket(zmq.XPUB)  # as PUB, but it tells when somebody has subscribed
        self._replay = context.socket(zmq.ROUTER)
        self._pub.bind("tcp://127.0.0.1:*")
        self._replay.bind("tcp://127.0.0.1:*")
        self.endpoint, self.replay_endpoint = (
            socket.getsockopt(zmq.LAST_ENDPOINT).decode().rstrip("\0") for socket in (self._pub, self._replay)
        )

    async def subscribed(self) -> None:
        assert await self._pub.recv() == b"\x01"

    async def send(self, sequence: int, payload: bytes | None = None) -> None:
        self.buffer[sequence] = payload or batch(sequence)
        await self._pub.send_multipart([b"", sequence.to_bytes(8, "big"), self.buffer[sequence]])

    async def answer(self) -> None:
        while True:
            client, empty, request = await self._replay.recv_multipart()
            if request == SNAPSHOT_REQUEST and self.snapshot:
                following = max(self.buffer, default=-1).to_bytes(8, "big", signed=True)
                await self._replay.send_multipart([client, empty, b"", following, self.snapshot])
                await self._replay.send_multipart([client, empty, b"", END_OF_REPLY, b""])
                continue
            first, topic = int.from_bytes(request, "big"), [b""] if self.topics else []
            for sequence, payload in self.buffer.items():
                if sequence >= first:
                    parts = [*topic, sequence.to_bytes(8, "big"), payload]
                    await self._replay.send_multipart([client, empty, *parts])
            if not self.mute:
                await self._replay.send_multipart([client, empty, *topic, END_OF_REPLY, b""])


def batch(number: int, ts: float = 1.0) -> bytes:
    """One block that has the batch's number."""
    stored = {"type": "BlockStored", "block_hashes": [number], "token_ids": [1], "block_size": 1}
    return msgspec.msgpack.encode([ts, [stored]])


@asynccontextmanager
async def engine(*known: int, replay: bool = True) -> AsyncIterator[tuple[EnginePublisher, Router]]:
    """An engine that has published some batches, and a router that joins then."""
    async with sockets() as context:
        publisher = EnginePublisher(context)
        publisher.buffer = {number: batch(number) for number in known}
        answering = asyncio.create_task(publisher.answer())
        endpoint = publisher.replay_endpoint if replay else None
        try:
            async with KvEventSubscriber.open(
                publisher.endpoint, replay_endpoint=endpoint, patience=30
            ) as subscriber:
                await publisher.subscribed()
                yield publisher, Router(subscriber)
        finally:
            answering.cancel()
            await asyncio.wait([answering])


async def received(router: Router, count: int) -> list[tuple[Origin, int]]:
    """The next updates, applied."""
    updates = [await anext(router.subscriber) for _ in range(count)]
    router.apply(updates)
    return [(update.origin, update.sequence) for update in updates]


def blocks(router: Router) -> set[Any]:
    return set().union(*router.index.locations.values())


@pytest.mark.parametrize("topics", [True, False], ids=["vLLM now", "before #45177"])
async def test_what_was_missed_is_replayed(topics: bool):
    async with engine(0, 1, 2) as (publisher, router):
        publisher.topics = topics
        assert await received(router, 3) == [(Origin.REPLAY, number) for number in (0, 1, 2)]
        publisher.buffer |= {3: batch(3), 4: batch(4)}  # lost on the way
        await publisher.send(5)
        await publisher.send(6)
        replayed = [(Origin.REPLAY, 3), (Origin.REPLAY, 4), (Origin.REPLAY, 5), (Origin.LIVE, 6)]
        found = await received(router, 4)
        assert found in (replayed, [*replayed[:3], (Origin.REPLAY, 6)])  # 6 may be sent before the reply
        assert blocks(router) == set(range(7))
        assert router.subscriber.gaps == 1


async def test_a_router_that_joins_late_is_told_that_it_knows_nothing_of_before():
    async with engine(500, 501) as (_, router):
        assert await received(router, 3) == [(Origin.LOST, 500), (Origin.REPLAY, 500), (Origin.REPLAY, 501)]
        assert blocks(router) == {500, 501}


async def test_what_nobody_can_replay_is_lost_and_said_so():
    async with engine(0, 1) as (publisher, router):
        await received(router, 2)
        publisher.buffer.clear()
        await publisher.send(7)
        assert await received(router, 2) == [(Origin.LOST, 7), (Origin.LIVE, 7)]
        assert blocks(router) == {7}


async def test_without_a_replay_endpoint_every_gap_is_a_loss():
    async with engine(replay=False) as (publisher, router):
        for number in (0, 1, 3):
            await publisher.send(number)
        assert await received(router, 4) == [
            (Origin.LIVE, 0),
            (Origin.LIVE, 1),
            (Origin.LOST, 3),
            (Origin.LIVE, 3),
        ]
        assert blocks(router) == {3}


async def test_an_engine_that_was_started_anew_is_noticed_by_its_numbers():
    async with engine(0, 1) as (publisher, router):
        await received(router, 2)
        await publisher.send(2)
        await received(router, 1)
        publisher.buffer.clear()
        await publisher.send(0)
        assert await received(router, 2) == [(Origin.LOST, 0), (Origin.REPLAY, 0)]
        assert blocks(router) == {0}


async def test_garbage_is_rejected_and_what_is_known_asked_for_again():
    async with engine(0) as (publisher, router):
        await received(router, 1)
        await publisher.send(1, b"\xdd\xff\xff\xff\xff")
        del publisher.buffer[1]
        assert await received(router, 2) == [(Origin.LOST, -1), (Origin.REPLAY, 0)]
        assert router.subscriber.rejected == 1


async def test_a_publisher_that_leaves_a_request_without_an_end_is_not_waited_for():
    async with engine(0) as (publisher, router):
        await received(router, 1)
        publisher.mute = True
        router.subscriber._patience = 0.05
        publisher.buffer |= {1: batch(1)}
        await publisher.send(2)
        assert await received(router, 2) == [(Origin.LOST, 2), (Origin.LIVE, 2)]


@pytest.mark.parametrize("replay", [True, False])
async def test_a_router_that_is_there_first_does_not_trust_what_it_did_not_hear(tmp_path: Path, replay: bool):
    """The first messages were sent before its socket had connected."""
    options = KvEventsConfig(endpoint=f"ipc://{tmp_path}/events", replay_endpoint=f"ipc://{tmp_path}/replay")
    where = options.replay_endpoint if replay else None
    async with KvEventSubscriber.open(options.endpoint, replay_endpoint=where, patience=0.01) as subscriber:
        subscriber._patience = 60
        router = Router(subscriber)
        async with HybridCache.open(SPEC, config()) as cache:
            await Engine(cache).serve(PROMPT)
            async with KvEventPublisher.open(cache, options) as publisher:
                publisher.sequence += 1  # it was sent, and nobody was there
                await until_live(router, cache)
                assert router.origins[0] is (Origin.SNAPSHOT if replay else Origin.LOST)
                assert subscriber.gaps == 1
                if replay:
                    await cache.drain()
                    await publisher.flush()
                    await router.catch_up()
                    assert router.known() == await truth(cache) != {}
                    assert subscriber.snapshots == 1


@pytest.mark.parametrize("kept", [0, 4, 9], ids=["all", "some", "none"])
async def test_an_engine_that_began_before_replays_what_it_has_or_it_is_lost(kept: int):
    async with engine() as (publisher, router):
        await router.catch_up()
        publisher.buffer = {number: batch(number) for number in range(kept, 5)}
        await publisher.send(5)
        if kept == 0:
            found = await received(router, 6)
            assert found in (
                [(Origin.REPLAY, number) for number in range(6)],
                [*((Origin.REPLAY, number) for number in range(5)), (Origin.LIVE, 5)],
            )
        else:
            assert (await received(router, 1)) == [(Origin.LOST, min(kept, 5))]
            await received(router, 2 if kept == 4 else 1)
        assert blocks(router) == {*range(kept, 5), 5}
        assert router.subscriber.gaps == 1


async def test_an_engine_that_was_started_anew_is_noticed_by_what_it_replays():
    """It has sent more than the one before, so its numbers do not go back."""
    async with engine(0, 1) as (publisher, router):
        await received(router, 2)
        publisher.buffer = {number: batch(number + 100, ts=2.0) for number in range(4)}
        await publisher.send(4, batch(104, ts=2.0))
        assert await received(router, 2) == [(Origin.LOST, 4), (Origin.LIVE, 4)]
        assert blocks(router) == {104}


async def test_what_is_sent_twice_counts_once():
    async with engine(0) as (publisher, router):
        await received(router, 1)
        await publisher.send(1)
        await publisher.send(1)
        await publisher.send(2)
        assert await received(router, 2) == [(Origin.LIVE, 1), (Origin.LIVE, 2)]
        assert router.subscriber.gaps == 0


def of(epoch: int, number: int) -> bytes:
    """A batch of one of several publishers of ours; its block begins with the publisher's number."""
    stored = {
        "type": "BlockStored",
        "block_hashes": [100 * epoch + number],
        "token_ids": [1],
        "block_size": 1,
    }
    return msgspec.msgpack.encode({"ts": 1.0, "events": [stored], "epoch": str(epoch)})


@pytest.mark.parametrize("replay", [True, False])
async def test_of_two_publishers_at_one_endpoint_one_is_followed(replay: bool, caplog: Any):
    async with engine(replay=replay) as (publisher, router):
        publisher.snapshot = of(1, 0) if replay else b""
        for number in range(20):
            await publisher.send(number, of(1, number))
            await publisher.send(number, of(2, number))
        await publisher.send(20, of(1 if replay else 2, 20))
        while not blocks(router) & {120, 220}:
            await received(router, 1)
        assert len({block // 100 for block in blocks(router)}) == 1
        assert router.subscriber.rejected >= 19
        assert router.subscriber.gaps < 10
    assert len([one for one in caplog.messages if "one endpoint has one publisher" in one]) == 1


async def test_iteration_ends_with_the_subscriber():
    async with sockets() as context:
        publisher = EnginePublisher(context)
        async with KvEventSubscriber.open(publisher.endpoint) as subscriber:
            waiting = asyncio.create_task(anext(subscriber, None))
            await publisher.subscribed()
        assert await waiting is None


async def test_an_iteration_that_begins_after_the_end_ends_at_once():
    async with sockets() as context:
        publisher = EnginePublisher(context)
        async with KvEventSubscriber.open(publisher.endpoint) as subscriber:
            pass
        assert await anext(subscriber, None) is None
