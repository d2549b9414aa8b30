"""KV events as they are on the wire: tagged msgpack maps in a batch that is an array.

The form that vLLM 0.33 (`vllm/distributed/kv_events.py`) and SGLang 0.5.23
(`sglang/srt/disaggregation/kv_events.py`) share; fields are the union of theirs. `epoch`, `pool` and
`media` are ours: a decoder of the engines' skips what it does not know.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import msgspec

BlockHash: TypeAlias = int | bytes
Tokens: TypeAlias = list[int] | list[tuple[int, int]]

SEQUENCE_BYTES = 8
END_OF_REPLY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""In place of a sequence number: nothing follows."""

SNAPSHOT_REQUEST = b"asynchicache-snapshot-v1"
"""Asks a replay socket for what is there now, instead of for batches from a sequence number on."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """Blocks that may be read from now on.

    Attributes:
        block_hashes, parent_block_hash: 64-bit integers, or digests.
        token_ids: `block_size` for each block; pairs where an engine hashes bigrams.
        medium: the tier, in the engine's words.
        group_idx, kv_cache_spec_kind, kv_cache_spec_sliding_window: of hybrid models, which pool.
        lora_id, lora_name, cache_salt, session_id, extra_keys, locality, ownership, lookahead_token_ids:
            see the engines.
        pool: our name of the pool.
    """

    block_hashes: list[BlockHash]
    parent_block_hash: BlockHash | None
    token_ids: Tokens
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[Any] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None
    session_id: str | None = None
    lookahead_token_ids: list[list[int]] | None = None
    cache_salt: str | None = None
    pool: str | None = None


class BlockRemoved(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """Blocks that are gone from one medium; attributes as above."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    pool: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """Everything is gone, or everything of `media`; what follows says what is left."""

    media: list[str] | None = None


class UnknownEvent(NamedTuple):
    """An event of a kind that this release does not know.

    Attributes:
        tag: its name.
        fields: its content as it came, a map or a list.
    """

    tag: str
    fields: dict[str, Any] | list[Any]


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
AnyEvent: TypeAlias = KvEvent | UnknownEvent


class EventBatch(NamedTuple):
    """What one message holds.

    Attributes:
        ts: seconds since 1970, by the publisher's clock.
        events: in order.
        data_parallel_rank: of the publisher; None if it did not say.
        epoch: differs whenever the publisher was started anew; None from engines.
    """

    ts: float
    events: list[AnyEvent]
    data_parallel_rank: int | None = None
    epoch: str | None = None


_encoder = msgspec.msgpack.Encoder()


def encode(ts: float, events: list[KvEvent], rank: int, epoch: str) -> bytes:
    """One message's payload."""
    return _encoder.encode([ts, events, rank, epoch])
