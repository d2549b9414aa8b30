"""Serve two turns of a conversation; the second computes only what is new."""

import asyncio

from transformers import PreTrainedModel

from asynchicache import CacheConfig, HybridCache, ModelSpec
from asynchicache.integrations.transformers.demo_model import build_demo_model, encode_text
from asynchicache.integrations.transformers.forward import prefill
from asynchicache.integrations.transformers.layers import PoolMap
from asynchicache.integrations.transformers.snapshot import restore, write_pages, write_states


async def serve(cache: HybridCache, memory: PoolMap, model: PreTrainedModel, prompt: list[int]) -> int:
    """Return the token after `prompt`."""
    page = cache.spec.page_size
    async with cache.request(prompt) as request:  # match the cached prefix and lock it against eviction
        await request.prefetch()  # storage -> host memory
        await request.load()  # host memory -> device memory
        done = request.hit.tokens
        print(f"{done} of {len(prompt)} prompt tokens come from the cache")
        state = request.state("mamba") if done else None
        held = restore(model.config, memory, request.pages("kv"), done, state)
        for end in sorted({*request.cuts, len(prompt)}):  # a state exists only where a forward ends
            logits = prefill(model, held, prompt, done, end)
            slots = request.extend(end - done)["kv"]
            write_pages(held, memory, done // page, slots[: end // page - done // page])
            if end % page == 0:
                write_states(held, memory, request.state("mamba"), tokens=end)
            await request.checkpoint(end)  # publish: other requests can match it from here on
            done = end
        return int(logits.argmax())


async def main() -> None:
    model, config = build_demo_model()  # a small Qwen3.5 with random weights
    spec = ModelSpec.from_config(config, page_size=16)
    async with HybridCache.open(spec, CacheConfig(device_bytes=64 << 20)) as cache:
        pools = {
            pool.name: {part.name: cache.device_tensor(pool.name, part.name) for part in pool.tensors}
            for pool in spec.pools
        }
        memory = PoolMap(spec, pools)
        first = encode_text("You are a helpful assistant. Tell me why the sky is blue.")
        second = [*first, await serve(cache, memory, model, first), *encode_text(" And at sunset?")]
        await serve(cache, memory, model, second)


asyncio.run(main())
