"""Real models over two processes: the tokens of one process, after a restart and with damaged storage too."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path

import msgspec
import pytest
from torch import distributed

from asynchicache import HybridCache
from asynchicache.hashing import namespace_seed, page_digests
from asynchicache.ranks.group import RankGroup
from asynchicache.types import token_array
from integrations.zoo import PAGE, random_tokens
from ranks.launch import Follower, launch
from ranks.sharded_model import (
    LIMITS,
    RANKS,
    STAGED,
    TOKEN,
    Job,
    ModelRank,
    generate_whole,
    join_model,
    options,
    rank_spec,
)
from soaking import first

NEW = 6

pytestmark = pytest.mark.asyncio


class ModelGroup:
    """The engine of the leader."""

    def __init__(
        self,
        name: str,
        group: RankGroup,
        cache: HybridCache,
        model: ModelRank,
        follower: Follower,
    ) -> None:
        self.cache = cache
        self._name = name
        self._group = group
        self._model = model
        self._follower = follower

    async def turn(self, history: list[int], seed: int) -> int:
        """Continue a conversation with new tokens and an answer; the tokens that were cached."""
        history += random_tokens(2 * PAGE + 5, seed)
        cut = len(history) // PAGE * PAGE
        async with self.cache.request(history) as request:
            await request.prefetch()
            await request.load()
            hit = request.hit.tokens
            await request.reserve(len(history) - hit)
            pages = list(request.pages("kv")[: cut // PAGE])
            states = [request.state(pool.name) for pool in self.cache.spec.pools if not pool.per_token]
            job = Job(self._group.mark(), list(history), hit, pages, next(iter(states), None), NEW)
            answer = await self._run(job)
            await request.checkpoint(cut)
            assert await request.durable(), self.cache.statistics().traffic
        assert answer == generate_whole(self._name, history, NEW)
        history += answer
        return hit

    async def _run(self, job: Job) -> list[int]:
        assert self._follower.stdin is not None
        assert self._follower.stdout is not None
        self._follower.stdin.write(msgspec.json.encode(job) + b"\n")
        ours = await asyncio.to_thread(self._model.run, job)
        theirs = msgspec.json.decode(await self._follower.stdout.readline(), type=list[int])
        assert theirs == ours
        return ours


@asynccontextmanager
async def life(name: str, folder: Path) -> AsyncIterator[ModelGroup]:
    """Both processes, until the end of the block; pages in storage outlive them."""
    (folder / "model").unlink(missing_ok=True)
    follower = await launch("model_process.py", name, str(folder), piped=True)
    assert follower.stdin is not None
    try:
        async with (
            RankGroup.listen(f"unix:{folder / 'group'}", TOKEN, LIMITS, ranks=RANKS) as group,
            HybridCache.open(rank_spec(name, 0), options(name, folder / "pages"), group=group) as cache,
        ):
            await asyncio.to_thread(join_model, folder, 0)
            model = ModelRank(name, 0, cache.device_tensor)
            yield ModelGroup(name, group, cache, model, follower)
            assert group.failure is None
            assert cache.verify() == []
        follower.stdin.close()
        assert await follower.wait() == 0
    finally:
        if distributed.is_initialized():
            distributed.destroy_process_group()
        if follower.returncode is None:
            follower.kill()
            await follower.wait()


def damage(folders: Sequence[Path], digests: Sequence[bytes]) -> int:
    """Flip a byte of these pages in each folder; how many there were."""
    names = {digest.hex() for digest in digests}
    found = [path for folder in folders for path in folder.iterdir() if path.name in names]
    for path in found:
        data = bytearray(path.read_bytes())
        data[-1] ^= 1
        path.write_bytes(data)
    return len(found)


@pytest.mark.parametrize(
    ("name", "pools", "damaged", "left"),
    first(
        2,
        [
            # Each rank stores its heads. The states that were read belong to the pages that are lost; the
            # ones before them are read by the next request.
            ("qwen3_5", "*.tp1-2", 2, 0),
            # Latents are stored once, for all ranks.
            ("deepseek_v3", "*.kv", 1, 2 * PAGE),
            # Each stage stores its layers.
            (STAGED, "*.kv", 1, 0),
        ],
    ),
)
async def test_two_processes_serve_the_tokens_of_one(
    name: str, pools: str, damaged: int, left: int, tmp_path: Path
) -> None:
    """Also after a restart, and with the first `damaged` of `pools` damaged; `left`: the hit then."""
    pages = tmp_path / "pages"
    pages.mkdir()
    talk, other = [1], [2]
    async with life(name, tmp_path) as group:
        for history, seed in ((talk, 1), (other, 2)):
            assert await group.turn(history, seed) == 0
            assert await group.turn(history, seed + 10) == 2 * PAGE
    digests = page_digests(token_array(other), PAGE, namespace_seed(None))[2:]
    assert damage(sorted(pages.glob(pools))[:damaged], digests) > 0
    async with life(name, tmp_path) as group:
        ceiling = computed(talk)
        assert await group.turn(talk, 3) == ceiling, "a restart finds everything in storage"
        assert await group.turn(other, 4) == left, "a page that one rank cannot read is there for none"
        ceiling = computed(other)
        assert await group.turn(other, 5) == ceiling, "and it is repaired"


def computed(talk: Sequence[int]) -> int:
    """The tokens in whole pages of the last prompt: its answer was not published."""
    return (len(talk) - NEW) // PAGE * PAGE
