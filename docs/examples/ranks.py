"""One model over two processes: the leader decides, the follower carries out. Keys are token ids."""

import asyncio
import multiprocessing
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from asynchicache import CacheConfig, HybridCache, ModelSpec, PoolSpec, RankGroup, RankWorker, TensorSpec
from asynchicache.streams.drivers import ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice

PAGE = 4
TOKEN = "a secret of this group"
KEYS = TensorSpec("keys", layers=(0,), shape=(1,), dtype="int64")
SPEC = ModelSpec("toy", page_size=PAGE, layers=1, pools=(PoolSpec("kv", (KEYS,)),))


def options(rank: int) -> CacheConfig:
    return CacheConfig(device_slots={"kv": 16}, rank=rank, ranks=2)


def forward(keys: torch.Tensor, tokens: Sequence[int], pages: Sequence[int], start: int) -> int:
    """Write the keys of `tokens` from position `start`; returns what attention over all of them gives."""
    for position in range(start, len(tokens)):
        keys[0, pages[position // PAGE], position % PAGE] = tokens[position]
    return sum(int(keys[0, pages[i // PAGE], i % PAGE]) for i in range(len(tokens)))


async def lead(address: str, engine: Connection) -> None:
    async with (
        RankGroup.listen(address, TOKEN) as group,
        HybridCache.open(SPEC, options(0), group=group) as cache,  # waits for the follower
    ):
        keys = cache.device_tensor("kv", "keys")
        for tokens in (list(range(10)), list(range(14))):
            async with cache.request(tokens) as request:
                await request.load()
                done = request.hit.tokens
                request.extend(len(tokens) - done)
                batch = (tokens, list(request.pages("kv")), done)
                engine.send((group.mark(), batch))  # the step goes along with the engine's own message
                mine = forward(keys, *batch)
                await request.checkpoint(len(tokens))
            theirs = await asyncio.to_thread(engine.recv)
            print(f"{done} of {len(tokens)} tokens were cached; both ranks computed {mine}: {mine == theirs}")
        engine.send(None)


async def follow(address: str, engine: Connection) -> None:
    device = EmulatedDevice(ThreadDriver())  # of a CPU; on a GPU, streams.cuda.CudaDevice(0)
    stream = device.stream("compute")
    async with RankWorker.join(SPEC, options(1), address, TOKEN, device=device) as worker:
        keys = worker.device_tensor("kv", "keys")
        while (message := await asyncio.to_thread(engine.recv)) is not None:
            step, batch = message
            async with worker.forward(step, stream) as copies:
                await copies.landed()  # on a GPU: copies.wait_on(stream, layer) before each layer
                engine.send(forward(keys, *batch))
        await worker.ended()  # the leader closes the group
    device.close()


def run_follower(address: str, engine: Connection) -> None:
    asyncio.run(follow(address, engine))


if __name__ == "__main__":
    here, there = multiprocessing.Pipe()
    with TemporaryDirectory() as folder:
        address = f"unix:{Path(folder) / 'group'}"
        follower = multiprocessing.get_context("spawn").Process(target=run_follower, args=(address, there))
        follower.start()
        asyncio.run(lead(address, here))
        follower.join()
