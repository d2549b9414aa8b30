"""From zero to a cached conversation; docs/tutorial.md explains it step by step."""

import asyncio
from tempfile import TemporaryDirectory

import torch
from transformers import DynamicCache, PreTrainedModel

from asynchicache import CacheConfig, HybridCache, ModelSpec, PrefetchOptions, PrefetchPolicy, Request
from asynchicache.integrations.transformers.demo_model import build_demo_model, encode_text
from asynchicache.integrations.transformers.forward import decode, prefill
from asynchicache.integrations.transformers.layers import PoolMap
from asynchicache.integrations.transformers.snapshot import new_cache, restore, write_pages, write_states

PAGE = 16
ANSWER = 32
SYSTEM = encode_text("You are the keeper of a lighthouse. Answer in one sentence, and be kind to sailors. ")


class Server:
    """One model behind one cache. A real one would run the model in a thread of its own."""

    def __init__(self, model: PreTrainedModel, cache: HybridCache) -> None:
        self.model = model
        self.cache = cache
        pools = {
            pool.name: {part.name: cache.device_tensor(pool.name, part.name) for part in pool.tensors}
            for pool in cache.spec.pools
        }
        self.memory = PoolMap(cache.spec, pools)

    async def serve(self, prompt: list[int]) -> list[int]:
        """Greedy: `ANSWER` tokens after `prompt`."""
        async with self.cache.request(prompt) as request:
            await request.prefetch()
            await request.load()
            report(request)
            held = self.restore(request)
            logits = await self.prefill(request, held)
            return await self.generate(request, held, logits)

    def restore(self, request: Request) -> DynamicCache:
        """Model memory with what the cache has of the prompt."""
        known = request.hit.tokens
        state = request.state("mamba") if known else None
        return restore(self.model.config, self.memory, request.pages("kv"), known, state)

    async def prefill(self, request: Request, held: DynamicCache) -> torch.Tensor:
        """Compute the rest of the prompt, and publish where a forward ends."""
        done, prompt = request.hit.tokens, list(request.tokens)
        for end in sorted({*request.cuts, len(prompt)}):
            logits = prefill(self.model, held, prompt, done, end)
            request.extend(end - done)
            self.write(request, held, done, end)
            await request.checkpoint(end)
            done = end
        return logits

    async def generate(self, request: Request, held: DynamicCache, logits: torch.Tensor) -> list[int]:
        """Decode, keep the state at each page boundary, publish the last one."""
        answer, kept = [int(logits.argmax())], 0
        while len(answer) < ANSWER:
            length = len(request.tokens)
            request.append(answer[-1:])
            request.extend(1)
            logits = decode(self.model, held, answer[-1:], length)[0]
            answer.append(int(logits.argmax()))
            if (length + 1) % PAGE == 0:
                kept = length + 1
                self.write(request, held, kept - PAGE, kept)
                await request.snapshot(kept)
        await request.checkpoint(kept)
        return answer

    def write(self, request: Request, held: DynamicCache, start: int, end: int) -> None:
        """Copy what the model computed to the request's own slots."""
        first, last = start // PAGE, end // PAGE
        write_pages(held, self.memory, first, request.pages("kv")[first:last])
        if end % PAGE == 0:
            write_states(held, self.memory, request.state("mamba"))


def report(request: Request) -> None:
    hit = request.hit
    where = ", ".join(tier.name.lower() for tier in hit.by_tier) or "nowhere"
    print(f"{hit.tokens:3} of {len(request.tokens)} tokens from {where}; why not more: {hit.reason.value}")


def uncached(model: PreTrainedModel, prompt: list[int]) -> list[int]:
    """What the model answers when everything is computed."""
    held = new_cache(model.config)
    answer = [int(prefill(model, held, prompt, 0, len(prompt)).argmax())]
    while len(answer) < ANSWER:
        length = len(prompt) + len(answer) - 1
        answer.append(int(decode(model, held, answer[-1:], length)[0].argmax()))
    return answer


def ask(question: str) -> list[int]:
    return [*SYSTEM, *encode_text(question)]


async def converse(server: Server) -> list[int]:
    print("one conversation")
    first = ask("How tall is your tower?")
    second = [*first, *await server.serve(first), *encode_text(" And how old?")]
    third = [*second, *await server.serve(second), *encode_text(" Who built it?")]
    await server.serve(third)
    return third


async def branch(server: Server) -> None:
    print("other questions to the same system prompt")
    await server.serve(ask("Which way is the wind?"))
    await server.serve(ask("What is the water like?"))


async def overflow(server: Server) -> None:
    print("more than the device holds, then the wind again")
    for number in range(3):
        await server.serve(encode_text(f"{number} is a different prompt, with nothing in common. " * 3))
    await server.serve(ask("Which way is the wind?"))


def show(spec: ModelSpec) -> None:
    print(f"{spec.model}, {spec.layers} layers, pages of {spec.page_size} tokens")
    for pool in spec.pools:
        parts = ", ".join(f"{part.name} {list(part.shape)} {part.dtype}" for part in pool.tensors)
        print(f"  {pool.name}: {parts}; a slot takes {pool.slot_bytes(spec.page_size)} bytes")


async def main() -> None:
    model, config = build_demo_model(seed=0)
    spec = ModelSpec.from_config(config, page_size=PAGE)
    show(spec)
    with TemporaryDirectory() as folder:
        options = CacheConfig(
            device_slots={"kv": 32, "mamba": 8},
            host_slots={"kv": 128, "mamba": 32},
            storage="file",
            storage_options={"path": folder},
            weight_version="demo-0",
            prefetch=PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE),
        )
        async with HybridCache.open(spec, options) as cache:
            server = Server(model, cache)
            conversation = await converse(server)
            await branch(server)
            await overflow(server)
        print("after a restart")
        async with HybridCache.open(spec, options) as cache:
            answer = await Server(model, cache).serve(conversation)
            print("same answer as without a cache:", answer == uncached(model, conversation))
            print("broken invariants:", cache.verify())


asyncio.run(main())
