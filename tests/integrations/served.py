"""Tiny models behind a cache, serving; and what they answer without one."""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from asynchicache import CacheConfig, PrefetchOptions, PrefetchPolicy
from asynchicache.integrations.transformers.forward import decode, prefill
from asynchicache.integrations.transformers.generation import Generation
from asynchicache.integrations.transformers.model import PrefixCachedModel
from asynchicache.integrations.transformers.sampling import Sampler, Sampling
from asynchicache.integrations.transformers.snapshot import new_cache
from asynchicache.storage.limits import PoolLimits
from asynchicache.storage.protocol import StorageBackend
from integrations.zoo import PAGE, tiny_config, tiny_model, tiny_spec

PATIENT = PoolLimits()
DRAWN = Sampling(temperature=1.0, seed=11)
"""Random weights repeat their likeliest token soon, whatever they remember; a draw tells of small errors."""
WAIT = PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE)


@asynccontextmanager
async def serving(
    name: str,
    *,
    slots: int = 64,
    device_slots: dict[str, int] | None = None,
    host_slots: dict[str, int] | None = None,
    storage: StorageBackend | None = None,
    storage_limits: PoolLimits = PATIENT,
    tails: bool = False,
    prefetch: PrefetchOptions = WAIT,
    **options: int,
) -> AsyncIterator[PrefixCachedModel]:
    """One of the zoo's models; afterwards every page must be accounted for, and none held."""
    sizes = {pool.name: slots for pool in tiny_spec(name).owners} | (device_slots or {})
    config = CacheConfig(
        device_slots=sizes,
        host_slots=host_slots or {},
        prefetch=prefetch,
        weight_version="test",
        storage_limits=storage_limits,
        tails=tails,
    )
    async with PrefixCachedModel.open(
        tiny_model(name), config=config, page_size=PAGE, storage=storage, **options
    ) as served:
        yield served
        await served.drain()
        assert nothing_held(served) == []


def nothing_held(served: PrefixCachedModel) -> list[str]:
    """What is wrong with the cache of a model that serves nobody."""
    books = served.cache._parts.planner.inventory
    held = [f"{len(books.requests)} requests are open"] if books.requests else []
    busy = [f"{served.running} run, {served.waiting} wait"] if served.running or served.waiting else []
    return served.cache.verify() + held + busy


async def read(generation: Generation) -> list[int]:
    return [token async for token in generation]


def begin(
    served: PrefixCachedModel, prompt: Sequence[int], count: int, sampling: Sampling = DRAWN
) -> Generation:
    return served.generate(prompt, max_new_tokens=count, sampling=sampling, stop_token_ids=())


async def answer(
    served: PrefixCachedModel, prompt: Sequence[int], count: int, sampling: Sampling = DRAWN
) -> list[int]:
    return await read(begin(served, prompt, count, sampling))


async def answers(served: PrefixCachedModel, prompts: Sequence[Sequence[int]], count: int) -> list[list[int]]:
    """All at once."""
    return await asyncio.gather(*(answer(served, prompt, count) for prompt in prompts))


def uncached(name: str, prompt: Sequence[int], count: int, sampling: Sampling = DRAWN) -> list[int]:
    """The tokens of a sequence that is computed from its beginning, by itself."""
    return list(_uncached(name, tuple(prompt), count, sampling))


@functools.cache
def _uncached(name: str, prompt: tuple[int, ...], count: int, sampling: Sampling) -> tuple[int, ...]:
    model, memory, sampler = tiny_model(name), new_cache(tiny_config(name)), Sampler(sampling)
    generated = [sampler.choose(prefill(model, memory, prompt, 0, len(prompt)))]
    while len(generated) < count:
        logits = decode(model, memory, generated[-1:], memory.get_seq_length())
        generated.append(sampler.choose(logits[0]))
    return tuple(generated)
