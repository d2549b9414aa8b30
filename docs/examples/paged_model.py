"""A model of one attention and one recurrent layer that computes on the cache's own pages and states."""

from collections.abc import Sequence

import torch

from asynchicache import Coverage, HybridCache, ModelSpec, PoolSpec, Request, TensorSpec

WORDS, WIDTH = 64, 16
SPEC = ModelSpec(
    "paged",
    page_size=8,
    layers=2,
    pools=(
        PoolSpec("kv", tuple(TensorSpec(name, (0,), (WIDTH,), "float64") for name in ("keys", "values"))),
        PoolSpec("mamba", (TensorSpec("sum", (1,), (WIDTH,), "float64"),), Coverage(1), per_token=False),
    ),
)


class PagedModel:
    """Random weights; each forward reads and writes device pages by their slots, as a paged kernel does."""

    def __init__(self, cache: HybridCache) -> None:
        self.page, self.vocabulary = cache.spec.page_size, WORDS
        self.keys, self.values = (cache.device_tensor("kv", name)[0] for name in ("keys", "values"))
        self.sums = cache.device_tensor("mamba", "sum")[0]
        chance = torch.Generator().manual_seed(0)
        shapes = [(WORDS, WIDTH), *[(WIDTH, WIDTH)] * 3]
        self.words, *self.maps = (torch.randn(s, generator=chance, dtype=torch.float64) for s in shapes)

    def prefill(self, request: Request, start: int, stop: int) -> int:
        """Compute `tokens[start:stop]`, one after the other; the token that follows."""
        for end in range(start + 1, stop + 1):
            chosen = self._forward([request], [end])
        return chosen[0]

    def decode(self, requests: Sequence[Request]) -> list[int]:
        """Compute the last token of each request, all in one forward; the token that follows each."""
        return self._forward(requests, [len(request.tokens) for request in requests])

    def _forward(self, requests: Sequence[Request], ends: Sequence[int]) -> list[int]:
        last = torch.tensor(ends) - 1
        tokens = torch.tensor([request.tokens[end - 1] for request, end in zip(requests, ends, strict=True)])
        states = torch.tensor([request.state("mamba") for request in requests])
        width = max(ends) // self.page + 1
        tables = [request.pages("kv")[:width] for request in requests]
        table = torch.tensor([slots + [0] * (width - len(slots)) for slots in tables])  # [rows, pages]
        x = self.words[tokens]
        before = torch.where((last > 0).unsqueeze(1), self.sums[states], 0.0)  # a new slot holds anything
        self.sums[states] = before * 0.9 + x
        x = torch.tanh(x + self.sums[states])
        query, key, value = (x @ weights for weights in self.maps)
        here = table[torch.arange(len(requests)), last // self.page]
        self.keys[here, last % self.page], self.values[here, last % self.page] = key, value
        seen = torch.arange(width * self.page) <= last.unsqueeze(1)
        scores = torch.einsum("rd,rnd->rn", query, self.keys[table].flatten(1, 2)).masked_fill(
            ~seen, -torch.inf
        )
        # What a slot held before may be anything, even no number: it must not be multiplied with a zero.
        values = self.values[table].flatten(1, 2).masked_fill(~seen.unsqueeze(2), 0.0)
        x = x + torch.einsum("rn,rnd->rd", scores.masked_fill(~seen, -torch.inf).softmax(1), values)
        return (x @ self.words.T).argmax(1).tolist()
