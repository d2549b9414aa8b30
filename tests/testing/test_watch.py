"""What `small_cache` sees of an engine that publishes too early, or goes on without its tickets."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from asynchicache import HybridCache, Request, RequestStateError
from asynchicache.testing.kit import OpenSmallCache
from asynchicache.testing.specs import synthetic_spec

pytestmark = pytest.mark.asyncio

PROMPT = list(range(1, 21))
PAGE = 4
WINDOWS = synthetic_spec(PAGE, ("kv", "swa"), window_pages=2)


def write(cache: HybridCache, request: Request, start: int, stop: int, *, states: bool = True) -> None:
    """What a forward of tokens `start` to `stop` writes."""
    for pool in cache.spec.pools:
        for tensor in pool.tensors:
            memory, owner = cache.device_tensor(pool.name, tensor.name), pool.slots_of or pool.name
            if pool.per_token:
                first = request.first_page(owner)
                for slot in request.pages(owner)[
                    max(start // PAGE - first, 0) : max(stop // PAGE - first, 0)
                ]:
                    memory[:, slot] = torch.ones_like(memory[:, slot])
            elif states:
                memory[:, request.state(owner)] = stop


async def serve(cache: HybridCache, prompt: Sequence[int] = PROMPT, stop: int = 8) -> None:
    """A right request, so that the others are not taken for bookkeeping."""
    async with cache.request(prompt) as request:
        await request.load()
        request.extend(stop)
        write(cache, request, 0, stop)
        await request.checkpoint(stop)


@pytest.mark.parametrize("spec", [None, WINDOWS])
async def test_an_engine_that_writes_first_is_not_found(small_cache: OpenSmallCache, spec: object) -> None:
    async with small_cache(spec) as cache:
        for turn in range(3):
            await serve(cache, [turn * 7, *PROMPT])
            async with cache.request([turn * 7, *PROMPT]) as request:
                await request.load()
                request.extend(8)
                write(cache, request, 8, 16)
                await request.snapshot(16)
                write(cache, request, 16, 16)
                request.suspend(16)
                request.rematch()
                await request.load()
            await cache.flush()


@pytest.mark.parametrize("publish", ["checkpoint", "final", "suspend"])
@pytest.mark.parametrize(
    ("spec", "left_out", "words"),
    [
        (None, "pages", "page 2 of pool 'kv' is not written"),
        (None, "states", "state of 'mamba' at 16 tokens is not written"),
        (WINDOWS, "pages", "page 2 of pool 'swa' is not written"),
    ],
)
async def test_what_nobody_wrote(
    small_cache: OpenSmallCache, spec: object, left_out: str, words: str, publish: str
) -> None:
    async def publish_too_much() -> None:
        async with small_cache(spec) as cache:
            await serve(cache)
            async with cache.request([99, *PROMPT]) as request:
                await request.load()
                request.extend(16)
                if left_out == "pages":
                    write(cache, request, 0, 8)
                else:
                    write(cache, request, 0, 16, states=False)
                if publish == "suspend":
                    request.suspend(16)
                else:
                    await request.checkpoint(16, final=publish == "final")

    with pytest.raises(AssertionError, match=words):
        await publish_too_much()


async def test_a_state_of_another_length(small_cache: OpenSmallCache) -> None:
    async def publish_an_old_one() -> None:
        async with small_cache() as cache, cache.request(PROMPT) as request:
            await request.load()
            request.extend(8)
            write(cache, request, 0, 8)
            await request.checkpoint(8)
            request.extend(4)
            write(cache, request, 8, 12, states=False)
            await request.checkpoint(12)

    with pytest.raises(AssertionError, match="state of 'mamba' at 12 tokens is that of 8"):
        await publish_an_old_one()


async def test_bookkeeping_alone_is_looked_at_if_asked(small_cache: OpenSmallCache) -> None:
    async def publish(**options: object) -> None:
        async with small_cache(**options) as cache, cache.request(PROMPT) as request:
            await request.load()
            request.extend(8)
            await request.checkpoint(8)

    await publish()
    with pytest.raises(AssertionError, match="page 0 of pool 'kv' is not written"):
        await publish(watch=True)
    await publish(watch=False)


async def test_tickets_that_nothing_waits_for(small_cache: OpenSmallCache) -> None:
    async with small_cache() as cache:
        await serve(cache)
        async with cache.request(PROMPT) as request:
            ticket = request.load()
            request.extend(4)  # room may be made meanwhile
            for verb in (request.checkpoint, request.snapshot, request.suspend, request.advance):
                with pytest.raises(RequestStateError, match=r"nothing has waited for the ticket of load\(\)"):
                    verb(12)
            await ticket
            write(cache, request, 8, 12)
            ticket = request.checkpoint(12)
            with pytest.raises(RequestStateError, match=r"extend\(\): .* ticket of checkpoint\(\)"):
                request.extend(4)
            with pytest.raises(RequestStateError, match="nothing has waited"):
                await request.reserve(4)
            await ticket.submitted()
            ticket.fence(0)
            request.extend(4)
            write(cache, request, 12, 16)
            ticket = request.snapshot(16)
            with pytest.raises(RequestStateError, match=r"ticket of snapshot\(\)"):
                request.suspend(16)
            await ticket
