"""Ranks whose pools are parts of one model (`ModelSpec.shard`) form a group."""

from __future__ import annotations

import asyncio
from functools import partial

import pytest
from transformers import LlamaConfig

from asynchicache import CacheConfig, HybridCache, ModelSpec
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.errors import RankError, UsageError
from asynchicache.ranks.group import RankGroup
from asynchicache.storage.chain import ChainStage, StagePolicy, StorageChain
from asynchicache.storage.protocol import StorageBackend
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache_lab.ranks.chaos import LIMITS, PAGE
from asynchicache_lab.ranks.group import openings, seeded_group

MODEL = ModelSpec.from_config(
    LlamaConfig(
        num_hidden_layers=2,
        hidden_size=32,
        num_attention_heads=4,
        num_key_value_heads=4,
        intermediate_size=32,
    ),
    page_size=PAGE,
)
FEW_HEADS = ModelSpec.from_config(
    LlamaConfig(num_hidden_layers=2, hidden_size=32, num_attention_heads=4, num_key_value_heads=2),
    page_size=PAGE,
)
CONFIG = CacheConfig(device_slots={"kv": 32}, host_slots={"kv": 32}, weight_version="test")
PROMPT = list(range(24))


def hits(seed: int, store: MemoryStore) -> list[int]:
    """Hits of a prompt and the next turn, on two ranks over one store; every rank checks its own part."""
    found: list[int] = []

    async def main(world: SeededWorld) -> None:
        specs = [MODEL.shard(tp=(rank, 2)) for rank in range(2)]
        ranks = openings(world, specs, CONFIG, [MemoryBackend(store)] * 2)
        async with seeded_group(world, ranks) as mirror:
            shapes = {one.device_tensor("kv", "keys").shape for one in (mirror.cache, *mirror.workers)}
            assert len(shapes) == 1
            found.append((await mirror.serve(PROMPT, durable=True))[0])
            found.append((await mirror.serve([*PROMPT, 1, 2]))[0])
            assert mirror.violations == []

    run_seeded(seed, main)
    return found


def test_each_rank_keeps_its_part_of_the_heads() -> None:
    store = MemoryStore()
    assert hits(0, store) == [0, 24]
    pages = len(PROMPT) // PAGE
    assert len(store) == 2 * pages, "each rank stored its part"
    assert hits(1, store) == [20, 24], "and a restart finds both; the last page is left to compute"


@pytest.mark.parametrize("rank", [0, 1])
@pytest.mark.parametrize("found", ["by sync", "by a match"])
def test_what_a_stage_behind_that_of_a_rank_has_lost_comes_back(rank: int, found: str) -> None:
    async def main(world: SeededWorld) -> None:
        stores = [[MemoryStore(1 << 20), MemoryStore(1 << 20)] for _ in range(2)]
        chains: list[StorageBackend] = []
        for near, far in stores:
            first = ChainStage("near", partial(MemoryBackend, near), StagePolicy(durable=True))
            second = ChainStage("far", partial(MemoryBackend, far), StagePolicy(durable=False))
            chains.append(StorageChain([first, second], world.port))
        specs = [MODEL.shard(tp=(number, 2)) for number in range(2)]
        async with seeded_group(world, openings(world, specs, CONFIG, chains)) as mirror:
            await mirror.serve(PROMPT, durable=True)
            far = stores[rank][1]
            before = set(far)
            for key in before:
                far.drop(key)
            if found == "by sync":
                assert await mirror.cache.sync()
            else:
                await mirror.serve([*PROMPT, 1, 2])
                await asyncio.sleep(5.0)
            await mirror.cache.drain()
            assert before
            assert before <= set(far)
            assert mirror.violations == []

    run_seeded(0, main)


def test_a_group_of_one_is_refused() -> None:
    async def main(world: SeededWorld) -> None:
        group = RankGroup("secret", LIMITS)
        opening = HybridCache.open(MODEL, CONFIG, port=world.port, device=world.device(), group=group)
        with pytest.raises(UsageError, match="led by rank 0 of 2 or more, not by 0 of 1"):
            await opening

    run_seeded(0, main)


@pytest.mark.parametrize(
    ("specs", "error", "words"),
    [
        # Both would store their heads under the same keys, and read those of the other.
        ([MODEL.shard(tp=(0, 2))] * 2, RankError, "rank 1 keeps the same part of pool 'kv' as rank 0"),
        # Of four ranks with two heads, 1 and 3 have copies: here of a head that nobody writes.
        (
            [FEW_HEADS.shard(tp=(rank, 4)) for rank in (0, 1, 1, 3)],
            RankError,
            "rank 3 has a copy of a part of pool 'kv' that no rank writes: .* tp1/2",
        ),
        (
            [MODEL.shard(tp=(0, 2)), MODEL.shard(pp=(1, 2))],
            RankError,
            "rank 1 differs from rank 0 in division: 'tp 1, pp 2, cp 1', not 'tp 2, pp 1, cp 1'",
        ),
        (
            [MODEL.shard(tp=(rank, 4)) for rank in range(2)],
            UsageError,
            "the model is divided over 4 ranks .tp 4, pp 1, cp 1.; this group has 2",
        ),
    ],
)
def test_ranks_that_are_not_the_parts_of_one_model(
    specs: list[ModelSpec], error: type[Exception], words: str
) -> None:
    refused(specs, error, words)


def test_stages_by_their_own_configurations() -> None:
    """Their layers have the same numbers, so their pages would have the same keys."""
    config = LlamaConfig(num_hidden_layers=1, hidden_size=32, num_attention_heads=4, num_key_value_heads=4)
    stage = ModelSpec.from_config(config, page_size=PAGE)
    refused([stage, stage], RankError, "rank 1 keeps the same part of pool 'kv' as rank 0", by_options=False)


def refused(specs: list[ModelSpec], error: type[Exception], words: str, *, by_options: bool = True) -> None:
    async def main(world: SeededWorld) -> None:
        stores = [MemoryBackend(MemoryStore())] * len(specs)
        async with seeded_group(world, openings(world, specs, CONFIG, stores, by_options=by_options)):
            pass

    with pytest.raises(BaseExceptionGroup) as caught:
        run_seeded(0, main)
    assert caught.group_contains(error, match=words), str(caught.value.exceptions)
