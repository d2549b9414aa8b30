"""What fails behind a serving model costs hits; the tokens are those of the uncached model."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest
import torch
from transformers import ByT5Tokenizer

from asynchicache import CacheConfig, MissReason, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.integrations.transformers.forward import decode
from asynchicache.integrations.transformers.model import PrefixCachedModel
from asynchicache.storage.limits import PoolLimits
from asynchicache.testing.devices import break_device
from asynchicache.testing.faults import FaultRates, Faulty
from engines import Server, executable, free_port
from integrations.served import DRAWN, WAIT, answer, answers, begin, nothing_held, read, serving, uncached
from integrations.zoo import MAIN, PAGE, random_tokens, tiny_model, tiny_spec


class FittingBytes(ByT5Tokenizer):
    """Of as many ids as the tiny models have."""

    def get_vocab(self) -> dict[str, int]:
        return {token: number for token, number in super().get_vocab().items() if number < 256}


pytestmark = pytest.mark.asyncio

IMPATIENT = PoolLimits(deadline=0.3, cooldown=0.1)
PATIENT = PoolLimits(deadline=600)


async def converse(
    served: PrefixCachedModel, name: str, seed: int, turns: int, said: int, asked: int = 20
) -> list[int]:
    """A conversation, each answer checked; how many tokens of each prompt came from the cache."""
    history: list[int] = []
    hits = []
    for turn in range(turns):
        history += random_tokens(asked, seed=100 * seed + turn)
        generation = begin(served, history, said)
        tokens = await read(generation)
        assert tokens == uncached(name, history, said)
        history += tokens
        hits.append(generation.cached_tokens)
    return hits


async def test_conversations_in_pools_that_are_too_small() -> None:
    """Nine pages for four conversations of up to six: they wait, evict each other, and hit nevertheless."""
    async with serving("qwen3_5", device_slots={"kv": 9, "mamba": 3}, prefill_chunk=24) as served:
        hits = await asyncio.gather(*(converse(served, "qwen3_5", seed, 3, 8) for seed in range(4)))
        assert all(first == 0 for first, *_ in hits)
        assert sum(map(sum, hits)) > 0
        assert served.cache.statistics().planner.lost + served.cache.statistics().planner.demoted > 0


async def test_windows_that_do_not_hold_a_prompt() -> None:
    async with serving("lfm3", device_slots={"kv": 24, "swa": 5}) as served:
        hits = await asyncio.gather(
            *(converse(served, "lfm3", seed, 2, 4, asked=6 * PAGE) for seed in range(2))
        )
        assert [last for _, last in hits] == [(6 * PAGE + 3) // PAGE * PAGE] * 2


async def test_what_was_evicted_comes_back_from_storage() -> None:
    prompt = random_tokens(70)
    async with serving("qwen3_5", storage=MemoryBackend(MemoryStore())) as served:
        said = await answer(served, prompt, 20)
        await served.drain()
        await served.cache.flush()
        turn = begin(served, [*prompt, *said, 5], 8)
        assert await read(turn) == uncached("qwen3_5", [*prompt, *said, 5], 8)
        assert turn.tokens_by_tier == {Tier.STORAGE: 89 // PAGE * PAGE}


@pytest.mark.parametrize("fault", ["fail", "raises", "hang", "swap"])
async def test_storage_that_breaks_in_the_middle(fault: str) -> None:
    storage = Faulty(MemoryBackend(MemoryStore()), FaultRates(), random.Random(0))
    prompts = [random_tokens(40 + number, seed=number) for number in range(4)]
    limits = IMPATIENT if fault == "hang" else PATIENT
    async with serving("llama", storage=storage, storage_limits=limits) as served:
        assert await answers(served, prompts, 4) == [uncached("llama", p, 4) for p in prompts]
        await served.drain()
        await served.cache.flush()
        storage.rates = FaultRates(**{fault: 1.0})
        turns = [begin(served, p, 4) for p in prompts]
        assert [await read(turn) for turn in turns] == [uncached("llama", p, 4) for p in prompts]
        assert storage.injected[fault] > 0
        assert [turn.cached_tokens for turn in turns] == [0] * 4
        assert turns[0].miss_reason in {
            MissReason.STORAGE_FAILED,
            MissReason.DEADLINE,
            MissReason.CORRUPT,
        }
        storage.rates = FaultRates()
        storage.release()


async def test_a_generation_waits_for_a_store_that_hangs_no_longer_than_it_says() -> None:
    storage = Faulty(MemoryBackend(MemoryStore()), FaultRates(hang=1.0, calls=["put"]), random.Random(0))
    prompt = random_tokens(40)
    async with serving("llama", storage=storage, storage_limits=PATIENT) as served:
        turn = served.generate(prompt, max_new_tokens=4, sampling=DRAWN, durable=True, seconds=0.05)
        assert await read(turn) == uncached("llama", prompt, 4)
        assert turn.durable_tokens == 0
        assert storage.hanging > 0
        storage.release()


@pytest.mark.soak
@pytest.mark.engine("redis")
async def test_a_server_that_is_killed_and_comes_back() -> None:
    port = free_port()
    command = [executable("redis-server"), "--port", str(port), "--save", ""]
    config = CacheConfig(
        device_slots={pool.name: 24 for pool in tiny_spec("lfm3").owners},
        prefetch=WAIT,
        weight_version="test",
        storage="redis",
        storage_options={"url": f"redis://127.0.0.1:{port}"},
    )
    with Server(command, ready="Ready to accept") as server:
        async with PrefixCachedModel.open(tiny_model("lfm3"), config=config, page_size=PAGE) as served:
            talks = [asyncio.create_task(converse(served, "lfm3", seed, 6, 12)) for seed in range(8)]
            await answer(served, random_tokens(60), 8)
            server.kill()
            await answer(served, random_tokens(60), 8)
            server.start()
            await asyncio.gather(*talks)
            await served.drain()
            assert nothing_held(served) == []


async def test_a_device_that_breaks() -> None:
    """Copies fail from then on: everything is a miss."""
    prompts = [random_tokens(40 + number, seed=number) for number in range(2)]
    async with serving("qwen3_5") as served:
        assert await answers(served, prompts, 4) == [uncached("qwen3_5", p, 4) for p in prompts]
        await served.drain()
        break_device(served.cache.device)
        turns = [begin(served, p, 10) for p in prompts]
        assert [await read(turn) for turn in turns] == [uncached("qwen3_5", p, 10) for p in prompts]
        assert turns[-1].miss_reason is MissReason.TRANSFER_FAILED


async def test_a_model_that_raises_fails_those_that_it_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    model = tiny_model("llama")
    forward, calls = model.forward, 0

    def fails_once(*args: object, **options: object) -> object:
        nonlocal calls
        calls += 1
        if calls == 6:
            raise RuntimeError("made to fail")
        return forward(*args, **options)

    monkeypatch.setattr(model, "forward", fails_once)
    async with serving("llama") as served:
        turn = begin(served, random_tokens(20), 9)
        with pytest.raises(RuntimeError, match="made to fail"):
            await read(turn)
        assert len(turn.token_ids) == 5  # those before are good
        assert len(await answer(served, random_tokens(20), 9)) == 9


async def test_stop_strings() -> None:
    tokenizer = FittingBytes(extra_ids=0)
    prompt = random_tokens(30)
    said = uncached("lfm3", prompt, 24)
    stop = tokenizer.decode(said)[3:5]
    config = CacheConfig(device_slots={pool.name: 16 for pool in tiny_spec("lfm3").owners})
    async with PrefixCachedModel.open(
        tiny_model("lfm3"), config=config, page_size=PAGE, tokenizer=tokenizer
    ) as served:
        turn = served.generate(
            prompt, max_new_tokens=24, sampling=DRAWN, stop_token_ids=(), stop=["?!?", stop]
        )
        tokens = await read(turn)
        assert turn.finish_reason == "stop"
        assert tokens == said[: len(tokens)]
        assert stop in tokenizer.decode(tokens)
        assert stop not in tokenizer.decode(tokens[:-1])


async def test_a_tokenizer_that_raises_fails_its_request(monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = FittingBytes(extra_ids=0)
    config = CacheConfig(device_slots={"kv": 16})
    async with PrefixCachedModel.open(
        tiny_model("llama"), config=config, page_size=PAGE, tokenizer=tokenizer
    ) as served:
        stopping = served.generate(random_tokens(20), max_new_tokens=9, stop_token_ids=(), stop=["?!?"])
        first = await anext(stopping)
        monkeypatch.setattr(tokenizer, "decode", lambda tokens: tokens[99])
        with pytest.raises(IndexError):
            await read(stopping)
        assert stopping.token_ids[0] == first
        assert len(await answer(served, random_tokens(20), 9)) == 9
        assert nothing_held(served) == []


@pytest.mark.soak
@pytest.mark.parametrize("name", MAIN)
async def test_many_conversations_half_of_which_hang_up(name: str) -> None:
    """Small pools over a store that fails and recovers in the middle."""
    storage = Faulty(MemoryBackend(MemoryStore()), FaultRates(), random.Random(0))
    sizes = {pool.name: 40 for pool in tiny_spec(name).owners}
    async with serving(
        name, device_slots=sizes, storage=storage, storage_limits=IMPATIENT, max_running=6, prefill_chunk=40
    ) as served:

        async def hang_up(seed: int) -> None:
            for turn in range(4):
                generation = served.generate(
                    random_tokens(30 + 11 * turn, seed=seed), max_new_tokens=60, stop_token_ids=()
                )
                async for _ in generation:
                    if len(generation.token_ids) > 3 + 7 * turn:
                        break
                await generation.aclose()

        stayed = asyncio.gather(*(converse(served, name, seed, 4, 20) for seed in range(10)))
        left = asyncio.gather(*(hang_up(seed) for seed in range(10)))
        await answer(served, random_tokens(60), 8)
        storage.rates = FaultRates(fail=0.5, swap=0.5, late=0.1)
        await answer(served, random_tokens(60), 8)
        storage.rates = FaultRates()
        hits = await stayed
        await left
        assert sum(map(sum, hits)) > 0


async def test_logits_that_are_no_numbers_fail_their_own_request(monkeypatch: pytest.MonkeyPatch) -> None:
    times: list[int] = []

    def broken(*arguments: Any, **options: Any) -> torch.Tensor:
        logits = decode(*arguments, **options)
        if len(logits) > 1 and not times:
            times.append(len(logits))
            logits[0] = torch.nan
        return logits

    prompts = [random_tokens(20 + number, seed=number) for number in range(3)]
    # So long that they meet in a batch on a busy machine too.
    wanted = [uncached("llama", prompt, 64) for prompt in prompts]
    async with serving("llama") as served:
        monkeypatch.setattr("asynchicache.integrations.transformers.calls.decode", broken)
        found = await asyncio.gather(
            *(answer(served, prompt, 64) for prompt in prompts), return_exceptions=True
        )
    failed = [number for number, one in enumerate(found) if isinstance(one, RuntimeError)]
    assert len(failed) == 1  # whichever came first into a batch
    assert all(found[number] == wanted[number] for number in range(3) if number not in failed)
