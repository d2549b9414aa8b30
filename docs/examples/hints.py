"""What only the client knows, and a trace of what was asked."""

import asyncio
import contextlib
import tempfile

from toy import SPEC, Toy

from asynchicache import CacheConfig, CacheHint, HybridCache


async def main() -> None:
    prompt = range(100, 120)
    async with HybridCache.open(SPEC, CacheConfig(device_slots={"kv": 16, "mamba": 4})) as cache:
        recorder = cache.record("requests.jsonl.gz")
        hint = CacheHint(continues=True)
        async with cache.request(prompt, hint=hint) as request:
            await request.load()
        await Toy(cache).serve(prompt)
        await recorder.aclose()
    print(f"{recorder.recorded} requests in {recorder.path.stat().st_size:,} bytes")


with tempfile.TemporaryDirectory() as folder, contextlib.chdir(folder):
    asyncio.run(main())
