"""`PrefixCachedModel` over two processes: the tokens of one process, for several conversations at once."""

from __future__ import annotations

import asyncio
import signal
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import pytest
from msgspec.structs import replace
from torch import distributed

from asynchicache import RankError
from asynchicache.integrations.transformers.calls import Feed, Restore
from asynchicache.integrations.transformers.model import PrefixCachedModel
from asynchicache.ranks.group import RankGroup
from integrations.zoo import PAGE, random_tokens
from ranks.launch import Follower, launch
from ranks.sharded_model import (
    LIMITS,
    RANKS,
    STAGED,
    TOKEN,
    generate_whole,
    join_model,
    options,
    rank_model,
    rank_spec,
)
from soaking import first

NEW = 2 * PAGE

pytestmark = pytest.mark.asyncio


@asynccontextmanager
async def served(
    name: str, folder: Path, **more: float
) -> AsyncIterator[tuple[PrefixCachedModel, RankGroup, Follower]]:
    """Both processes, until the end of the block; the last is the follower's, which ends by itself."""
    (folder / "model").unlink(missing_ok=True)
    (folder / "pages").mkdir(exist_ok=True)
    follower = await launch("served_process.py", name, str(folder))
    try:
        await asyncio.to_thread(join_model, folder, 0)
        limits = replace(LIMITS, **more)
        async with RankGroup.listen(f"unix:{folder / 'group'}", TOKEN, limits, ranks=RANKS) as group:
            opening = PrefixCachedModel.open(
                rank_model(name, 0),
                config=options(name, folder / "pages"),
                spec=rank_spec(name, 0),
                group=group,
                prefill_chunk=3 * PAGE,
            )
            async with opening as model:
                yield model, group, follower
        await follower.wait()
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        if follower.returncode is None:
            follower.kill()
            await follower.wait()


async def turn(model: PrefixCachedModel, name: str, history: list[int], seed: int) -> int:
    """Continue a conversation; the tokens that were cached."""
    history += random_tokens(PAGE + 5, seed)
    answer = model.generate(history, max_new_tokens=NEW, stop_token_ids=())
    said = [token async for token in answer]
    assert said == generate_whole(name, history, NEW)
    history += said
    return answer.cached_tokens


def ends(history: Sequence[int]) -> int:
    """Where the next turn resumes: the last page of what the model computed, prompt and output."""
    return (len(history) - 1) // PAGE * PAGE


@pytest.mark.parametrize(("name", "restarts"), first(2, [("qwen3_5", 1), (STAGED, 0), ("deepseek_v3", 0)]))
async def test_conversations_over_two_processes(name: str, restarts: int, tmp_path: Path) -> None:
    """They join and leave one batch, resume where they ended, and after a restart too."""
    talks = [random_tokens(length, seed=length) for length in (7, 19, 30)]
    async with served(name, tmp_path) as (model, group, follower):
        for round_number in range(2):
            resumed = [ends(talk) if round_number else 0 for talk in talks]
            turns = (turn(model, name, talk, 10 * i + round_number) for i, talk in enumerate(talks))
            assert await asyncio.gather(*turns) == resumed
        await model.drain()
        assert model.cache.verify() == []
        assert await model.cache.verify_ranks() == []
        assert group.failure is None
    assert follower.returncode == 0
    for number in range(restarts):
        before = ends(talks[number])
        async with served(name, tmp_path) as (model, group, _):
            assert await turn(model, name, talks[number], 50) == before
            assert group.failure is None


async def test_what_was_sent_runs_on_every_rank(tmp_path: Path) -> None:
    """Also if its waiter is cancelled before: the sums of the next forward would not meet those of others."""
    name, tokens, may_run = "qwen3_5", random_tokens(20, seed=9), threading.Event()
    async with served(name, tmp_path) as (model, group, _):
        calls = model._runner.context.calls
        with calls.sequence() as sequence:
            await calls.run(Restore(sequence))
            calls.thread.start(may_run.wait)
            waiting = asyncio.create_task(calls.run(Feed(sequence, 0, tokens)))
            await asyncio.sleep(0)  # it is sent
            waiting.cancel()
            await asyncio.sleep(0)
            may_run.set()
            with pytest.raises(asyncio.CancelledError):
                await waiting
            assert calls.rank.sequences[sequence].length == len(tokens)
        for number in range(3):
            answer = model.generate(random_tokens(60, seed=number), max_new_tokens=50, stop_token_ids=())
            await anext(answer)
            await answer.aclose()
        assert await turn(model, name, tokens, 9) == 0
        await model.drain()
        assert group.failure is None
        assert model.cache.verify() == []


async def test_a_killed_rank_ends_every_generation(tmp_path: Path) -> None:
    """With the error that names it: the model cannot run without its part."""
    async with served("deepseek_v3", tmp_path) as (model, group, follower):
        running = [
            model.generate(random_tokens(20, seed=i), max_new_tokens=150, stop_token_ids=()) for i in range(3)
        ]
        await anext(running[0])
        follower.kill()
        async with asyncio.timeout(60):
            ended = await asyncio.gather(*(read(one) for one in running), return_exceptions=True)
            assert all(isinstance(one, Exception) for one in ended), ended
            with pytest.raises(RankError, match="rank 1"):
                await read(model.generate([1, 2, 3], max_new_tokens=2))
        assert "rank 1" in str(group.failure)


async def test_a_silent_rank_ends_every_generation(tmp_path: Path) -> None:
    """Though the model hangs in a sum until its own timeout: nobody waits for that, new ones neither."""
    async with served("deepseek_v3", tmp_path, silence=2.0) as (model, _, follower):
        running = [
            model.generate(random_tokens(20, seed=i), max_new_tokens=150, stop_token_ids=()) for i in range(3)
        ]
        await anext(running[0])
        follower.send_signal(signal.SIGSTOP)
        async with asyncio.timeout(60):
            ended = await asyncio.gather(*(read(one) for one in running), return_exceptions=True)
            assert all(isinstance(one, Exception) for one in ended), ended
            with pytest.raises(RankError, match="rank 1 is lost"):
                await read(model.generate([1, 2, 3], max_new_tokens=2))
            await model.aclose()
        follower.kill()  # and the sum fails


async def read(answer: object) -> list[int]:
    return [token async for token in answer]  # type: ignore[attr-defined]
