"""Replicated pools lie once in the memory of a host: filled by one rank, read by all."""

from __future__ import annotations

import asyncio
import gc
import signal
from collections import Counter
from collections.abc import Callable, Coroutine, Sequence
from pathlib import Path

import pytest

from asynchicache import CacheConfig, HybridCache, ModelSpec
from asynchicache.backends.memory import MemoryBackend, MemoryEngine, MemoryStore
from asynchicache.errors import ConfigError
from asynchicache.hashing import ObjectKey
from asynchicache.layouts import HostLayout
from asynchicache.pools.shared import share
from asynchicache.ranks.sharing import HostShare, share_of, sharing_key, sharing_ranks
from asynchicache.ranks.worker import RankWorker
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.types import Outcome, PoolTransfer
from asynchicache_lab.ranks.group import openings, seeded_group
from asynchicache_lab.ranks.mirror import RankMirror
from integrations.zoo import tiny_config
from ranks.processes import processes

RANKS = 4
PAGE = 16
V4 = ModelSpec.from_config(tiny_config("deepseek_v4"), page_size=PAGE)
SPECS = [V4.shard(tp=(rank, RANKS)) for rank in range(RANKS)]
CONFIG = CacheConfig(
    device_slots={"kv": 24, "tail": 8}, host_slots={"kv": 24, "tail": 8}, weight_version="test"
)
PROMPT = list(range(6 * PAGE))
LAYOUT = HostLayout.PAGE_FIRST_DIRECT


def mapped() -> Counter[str]:
    """Mappings of shared host memory in this process, by inode."""
    gc.collect()  # one goes with the last tensor over it
    lines = Path("/proc/self/maps").read_text("utf-8").splitlines()
    return Counter(line.split()[4] for line in lines if "memfd:asynchicache-host" in line)


def memory_of(cache: HybridCache) -> list[str]:
    """Inodes of the shared host memory of a leader, by pool."""
    handles = share(cache._parts.hosts).pools
    return [str(handles[pool.name].slab.inode) for pool in cache.spec.pools]


def in_a_group(
    part: Callable[[RankMirror, list[RankWorker]], Coroutine[object, object, None]],
    specs: Sequence[ModelSpec] = SPECS,
) -> None:
    used: list[str] = []

    async def main(world: SeededWorld) -> None:
        store = MemoryStore()
        storage = [MemoryBackend(store) for _ in specs]
        async with seeded_group(world, openings(world, specs, CONFIG, storage)) as mirror:
            used.extend(memory_of(mirror.cache))
            await part(mirror, mirror.workers)
            assert mirror.violations == []
            assert mirror.cache.verify() == []

    run_seeded(5, main)
    assert used
    assert not mapped().keys() & set(used)


def test_the_pools_of_deepseek_v4_are_all_shared() -> None:
    async def part(mirror: RankMirror, workers: list[RankWorker]) -> None:
        counts = mapped()
        assert [counts[inode] for inode in memory_of(mirror.cache)] == [RANKS] * len(V4.pools)
        for pool in V4.pools:
            ours = mirror.cache._parts.hosts[pool.name]
            theirs = [worker.memories[pool.name].host for worker in workers]
            assert [one.slots for one in theirs] == [ours.slots] * len(theirs)
            ours.page(0)[:4] = b"here"
            assert [bytes(one.page(0)[:4]) for one in theirs] == [b"here"] * len(theirs)

    in_a_group(part)


def test_a_page_is_written_once_and_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    moved: dict[str, Counter[ObjectKey]] = {"get": Counter(), "put": Counter()}
    engines: dict[str, set[int]] = {"get": set(), "put": set()}

    def count(name: str) -> None:
        call = getattr(MemoryEngine, name)

        async def counted(
            self: MemoryEngine, keys: Sequence[ObjectKey], slots: Sequence[int]
        ) -> list[Outcome]:
            moved[name].update(keys)
            engines[name].add(id(self))
            outcomes: list[Outcome] = await call(self, keys, slots)
            return outcomes

        monkeypatch.setattr(MemoryEngine, name, counted)

    async def part(mirror: RankMirror, workers: list[RankWorker]) -> None:
        assert await mirror.serve(PROMPT, durable=True) == (0, len(PROMPT))
        assert (await mirror.serve([*PROMPT, 1]))[0] == len(PROMPT), "from memory"
        await mirror.cache.flush()
        assert (await mirror.serve([*PROMPT, 2]))[0] == len(PROMPT), "from storage"
        assert mirror.cache.statistics().served.hit_tokens

    count("get")
    count("put")
    in_a_group(part)
    pages = len(PROMPT) // PAGE + 1  # and the state at the end
    for name in ("get", "put"):
        assert len(moved[name]) == pages
        assert set(moved[name].values()) == {1}, name
    assert len(engines["get"]) >= RANKS, "the reads are spread over the ranks"


def test_what_a_rank_copies() -> None:
    share = HostShare(frozenset({"kv"}), place=1, size=3)
    transfers = (PoolTransfer("kv", [5, 6, 7, 8], [0, 1, 2, 4]), PoolTransfer("mamba", [1], [0]))
    own = share.own_part(CacheOperation(Direction.BACKUP, transfers))
    assert [(one.pool, list(one.sources), list(one.destinations)) for one in own.transfers] == [
        ("kv", [6, 8], [1, 4]),
        ("mamba", [1], [0]),
    ]
    load = CacheOperation(Direction.LOAD, transfers)
    assert share.own_part(load) is load, "every rank loads all"
    assert HostShare().own_part(own) is own


def test_every_slot_is_filled_by_one_rank() -> None:
    shares = [share_of(SPECS[rank], rank, [0, 1, 3]) for rank in (0, 1, 3)]
    assert all(one.pools == {"kv", "tail"} for one in shares)
    assert all(sum(one.fills(slot) for one in shares) == 1 for slot in range(30))
    assert share_of(SPECS[2], 2, []) == HostShare()


def test_ranks_with_other_bytes_do_not_share() -> None:
    keys = [sharing_key(spec, LAYOUT) for spec in SPECS]
    assert len(set(keys)) == 1
    wide = ModelSpec.from_config(tiny_config("deepseek_v4"), page_size=2 * PAGE)
    stripes = [wide.shard(tp=(0, 2), cp=(stripe, 2)) for stripe in range(2)]
    assert sharing_key(stripes[0], LAYOUT) != sharing_key(stripes[1], LAYOUT)
    first, second = (V4.shard(pp=(stage, 2)) for stage in range(2))
    assert sharing_key(first, LAYOUT) != sharing_key(second, LAYOUT), "other layers"
    assert sharing_ranks({0: "a", 1: "b", 2: "a", 3: "", 4: "", 5: "c"}) == {
        0: [0, 2],
        1: [],
        2: [0, 2],
        3: [],
        4: [],
        5: [],
    }


def test_stages_share_with_their_own_kind() -> None:
    """Ranks 2 and 3 have other layers than the leader, so rank 2 has memory that rank 3 maps."""
    specs = [V4.shard(tp=(rank % 2, 2), pp=(rank // 2, 2)) for rank in range(4)]
    assert {pool.name for pool in specs[0].pools} == {pool.name for pool in specs[2].pools}

    async def part(mirror: RankMirror, workers: list[RankWorker]) -> None:
        pools = [mirror.cache._parts.hosts["kv"], *(worker.memories["kv"].host for worker in workers)]
        for first, second in ((0, 1), (2, 3)):
            pools[first].page(0)[:4] = b"%4d" % first
            assert bytes(pools[second].page(0)[:4]) == b"%4d" % first
        assert bytes(pools[0].page(0)[:4]) != bytes(pools[2].page(0)[:4])

    in_a_group(part, specs)


def test_memory_that_cannot_be_mapped_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*args: object) -> None:
        raise ConfigError("its owner has ended")

    async def part(mirror: RankMirror, workers: list[RankWorker]) -> None:
        raise AssertionError("the group must not form")

    monkeypatch.setattr("asynchicache.parts.attach_pool", refuse)
    with pytest.raises(ExceptionGroup) as caught:
        in_a_group(part)
    assert {str(one) for one in caught.value.exceptions} == {"its owner has ended"}


@pytest.mark.asyncio
async def test_processes_share_memory_and_leave_none(tmp_path: Path) -> None:
    prompt = list(range(40))
    async with processes(tmp_path, 3, replicated=True) as group:
        (inode,) = memory_of(group.cache)
        assert mapped()[inode] == 1
        assert await group.serve(prompt) == 0
        assert await group.serve([*prompt, 1]) == 40
        await group.cache.drain()
        assert any(group.cache._parts.hosts["kv"].memory.memory), "pages are on the host"
        group.followers[0].send_signal(signal.SIGKILL)
        while group.group.failure is None:  # noqa: ASYNC110  a bound is the test's own timeout
            await asyncio.sleep(0.01)
        assert await group.serve(prompt) == 0
    del group
    assert inode not in mapped()
