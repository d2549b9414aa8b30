"""A scheduler without device memory, and a worker process with it; they speak in lines of JSON.

The scheduler kills the first worker in the middle of a copy. What it had reported is restored by the next.
"""

from __future__ import annotations

import asyncio
import sys
from array import array

import msgspec

from asynchicache import CacheConfig, HybridCache
from asynchicache.hashing import page_digests
from asynchicache.integrations.copy_worker import CopyWorker
from asynchicache.pools.shared import HostHandle
from asynchicache.testing.paged import PagedMemory
from asynchicache.testing.specs import synthetic_spec
from asynchicache.transfer.remote import CopyOrder, CopyResult, RemoteCopies
from ranks.launch import Follower, launch

SPEC = synthetic_spec(4, ("kv", "mamba"))
PAGES = {"kv": 16, "mamba": 4}
PROMPT = array("q", range(22))
DIGESTS = page_digests(PROMPT, 4)


class Job(msgspec.Struct):
    """One line for the worker.

    Attributes:
        orders: copies to carry out.
        compute: pages of `kv` in which it first writes what belongs there.
        check: pages of `kv` that it compares afterwards.
    """

    orders: list[CopyOrder]
    compute: list[int] = []
    check: list[int] = []


class Answer(msgspec.Struct):
    """What it says: results, and how many pages are wrong."""

    results: list[CopyResult]
    wrong: int


async def work(handle: HostHandle) -> None:
    memory = PagedMemory(SPEC, PAGES)
    async with CopyWorker.open(SPEC, memory.memory, handle, CacheConfig(inline=True)) as worker:
        for line in sys.stdin:
            job = msgspec.json.decode(line, type=Job)
            memory.compute("kv", job.compute, DIGESTS)
            memory.compute("mamba", [0] * bool(job.compute), DIGESTS[-1:])
            results = await worker.run(job.orders)
            wrong = memory.count_wrong("kv", job.check, DIGESTS)
            wrong += memory.count_wrong("mamba", [1] * bool(job.check), DIGESTS[-1:])
            print(msgspec.json.encode(Answer(results, wrong)).decode(), flush=True)


class WorkerProcess:
    def __init__(self, process: Follower) -> None:
        self.process = process

    @classmethod
    async def start(cls, handle: HostHandle) -> WorkerProcess:
        text = msgspec.json.encode(handle).decode()
        return cls(await launch(__file__, text, piped=True))

    def send(self, job: Job) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(msgspec.json.encode(job) + b"\n")

    async def ask(self, job: Job) -> Answer:
        self.send(job)
        assert self.process.stdout is not None
        return msgspec.json.decode(await self.process.stdout.readline(), type=Answer)

    async def kill(self) -> None:
        self.process.kill()
        await self.process.wait()


async def schedule() -> str:
    remote = RemoteCopies(PAGES)
    config = CacheConfig(host_slots={"kv": 16, "mamba": 4}, close_seconds=2)
    async with HybridCache.open(SPEC, config, engine=remote) as cache:
        worker = await WorkerProcess.start(remote.host)
        table = {"kv": [3, 1, 4, 15, 9], "mamba": [0]}
        async with cache.request(PROMPT) as request:
            computed = (await request.prefetch()).tokens
            request.checkpoint(20, pages=table)
            answer = await worker.ask(Job(remote.take(), compute=table["kv"]))
            remote.finish(answer.results)
        async with cache.request([*PROMPT, 1, 2, 3]) as request:
            ticket = request.checkpoint(24, pages={"kv": [2]})
            remote.take()
            await worker.kill()
            remote.abandon("the worker was killed")
            assert not ticket.ok
        worker = await WorkerProcess.start(remote.host)
        async with cache.request(PROMPT) as request:
            hit = await request.prefetch()
            request.load(into={"kv": [10, 11, 12, 13, 14], "mamba": [1]})
            answer = await worker.ask(Job(remote.take(), check=[10, 11, 12, 13, 14]))
            remote.finish(answer.results)
        assert cache.verify(idle=True) == []
        assert answer.wrong == 0
        await worker.kill()
    return f"computed {computed}, killed, restored {hit.tokens} of 20"


if __name__ == "__main__":
    asyncio.run(work(msgspec.json.decode(sys.argv[1], type=HostHandle)))
