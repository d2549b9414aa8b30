"""Tests of the engine in engine.py: bursts, forwards that fail, clients that hang up."""

import asyncio
from collections.abc import Sequence

import pytest
from engine import Engine
from paged_model import SPEC, WORDS

from asynchicache import BusyError, InvalidTokensError, Request
from asynchicache.testing.checks import assert_clean
from asynchicache.testing.interrupts import Interrupted, cancel_this_task

RULES = [token % 60 for token in range(21)]  # a beginning that all prompts share
BAD = WORDS - 1  # a prompt that ends with it fails


async def answer(engine: Engine, prompt: Sequence[int], most: int = 12) -> list[int]:
    return [token async for token in engine.generate(prompt, most)]


def break_forwards(engine: Engine, monkeypatch: pytest.MonkeyPatch, *, at: int) -> None:
    """Forwards of a prompt that has BAD in it fail at token `at`, after they wrote some of the state."""
    forward = engine.model._forward  # noqa: SLF001 - both of its methods call it

    def failing(requests: Sequence[Request], ends: Sequence[int]) -> list[int]:
        chosen = forward(requests, ends)
        if any(BAD in request.tokens and end > at for request, end in zip(requests, ends, strict=True)):
            raise RuntimeError("no kernel image is available")
        return chosen

    monkeypatch.setattr(engine.model, "_forward", failing)


@pytest.mark.asyncio
async def test_fifty_clients_at_once_find_two_places(small_cache):
    async with small_cache(SPEC) as cache, Engine(cache, most_waiting=2) as engine:
        burst = [answer(engine, [*RULES, number]) for number in range(50)]
        got = await asyncio.gather(*burst, return_exceptions=True)
        assert sum(isinstance(one, BusyError) for one in got) == 48
        assert sum(isinstance(one, list) for one in got) == 2
        assert len(await answer(engine, RULES)) == 12  # their places are free again


@pytest.mark.parametrize("at", [0, 22, 24, 27])
@pytest.mark.asyncio
async def test_a_forward_that_fails_ends_its_request_and_no_other(small_cache, monkeypatch, at):
    prompts = [[*RULES, number] for number in range(3)]
    async with small_cache(SPEC) as cache, Engine(cache) as engine:
        right = [await answer(engine, prompt) for prompt in prompts]
    async with small_cache(SPEC) as cache, Engine(cache) as engine:
        break_forwards(engine, monkeypatch, at=at)
        asked = [answer(engine, prompt) for prompt in (*prompts[:2], [*RULES, BAD], prompts[2])]
        first, second, broken, third = await asyncio.gather(*asked, return_exceptions=True)
        assert isinstance(broken, RuntimeError), broken
        assert "no kernel image" in str(broken)
        assert [first, second, third] == right
        assert [await answer(engine, prompt) for prompt in prompts] == right  # later, from the cache


@pytest.mark.parametrize("token", [WORDS, 1 << 40, -1])
@pytest.mark.asyncio
async def test_an_id_outside_the_vocabulary_is_refused(small_cache, token):
    async with small_cache(SPEC) as cache, Engine(cache) as engine:
        bad = answer(engine, [*RULES, token])
        got = await asyncio.gather(bad, answer(engine, RULES), return_exceptions=True)
        assert isinstance(got[0], InvalidTokensError)
        assert str(token) in str(got[0])
        assert len(got[1]) == 12


@pytest.mark.parametrize("length", [1, 3, 7, 8, 9])
@pytest.mark.asyncio
async def test_short_prompts_are_served(small_cache, length):
    async with small_cache(SPEC) as cache, Engine(cache) as engine:
        once = await answer(engine, RULES[:length])
        assert await answer(engine, RULES[:length]) == once
        assert len(once) == 12


@pytest.mark.asyncio
async def test_a_client_may_be_cancelled_at_every_await(small_cache):
    async with small_cache(SPEC) as cache, Engine(cache, most_waiting=3) as engine:
        right = await answer(engine, RULES)
        for at in range(1, 200):
            leaving = Interrupted(answer(engine, [*RULES, 1]), at, cancel_this_task)
            await asyncio.gather(as_a_task(leaving), return_exceptions=True)
            if not leaving.struck:
                break
        assert at > 5
        assert engine.arriving == len(engine.waiting) == len(engine.running) == 0
        assert await answer(engine, RULES) == right
    assert_clean(cache)


async def as_a_task(client: Interrupted) -> None:
    await client
