"""From zero to a cached conversation; docs/tutorial.md explains it block by block, to be pasted."""

import asyncio
from tempfile import TemporaryDirectory

import torch
from transformers import DynamicCache, PreTrainedModel

from asynchicache import CacheConfig, HybridCache, ModelSpec, Request, prefix_cached
from asynchicache.integrations.transformers.demo_model import build_demo_model, encode_text
from asynchicache.integrations.transformers.forward import decode, prefill
from asynchicache.integrations.transformers.layers import PoolMap
from asynchicache.integrations.transformers.snapshot import new_cache, restore, write_pages, write_states

PAGE = 16
ANSWER = 32
SYSTEM = encode_text("You are the keeper of a lighthouse. Answer in one sentence, and be kind to sailors. ")


def show(spec: ModelSpec) -> None:
    print(f"{spec.model}, {spec.layers} layers, pages of {spec.page_size} tokens")
    for pool in spec.pools:
        parts = ", ".join(f"{part.name} {list(part.shape)} {part.dtype}" for part in pool.tensors)
        print(f"  {pool.name}: {parts}; a slot takes {pool.slot_bytes(spec.page_size)} bytes")


def map_memory(cache: HybridCache) -> PoolMap:
    """The cache's device memory, by pool and tensor, as the model's layers use it."""
    pools = {
        pool.name: {part.name: cache.device_tensor(pool.name, part.name) for part in pool.tensors}
        for pool in cache.spec.pools
    }
    return PoolMap(cache.spec, pools)


async def serve(cache: HybridCache, memory: PoolMap, model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """Greedy: `ANSWER` tokens after `prompt`."""
    async with cache.request(prompt) as request:
        await request.prefetch()
        await request.load()
        report(request)
        state = request.state("mamba") if request.hit.tokens else None
        held = restore(model.config, memory, request.pages("kv"), request.hit.tokens, state)
        logits = await prefill_rest(request, memory, model, held)
        return await generate(request, memory, model, held, logits)


def report(request: Request) -> None:
    hit = request.hit
    where = ", ".join(tier.name.lower() for tier in hit.by_tier) or "nowhere"
    print(f"{hit.tokens:3} of {len(request.tokens)} tokens from {where}; why not more: {hit.reason.value}")


async def prefill_rest(
    request: Request, memory: PoolMap, model: PreTrainedModel, held: DynamicCache
) -> torch.Tensor:
    """Compute the rest of the prompt, and publish it wherever a forward pass ends."""
    done, prompt = request.hit.tokens, list(request.tokens)
    for end in sorted({*request.cuts, len(prompt)}):
        logits = prefill(model, held, prompt, done, end)
        request.extend(end - done)
        write(request, memory, held, done, end)
        await request.checkpoint(end)
        done = end
    return logits


def write(request: Request, memory: PoolMap, held: DynamicCache, start: int, end: int) -> None:
    """Copy what the model computed from `start` to `end` to the request's own slots."""
    first, last = start // PAGE, end // PAGE
    write_pages(held, memory, first, request.pages("kv")[first:last])
    if end % PAGE == 0:
        write_states(held, memory, request.state("mamba"), tokens=end)


async def generate(
    request: Request, memory: PoolMap, model: PreTrainedModel, held: DynamicCache, logits: torch.Tensor
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
            write(request, memory, held, kept - PAGE, kept)
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
    memory = map_memory(cache)

    print("one conversation")
    first = [*SYSTEM, *encode_text("How tall is your tower?")]
    answer = await serve(cache, memory, model, first)
    second = [*first, *answer, *encode_text(" And how old?")]
    answer = await serve(cache, memory, model, second)
    third = [*second, *answer, *encode_text(" Who built it?")]
    answer = await serve(cache, memory, model, third)

    print("other questions to the same system prompt")
    wind = [*SYSTEM, *encode_text("Which way is the wind?")]
    answer = await serve(cache, memory, model, wind)
    answer = await serve(cache, memory, model, [*SYSTEM, *encode_text("What is the water like?")])

    print("more than the device holds, then the wind again")
    for number in range(3):
        prompt = encode_text(f"{number} is a different prompt, with nothing in common. " * 3)
        answer = await serve(cache, memory, model, prompt)

    answer = await serve(cache, memory, model, wind)

    await cache.aclose()
    print("after a restart")
    cache = await HybridCache.open(spec, options)
    memory = map_memory(cache)
    answer = await serve(cache, memory, model, third)
    print("same answer as without a cache:", answer == uncached(model, third))
    print("broken invariants:", cache.verify())
    await cache.aclose()
    folder.cleanup()


asyncio.run(main())
