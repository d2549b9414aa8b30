"""The smallest hybrid engine: a token's key is its id, and the state is the sum of all ids so far."""

import asyncio
from collections.abc import Sequence

from asynchicache import CacheConfig, Coverage, Hit, HybridCache, ModelSpec, PoolSpec, TensorSpec

PAGE = 4
KEYS = TensorSpec("keys", layers=(0,), shape=(1,), dtype="int64")
SUM = TensorSpec("sum", layers=(1,), shape=(1,), dtype="int64")
SPEC = ModelSpec(
    "toy",
    page_size=PAGE,
    layers=2,
    pools=(
        PoolSpec("kv", (KEYS,)),  # attention: a prefix needs every page
        PoolSpec("mamba", (SUM,), coverage=Coverage(1), per_token=False),  # only the state at its end
    ),
)


class Toy:
    """Serves prompts on one cache; a wrong byte shows as a wrong sum."""

    def __init__(self, cache: HybridCache) -> None:
        self.cache = cache
        self.keys = cache.device_tensor("kv", "keys")  # [layers, slots, page_size, 1]
        self.sums = cache.device_tensor("mamba", "sum")  # [layers, slots, 1]

    async def serve(self, tokens: Sequence[int]) -> Hit:
        async with self.cache.request(tokens) as request:
            await request.prefetch()
            await request.load()
            hit, done = request.hit, request.hit.tokens
            for end in sorted({*request.cuts, len(tokens)}):
                request.extend(end - done)
                self.compute(tokens[done:end], done, request.pages("kv"), request.state("mamba"))
                await request.checkpoint(end)
                done = end
            if self.sums[0, request.state("mamba")].item() != sum(tokens):
                raise AssertionError("the cache restored something else")
        await self.cache.drain()  # so that examples print the same each time
        return hit

    def compute(self, tokens: Sequence[int], start: int, pages: Sequence[int], state: int) -> None:
        """The forward of `tokens`, which begin at position `start`."""
        if start == 0:
            self.sums[0, state] = 0  # a slot holds what it held before
        for position, token in enumerate(tokens, start):
            self.keys[0, pages[position // PAGE], position % PAGE] = token
            self.sums[0, state] += token


async def main() -> None:
    options = CacheConfig(device_slots={"kv": 16, "mamba": 4})
    async with HybridCache.open(SPEC, options) as cache:
        toy = Toy(cache)
        print(await toy.serve(range(10)))
        print(await toy.serve(range(14)))


if __name__ == "__main__":
    asyncio.run(main())
