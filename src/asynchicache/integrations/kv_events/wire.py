"""The wire format of KV events: a batch is a msgpack array whose events are tagged maps.

vLLM 0.33 (`vllm/distributed/kv_events.py`) and SGLang 0.5.23 (`sglang/srt/disaggregation/kv_events.py`)
share this format; the fields are the union of theirs. `epoch`, `pool` and `media` are additions of this
package; the engines' decoders skip unknown fields.
"""

from __future__ import annotations

from typing import Any, NamedTuple, TypeAlias

import msgspec

BlockHash: TypeAlias = int | bytes
Tokens: TypeAlias = list[int] | list[tuple[int, int]]

SEQUENCE_BYTES = 8
END_OF_REPLY = (-1).to_bytes(SEQUENCE_BYTES, "big", signed=True)
"""Sequence number that marks the end of a reply."""

SNAPSHOT_REQUEST = b"asynchicache-snapshot-v1"
"""Request to a replay socket for a snapshot of the current blocks, instead of a replay."""


class BlockStored(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """Blocks that became readable.

    Attributes:
        block_hashes, parent_block_hash: 64-bit integers, or digests.
        token_ids: `block_size` tokens per block; pairs if an engine hashes bigrams.
        medium: the engine's name of the tier.
        group_idx, kv_cache_spec_kind, kv_cache_spec_sliding_window: the pool of a hybrid model.
        lora_id, lora_name, cache_salt, session_id, extra_keys, locality, ownership, lookahead_token_ids:
            as defined by the engines.
        pool: the pool's name in this package.
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
    """Blocks removed from one medium; attributes as in `BlockStored`."""

    block_hashes: list[BlockHash]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None
    ownership: str | None = None
    pool: str | None = None


class AllBlocksCleared(msgspec.Struct, tag=True, omit_defaults=True, frozen=True):
    """All blocks were removed, or all blocks on `media`; later events report the remaining blocks."""

    media: list[str] | None = None


class UnknownEvent(NamedTuple):
    """An event of a kind that this release does not know.

    Attributes:
        tag: name of the kind.
        fields: the content as received, a map or a list.
    """

    tag: str
    fields: dict[str, Any] | list[Any]


KvEvent: TypeAlias = BlockStored | BlockRemoved | AllBlocksCleared
AnyEvent: TypeAlias = KvEvent | UnknownEvent


class EventBatch(NamedTuple):
    """The content of one message.

    Attributes:
        ts: seconds since 1970, by the publisher's clock.
        data_parallel_rank: rank of the publisher; None if not given.
        epoch: changes when the publisher restarts; None from engines.
    """

    ts: float
    events: list[AnyEvent]
    data_parallel_rank: int | None = None
    epoch: str | None = None


_encoder = msgspec.msgpack.Encoder()


def encode(ts: float, events: list[KvEvent], rank: int, epoch: str) -> bytes:
    """Encode the payload of one message."""
    return _encoder.encode([ts, events, rank, epoch])
