"""An engine with paged tensors and a block manager of its own. The cache adds host memory and storage to it.

The model is a toy: a token's key is its id plus the layer, and the state is the sum of all ids so far.
"""

import asyncio
import tempfile
from collections.abc import Sequence

import torch

from asynchicache import (
    CacheConfig,
    CapacityError,
    Coverage,
    EngineCache,
    EngineMemory,
    EnginePages,
    HybridCache,
    ModelSpec,
    PoolSpec,
    TensorSpec,
)

PAGE, LAYERS, PAGES, STATES = 4, 2, 12, 2
KEYS = TensorSpec("keys", layers=(0, 1), shape=(1,), dtype="int64")
SUM = TensorSpec("sum", layers=(2,), shape=(1,), dtype="int64")
KV = PoolSpec("kv", (KEYS,))
MAMBA = PoolSpec("mamba", (SUM,), coverage=Coverage(1), per_token=False)
SPEC = ModelSpec("toy", page_size=PAGE, layers=3, pools=(KV, MAMBA))


class BlockManager:
    """Pages of one pool. Those that no request uses can be found again until they are needed."""

    def __init__(self, pages: int) -> None:
        self.idle: dict[int, tuple[int, ...]] = dict.fromkeys(range(pages), ())  # oldest first
        self.found: dict[tuple[int, ...], int] = {}

    def lookup(self, tokens: Sequence[int], most: int) -> list[int]:
        """Take the idle pages of a prefix, `most` at most, as far as they are there."""
        pages: list[int] = []
        for number in range(most):
            page = self.found.get(tuple(tokens[: (number + 1) * PAGE]))
            if page is None or page not in self.idle:
                break
            pages.append(page)
            del self.idle[page]
        return pages

    def take(self, count: int) -> list[int]:
        if count > len(self.idle):
            raise CapacityError(f"{count} pages wanted, {len(self.idle)} are idle")
        pages = list(self.idle)[:count]
        for page in pages:
            self.found.pop(self.idle.pop(page), None)
        return pages

    def give(self, pages: Sequence[int], tokens: Sequence[int]) -> None:
        """Return the pages of `tokens`; the first to go are the last ones of a prefix."""
        for number in reversed(range(len(pages))):
            whole = (number + 1) * PAGE <= len(tokens)
            prefix = tuple(tokens[: (number + 1) * PAGE]) if whole else ()
            self.idle[pages[number]] = prefix
            if whole:
                self.found[prefix] = pages[number]


class Engine:
    def __init__(self) -> None:
        self.keys = [torch.zeros(PAGES, PAGE, 1, dtype=torch.int64) for _ in range(LAYERS)]
        self.sums = torch.zeros(STATES, 1, dtype=torch.int64)
        self.pages, self.states = BlockManager(PAGES), BlockManager(STATES)
        kv = EnginePages.of_tensors(KV, PAGE, {"keys": self.keys})
        mamba = EnginePages.of_tensors(MAMBA, PAGE, {"sum": [self.sums]})
        self.memory = EngineMemory({"kv": kv, "mamba": mamba})

    async def serve(self, cache: EngineCache, tokens: Sequence[int]) -> str:
        (state,) = self.states.take(1)
        async with cache.request(tokens) as request:
            hit = await request.prefetch()  # reads from storage first: what it promises is in host memory
            restored = hit.tokens // PAGE
            table = self.pages.lookup(tokens, restored)  # these need no copy
            own = len(table)
            table += self.pages.take(-(-len(tokens) // PAGE) - own)
            await request.load(into={"kv": table[own:restored], "mamba": [state][: min(restored, 1)]})
            done = request.hit.tokens
            for end in sorted({*request.cuts, len(tokens)}):
                self.compute(tokens[done:end], done, table, state)
                whole = table[: end // PAGE]  # all of them: those that the host has are not copied
                await request.checkpoint(end, pages={"kv": whole, "mamba": [state]})
                done = end
        self.check(tokens, table, state)
        self.pages.give(table, tokens)
        self.states.give([state], ())
        return f"{own} own pages, {restored - own} restored, {len(tokens) - hit.tokens} tokens computed"

    def compute(self, tokens: Sequence[int], start: int, table: Sequence[int], state: int) -> None:
        """The forward of `tokens`, which begin at position `start`."""
        if start == 0:
            self.sums[state] = 0
        for position, token in enumerate(tokens, start):
            for layer, keys in enumerate(self.keys):
                keys[table[position // PAGE], position % PAGE] = token + layer
            self.sums[state] += token

    def check(self, tokens: Sequence[int], table: Sequence[int], state: int) -> None:
        for layer, keys in enumerate(self.keys):
            if keys[table].flatten()[: len(tokens)].tolist() != [token + layer for token in tokens]:
                raise AssertionError("the cache restored other keys")
        if self.sums[state].item() != sum(tokens):
            raise AssertionError("the cache restored another state")


async def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        options = CacheConfig(
            host_slots={"kv": 32, "mamba": 8},
            storage="file",
            storage_options={"path": folder},
            weight_version="1",
        )
        for start in ("first start", "second start"):
            engine = Engine()  # its device memory is empty
            async with HybridCache.open(SPEC, options, engine=engine.memory) as cache:
                for prompt in (range(10, 24), range(50, 80), range(10, 30)):
                    print(f"{start}: {await engine.serve(cache, prompt)}")
                    await cache.drain()  # so that the example prints the same each time


if __name__ == "__main__":
    asyncio.run(main())
