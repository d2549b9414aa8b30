"""Prefill in one process and decode in another one, through a folder that both have open as a store."""

import asyncio
import json
import sys
from asyncio.subprocess import PIPE, Process
from collections.abc import Sequence
from tempfile import TemporaryDirectory
from typing import Any

from toy import SPEC, Toy

from asynchicache import CacheConfig, CacheHint, HybridCache, Request

ANSWER = 6
"""Tokens of an answer."""


def shared(folder: str) -> CacheConfig:
    return CacheConfig(
        device_slots={"kv": 32, "mamba": 8},
        storage="object",
        storage_options={"url": f"file://{folder}"},
        weight_version="1",
    )


class Worker:
    """Answers for one role."""

    def __init__(self, cache: HybridCache) -> None:
        self.cache = cache
        self.toy = Toy(cache)

    async def prefill(self, prompt: Sequence[int]) -> dict[str, Any]:
        async with self.cache.request(prompt, hint=CacheHint(repeats=(len(prompt),))) as request:
            hit = await request.prefetch()
            await request.load()
            await self.compute(request)
            assert await request.durable()
            return {"restored": hit.tokens, "published": request.published}

    async def decode(self, prompt: Sequence[int]) -> dict[str, Any]:
        async with self.cache.request(prompt) as request:
            hit = await request.prefetch(until=len(prompt), seconds=10)
            await request.load()
            await self.compute(request)
            for _ in range(ANSWER):
                request.append([int(self.toy.sums[0, request.state("mamba")]) % 1000])  # what the model says
                await self.compute(request)
            await request.durable()  # the next turn's prefill finds the answer
            return {"restored": hit.tokens, "answer": request.tokens.tolist()[len(prompt) :]}

    async def compute(self, request: Request) -> None:
        """Compute what is not restored, and publish it."""
        for end in sorted({*request.cuts, len(request.tokens)}):
            done = request.reserved
            if end > done:
                request.extend(end - done)
                tokens, state = request.tokens[done:end], request.state("mamba")
                self.toy.compute(tokens, done, request.pages("kv"), state)
                await request.checkpoint(end)


class Proxy:
    """Asks both workers at once: the decoder waits for what the other one computes."""

    def __init__(self, prefill: Process, decode: Process) -> None:
        self.prefill, self.decode = prefill, decode

    async def answer(self, prompt: Sequence[int]) -> list[int]:
        first, second = await asyncio.gather(ask(self.prefill, prompt), ask(self.decode, prompt))
        print(f"{len(prompt)} tokens:", first, second)
        return list(second["answer"])


async def ask(worker: Process, prompt: Sequence[int]) -> dict[str, Any]:
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write(json.dumps(list(prompt)).encode() + b"\n")
    return dict(json.loads(await worker.stdout.readline()))


async def work(role: str, folder: str) -> None:
    async with HybridCache.open(SPEC, shared(folder)) as cache:
        worker = Worker(cache)
        while line := await asyncio.to_thread(sys.stdin.readline):
            prompt = json.loads(line)
            answer = await (worker.prefill(prompt) if role == "prefill" else worker.decode(prompt))
            print(json.dumps(answer), flush=True)


async def main() -> None:
    with TemporaryDirectory() as folder:
        workers = [
            await asyncio.create_subprocess_exec(
                sys.executable, __file__, role, folder, stdin=PIPE, stdout=PIPE
            )
            for role in ("prefill", "decode")
        ]
        proxy = Proxy(*workers)
        prompt = list(range(100, 121))
        for question in ([500, 501, 502], [600, 601]):
            prompt += [*await proxy.answer(prompt), *question]
        await proxy.answer(prompt)
        for worker in workers:
            worker.stdin.close()  # type: ignore[union-attr]
            await worker.wait()


asyncio.run(work(*sys.argv[1:]) if sys.argv[1:] else main())
