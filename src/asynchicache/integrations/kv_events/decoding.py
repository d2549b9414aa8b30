"""Decode KV events of vLLM, SGLang and asynchicache, in old and new formats; other input is an error.

Events are tagged maps (vLLM since #42892, SGLang 0.5.23) or, before that, arrays that begin with the tag. A
batch is an array, or a map in some releases of vLLM. Unknown fields are ignored, and unknown kinds of events
are passed on.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import msgspec

from asynchicache.errors import WireFormatError
from asynchicache.integrations.kv_events.wire import (
    AllBlocksCleared,
    AnyEvent,
    BlockHash,
    BlockRemoved,
    BlockStored,
    EventBatch,
    Tokens,
    UnknownEvent,
)

MAX_PAYLOAD_BYTES = 64 << 20
"""Most bytes of a payload; a batch of a thousand events of a thousand tokens has 5 MiB."""

_MAX_HASH_BYTES = 64

# Order of fields in the engines' old arrays. SGLang had six fields and, for salted requests, a map after
# them, which is ignored like any field of an unexpected type.
_STORED_FIELDS = BlockStored.__struct_fields__[: BlockStored.__struct_fields__.index("locality")]
_REMOVED_FIELDS = BlockRemoved.__struct_fields__[: BlockRemoved.__struct_fields__.index("locality")]
_BATCH_FIELDS = ("ts", "events", "data_parallel_rank", "epoch")
_RANKS = ("data_parallel_rank", "attn_dp_rank")

_OPTIONAL: Mapping[str, type] = {
    "lora_id": int,
    "medium": str,
    "lora_name": str,
    "extra_keys": list,
    "group_idx": int,
    "kv_cache_spec_kind": str,
    "kv_cache_spec_sliding_window": int,
    "locality": str,
    "ownership": str,
    "session_id": str,
    "lookahead_token_ids": list,
    "cache_salt": str,
    "pool": str,
}

T = TypeVar("T")


def decode(payload: bytes) -> EventBatch:
    """Decode the payload of one message.

    Raises:
        WireFormatError: the payload is too long, not msgpack, or not a batch of events; names the field.
    """
    if len(payload) > MAX_PAYLOAD_BYTES:
        raise WireFormatError(f"a payload of {len(payload)} bytes; {MAX_PAYLOAD_BYTES} are the most")
    try:
        found = msgspec.msgpack.decode(payload)
    except (msgspec.MsgspecError, RecursionError, ValueError) as error:
        raise WireFormatError(f"a payload of {len(payload)} bytes is no msgpack: {error}") from error
    fields = _named(found, _BATCH_FIELDS, "a batch")
    events = fields.get("events")
    if not isinstance(events, list):
        raise WireFormatError(f"a batch's events are {_shown(events)}, not an array")
    return EventBatch(
        ts=_timestamp(fields.get("ts")),
        events=[_event(event) for event in events],
        data_parallel_rank=_optional(next((fields[name] for name in _RANKS if name in fields), None), int),
        epoch=_optional(fields.get("epoch"), str),
    )


def _event(found: object) -> AnyEvent:
    tag = _tag(found)
    read = _READERS.get(tag)
    if read is not None:
        return read(found)
    assert isinstance(found, dict | list), "it has a tag"
    return UnknownEvent(tag, found)


def _tag(found: object) -> str:
    if isinstance(found, dict):
        tag = found.get("type")
    else:
        tag = found[0] if isinstance(found, list) and found else None
    if not isinstance(tag, str):
        raise WireFormatError(f"an event is {_shown(found)}, not a map with a type or an array behind one")
    return tag


def _stored(found: object) -> BlockStored:
    fields = _named(found, ("type", *_STORED_FIELDS), "BlockStored")
    extra = {name: _optional(fields.get(name), kind) for name, kind in _OPTIONAL.items()}
    size = _optional(fields.get("block_size"), int)
    if size is None or size < 0:
        raise WireFormatError(f"BlockStored.block_size is {_shown(fields.get('block_size'))}, not a number")
    parent = fields.get("parent_block_hash")
    return BlockStored(
        block_hashes=_hashes(fields, "BlockStored"),
        parent_block_hash=None if parent is None else _hash(parent, "BlockStored.parent_block_hash"),
        token_ids=_tokens(fields.get("token_ids")),
        block_size=size,
        **extra,
    )


def _removed(found: object) -> BlockRemoved:
    fields = _named(found, ("type", *_REMOVED_FIELDS), "BlockRemoved")
    names = BlockRemoved.__struct_fields__[1:]
    extra = {name: _optional(fields.get(name), _OPTIONAL[name]) for name in names}
    return BlockRemoved(block_hashes=_hashes(fields, "BlockRemoved"), **extra)


def _cleared(found: object) -> AllBlocksCleared:
    media = _named(found, ("type",), "AllBlocksCleared").get("media")
    known = isinstance(media, list) and all(isinstance(medium, str) for medium in media)
    return AllBlocksCleared(media if known else None)


_READERS: Mapping[str, Callable[[object], AnyEvent]] = {
    "BlockStored": _stored,
    "BlockRemoved": _removed,
    "AllBlocksCleared": _cleared,
}


def _named(found: object, names: Sequence[str], what: str) -> Mapping[str, Any]:
    """Return the fields of a map, or of an array in the order of `names`; further elements are dropped."""
    if isinstance(found, dict):
        return found
    if isinstance(found, list):
        return dict(zip(names, found, strict=False))
    raise WireFormatError(f"{what} is {_shown(found)}, not a map or an array")


def _hashes(fields: Mapping[str, Any], what: str) -> list[BlockHash]:
    hashes = fields.get("block_hashes")
    if not isinstance(hashes, list):
        raise WireFormatError(f"{what}.block_hashes is {_shown(hashes)}, not an array")
    return [_hash(one, f"{what}.block_hashes") for one in hashes]


def _hash(found: object, where: str) -> BlockHash:
    if isinstance(found, bytes) and 0 < len(found) <= _MAX_HASH_BYTES:
        return found
    if isinstance(found, int) and not isinstance(found, bool):
        return found
    raise WireFormatError(f"{where} has {_shown(found)}; hashes are integers or 1 to {_MAX_HASH_BYTES} bytes")


def _tokens(found: object) -> Tokens:
    if isinstance(found, list):
        if all(map(_is_integer, found)):
            return found
        if all(isinstance(pair, list) and len(pair) == 2 and all(map(_is_integer, pair)) for pair in found):
            return [(first, second) for first, second in found]
    raise WireFormatError(f"BlockStored.token_ids is {_shown(found)}, not an array of token ids")


def _timestamp(found: object) -> float:
    if isinstance(found, int | float) and not isinstance(found, bool):
        return float(found)
    raise WireFormatError(f"a batch's ts is {_shown(found)}, not a number of seconds")


def _optional(found: object, kind: type[T]) -> T | None:
    """Return an optional field; None if it is missing or, as in other releases, of another type."""
    return found if isinstance(found, kind) and not isinstance(found, bool) else None


def _is_integer(found: object) -> bool:
    return isinstance(found, int) and not isinstance(found, bool)


def _shown(found: object) -> str:
    """Format a value for an error message, with bounded length."""
    text = repr(found)[:60] if not isinstance(found, list | dict) else f"{len(found)} elements"
    return f"{type(found).__name__} {text}"
