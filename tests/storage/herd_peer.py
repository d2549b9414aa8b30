"""One of several replicas that meet one new prompt at once.

`python herd_peer.py STORAGE OPTIONS FOLDER REPLICAS PAGES`: replicas know each other by the folder's files.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
from pathlib import Path

from asynchicache import CacheConfig, HybridCache
from asynchicache.testing.specs import synthetic_spec

SPEC = synthetic_spec(64, ("kv", "mamba"), token_bytes=1024, state_bytes=1 << 18)
LIMITS = {"claim_seconds": 60.0, "deadline": 60.0, "batch_bytes": 4 << 20}  # for a machine that is slow


async def main(storage: str, options: str, folder: str, replicas: int, pages: int) -> None:
    config = CacheConfig(
        device_bytes="64MiB",
        host_bytes="64MiB",
        storage=storage,
        storage_options=json.loads(options),
        storage_limits=LIMITS,
        weight_version="1",
    )
    async with HybridCache.open(SPEC, config) as cache, cache.request(list(range(64 * pages + 1))) as request:
        while _told(Path(folder)) < replicas:  # noqa: ASYNC110 - another process tells
            await asyncio.sleep(0.01)
        await request.load()
        for end in request.cuts:
            request.extend(end - request.reserved)
            await request.checkpoint(end)
        print(await request.durable())


def _told(folder: Path) -> int:
    """Tell the others that we are there; returns how many are."""
    Path(folder, str(os.getpid())).touch()
    return len(list(folder.iterdir()))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:4], *map(int, sys.argv[4:])))
