"""Many requests at once on one model: tokens as they come, what the cache had, and readers who leave."""

import asyncio

from asynchicache import CacheConfig, PrefixCachedModel, Sampling
from asynchicache.integrations.transformers.demo_model import build_demo_model, encode_text

RULES = encode_text("You answer questions about gardens. " * 4)


async def talk(served: PrefixCachedModel, questions: list[str]) -> list[int]:
    """A conversation; how many tokens of each prompt were not computed."""
    history, cached = list(RULES), []
    for question in questions:
        history += encode_text(question)
        answer = served.generate(history, max_new_tokens=20)
        async for token in answer:
            history.append(token)
        cached.append(answer.cached_tokens)
    return cached


async def look_in(served: PrefixCachedModel) -> str:
    """Ten tokens are enough."""
    sampling = Sampling(temperature=0.8, top_p=0.95, seed=7)
    async with served.generate(RULES, max_new_tokens=500, sampling=sampling, salt="guest") as answer:
        async for _ in answer:
            if len(answer.token_ids) == 10:
                break
    return f"{answer.finish_reason}, {answer.cached_tokens} cached"


async def main() -> None:
    model, _ = build_demo_model()
    config = CacheConfig(device_bytes=64 << 20)
    async with PrefixCachedModel.open(model, page_size=32, config=config) as served:
        gardens = ["When do roses flower? ", "And tulips? "]
        trees = ["How old do oaks get? ", "And birches? "]
        guest, *talks = await asyncio.gather(look_in(served), talk(served, gardens), talk(served, trees))
        for cached in talks:
            print("cached tokens by turn:", cached)
        print("guest:", guest)


asyncio.run(main())
