"""What of a row of vLLM's primary tier goes to storage: the chunk's own bytes, and no others."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from itertools import accumulate
from mmap import mmap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from asynchicache.errors import ConfigError
from asynchicache.integrations.vllm import rows, words
from asynchicache.integrations.vllm.options import TierOptions, group_identity
from asynchicache.integrations.vllm.rows import (
    GroupRuns,
    MemoryRun,
    canonical_runs,
    chunk_runs,
    join,
    merged,
    worker_runs,
)
from asynchicache.integrations.vllm.spec import AsynchicacheTieringSpec
from asynchicache.integrations.vllm.tier import AsynchicacheTier
from integrations.vllm_host import CHUNK_BYTES, aligned_rows, kv_caches, offloading_spec

# A tiny Qwen3-Next, as vLLM lays it out: a state has 68,608 bytes of a page of 131,072, attention all of it.
PAGE, STATE = 131_072, 68_608
FULL, STATES = 3, (0, 1, 2)
POISON = np.frombuffer(b"another tenant's", np.int8)
NEXT = kv_caches([PAGE, PAGE], *[[(0, STATE), (1, STATE)]] * 3, [(0, PAGE), (1, PAGE)])
RUNS = {number: (MemoryRun(0, STATE), MemoryRun(PAGE, STATE)) for number in STATES} | {
    FULL: (MemoryRun(0, PAGE), MemoryRun(PAGE, PAGE))
}
ROWS = 20


def layers(count: int, per_group: int = 2) -> list[SimpleNamespace]:
    """Groups as vLLM's configuration has them."""
    return [
        SimpleNamespace(group_id=number, layer_names=tuple(f"layers.{number}.{i}" for i in range(per_group)))
        for number in range(count)
    ]


def poisoned(shape: tuple[int, int]) -> np.ndarray:
    """Rows full of somebody else's bytes."""
    memory = np.frombuffer(mmap(-1, shape[0] * shape[1]), np.int8).reshape(shape)
    memory[:] = np.resize(POISON, shape[1])
    return memory


def key(number: int, group: int) -> bytes:
    return number.to_bytes(32, "big") + group.to_bytes(4, "big")


def write(row: np.ndarray, runs: Sequence[MemoryRun], seed: int) -> list[np.ndarray]:
    """A worker copies a chunk into a row."""
    random = np.random.default_rng(seed)
    for offset, nbytes in runs:
        row[offset : offset + nbytes] = np.frombuffer(random.bytes(nbytes), np.int8)
    return read(row, runs)


def read(row: np.ndarray, runs: Sequence[MemoryRun]) -> list[np.ndarray]:
    return [row[offset : offset + nbytes].copy() for offset, nbytes in runs]


class Host:
    """A tier over rows of a model like Qwen3-Next, with files below."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.rows = poisoned((ROWS, 2 * PAGE))
        given = {"storage": "file", "storage_options": {"path": str(folder)}, "weight_version": "w1"}
        spec = offloading_spec(4, runs=RUNS)
        self.tier = AsynchicacheTier(
            spec, memoryview(self.rows), "AsynchicacheTier", None, **given, **options
        )
        self._jobs = 0

    def store(self, keys: Sequence[bytes], first: int = 0) -> words.JobResult:
        return self._move(self.tier.submit_store, keys, first, load=False)

    def load(self, keys: Sequence[bytes], first: int = 0) -> words.JobResult:
        return self._move(self.tier.submit_load, keys, first, load=True)

    def _move(
        self, call: Callable[..., None], keys: Sequence[bytes], first: int, *, load: bool
    ) -> words.JobResult:
        self._jobs += 1
        chunk_ids = np.arange(first, first + len(keys), dtype=np.int32)
        call(words.TransferJob(self._jobs, list(keys), chunk_ids, load, words.ReqContext("r")))
        self.tier.drain_jobs()
        (result,) = self.tier.get_finished_jobs()
        return result


CHUNKS = [(number, group) for number, group in enumerate([FULL] * 4 + [0, 1, 2] * 2)]
"""What a prompt of 700 tokens stored: four chunks of attention, two of each group of states."""


@pytest.mark.parametrize("zero_copy", [True, False])
def test_nothing_of_others_reaches_storage(tmp_path: Path, zero_copy: bool) -> None:
    host = Host(tmp_path, zero_copy=zero_copy)
    keys = [key(*chunk) for chunk in CHUNKS]
    own = [write(host.rows[row], RUNS[group], row) for row, (_, group) in enumerate(CHUNKS)]

    stored = host.store(keys)
    host.rows[10:] = 7
    loaded = host.load(keys, 10)

    assert stored.success
    assert loaded.success
    assert stored.transfer_bytes == loaded.transfer_bytes == 1_871_872  # whole rows: 2,621,440, 40 % more
    assert sum(host.tier.get_stats().data["data"]["vllm:asynchicache_tier_bytes"].values()) == 2 * 1_871_872
    for place, (_, group) in enumerate(CHUNKS):
        row = host.rows[10 + place]
        assert all(np.array_equal(a, b) for a, b in zip(own[place], read(row, RUNS[group]), strict=True))
        if group != FULL:
            assert set(row[STATE:PAGE]) | set(row[PAGE + STATE :]) == {7}  # not touched either
    host.tier.shutdown()
    assert not holds_poison(tmp_path)


def test_rows_that_are_stored_whole_do_hold_it(tmp_path: Path) -> None:
    """What the other test finds, where one has asked for it."""
    host = Host(tmp_path, whole_rows=True)
    write(host.rows[0], RUNS[0], 0)
    assert host.store([key(0, 0)]).transfer_bytes == 2 * PAGE
    host.tier.shutdown()
    assert holds_poison(tmp_path)


def holds_poison(folder: Path) -> bool:
    return any(POISON.tobytes() in path.read_bytes() for path in folder.rglob("*") if path.is_file())


def test_a_page_with_bytes_of_others_is_not_found_any_more(tmp_path: Path) -> None:
    before = Host(tmp_path, whole_rows=True)
    write(before.rows[0], RUNS[0], 0)
    full = write(before.rows[1], RUNS[FULL], 1)
    before.store([key(0, 0), key(1, FULL)])
    before.tier.shutdown()

    after = Host(tmp_path)
    result = after.load([key(0, 0), key(1, FULL)])

    assert result.successful_keys == [key(1, FULL)]  # the same bytes as ever
    assert all(np.array_equal(a, b) for a, b in zip(full, read(after.rows[1], RUNS[FULL]), strict=True))
    after.tier.shutdown()


def test_pages_that_are_cut_otherwise_have_other_names() -> None:
    config = offloading_spec(4).config
    options = TierOptions.of({"storage": "memory", "weight_version": "w1"})

    def layout(*sizes: int, start: int = 0) -> str:
        starts = accumulate(sizes, initial=start)
        runs = [MemoryRun(at, nbytes) for at, nbytes in zip(starts, sizes, strict=False)]
        return group_identity(config, config.groups[0], options, runs).layout

    assert layout(10, 20) != layout(20, 10) != group_identity(config, config.groups[0], options).layout
    assert layout(10, 20) == layout(10, 20, start=512)  # where they lie in a row changes no byte of the page


# Where they are.


def test_groups_share_tensors_and_fill_different_parts_of_them() -> None:
    assert worker_runs(NEXT, layers(4), 0, 1) == RUNS


def test_each_worker_has_an_area_and_each_block_a_place_in_it() -> None:
    caches = kv_caches([100, 60], [(0, 100)], [(1, 50)])

    workers = [worker_runs(caches, layers(2, 1), 1000 * rank, 2) for rank in (0, 1)]

    assert join(workers) == {
        0: (MemoryRun(0, 100), MemoryRun(100, 100), MemoryRun(1000, 100), MemoryRun(1100, 100)),
        1: (MemoryRun(200, 50), MemoryRun(260, 50), MemoryRun(1200, 50), MemoryRun(1260, 50)),
    }


def test_workers_that_fill_one_area_together_are_counted_once() -> None:
    caches = kv_caches([100, 60], [(0, 100)], [(1, 50)])
    for refs, nbytes in zip(caches.group_data_refs, (400, 200), strict=True):
        refs[0].mapping = SimpleNamespace(canonical_page_size_bytes=nbytes)

    worker = canonical_runs(caches, layers(2, 1), 1)

    assert join([worker, worker]) == {0: (MemoryRun(0, 400),), 1: (MemoryRun(400, 200),)}
    caches.group_data_refs[1][0].mapping = None
    assert canonical_runs(caches, layers(2, 1), 1) is None


def test_blocks_into_which_layers_are_packed_are_not_known() -> None:
    packed = kv_caches([4096], [(0, 4096)], [(0, 4096)])

    assert worker_runs(packed, layers(2, per_group=3), 0, 1) is None
    assert join([{0: (MemoryRun(0, 1),)}, None]) is None


def test_runs_that_touch_become_one() -> None:
    assert merged([MemoryRun(0, 4), MemoryRun(4, 4), MemoryRun(9, 1), MemoryRun(8, 1)]) == [
        MemoryRun(0, 8),
        MemoryRun(9, 1),
        MemoryRun(8, 1),
    ]


def config_of(groups: int, *, blocks: int = 1, windows: Sequence[int] = ()) -> Any:
    config = offloading_spec(groups).config
    config.cache.blocks_per_chunk = blocks
    for number in windows:
        config.groups[number].sliding_window_size_in_chunks = 1
    return config


@pytest.mark.parametrize(
    ("config", "known", "whole"),
    [
        (config_of(1), None, {0}),
        (config_of(1, blocks=4), None, {0}),
        (config_of(2), {0: (MemoryRun(0, 8),), 1: (MemoryRun(0, 8),)}, {0, 1}),
        (config_of(2), {0: (MemoryRun(0, 4), MemoryRun(4, 4)), 1: (MemoryRun(2, 4),)}, {0}),
        (config_of(2), {0: (MemoryRun(0, 4),), 1: (MemoryRun(4, 4),)}, set()),
    ],
)
def test_a_row_goes_whole_where_nobody_else_writes_to_it(
    config: Any, known: GroupRuns | None, whole: set[int]
) -> None:
    found = chunk_runs(config, known, whole_rows=False)

    assert {group for group, runs in found.items() if runs is None} == whole
    assert all(
        known is not None and runs == known[group] for group, runs in found.items() if runs is not None
    )


@pytest.mark.parametrize(
    ("config", "known", "message"),
    [
        (config_of(2), None, "2 KV cache groups share .*AsynchicacheTieringSpec.*whole_rows"),
        (config_of(2, blocks=2, windows=[1]), {}, "2 blocks, and groups .1. have windows.*whole_rows"),
        (config_of(1, blocks=2, windows=[0]), None, "blocks_per_chunk"),
    ],
)
def test_rows_that_hold_what_nobody_knows_are_refused(
    config: Any, known: GroupRuns | None, message: str
) -> None:
    with pytest.raises(ConfigError, match=message):
        chunk_runs(config, known, whole_rows=False)
    assert set(chunk_runs(config, known, whole_rows=True).values()) == {None}


def test_the_tier_refuses_too() -> None:
    spec = offloading_spec(runs=None)
    with pytest.raises(ConfigError, match="share the rows"):
        AsynchicacheTier(spec, memoryview(aligned_rows()), "t", storage="memory", weight_version="w1")
    del spec.group_runs  # vLLM's own specification
    with pytest.raises(ConfigError, match="share the rows"):
        AsynchicacheTier(spec, memoryview(aligned_rows()), "t", storage="memory", weight_version="w1")


# From the workers to the scheduler.


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where they meet."""
    place = tmp_path.with_name(f"{tmp_path.name}-shm")
    place.mkdir()
    monkeypatch.setattr(rows, "FOLDER", place)
    return place


def spec_of(rank: int, *, world: int = 2) -> AsynchicacheTieringSpec:
    config = offloading_spec(4).config
    for group, named in zip(config.groups, layers(4), strict=True):
        group.layer_names = named.layer_names
    config.engine_id = "engine_dp0"
    config.parallel.rank, config.parallel.world_size = rank, world
    spec = AsynchicacheTieringSpec(config)
    spec.cpu_page_size_per_worker = 2 * PAGE
    return spec


def test_workers_tell_the_scheduler_and_leave_nothing_behind(folder: Path) -> None:
    for rank in (0, 1):
        spec_of(rank).get_worker(NEXT)
    scheduler = spec_of(0)
    scheduler.get_manager()
    assert list(folder.iterdir()) == []

    runs = scheduler.group_runs()

    assert runs is not None
    assert runs[0] == (*RUNS[0], MemoryRun(2 * PAGE, STATE), MemoryRun(3 * PAGE, STATE))
    assert scheduler.group_runs() is runs  # each tier asks


def test_the_last_word_counts_and_what_is_not_known_is_told(folder: Path) -> None:
    spec_of(0, world=1).get_worker(NEXT)
    spec_of(0, world=1).get_worker(kv_caches([PAGE], *[[(0, PAGE)]] * 4))

    assert spec_of(0, world=1).group_runs() is None


def test_workers_with_one_area_are_told_so() -> None:
    for rank in (0, 1):
        worker = spec_of(rank)
        worker.replicated_layout = True
        worker.get_worker(NEXT)
    assert spec_of(0).group_runs() == RUNS


def test_a_worker_that_did_not_tell_is_named() -> None:
    spec_of(0).get_worker(NEXT)
    with pytest.raises(ConfigError, match="worker 1 of engine 'engine_dp0' did not tell"):
        spec_of(0).group_runs()


@pytest.mark.parametrize("content", [b"", b"{", b'{"0": [[1]]}'])
def test_nonsense_is_refused(folder: Path, content: bytes) -> None:
    (folder / "asynchicache-engine_dp0-0.json").write_bytes(content)
    with pytest.raises(ConfigError, match="did not tell"):
        spec_of(0, world=1).group_runs()


def test_what_somebody_else_tells_is_not_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    spec_of(0, world=1).get_worker(NEXT)
    monkeypatch.setattr(os, "geteuid", lambda: 4711)
    with pytest.raises(ConfigError, match="belongs to user"):
        spec_of(0, world=1).group_runs()


def test_a_worker_that_cannot_tell_leaves_no_draft(folder: Path) -> None:
    (folder / "asynchicache-engine_dp0-0.json").mkdir()
    with pytest.raises(OSError, match="directory"):
        spec_of(0).get_worker(NEXT)
    assert [path.name for path in folder.iterdir()] == ["asynchicache-engine_dp0-0.json"]


def test_chunks_of_the_tests_beside_fill_their_rows() -> None:
    assert chunk_runs(config_of(3), offloading_spec(3).group_runs(), whole_rows=False) == {
        0: None,
        1: None,
        2: None,
    }
    assert CHUNK_BYTES % 4096 == 0
