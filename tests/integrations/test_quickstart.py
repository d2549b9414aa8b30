"""The core of an engine that README teaches serves models of every kind with the same lines."""

from __future__ import annotations

import runpy
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from asynchicache.integrations.transformers.forward import prefill
from asynchicache.integrations.transformers.snapshot import new_cache
from integrations.tiers import open_tiers
from integrations.zoo import PAGE, SLICE, random_tokens, tiny_config, tiny_model

pytestmark = pytest.mark.asyncio

SCRIPT = Path(__file__).parents[2] / "docs" / "examples" / "quickstart.py"


@pytest.fixture(scope="module")
def serve() -> Callable[..., Awaitable[int]]:
    found: Callable[..., Awaitable[int]] = runpy.run_path(str(SCRIPT))["serve"]
    return found


@pytest.mark.parametrize("name", ["qwen2", "mistral_windows", "jamba", *SLICE])
async def test_two_turns_are_answered_as_without_a_cache(
    name: str, serve: Callable[..., Awaitable[int]], capsys: pytest.CaptureFixture[str]
) -> None:
    model, prompt = tiny_model(name), random_tokens(4 * PAGE + 5)
    async with open_tiers(name) as (cache, bridge):
        for _ in range(2):
            alone = prefill(model, new_cache(tiny_config(name)), prompt, 0, len(prompt))
            answer = await serve(cache, bridge, model, prompt)
            assert answer == int(alone.argmax())
            prompt = [*prompt, answer, *random_tokens(PAGE, seed=1)]

    assert [int(line.split()[0]) for line in capsys.readouterr().out.splitlines()] == [0, 4 * PAGE]
