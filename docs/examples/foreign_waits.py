"""Fences for a captured graph, and for a thread that knows nothing of the event loop."""

import asyncio
import threading

from toy import SPEC, Toy

from asynchicache import CacheConfig, HybridCache
from asynchicache.transfer.graph_fences import GraphFences

TOKENS = list(range(22))


async def graph(cache: HybridCache) -> None:
    """A forward that is captured once, and replayed behind the layers of each request."""
    compute = cache.device.stream("compute")
    fences = GraphFences(cache.device, SPEC.layers)
    with cache.device.capture(compute) as forward:
        for layer in range(SPEC.layers):
            fences.wait_on(layer, compute)
            compute.launch(lambda layer=layer: print("layer", layer))
    async with cache.request(TOKENS) as request:
        ticket = request.load()
        await ticket.submitted()
        fences.arm(ticket)
        forward.replay()
        end = cache.device.event()
        compute.record(end)
        await asyncio.to_thread(end.synchronize)


async def thread(cache: HybridCache) -> None:
    """An engine whose forward runs in a thread of its own, and waits there."""
    async with cache.request(TOKENS) as request:
        ticket = request.load()

        def forward() -> None:
            for layer in range(SPEC.layers):
                if not ticket.host_fence(layer).wait(timeout=10):
                    raise TimeoutError(f"layer {layer} did not come")
            print("all layers are there, ok:", ticket.ok)

        worker = threading.Thread(target=forward)
        worker.start()
        await ticket
        worker.join()


async def thread_and_stream(cache: HybridCache) -> None:
    """An engine whose forward is launched by a thread of its own, on a stream that waits there."""
    compute, end = cache.device.stream("engine"), cache.device.event()
    async with cache.request(TOKENS) as request:
        ticket = request.load()

        def forward() -> None:
            for layer in range(SPEC.layers):
                if not ticket.host_fence(layer).wait_on(compute, timeout=10):
                    raise TimeoutError(f"layer {layer} was not enqueued")
                compute.launch(lambda layer=layer: print("layer", layer, "on the stream"))
            compute.record(end)
            end.synchronize()

        worker = threading.Thread(target=forward)
        worker.start()
        await ticket
        worker.join()


async def main() -> None:
    async with HybridCache.open(SPEC, CacheConfig(device_slots={"kv": 16, "mamba": 4})) as cache:
        await Toy(cache).serve(TOKENS)
        await graph(cache)
        await thread(cache)
        await thread_and_stream(cache)


asyncio.run(main())
