"""The connector's configuration, and what lies in its storage."""

from __future__ import annotations

import json
from pathlib import Path
from struct import Struct
from typing import Any

import numpy as np
from xxhash import xxh3_64_digest

_ENTRY = Struct("<40sQQ8s56x8s")  # docs/reference/file_format.md
_SEALED = 120

Stored = dict[tuple[str, str], np.ndarray]
"""By pool and digest, the bytes of a page."""


def connector(folder: Path, **options: Any) -> dict[str, Any]:
    """What docs/howto/vllm.md configures."""
    extra = {
        "host_bytes": 64 << 20,
        "storage": "file",
        "storage_options": {"path": str(folder)},
        "weight_version": "w1",
    }
    return {
        "kv_connector": "AsynchicacheConnector",
        "kv_connector_module_path": "asynchicache.integrations.vllm.connector",
        "kv_role": "kv_both",
        "kv_load_failure_policy": "recompute",
        "kv_connector_extra_config": extra | options,
    }


def shared_memory() -> list[str]:
    """What lies in /dev/shm, and this process's mappings of shared memory without a name there."""
    named = [path.name for path in Path("/dev/shm").iterdir() if "asynchicache" in path.name]
    mapped = [
        line for line in Path("/proc/self/maps").read_text().splitlines() if "memfd:asynchicache" in line
    ]
    return sorted(named + mapped)


def stored_pages(folder: Path) -> Stored:
    """Read a file store by nothing but its format."""
    found: Stored = {}
    for manifest in folder.glob("*/pool.json"):
        pool = json.loads(manifest.read_text())
        for segment in sorted(manifest.parent.glob("*.pages")):
            found |= {(pool["pool"], digest): page for digest, page in _pages(pool, segment).items()}
    return found


def _pages(pool: dict[str, Any], segment: Path) -> dict[str, np.ndarray]:
    data = np.memmap(segment, np.uint8, "r")
    identity = f"{pool['fingerprint']} {pool['pool']} {pool['shard']}".encode()
    slots, start = _layout(pool)
    found = {}
    for slot in range(slots):
        entry = data[slot * _ENTRY.size : (slot + 1) * _ENTRY.size].tobytes()
        digest, _, _, checksum, seal = _ENTRY.unpack(entry)
        if seal == xxh3_64_digest(entry[:_SEALED] + identity, seed=slot):
            at = start + slot * pool["slot_bytes"]
            page = np.array(data[at : at + pool["page_bytes"]])
            assert checksum == xxh3_64_digest(page.tobytes())
            found[digest.hex()] = page
    return found


def _layout(pool: dict[str, Any]) -> tuple[int, int]:
    """Slots of a segment, and where the first begins."""
    slots = min(max(-(-((4 << 30) // pool["slot_bytes"]) // 64) * 64, 64), 4096)
    return slots, -(-slots * _ENTRY.size // 65536) * 65536


def damage(folder: Path, every: int, pool: str | None = None) -> int:
    """Overwrite some bytes of every so manieth page of a store, or of a pool; returns how many that were."""
    damaged = 0
    for manifest in folder.glob("*/pool.json"):
        found = json.loads(manifest.read_text())
        if pool not in (None, found["pool"]):
            continue
        slots, start = _layout(found)
        for segment in manifest.parent.glob("*.pages"):
            data = np.memmap(segment, np.uint8, "r+")
            used = [
                slot for slot in range(slots) if data[slot * _ENTRY.size : (slot + 1) * _ENTRY.size].any()
            ]
            for slot in used[::every]:
                at = start + slot * found["slot_bytes"]
                data[at + 100 : at + 164] = 0xFF
                damaged += 1
            data.flush()
    return damaged


def worst_difference(some: Stored, others: Stored, dtype: str) -> tuple[int, float]:
    """Compare pages that two stores have both: how many, and the largest difference of two numbers."""
    common = sorted(set(some) & set(others))
    worst = 0.0
    for name in common:
        if dtype == "float32":
            one, two = (pages[name].view(np.float32) for pages in (some, others))
            worst = max(worst, float(np.abs(one - two).max()))
        else:
            worst = max(worst, float((some[name] != others[name]).any()))
    return len(common), worst
