"""Reads a file store with nothing but its format: what docs/reference/file_format.md says is so."""

import asyncio
from pathlib import Path
from struct import Struct
from tempfile import TemporaryDirectory

from toy import SPEC, Toy
from xxhash import xxh3_64_digest

from asynchicache import CacheConfig, HybridCache

BLOCK = 4096
# magic, version, checksum algorithm, page bytes, fingerprint, pool, shard, page digest, page checksum
HEADER = Struct("<8sHH4xQ32s64s32s32s8s")


def used(data: bytes, slots: int) -> list[int]:
    """Slots of the first segment that hold a page."""
    entries = [data[slot * 64 : slot * 64 + 64] for slot in range(slots)]
    return [slot for slot, entry in enumerate(entries) if entry[56:] == xxh3_64_digest(entry[:56], seed=slot)]


def pages(data: bytes, slot_bytes: int) -> int:
    """Print and count the pages of the first segment."""
    frame = BLOCK + slot_bytes
    slots = min(max(-(-((4 << 30) // frame) // 64) * 64, 64), 4096)
    entries_bytes = -(-slots * 64 // 65536) * 65536
    count = 0
    for start in (entries_bytes + slot * frame for slot in used(data, slots)):
        header = data[start : start + HEADER.size]
        seal = data[start + HEADER.size : start + HEADER.size + 8]
        if seal != xxh3_64_digest(header):
            continue  # damaged
        magic, version, _, size, _, pool, _, digest, checksum = HEADER.unpack(header)
        page = data[start + BLOCK : start + BLOCK + size]
        whole = checksum == xxh3_64_digest(page)
        names = magic.decode(), version, pool.rstrip(b"\0").decode(), digest.hex()[:8]
        print(*names, f"{size} bytes", "whole" if whole else "damaged")
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
        for file in sorted(Path(folder).glob("*/00000.pages")):
            print(pages(file.read_bytes(), slot_bytes=BLOCK), "pages")  # a toy's page fits into one block


main()
