"""Serve two turns of a conversation; the second computes only what is new."""

import asyncio

from transformers import PreTrainedModel

from asynchicache import CacheBridge, CacheConfig, HybridCache, ModelSpec
from asynchicache.integrations.transformers.demo_model import build_demo_model, encode_text
from asynchicache.integrations.transformers.forward import prefill


async def serve(cache: HybridCache, bridge: CacheBridge, model: PreTrainedModel, prompt: list[int]) -> int:
    """Return the token after `prompt`."""
    async with cache.request(prompt) as request:  # match the cached prefix and lock it against eviction
        await request.prefetch()  # storage -> host memory
        await request.load()  # host memory -> device memory
        held, done = bridge.restore(request), request.hit.tokens
        print(f"{done} of {len(prompt)} prompt tokens come from the cache")
        for end in sorted({*request.cuts, len(prompt)}):  # a state exists only where a forward ends
            logits = prefill(model, held, prompt, done, end)
            request.extend(end - done)  # slots for what was computed
            bridge.save(request, held, done, end)
            await request.checkpoint(end)  # publish: other requests can match it from here on
            done = end
        return int(logits.argmax())


async def main() -> None:
    model, config = build_demo_model()  # a small Qwen3.5 with random weights
    spec = ModelSpec.from_config(config, page_size=16)
    async with HybridCache.open(spec, CacheConfig(device_bytes=64 << 20)) as cache:
        bridge = CacheBridge(config, cache)
        first = encode_text("You are a helpful assistant. Tell me why the sky is blue.")
        second = [*first, await serve(cache, bridge, model, first), *encode_text(" And at sunset?")]
        await serve(cache, bridge, model, second)


if __name__ == "__main__":
    asyncio.run(main())
