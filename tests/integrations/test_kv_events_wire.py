"""KV events on the wire: what engines sent is read, hostile bytes are refused, ours says everything."""

from __future__ import annotations

import json
import random
from array import array
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asynchicache import ConfigError, Coverage, ModelSpec, PoolSpec, TensorSpec, Tier
from asynchicache.errors import WireFormatError
from asynchicache.events import PagesRemoved, PagesStored
from asynchicache.hashing import NAMESPACE_BYTES, page_digests
from asynchicache.integrations.kv_events.config import KvEventsConfig, at_rank
from asynchicache.integrations.kv_events.decoding import MAX_PAYLOAD_BYTES, decode
from asynchicache.integrations.kv_events.encoding import EventEncoder
from asynchicache.integrations.kv_events.index import BlockIndex, BlockLocation
from asynchicache.integrations.kv_events.wire import (
    AllBlocksCleared,
    BlockRemoved,
    BlockStored,
    UnknownEvent,
    encode,
)

RECORDED = Path(__file__).parents[1] / "data" / "kv_events"
"""Bytes of the engines' own classes, see tests/conformance/kv_event_samples.py. `vllm-positional` is of the
classes that vLLM had before its maps, written down; the others are of published wheels."""

SAMPLES = [
    pytest.param(bytes.fromhex(sample["payload"]), sample["events"], id=f"{file.stem} {name}")
    for file in sorted(RECORDED.glob("*.json"))
    for name, sample in json.loads(file.read_text()).items()
]

KEYS = TensorSpec("keys", layers=(0,), shape=(1,), dtype="int64")
SPEC = ModelSpec(
    "model",
    page_size=4,
    layers=1,
    pools=(
        PoolSpec("kv", (KEYS,)),
        PoolSpec("index", (KEYS,), slots_of="kv"),
        PoolSpec("swa", (KEYS,), coverage=Coverage(2)),
        PoolSpec("mamba", (KEYS,), coverage=Coverage(1), per_token=False),
    ),
)
TOKENS = array("q", range(16))
DIGESTS = page_digests(TOKENS, 4)
HASHES = [digest[NAMESPACE_BYTES:] for digest in DIGESTS]


def plain(value: Any) -> Any:
    """As the records have it."""
    if isinstance(value, bytes):
        return "0x" + value.hex()
    return [plain(one) for one in value] if isinstance(value, list | tuple) else value


# What engines send


def test_there_are_records_of_all_four_forms():
    assert {file.stem for file in RECORDED.glob("*.json")} == {
        "sglang-0.5.5",
        "sglang-0.5.23",
        "vllm-positional",
        "vllm-0.33.0",
    }


@pytest.mark.parametrize(("payload", "events"), SAMPLES)
def test_what_the_engines_classes_encode_is_read(payload: bytes, events: list[Any]):
    batch = decode(payload)

    assert batch.ts == 1700000000.5
    assert batch.data_parallel_rank == 3
    assert [type(event).__name__ for event in batch.events] == [kind for kind, _ in events]
    for event, (_, fields) in zip(batch.events, events, strict=True):
        assert {name: plain(getattr(event, name)) for name in fields} == fields


def test_a_batch_may_be_a_map():
    """As it was in some releases of vLLM."""
    sent = {"ts": 1.0, "events": [{"type": "AllBlocksCleared"}], "data_parallel_rank": 2, "news": 1}

    assert decode(msgspec.msgpack.encode(sent)).events == [AllBlocksCleared()]
    assert decode(msgspec.msgpack.encode(sent)).data_parallel_rank == 2


def test_fields_and_kinds_that_nobody_knows_are_let_pass():
    sent = [
        1,
        [
            {
                "type": "BlockRemoved",
                "block_hashes": [1],
                "medium": "GPU",
                "since": [1, {}],
                "group_idx": "?",
            },
            ["BlockRemoved", [2], "CPU", None, None, None, None, "more"],
            {"type": "BlockMoved", "to": 3},
            ["BlockPinned", 4],
        ],
        None,
        "epoch",
        "more",
    ]
    batch = decode(msgspec.msgpack.encode(sent))

    assert batch.epoch == "epoch"
    assert batch.events[:2] == [BlockRemoved([1], "GPU"), BlockRemoved([2], "CPU")]
    assert batch.events[2:] == [
        UnknownEvent("BlockMoved", {"type": "BlockMoved", "to": 3}),
        UnknownEvent("BlockPinned", ["BlockPinned", 4]),
    ]


def test_the_metadata_that_sglang_once_put_behind_an_array_is_let_pass():
    event = ["BlockStored", [1], None, [1, 2], 2, None, "GPU", {"cache_salt": "s"}]

    assert decode(msgspec.msgpack.encode([1.0, [event]])).events == [
        BlockStored([1], None, [1, 2], 2, None, "GPU", None)
    ]


def test_bigrams_are_tokens():
    event = {"type": "BlockStored", "block_hashes": [1], "token_ids": [[1, 2], [2, 3]], "block_size": 2}
    (stored,) = decode(msgspec.msgpack.encode([1.0, [event]])).events

    assert isinstance(stored, BlockStored)
    assert stored.token_ids == [(1, 2), (2, 3)]


# What nobody should send


STORED: dict[str, object] = {"type": "BlockStored", "block_hashes": [1], "token_ids": [1], "block_size": 1}


@pytest.mark.parametrize(
    ("sent", "words"),
    [
        (7, "a batch is int 7, not a map or an array"),
        ([], "events are NoneType None, not an array"),
        ([1.0, {"a": 1}], "events are dict 1 elements, not an array"),
        (["now", []], "ts is str 'now', not a number of seconds"),
        ([True, []], "ts is bool True"),
        ([1.0, [None]], "an event is NoneType None, not a map with a type"),
        ([1.0, [[]]], "an event is list 0 elements"),
        ([1.0, [{"type": 3}]], "an event is dict 1 elements"),
        ([1.0, [STORED | {"block_hashes": 1}]], "BlockStored.block_hashes is int 1, not an array"),
        ([1.0, [STORED | {"block_hashes": [1.5]}]], "BlockStored.block_hashes has float 1.5"),
        ([1.0, [STORED | {"block_hashes": [b""]}]], "1 to 64 bytes"),
        ([1.0, [STORED | {"block_hashes": [b"x" * 65]}]], "1 to 64 bytes"),
        ([1.0, [STORED | {"parent_block_hash": "x"}]], "BlockStored.parent_block_hash has str 'x'"),
        ([1.0, [STORED | {"token_ids": ["a"]}]], "BlockStored.token_ids is list 1 elements"),
        ([1.0, [STORED | {"token_ids": [[1, 2, 3]]}]], "BlockStored.token_ids"),
        ([1.0, [STORED | {"block_size": -1}]], "BlockStored.block_size is int -1, not a number"),
        ([1.0, [["BlockRemoved"]]], "BlockRemoved.block_hashes is NoneType None"),
    ],
)
def test_what_is_no_batch_is_refused_in_words(sent: object, words: str):
    with pytest.raises(WireFormatError, match=words.replace("(", r"\(")):
        decode(msgspec.msgpack.encode(sent))


@pytest.mark.parametrize(
    "payload",
    [
        b"",
        b"\xc1",
        b"\xdd\xff\xff\xff\xff",  # an array of four billion elements
        b"\xdf\xff\xff\xff\xff",  # a map likewise
        b"\xc6\xff\xff\xff\xff",  # and bytes
        b"\x91" * 100_000,  # arrays in arrays
        b"\x93\xcb\x00\x00\x00\x00\x00\x00\x00\x00\x90\xc0\x00",  # something behind the end
    ],
)
def test_bytes_that_would_exhaust_a_decoder_are_refused(payload: bytes):
    with pytest.raises(WireFormatError, match="is no msgpack"):
        decode(payload)


def test_a_payload_has_a_largest_size():
    with pytest.raises(WireFormatError, match=f"{MAX_PAYLOAD_BYTES} are the most"):
        decode(bytes(MAX_PAYLOAD_BYTES + 1))


def test_damaged_bytes_are_read_or_refused_and_nothing_else():
    rng = random.Random(0)
    payloads = [sample.values[0] for sample in SAMPLES]
    refused = []
    for _ in range(3000):
        damaged = bytearray(rng.choice(payloads))
        for _ in range(rng.randrange(1, 4)):
            damaged[rng.randrange(len(damaged))] = rng.randrange(256)
        try:
            decode(bytes(damaged[: rng.randrange(1, len(damaged) + 1)]))
        except WireFormatError as error:
            refused.append(str(error))
    assert len(refused) > 1000
    assert max(map(len, refused)) < 300


# What we send


def stored(first: int, last: int, tier: Tier = Tier.DEVICE, pool: str = "kv", **named: str) -> PagesStored:
    """Pages `first` to `last` of the tokens above."""
    parent = DIGESTS[first - 1] if first else None
    tokens = TOKENS[first * 4 : last * 4]
    return PagesStored(pool, tier, tuple(DIGESTS[first:last]), parent, tokens, 4, **named)


def test_what_we_send_is_a_map_that_says_everything():
    encoder = EventEncoder(SPEC, KvEventsConfig())
    (event,) = encoder.encode([stored(1, 3, Tier.HOST, "swa", namespace="adapter", salt="s")])
    (sent,) = msgspec.msgpack.decode(encode(2.0, [event], 1, "e"))[1]

    assert sent == {
        "type": "BlockStored",
        "block_hashes": [int.from_bytes(each[:8], "big", signed=True) for each in HASHES[1:3]],
        "parent_block_hash": int.from_bytes(HASHES[0][:8], "big", signed=True),
        "token_ids": list(range(4, 12)),
        "block_size": 4,
        "lora_id": None,
        "medium": "CPU",
        "lora_name": "adapter",
        "group_idx": 1,
        "kv_cache_spec_kind": "sliding_window",
        "kv_cache_spec_sliding_window": 8,
        "locality": "LOCAL",
        "cache_salt": "s",
        "pool": "swa",
    }
    batch = decode(encode(2.0, [event], 1, "e"))
    assert batch == (2.0, [event], 1, "e")


def test_words_and_hashes_are_a_choice():
    encoder = EventEncoder(SPEC, KvEventsConfig(hashes="bytes", media="sglang", pools=("kv", "mamba")))
    events = [stored(0, 1, Tier.STORAGE), stored(0, 1, pool="swa"), stored(0, 1, Tier.HOST, "mamba")]
    first, second = encoder.encode(events)

    assert isinstance(first, BlockStored)
    assert (first.block_hashes, first.medium, first.kv_cache_spec_kind) == (
        HASHES[:1],
        "DISK",
        "full_attention",
    )
    assert isinstance(second, BlockStored)
    assert (second.medium, second.kv_cache_spec_kind, second.group_idx) == ("CPU_PINNED", "mamba", 2)


def test_neighbours_that_go_on_from_one_another_are_one_event():
    encoder = EventEncoder(SPEC, KvEventsConfig())
    gone = [PagesRemoved("kv", Tier.DEVICE, (digest,)) for digest in DIGESTS]
    apart = [stored(0, 1), stored(2, 3), stored(3, 4, Tier.HOST), stored(3, 4, salt="s")]

    (together,) = encoder.encode([stored(0, 1), stored(1, 3), stored(3, 4)])
    assert together == next(encoder.encode([stored(0, 4)]))
    (removed,) = encoder.encode(gone)
    assert len(removed.block_hashes) == 4
    assert len(list(encoder.encode(apart))) == 4


def test_an_index_knows_how_far_a_sequence_reaches():
    index = BlockIndex()
    index.apply(
        [
            BlockStored([1, 2], None, [0] * 8, 4, None, "GPU", None, group_idx=0),
            BlockStored([3], 2, [0] * 4, 4, None, "CPU", None, group_idx=0),
            BlockStored([2], 1, [0] * 4, 4, None, "CPU", None, group_idx=1),
            UnknownEvent("BlockMoved", {}),
        ]
    )
    assert index.reach([1, 2, 3, 4]) == 3
    assert index.reach([2, 3], group=1) == 1
    index.apply([BlockRemoved([2], "GPU", group_idx=0)])
    assert index.reach([1, 2, 3]) == 1
    index.apply([AllBlocksCleared(["GPU"])])
    assert set(index.locations) == {BlockLocation("CPU", 0), BlockLocation("CPU", 1)}
    index.apply([AllBlocksCleared()])
    assert not index.locations


# Options


def test_the_engines_configurations_are_taken():
    vllm = (
        '{"enable_kv_cache_events": true, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv@pod"}'
    )

    assert KvEventsConfig.from_json(vllm) == KvEventsConfig(topic="kv@pod")
    assert KvEventsConfig.from_json('{"pools": ["kv"], "hashes": "bytes"}').pools == ("kv",)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("[]", "does not fit"),
        ("{", "does not fit"),
        ('{"endpont": "x"}', "endpont"),
        ('{"topic": "\udcff"}', "does not fit"),
        ('{"hashes": "md5"}', "md5"),
        ('{"hwm": 0}', "hwm 0 must be a whole number above 0"),
        ('{"data_parallel_rank": -1}', "data_parallel_rank -1 must be a whole number of at least 0"),
        ('{"publisher": "null"}', "one publisher, 'zmq'"),
        ('{"enable_kv_cache_events": false}', "one publisher, 'zmq'"),
    ],
)
def test_a_configuration_that_does_not_fit_is_refused_in_words(text: str, words: str):
    with pytest.raises(ConfigError, match=words):
        KvEventsConfig.from_json(text)


def test_ports_are_raised_by_the_rank():
    assert at_rank("tcp://*:5557", 3) == "tcp://*:5560"
    assert at_rank("tcp://*:*", 3) == "tcp://*:*"
    assert at_rank("ipc:///tmp/events", 2) == "ipc:///tmp/events_dp2"
    assert at_rank("inproc://events", 0) == "inproc://events"
    for endpoint in ("tcp://*", "tcp://*:http", "tcp://*:65535"):
        with pytest.raises(ConfigError, match="has no port of 1 to 65535"):
            at_rank(endpoint, 1)
