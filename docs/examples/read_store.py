"""Reads a file store with nothing but its format: what docs/reference/file_format.md says is so."""

import asyncio
import json
from pathlib import Path
from struct import Struct
from tempfile import TemporaryDirectory

from toy import SPEC, Toy
from xxhash import xxh3_64_digest

from asynchicache import CacheConfig, HybridCache

# page digest, stamp, mark, page checksum; then the entry's own
ENTRY = Struct("<40sQQ8s56x8s")


def pages(folder: Path) -> int:
    """Print and count the pages of the first segment of a pool."""
    pool = json.loads((folder / "pool.json").read_text())
    data = (folder / "00000.pages").read_bytes()
    identity = f"{pool['fingerprint']} {pool['pool']} {pool['shard']}".encode()
    slots = min(max(-(-((4 << 30) // pool["slot_bytes"]) // 64) * 64, 64), 4096)
    entries_bytes = -(-slots * ENTRY.size // 65536) * 65536
    count = 0
    for slot in range(slots):
        entry = data[slot * ENTRY.size : (slot + 1) * ENTRY.size]
        digest, _, _, checksum, seal = ENTRY.unpack(entry)
        if seal != xxh3_64_digest(entry[:120] + identity, seed=slot):
            continue  # empty, damaged, or of another pool
        start = entries_bytes + slot * pool["slot_bytes"]
        page = data[start : start + pool["page_bytes"]]
        whole = checksum == xxh3_64_digest(page)
        print(pool["pool"], digest[8:].hex()[:8], f"{len(page)} bytes", "whole" if whole else "damaged")
        count += 1
    return count


async def write(folder: str) -> None:
    options = CacheConfig(
        device_slots={"kv": 16, "mamba": 4},
        storage="file",
        storage_options={"path": folder},
        weight_version="1",
    )
    async with HybridCache.open(SPEC, options) as cache:
        await Toy(cache).serve(range(10))


def main() -> None:
    with TemporaryDirectory() as folder:
        asyncio.run(write(folder))
        print(sorted(path.name[:8] for path in Path(folder).iterdir()))
        print((Path(folder) / "FORMAT").read_text().strip())
        for manifest in sorted(Path(folder).glob("*/pool.json")):
            print(pages(manifest.parent), "pages")


main()
