"""A model that serves from a cache: the tokens of the uncached model, and no prefix computed twice."""

from __future__ import annotations

import asyncio
import gc

import pytest

from asynchicache import CacheConfig, MissReason, Tier
from asynchicache.errors import (
    BusyError,
    CapacityError,
    ClosedError,
    ConfigError,
    InvalidTokensError,
    UsageError,
)
from asynchicache.integrations.transformers.model import PrefixCachedModel
from asynchicache.integrations.transformers.sampling import GREEDY, Sampling
from integrations.served import DRAWN, answer, begin, nothing_held, read, serving, uncached
from integrations.zoo import ALL, PAGE, VOCABULARY, random_tokens, tiny_model

pytestmark = pytest.mark.asyncio

PROMPT, ANSWER, QUESTION = 54, 20, 11


DEFAULT = ("qwen3_5", "lfm3", "jamba")
"""States, windows, and states that forbid pieces."""


async def check_two_turns(name: str) -> None:
    """The second turn begins inside of what the first one generated; pieces are no whole pages."""
    first = random_tokens(PROMPT)
    async with serving(name, prefill_chunk=24) as served:
        said = await answer(served, first, ANSWER)
        assert said == uncached(name, first, ANSWER)
        second = [*first, *said, *random_tokens(QUESTION, seed=1)]
        turn = begin(served, second, ANSWER)
        assert await read(turn) == uncached(name, second, ANSWER)
        # The last generated token was not fed to the model, so its page is not whole.
        assert turn.cached_tokens == (PROMPT + ANSWER - 1) // PAGE * PAGE
        assert turn.tokens_by_tier == {Tier.DEVICE: turn.cached_tokens}
        assert turn.finish_reason == "length"
        assert turn.miss_reason in (MissReason.NONE, MissReason.COLD)


@pytest.mark.parametrize("name", DEFAULT)
async def test_a_turn_resumes_inside_the_last_answer(name: str) -> None:
    await check_two_turns(name)


@pytest.mark.soak
@pytest.mark.parametrize("name", [name for name in ALL if name not in DEFAULT])
async def test_a_turn_of_every_other_model(name: str) -> None:
    await check_two_turns(name)


@pytest.mark.parametrize("device_bytes", [40_000, 60_000, 500_000])
async def test_a_prompt_that_fits_hits_when_it_comes_again(device_bytes: int) -> None:
    """Whatever the memory: states are worth more than further pages."""
    config = CacheConfig(device_bytes=device_bytes, host_ratio=0.0)
    async with PrefixCachedModel.open(tiny_model("qwen3_5"), config=config, page_size=PAGE) as served:
        prompt = random_tokens(min(served.capacity_tokens - 2, 500) // PAGE * PAGE - 3)
        await answer(served, prompt, 4)
        again = begin(served, prompt, 4)
        await read(again)
        assert again.cached_tokens == len(prompt) // PAGE * PAGE > 0


@pytest.mark.parametrize(("name", "prompt", "said"), [("mistral_windows", 20, 60), ("gemma3", 20, 90)])
async def test_an_answer_longer_than_a_window(name: str, prompt: int, said: int) -> None:
    """Of the first model all pages are kept, of the second those of the last window."""
    tokens = random_tokens(prompt)
    async with serving(name) as served:
        history = [*tokens, *await answer(served, tokens, said), 5]
        turn = begin(served, history, 4)
        assert await read(turn) == uncached(name, history, 4)
        assert turn.cached_tokens == (prompt + said - 1) // PAGE * PAGE


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
async def test_many_at_once(sampling: Sampling) -> None:
    prompts = [random_tokens(30 + 7 * number, seed=number) for number in range(6)]
    async with serving("qwen3_5") as served:
        said = await asyncio.gather(*(answer(served, prompt, 12, sampling) for prompt in prompts))
        assert said == [uncached("qwen3_5", prompt, 12, sampling) for prompt in prompts]


async def test_those_who_wait_for_their_turn_meet_what_those_before_published() -> None:
    shared = random_tokens(4 * PAGE)
    prompts = [[*shared, *random_tokens(9, seed=number)] for number in range(4)]
    async with serving("qwen3_5") as served:
        turns = [begin(served, p, 4) for p in prompts]
        assert [await read(turn) for turn in turns] == [uncached("qwen3_5", p, 4) for p in prompts]
        assert [turn.cached_tokens for turn in turns] == [0, *[4 * PAGE] * 3]
        assert served.cache.statistics().served.requests == 4  # publications are none


@pytest.mark.parametrize("name", ["qwen3_5", "gemma3", "jamba"])
async def test_only_the_first_of_those_who_come_together_computes_their_beginning(name: str) -> None:
    """They part long before their ends, where nothing but their waiting asks for a state or a window."""
    shared = random_tokens(4 * PAGE)
    prompts = [[*shared, *random_tokens(3 * PAGE, seed=number)] for number in range(4)]
    async with serving(name) as served:
        turns = [begin(served, p, 2) for p in prompts]
        assert [await read(turn) for turn in turns] == [uncached(name, p, 2) for p in prompts]
        assert [turn.cached_tokens for turn in turns] == [0, *[4 * PAGE] * 3]


async def test_all_is_published_without_complaint(caplog: pytest.LogCaptureFixture) -> None:
    async with serving("qwen3_5") as served:
        await answer(served, random_tokens(PROMPT), ANSWER)
    assert [record for record in caplog.records if record.name.startswith("asynchicache")] == []


async def test_namespaces_do_not_meet() -> None:
    prompt = random_tokens(PROMPT)
    async with serving("llama") as served:
        for place in ({}, {"namespace": "a"}, {"namespace": "b"}, {"salt": "a"}):
            turn = served.generate(prompt, max_new_tokens=1, **place)
            await read(turn)
            assert turn.cached_tokens == 0
        again = served.generate(prompt, max_new_tokens=1, namespace="b")
        await read(again)
        assert again.cached_tokens == 3 * PAGE


async def test_end_tokens() -> None:
    prompt = random_tokens(PROMPT)
    said = uncached("llama", prompt, ANSWER)
    end = said[10]
    async with serving("llama") as served:
        turn = served.generate(prompt, max_new_tokens=ANSWER, sampling=DRAWN, stop_token_ids=(end,))
        assert await read(turn) == said[: said.index(end) + 1]
        assert turn.finish_reason == "stop"
        assert turn.token_ids == said[: said.index(end) + 1]


async def test_drawn_tokens_follow_their_seed() -> None:
    prompt = random_tokens(PROMPT)

    async def draw(served: PrefixCachedModel, seed: int) -> list[int]:
        sampling = Sampling(temperature=1.0, top_p=0.9, seed=seed)
        return await read(served.generate(prompt, max_new_tokens=12, sampling=sampling, stop_token_ids=()))

    async with serving("llama") as served:
        first, again, other = [await draw(served, seed) for seed in (1, 1, 2)]
    assert first == again != other


# Leaving


async def test_closing_frees_everything_wherever_it_is() -> None:
    prompts = [random_tokens(100, seed=number) for number in range(6)]
    async with serving("qwen3_5", max_running=3, prefill_chunk=16) as served:
        turns = [begin(served, p, 50) for p in prompts]
        async for _ in turns[0]:  # it decodes, the next one prefills, the last ones wait in the line
            break
        for turn in turns:
            await turn.aclose()
            await turn.aclose()
            assert turn.finish_reason == "cancelled"
            assert await read(turn) == []
        assert nothing_held(served) == []
        assert await answer(served, prompts[5], 10) == uncached("qwen3_5", prompts[5], 10)


async def test_what_a_closed_generation_computed_is_kept() -> None:
    prompt = random_tokens(PROMPT)
    async with serving("qwen3_5") as served:
        async with begin(served, prompt, 200) as turn:
            async for _ in turn:
                if len(turn.token_ids) > 30:
                    break
        more = served.generate([*prompt, *turn.token_ids], max_new_tokens=1)
        await read(more)
        assert more.cached_tokens >= PROMPT + 30 - PAGE


async def test_a_cancelled_reader_ends_its_generation() -> None:
    async with serving("qwen3_5") as served:
        turn = begin(served, random_tokens(PROMPT), 900)
        reader = asyncio.create_task(read(turn))
        await anext(aiter(turn))
        reader.cancel()
        with pytest.raises(asyncio.CancelledError):
            await reader
        await served.drain()
        assert turn.finish_reason == "cancelled"
        assert len(turn.token_ids) < 900


async def test_a_generation_that_nobody_holds_ends() -> None:
    async with serving("llama") as served:
        async for _ in begin(served, random_tokens(PROMPT), 900):
            break
        gc.collect()
        await served.drain()
        fed = sum(pool.held for pool in served.cache.statistics().occupancy["kv"][:1])
        assert fed < 900 // PAGE


async def test_half_of_many_hang_up() -> None:
    prompts = [random_tokens(60 + number, seed=number) for number in range(8)]
    async with serving("lfm3", slots=40, max_running=3) as served:
        turns = [begin(served, p, 24) for p in prompts]

        async def hang_up(number: int) -> None:
            async for _ in turns[number]:
                if len(turns[number].token_ids) > number:
                    break
            await turns[number].aclose()

        stayed = [read(turn) for turn in turns[1::2]]
        said, _ = await asyncio.gather(asyncio.gather(*stayed), asyncio.gather(*map(hang_up, range(0, 8, 2))))
        assert said == [uncached("lfm3", prompt, 24) for prompt in prompts[1::2]]


async def test_leaving_the_model_ends_what_runs() -> None:
    async with serving("llama") as served:
        turn = begin(served, random_tokens(PROMPT), 900)
        await anext(turn)
        await served.aclose()
        assert turn.finish_reason == "cancelled"
        with pytest.raises(ClosedError, match="async with"):
            served.generate([1], max_new_tokens=1)


# Room


async def test_requests_wait_for_room_in_their_order() -> None:
    prompts = [random_tokens(5 * PAGE, seed=number) for number in range(4)]
    ended: list[int] = []

    async def serve(served: PrefixCachedModel, number: int) -> list[int]:
        said = await answer(served, prompts[number], PAGE)
        ended.append(number)
        return said

    async with serving("qwen3_5", device_slots={"kv": 8, "mamba": 2}) as served:
        assert served.capacity_tokens == 8 * PAGE
        tasks = [asyncio.create_task(serve(served, number)) for number in range(4)]
        await asyncio.sleep(0)
        assert (served.running, served.waiting) == (1, 3)
        assert await asyncio.gather(*tasks) == [uncached("qwen3_5", p, PAGE) for p in prompts]
        assert ended == list(range(4))


async def test_too_many_are_refused() -> None:
    async with serving("llama", max_running=1, max_waiting=1) as served:
        first = begin(served, random_tokens(PROMPT), 4)
        second = begin(served, random_tokens(PROMPT), 4)
        with pytest.raises(BusyError, match="1 requests wait already"):
            served.generate([1], max_new_tokens=1)
        assert await read(first) == await read(second)
        assert len(await answer(served, [1], 1)) == 1


async def test_what_can_never_fit_is_refused() -> None:
    async with serving("llama", slots=8) as served:
        with pytest.raises(CapacityError, match="144 tokens in whole pages; the cache's device holds 128"):
            served.generate(random_tokens(120), max_new_tokens=9)
        assert len(await answer(served, random_tokens(120), 8)) == 8


# Misuse


async def test_bad_input_is_refused_at_once() -> None:
    async with serving("llama") as served:
        with pytest.raises(InvalidTokensError, match=f"{VOCABULARY}: the model knows {VOCABULARY}"):
            served.generate([VOCABULARY], max_new_tokens=1)
        with pytest.raises(InvalidTokensError, match="empty"):
            served.generate([], max_new_tokens=1)
        with pytest.raises(UsageError, match="max_new_tokens 0"):
            served.generate([1], max_new_tokens=0)
        with pytest.raises(UsageError, match="need a tokenizer"):
            served.generate([1], max_new_tokens=1, stop=["x"])
        with pytest.raises(ConfigError, match="must be a string"):
            served.generate([1], max_new_tokens=1, namespace=3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"prefill_chunk": 0}, "prefill_chunk 0"),
        ({"decode_batch": 0}, "decode_batch 0"),
        ({"max_running": 0}, "max_running 0"),
        ({"max_waiting": -1}, "max_waiting -1"),
        ({"config": CacheConfig(device="cuda")}, "the model is on cpu, the cache on cuda"),
    ],
)
async def test_bad_options(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        async with PrefixCachedModel.open(tiny_model("llama"), **options):
            raise AssertionError("it opened")


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"temperature": -1}, "temperature -1"),
        ({"temperature": float("nan")}, "temperature nan"),
        ({"top_p": 0}, "top_p 0"),
        ({"top_k": -1}, "top_k -1"),
        ({"seed": -1}, "seed -1"),
    ],
)
async def test_bad_sampling(values: dict[str, float], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        Sampling(**values)
