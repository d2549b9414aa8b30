"""What KV events of both engines have in common with ours, checked inside their own classes."""

from __future__ import annotations

import asyncio
import json
from array import array
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
import zmq
import zmq.asyncio
from kv_event_samples import record

from asynchicache import HybridCache, Tier
from asynchicache.events import PagesRemoved, PagesStored
from asynchicache.hashing import page_digests
from asynchicache.integrations.kv_events.config import KvEventsConfig
from asynchicache.integrations.kv_events.decoding import decode
from asynchicache.integrations.kv_events.encoding import EventEncoder
from asynchicache.integrations.kv_events.publisher import KvEventPublisher
from asynchicache.integrations.kv_events.subscriber import KvEventSubscriber, Origin
from asynchicache.integrations.kv_events.wire import END_OF_REPLY, SNAPSHOT_REQUEST, AllBlocksCleared, encode
from cache.engine import SPEC, Engine, config

RECORDED = Path(__file__).parents[1] / "data" / "kv_events"
PAGE = SPEC.page_size
TOKENS = array("q", range(4 * PAGE))
DIGESTS = page_digests(TOKENS, PAGE)


def check_record(module: ModuleType, name: str) -> None:
    """What the default tests decode is what the engine's classes encode."""
    assert record(module) == json.loads((RECORDED / name).read_text())


def check_ours_is_read(module: ModuleType, **options: Any) -> None:
    """The engine's typed decoder takes what we send, fields of our own included."""
    encoder = EventEncoder(SPEC, KvEventsConfig(**options))
    ours = [
        *encoder.encode(
            [
                PagesStored(
                    "kv", Tier.DEVICE, tuple(DIGESTS[:2]), None, TOKENS[: 2 * PAGE], PAGE, "lora", "salt"
                ),
                PagesStored("mamba", Tier.HOST, tuple(DIGESTS[2:3]), DIGESTS[1], TOKENS[:PAGE], PAGE),
                PagesRemoved("kv", Tier.STORAGE, tuple(DIGESTS)),
            ]
        ),
        AllBlocksCleared(["GPU"]),
    ]
    read = msgspec.msgpack.decode(encode(1.5, list(ours), 2, "epoch"), type=module.KVEventBatch)

    assert read.ts == 1.5
    assert 2 in (getattr(read, "data_parallel_rank", None), getattr(read, "attn_dp_rank", None))
    for theirs, our in zip(read.events, ours, strict=True):
        assert type(theirs).__name__ == type(our).__name__
        shared = set(type(theirs).__struct_fields__) & set(type(our).__struct_fields__)
        assert {name: getattr(theirs, name) for name in shared} == {
            name: getattr(our, name) for name in shared
        }


async def check_engine_is_followed(module: ModuleType, folder: Path, rank: str) -> None:
    """Our subscriber joins the engine's publisher late, is replayed everything, and goes on."""
    endpoints = {"endpoint": f"ipc://{folder}/events", "replay_endpoint": f"ipc://{folder}/replay"}
    publisher = module.ZmqEventPublisher(**{rank: 0}, **endpoints, topic="kv")
    try:
        for number in range(3):
            publisher.publish(_batch(module, number))
        while len(publisher._buffer) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0.01)  # it sends in a thread of its own
        async with (
            KvEventSubscriber.open(**endpoints, topic="kv", patience=10) as subscriber,
            asyncio.timeout(60),
        ):
            updates = [await anext(subscriber) for _ in range(3)]
            assert [(update.origin, update.sequence) for update in updates] == [
                (Origin.REPLAY, number) for number in range(3)
            ]
            number = 3
            while updates[-1].origin is not Origin.LIVE:  # until the sockets have found each other
                publisher.publish(_batch(module, number))
                number += 1
                updates.append(await anext(subscriber))
            hashes = [event.block_hashes for update in updates for event in update.batch.events]
            assert hashes == [[number] for number in range(len(updates))]
    finally:
        publisher.shutdown()


def _batch(module: ModuleType, number: int) -> Any:
    stored = module.BlockStored(
        block_hashes=[number],
        parent_block_hash=None,
        token_ids=[1],
        block_size=1,
        lora_id=None,
        medium="GPU",
        **({"lora_name": None} if "lora_name" in module.BlockStored.__struct_fields__ else {}),
    )
    return module.KVEventBatch(1.0, [stored])


async def check_our_publisher_is_understood(module: ModuleType, **options: Any) -> None:
    """A client with the engine's decoder follows a cache: live, replayed and as a snapshot."""
    settings = KvEventsConfig(
        endpoint="tcp://*:*", replay_endpoint="tcp://127.0.0.1:*", topic="kv", **options
    )
    decoder = msgspec.msgpack.Decoder(type=module.KVEventBatch)
    context = zmq.asyncio.Context()
    try:
        async with (
            HybridCache.open(SPEC, config()) as cache,
            KvEventPublisher.open(cache, settings) as publisher,
            asyncio.timeout(60),
        ):
            for start in range(0, 300, 100):
                await Engine(cache).serve(range(start, start + 21))
                await publisher.flush()
            client = context.socket(zmq.DEALER)
            client.connect(str(publisher.replay_endpoint))
            replayed = await _ask(client, (0).to_bytes(8, "big"))
            assert [int.from_bytes(frames[1], "big") for frames in replayed] == list(
                range(publisher.sequence)
            )
            snapshot = await _ask(client, SNAPSHOT_REQUEST)
            assert _followed(replayed, decoder) == _followed(snapshot, decoder) != {}
    finally:
        context.destroy(linger=0)


async def _ask(client: zmq.asyncio.Socket, request: bytes) -> list[list[bytes]]:
    await client.send_multipart([b"", request])
    replies = []
    while (frames := (await client.recv_multipart())[1:])[1] != END_OF_REPLY:
        replies.append(frames)
    return replies


def _followed(replies: list[list[bytes]], decoder: Any) -> dict[Any, set[Any]]:
    """Blocks by medium, as a consumer of the engine's would keep them."""
    found: dict[Any, set[Any]] = {}
    for _, _, payload in replies:
        assert [type(event).__name__ for event in decode(payload).events] == [
            type(event).__name__ for event in decoder.decode(payload).events
        ]
        for event in decoder.decode(payload).events:
            kind = type(event).__name__
            if kind == "BlockStored":
                found.setdefault(event.medium, set()).update(event.block_hashes)
            elif kind == "BlockRemoved":
                found.get(event.medium, set()).difference_update(event.block_hashes)
            else:
                found.clear()
    return {medium: blocks for medium, blocks in found.items() if blocks}
