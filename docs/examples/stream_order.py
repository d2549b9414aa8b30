"""Order the cache's copies with a compute stream, so that the host waits for no layer."""

import asyncio
from functools import partial

import torch
from toy import SPEC, Toy

from asynchicache import CacheConfig, HybridCache
from asynchicache.streams.base import Stream
from asynchicache.streams.cuda import CudaDevice
from asynchicache.transfer.ticket import Ticket


def compute_stream(cache: HybridCache) -> Stream:
    """The stream that forwards run on; on a CPU an emulated one, with a thread of its own."""
    device = cache.device
    if isinstance(device, CudaDevice):
        return device.wrap(torch.cuda.current_stream())
    return device.stream("compute")


async def follow(ticket: Ticket, compute: Stream) -> None:
    """Let nothing that is launched on `compute` from now on run before the ticket's bytes are there."""
    for layer in range(SPEC.layers):
        await ticket.submitted(layer)  # it is enqueued: its fence means something
        ticket.fence(layer).wait_on(compute)


async def serve(toy: Toy, compute: Stream, tokens: list[int]) -> int:
    """Serve a prompt; everything below is enqueued, nothing is waited for but enqueueing."""
    async with toy.cache.request(tokens, stream=compute) as request:  # its pages outlive what runs there
        await request.prefetch()
        ticket = request.load()
        await follow(ticket, compute)  # a real forward waits layer by layer, each before its attention
        done = request.hit.tokens
        for end in sorted({*request.cuts, len(tokens)}):
            request.extend(end - done)
            slots = request.pages("kv"), request.state("mamba")  # now: the work runs later
            compute.launch(partial(toy.compute, tokens[done:end], done, *slots))
            saved = request.checkpoint(end)  # its copies run behind this forward
            await follow(saved, compute)  # the next forward overwrites the state that is being copied
            done = end
        answer = torch.empty(1, dtype=torch.int64)
        compute.launch(partial(answer.copy_, toy.sums[0, request.state("mamba")]))
    await toy.cache.drain()  # a server would go on; here the answer is wanted
    return int(answer)


async def main() -> None:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    options = CacheConfig(device=device, device_slots={"kv": 16, "mamba": 4})
    async with HybridCache.open(SPEC, options) as cache:
        toy, compute = Toy(cache), compute_stream(cache)
        for tokens in (list(range(22)), list(range(30))):
            answer = await serve(toy, compute, tokens)
            print(f"{answer} is right: {answer == sum(tokens)}")
        print("hits:", cache.statistics().served.hit_tokens)


asyncio.run(main())
