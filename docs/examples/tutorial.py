"""From zero to a cached conversation; docs/tutorial.md explains it block by block, to be pasted."""

import asyncio
from tempfile import TemporaryDirectory

import torch
from transformers import DynamicCache, PreTrainedModel

from asynchicache import CacheBridge, CacheConfig, HybridCache, ModelSpec, Request, prefix_cached
from asynchicache.integrations.transformers.demo_model import build_demo_model, encode_text
from asynchicache.integrations.transformers.forward import decode, prefill
from asynchicache.integrations.transformers.snapshot import new_cache

PAGE = 16
ANSWER = 32
SYSTEM = encode_text("You are the keeper of a lighthouse. Answer in one sentence, and be kind to sailors. ")


def show(spec: ModelSpec) -> None:
    print(f"{spec.model}, {spec.layers} layers, pages of {spec.page_size} tokens")
    for pool in spec.pools:
        parts = ", ".join(f"{part.name} {list(part.shape)} {part.dtype}" for part in pool.tensors)
        print(f"  {pool.name}: {parts}; a slot takes {pool.slot_bytes(spec.page_size)} bytes")


async def serve(
    cache: HybridCache, bridge: CacheBridge, model: PreTrainedModel, prompt: list[int]
) -> list[int]:
    """Greedy: `ANSWER` tokens after `prompt`."""
    async with cache.request(prompt) as request:
        await request.prefetch()
        await request.load()
        report(request)
        held = bridge.restore(request)
        logits = await prefill_rest(request, bridge, model, held)
        return await generate(request, bridge, model, held, logits)


def report(request: Request) -> None:
    hit = request.hit
    where = ", ".join(tier.name.lower() for tier in hit.by_tier) or "nowhere"
    print(f"{hit.tokens:3} of {len(request.tokens)} tokens from {where}; why not more: {hit.reason.value}")


async def prefill_rest(
    request: Request, bridge: CacheBridge, model: PreTrainedModel, held: DynamicCache
) -> torch.Tensor:
    """Compute the rest of the prompt, and publish it wherever a forward pass ends."""
    done, prompt = request.hit.tokens, list(request.tokens)
    for end in sorted({*request.cuts, len(prompt)}):
        logits = prefill(model, held, prompt, done, end)
        request.extend(end - done)
        bridge.save(request, held, done, end)
        await request.checkpoint(end)
        done = end
    return logits


async def generate(
    request: Request, bridge: CacheBridge, model: PreTrainedModel, held: DynamicCache, logits: torch.Tensor
) -> list[int]:
    """Decode, keep the state at each page boundary, publish the last one."""
    answer, kept = [int(logits.argmax())], 0
    while len(answer) < ANSWER:
        length = len(request.tokens)
        request.append(answer[-1:])
        request.extend(1)
        logits = decode(model, held, answer[-1:], length)[0]
        answer.append(int(logits.argmax()))
        if (length + 1) % PAGE == 0:
            kept = length + 1
            bridge.save(request, held, kept - PAGE, kept)
            await request.snapshot(kept)
    await request.checkpoint(kept)
    return answer


def uncached(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """What the model answers when everything is computed."""
    held = new_cache(model.config)
    answer = [int(prefill(model, held, prompt, 0, len(prompt)).argmax())]
    while len(answer) < ANSWER:
        length = len(prompt) + len(answer) - 1
        answer.append(int(decode(model, held, answer[-1:], length)[0].argmax()))
    return answer


async def main() -> None:
    model, config = build_demo_model(seed=0)

    with prefix_cached(model, page_size=PAGE, config=CacheConfig(device_bytes="64MiB")) as cached:
        prompt = torch.tensor([encode_text("You answer questions about gardens. When do roses flower?")])
        answer = cached.generate(prompt, max_new_tokens=24)
        follow_up = torch.cat([answer, torch.tensor([encode_text(" And tulips?")])], dim=1)
        answer = cached.generate(follow_up, max_new_tokens=24)
        print(f"{cached.hit.tokens} of {follow_up.shape[1]} tokens from the cache")

    spec = ModelSpec.from_config(config, page_size=PAGE)
    show(spec)

    folder = TemporaryDirectory()
    options = CacheConfig(
        device_slots={"kv": 32, "mamba": 8},
        host_slots={"kv": 128, "mamba": 32},
        storage="file",
        storage_options={"path": folder.name},
        weight_version="demo-0",
        prefetch={"policy": "wait_complete"},
    )
    cache = await HybridCache.open(spec, options)
    bridge = CacheBridge(config, cache)

    print("one conversation")
    first = [*SYSTEM, *encode_text("How tall is your tower?")]
    answer = await serve(cache, bridge, model, first)
    second = [*first, *answer, *encode_text(" And how old?")]
    answer = await serve(cache, bridge, model, second)
    third = [*second, *answer, *encode_text(" Who built it?")]
    answer = await serve(cache, bridge, model, third)

    print("other questions to the same system prompt")
    wind = [*SYSTEM, *encode_text("Which way is the wind?")]
    answer = await serve(cache, bridge, model, wind)
    answer = await serve(cache, bridge, model, [*SYSTEM, *encode_text("What is the water like?")])

    print("more than the device holds, then the wind again")
    for number in range(3):
        prompt = encode_text(f"{number} is a different prompt, with nothing in common. " * 3)
        answer = await serve(cache, bridge, model, prompt)

    answer = await serve(cache, bridge, model, wind)

    await cache.aclose()
    print("after a restart")
    cache = await HybridCache.open(spec, options)
    bridge = CacheBridge(config, cache)
    answer = await serve(cache, bridge, model, third)
    print("same answer as without a cache:", answer == uncached(model, third))
    print("broken invariants:", cache.verify())
    await cache.aclose()
    folder.cleanup()


asyncio.run(main())
