"""Two processes on one store: what one prefills the other decodes, wherever the first one dies."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from asynchicache import Hit, HybridCache
from cache.engine import SPEC, Engine, config
from cache.prefiller import prompt
from ranks.launch import launch
from storage.redis_servers import RedisServer

PROMPTS = 4
FOLDER = Path(__file__).parent


async def decode(cache: HybridCache, number: int, seconds: float) -> Hit:
    async with cache.request([*prompt(number), 1]) as request:
        await request.prefetch(until=20, seconds=seconds)
        await request.load()
        Engine(cache).check(request)
        return request.hit


@pytest.mark.asyncio
@pytest.mark.engine("redis")
async def test_a_decoder_waits_for_another_process_and_outlives_it(tmp_path: Path) -> None:
    with RedisServer(tmp_path) as server:
        options = config(storage="redis", storage_options={"url": server.url})
        async with HybridCache.open(SPEC, options) as cache:
            for done in range(PROMPTS + 1):  # how many prompts are durable when the prefill is killed
                first = done * PROMPTS
                prefill = await launch(
                    str(FOLDER / "prefiller.py"), server.url, str(first), str(PROMPTS), piped=True
                )
                assert prefill.stdout is not None
                seconds = [600.0] * done + [0.5] * (PROMPTS - done)
                waiting = [
                    asyncio.create_task(decode(cache, first + number, seconds[number]))
                    for number in range(PROMPTS)
                ]
                for number in range(done):
                    assert await prefill.stdout.readline() == f"{first + number} 20\n".encode()
                prefill.kill()
                await prefill.wait()
                hits = await asyncio.gather(*waiting)
                assert [hit.tokens for hit in hits[:done]] == [20] * done
                assert {hit.tokens for hit in hits} <= {0, 20}
            await cache.drain()
            assert cache.verify(idle=True) == []
