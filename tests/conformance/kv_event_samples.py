"""Batches of KV events, encoded by an engine's own classes, and what is in them.

    ASYNCHICACHE_ENGINE_WHEEL=... python kv_event_samples.py vllm.distributed.kv_events vllm-0.33.0.json

records what the default tests decode where no engine is installed (`tests/data/kv_events`), from an unpacked
wheel. It takes a file in place of a module, so that forms of older releases can be recorded from theirs.
"""

from __future__ import annotations

import importlib.util
import json
import os
import sys
from importlib import import_module
from pathlib import Path
from types import ModuleType
from typing import Any

import msgspec
from standins import WHEEL, enter_wheel

STORED: dict[str, Any] = {
    "block_hashes": [72623859790382856, -2],
    "parent_block_hash": 5,
    "token_ids": [1, 2, 3, 4, 5, 6, 7, 2**31],
    "block_size": 4,
    "lora_id": 7,
    "medium": "GPU",
    "lora_name": "adapter",
    "extra_keys": [["adapter", "salt"], None],
    "group_idx": 1,
    "kv_cache_spec_kind": "sliding_window",
    "kv_cache_spec_sliding_window": 128,
    "locality": "LOCAL",
    "ownership": "tier",
    "session_id": "session",
    "lookahead_token_ids": [[8], [9]],
    "cache_salt": "salt",
}
LEAST = dict.fromkeys(("parent_block_hash", "lora_id", "medium", "lora_name")) | {
    "block_hashes": [1],
    "token_ids": [1, 2],
    "block_size": 2,
}
DIGESTS = {"block_hashes": [b"\x01" * 32, b"\xff" * 32], "parent_block_hash": b"\x02" * 32}


def _fields(kind: type[msgspec.Struct], values: dict[str, Any]) -> dict[str, Any]:
    """Those of the values that this release has a field for."""
    return {name: value for name, value in values.items() if name in kind.__struct_fields__}


def batches(module: ModuleType) -> dict[str, tuple[bytes, list[tuple[str, dict[str, Any]]]]]:
    """By name, a payload, and the kinds and fields of its events."""
    stored, removed = module.BlockStored, module.BlockRemoved
    full, least = _fields(stored, STORED), _fields(stored, LEAST)
    gone = _fields(removed, STORED)
    found = {
        "stored": [("BlockStored", full)],
        "least": [("BlockStored", least)],
        "digests": [("BlockStored", full | DIGESTS)],
        "removed": [("BlockRemoved", gone)],
        "several": [("BlockStored", least), ("BlockRemoved", gone), ("AllBlocksCleared", {})],
        "empty": [],
    }
    return {name: (_encode(module, events), events) for name, events in found.items()}


def _encode(module: ModuleType, events: list[tuple[str, dict[str, Any]]]) -> bytes:
    batch = module.KVEventBatch(1700000000.5, [getattr(module, kind)(**fields) for kind, fields in events], 3)
    return msgspec.msgpack.encode(batch)


def record(module: ModuleType) -> dict[str, Any]:
    """What goes into a file: digests are written as `0x...`."""
    return {
        name: {"payload": payload.hex(), "events": [[kind, _plain(fields)] for kind, fields in events]}
        for name, (payload, events) in batches(module).items()
    }


def _plain(value: Any) -> Any:
    if isinstance(value, bytes):
        return "0x" + value.hex()
    if isinstance(value, dict):
        return {name: _plain(one) for name, one in value.items()}
    return [_plain(one) for one in value] if isinstance(value, list) else value


def _load(name: str) -> ModuleType:
    if not name.endswith(".py"):
        return import_module(name)
    spec = importlib.util.spec_from_file_location("recorded", name)
    assert spec is not None, name
    assert spec.loader is not None, name
    module = importlib.util.module_from_spec(spec)
    sys.modules["recorded"] = module
    spec.loader.exec_module(module)
    return module


if __name__ == "__main__":
    os.environ.setdefault("VLLM_TARGET_DEVICE", "cpu")
    os.environ.setdefault("SGLANG_RUST_BUILD_MODE", "never")
    if WHEEL in os.environ:
        enter_wheel({"llguidance", "sgl_kernel", "torchaudio", "torchvision", "xgrammar"})
    Path(sys.argv[2]).write_text(json.dumps(record(_load(sys.argv[1])), indent=1) + "\n")
