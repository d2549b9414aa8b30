"""A model with sliding windows keeps its own `generate`; the cache stands before and behind it."""

import asyncio

import torch
from transformers import DynamicCache, Gemma3ForCausalLM, Gemma3TextConfig, PreTrainedModel

from asynchicache import CacheConfig, HybridCache, ModelSpec
from asynchicache.integrations.transformers.bridge import CacheBridge
from asynchicache.integrations.transformers.forward import prefill

PAGE = 16
CONFIG = Gemma3TextConfig(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=4,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    layer_types=["sliding_attention"] * 3 + ["full_attention"],
    sliding_window=40,
)


def generate(model: PreTrainedModel, tokens: list[int], held: DynamicCache | None) -> list[int]:
    ids = torch.tensor([tokens])
    output = model.generate(
        ids, attention_mask=torch.ones_like(ids), past_key_values=held, max_new_tokens=24, do_sample=False
    )
    return output[0].tolist()


async def turn(model: PreTrainedModel, cache: HybridCache, prompt: list[int]) -> list[int]:
    """The prompt and the answer; both are known to the cache afterwards."""
    bridge = CacheBridge(model.config, cache)
    async with cache.request(prompt) as request:
        await request.prefetch()
        await request.load()
        held, known = bridge.restore(request), request.hit.tokens
        for cut in request.cuts:
            prefill(model, held, prompt, known, cut)
            request.extend(cut - known)
            bridge.save(request, held, known, cut)
            await request.checkpoint(cut)
            known = cut
        text = generate(model, prompt, held)
        computed = len(text) - 1  # the last token was not fed to the model
        request.append(text[len(prompt) :])
        request.extend(computed - known)
        bridge.save(request, held, known, computed)
        await request.checkpoint(computed)
        print(f"{request.hit.tokens} of {len(prompt)} tokens from the cache")
    return text


async def main() -> None:
    torch.manual_seed(0)
    model = Gemma3ForCausalLM(CONFIG).eval()
    spec = ModelSpec.from_config(CONFIG, page_size=PAGE)
    print({pool.name: pool.coverage.pages or "every page" for pool in spec.pools})
    async with HybridCache.open(spec, CacheConfig(device_bytes=8 << 20)) as cache:
        prompt = list(range(70))
        first = await turn(model, cache, prompt)
        second = await turn(model, cache, [*first, 1, 2, 3])
        print("as without a cache:", second == generate(model, [*first, 1, 2, 3], None))


asyncio.run(main())
