"""Conversations on the engine of `engine.py`: all at once, with less memory than they need, and a restart."""

import asyncio
import tempfile
from collections.abc import Sequence
from contextlib import suppress

from engine import Engine
from paged_model import SPEC

from asynchicache import CacheConfig, HybridCache

RULES = [token % 60 for token in range(50)]  # a beginning that all prompts share


async def answer(engine: Engine, prompt: Sequence[int], most: int = 30) -> list[int]:
    return [token async for token in engine.generate(prompt, most)]


async def hang_up(engine: Engine, prompt: Sequence[int]) -> None:
    with suppress(TimeoutError):
        async with asyncio.timeout(0.01):
            await answer(engine, prompt, 100)


async def ask_all(folder: str, prompts: list[list[int]], *, pages: int) -> list[list[int]]:
    config = CacheConfig(
        device_slots={"kv": pages, "mamba": 16},
        storage="file",
        storage_options={"path": folder},
        weight_version="0",
        prefetch={"policy": "wait_complete"},
    )
    async with HybridCache.open(SPEC, config) as cache, Engine(cache) as engine:
        clients = [asyncio.create_task(answer(engine, prompt)) for prompt in prompts]
        leaving = asyncio.create_task(hang_up(engine, [*RULES, 1]))
        answers = await asyncio.gather(*clients)
        await asyncio.wait([leaving])
        served = cache.statistics().served
        hit_rate = sum(served.hit_tokens.values()) / served.prompt_tokens
        print(f"{len(answers)} answers, most of the prompts from the cache: {hit_rate > 0.5}")
        print("preempted:", engine.preempted > 0, "- broken invariants:", cache.verify())
    return answers


async def main() -> None:
    prompts = [[*RULES, *(token * 7 % 60 for token in range(number, number + 20))] for number in range(8)]
    with tempfile.TemporaryDirectory() as roomy, tempfile.TemporaryDirectory() as folder:
        alone = await ask_all(roomy, prompts, pages=500)
        tight = await ask_all(folder, prompts, pages=32)
        again = await ask_all(folder, prompts, pages=32)  # a restart: storage has what was computed
    print("the same answers each time:", alone == tight == again)


asyncio.run(main())
