"""The whole cache behind a compute stream, on a GPU and on a CPU: each tier serves in turn, to the byte."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial

import pytest
import torch

from asynchicache import CacheConfig, HybridCache, PrefetchOptions, PrefetchPolicy, Request, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.hashing import namespace_seed, page_digests
from asynchicache.layouts import HostLayout
from asynchicache.streams.base import Stream
from asynchicache.streams.cuda import CudaDevice
from asynchicache.testing.oracle import Pattern
from asynchicache.testing.specs import synthetic_spec
from asynchicache.transfer.paths import CopyPath
from asynchicache.transfer.ticket import Ticket
from asynchicache.types import token_array

needs_gpu = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")]
pytestmark = [
    pytest.mark.asyncio,
    pytest.mark.parametrize("device", ["cpu", pytest.param("cuda:0", marks=needs_gpu)]),
]
PAGE = 4
SPEC = synthetic_spec(PAGE)
PROMPT = list(range(100, 120))


class Engine:
    """Enqueues forwards, and what looks at restored pages, on a stream; waits for enqueueing only."""

    def __init__(self, cache: HybridCache, compute: Stream) -> None:
        self.cache = cache
        self.looked: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._compute = compute
        self._parts = [
            (pool, Pattern(cache.spec, pool, tensor, ""), cache.device_tensor(pool.name, tensor.name))
            for pool in cache.spec.pools
            for tensor in pool.tensors
        ]

    async def serve(self, tokens: Sequence[int]) -> dict[Tier, int]:
        digests = page_digests(token_array(tokens), PAGE, namespace_seed(None))
        request = self.cache.request(tokens)
        async with request:
            await request.prefetch()
            await self._follow(request.load())
            hit = request.hit
            self._launch(request, 0, hit.tokens, digests, partial(self._look, self.looked))
            done = hit.tokens
            for end in sorted({*request.cuts, len(tokens)}):
                request.extend(end - done)
                self._launch(request, done, end, digests, _write)
                await self._follow(request.checkpoint(end, after=self._compute))
                done = end
            request.close(after=self._compute)
        await self.cache.drain()
        return dict(hit.by_tier)

    async def settle(self) -> None:
        """Wait for what was enqueued."""
        end = self.cache.device.event()
        self._compute.record(end)
        await asyncio.to_thread(end.synchronize)

    async def _follow(self, ticket: Ticket) -> None:
        """Enqueue nothing that runs before the ticket's bytes are there."""
        for layer in range(self.cache.spec.layers):
            await ticket.submitted(layer)
            ticket.fence(layer).wait_on(self._compute)

    def _launch(self, request: Request, start: int, stop: int, digests: list[bytes], act) -> None:
        """`act` on the pages of tokens `start` to `stop` and the state there, with what belongs in them."""
        first, last = start // PAGE, stop // PAGE
        for pool, pattern, tensor in self._parts:
            if pool.per_token:
                slots, whose = request.pages(pool.name)[first:last], digests[first:last]
            else:
                at_end = stop > start and stop % PAGE == 0
                slots, whose = ([request.state(pool.name)], [digests[last - 1]]) if at_end else ([], [])
            if slots:
                items = tensor.view(torch.uint8).view(*tensor.shape[:2], -1)
                expected = torch.tensor(pattern.expected(whose))
                self._compute.launch(partial(act, items, slots, expected))

    @staticmethod
    def _look(looked: list, items: torch.Tensor, slots: list[int], expected: torch.Tensor) -> None:
        looked.append((items[:, slots].clone(), expected))


def _write(items: torch.Tensor, slots: list[int], expected: torch.Tensor) -> None:
    items[:, slots] = expected.to(items.device)


def _compute_stream(cache: HybridCache) -> Stream:
    if isinstance(cache.device, CudaDevice):
        return cache.device.wrap(torch.cuda.Stream(0))  # an engine's own
    return cache.device.stream("compute")


def _config(**options: object) -> CacheConfig:
    slots = {"kv": 32, "mamba": 8}
    patient = PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE)
    return CacheConfig(device_slots=slots, prefetch=patient, weight_version="test", **options)


@pytest.mark.parametrize("path", [None, *CopyPath], ids=lambda path: path.value if path else "measured")
async def test_each_tier_serves_what_a_stream_computed(device: str, path: CopyPath | None) -> None:
    options = _config(device=device, copy_path=path, audit=1.0)
    async with HybridCache.open(SPEC, options, storage=MemoryBackend(MemoryStore())) as cache:
        engine = Engine(cache, _compute_stream(cache))
        hits = [await engine.serve(PROMPT), await engine.serve([*PROMPT, 1, 2, 3])]
        for client in range(4):  # push it out of device memory
            await engine.serve([client * 1000 + n for n in range(32)])
        hits.append(await engine.serve([*PROMPT, 4, 5, 6]))
        await cache.flush()
        hits.append(await engine.serve([*PROMPT, 7, 8, 9]))
        await engine.settle()
        audit, problems = cache.statistics().transfers.audit, cache.verify(idle=True)

    assert hits == [{}, {Tier.DEVICE: 20}, {Tier.HOST: 20}, {Tier.STORAGE: 20}]
    assert (problems, audit.mismatched) == ([], 0)
    assert audit.compared > 0
    assert len(engine.looked) == 3 * sum(len(pool.tensors) for pool in SPEC.pools)
    assert all(torch.equal(found.cpu(), expected) for found, expected in engine.looked)


@pytest.mark.parametrize("layout", list(HostLayout), ids=lambda layout: layout.value)
async def test_prompts_that_do_not_all_fit_come_back_in_every_layout(device: str, layout: HostLayout) -> None:
    async with HybridCache.open(SPEC, _config(device=device, host_layout=layout)) as cache:
        engine = Engine(cache, _compute_stream(cache))
        prompts = [[*PROMPT, *(client * 1000 + n for n in range(12))] for client in range(6)]
        for _ in range(3):
            for prompt in prompts:
                await engine.serve(prompt)
        await engine.settle()
        problems, served = cache.verify(idle=True), cache.statistics().served

    assert problems == []
    assert served.hit_tokens[Tier.HOST] > 0
    assert all(torch.equal(found.cpu(), expected) for found, expected in engine.looked)
