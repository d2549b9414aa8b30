"""SGLang's storage backend without SGLang, over its pools, names and signatures as recorded from it.

`make conformance` runs the same backend inside the real one.
"""

from __future__ import annotations

import inspect
import json
import sys
from array import array
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from asynchicache.backends.memory import MemoryBackend
from asynchicache.errors import ConfigError, StorageError, StorageLockedError
from asynchicache.hashing import NAMESPACE_BYTES, namespace_seed, page_digests
from asynchicache.integrations.sglang.options import RankIdentity, SGLangOptions
from asynchicache.integrations.sglang.prefixes import PrefixHits, prefix_hits
from asynchicache.integrations.sglang.seam import StandInMetrics, StandInTransferResult, load_seam
from asynchicache.integrations.sglang.storage import AsynchicacheStorage
from asynchicache.types import ALL_PAGES, Outcome, trailing_pages
from integrations.sglang_pools import RECORD, RecordedPool, storage_config

SEAM = json.loads((Path(__file__).parents[1] / "data" / "seams" / "sglang-0.5.23.json").read_text())
HICACHE = "sglang.srt.mem_cache.hicache_storage"
KEYS = [f"{number:064x}" for number in range(20)]


def options(path: Path, **more: Any) -> dict[str, Any]:
    return {
        "interface_v1": 1,
        "weight_version": "1",
        "storage": "memory",
        "storage_options": {"name": str(path)},
    } | more


@contextmanager
def attached(
    extra: dict[str, Any], pools: dict[str, RecordedPool] | None = None, **config: Any
) -> Iterator[AsynchicacheStorage]:
    """The backend, with pools registered as SGLang does it."""
    backend = AsynchicacheStorage(storage_config(extra, **config), {})
    try:
        for name, pool in (pools or {}).items():
            if name == "kv":
                backend.register_mem_pool_host(pool)
            backend.register_mem_host_pool_v2(pool, name)
        backend.on_host_pools_registered()
        yield backend
    finally:
        backend.close()


def transfer(name: str, keys: list[str] | None, indices: Any = None, policy: str = "all_pages") -> Any:
    """`PoolTransfer`, as far as it is looked at."""
    return SimpleNamespace(name=name, keys=keys, host_indices=indices, hit_policy=policy)


# The seam.


@pytest.mark.parametrize("name", SEAM[f"{HICACHE}:HiCacheStorage"]["methods"])
def test_every_method_of_the_seam_takes_what_sglang_gives(name: str) -> None:
    recorded = SEAM[f"{HICACHE}:HiCacheStorage"]["methods"][name]
    parameters = inspect.signature(getattr(AsynchicacheStorage, name)).parameters.values()
    ours = [each.name + ("" if each.default is each.empty else "=") for each in parameters]
    assert ours == recorded


def test_what_is_handed_back_has_the_fields_that_sglang_reads() -> None:
    recorded = SEAM[f"{HICACHE}:PoolTransferResult"]["fields"]
    ours = inspect.signature(StandInTransferResult).parameters.values()
    assert [each.name + ("" if each.default is each.empty else "=") for each in ours] == recorded


@pytest.mark.parametrize(
    ("module", "message"),
    [
        ("", "cannot use this backend.*install sglang=="),
        ("HiCacheStorage = object\n", "cannot use this backend.*PoolTransferResult"),
        (
            "from dataclasses import dataclass\nclass HiCacheStorage: ...\n"
            "@dataclass\nclass PoolTransferResult:\n    kv_hit_pages: int\n",
            "one hit length for all pools",
        ),
    ],
    ids=["no such names", "no result", "no sets"],
)
def test_another_sglang_is_refused_by_name(
    module: str, message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sglang/srt/mem_cache").mkdir(parents=True)
    (tmp_path / "sglang/srt/observability").mkdir()
    (tmp_path / "sglang/__init__.py").touch()
    (tmp_path / "sglang/srt/mem_cache/hicache_storage.py").write_text(module)
    (tmp_path / "sglang/srt/observability/metrics_collector.py").write_text("StorageMetrics = object\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(ConfigError, match=message):
        load_seam()
    for name in [name for name in sys.modules if name.split(".")[0] == "sglang"]:
        del sys.modules[name]


def test_policies_are_those_that_are_understood_or_left_out() -> None:
    assert SEAM[f"{HICACHE}:PoolHitPolicy"]["members"] == {
        "ALL_PAGES": "all_pages",
        "BLOCK_GROUPS": "block_groups",
        "TRAILING_PAGES": "trailing_pages",
    }


@pytest.mark.parametrize("recorded", RECORD["hashes"])
def test_pages_have_the_names_that_sglang_gives_them(recorded: dict[str, Any]) -> None:
    seed = namespace_seed(recorded["extra_key"], recorded["cache_salt"])
    digests = page_digests(array("q", recorded["tokens"]), recorded["page_size"], seed)
    assert [digest[NAMESPACE_BYTES:].hex() for digest in digests] == recorded["hashes"]


# Pages.


@pytest.mark.parametrize("storage", ["file", "memory"])
@pytest.mark.parametrize("name", RECORD["pools"])
def test_pages_of_every_pool_and_layout_come_back(name: str, storage: str, tmp_path: Path) -> None:
    pool, other = RecordedPool(name), RecordedPool(name)
    extra = options(tmp_path, storage=storage)
    if storage == "file":
        extra["storage_options"] = {"path": str(tmp_path / "store")}
    with attached(extra, {"kv": pool}) as backend:
        written = [pool.fill(page, page) for page in (3, 1, 7)]
        assert backend.batch_exists(KEYS[:3]) == 0
        assert backend.batch_set_v1(KEYS[:3], pool.indices(3, 1, 7)) == [True] * 3
        assert backend.batch_set_v1(KEYS[:1], pool.indices(3)) == [True], "it is there already"
    with attached(extra, {"kv": other}) as backend:
        assert backend.batch_exists(KEYS[:5]) == 3
        assert backend.batch_get_v1(KEYS[:4], other.indices(0, 5, 2, 9)) == [True] * 3 + [False]
        assert [other.page(page) for page in (0, 5, 2)] == written


def test_a_batch_of_sglang_is_one_call_and_its_pages_are_counted(tmp_path: Path) -> None:
    pool = RecordedPool("mha-page_first_direct")
    with attached(options(tmp_path), {"kv": pool}, enable_storage_metrics=True) as backend:
        pages = list(range(16))
        backend.batch_set_v1(KEYS[:16], pool.indices(*pages))
        backend.batch_get_v1(KEYS[:16], pool.indices(*reversed(pages)))
        stats = backend.get_stats()
        assert (stats.prefetch_pgs, stats.backup_pgs) == ([16], [16])
        assert len(stats.prefetch_bandwidth) == len(stats.backup_bandwidth) == 1
        assert backend.get_stats() == StandInMetrics(), "each call is told once"
        counted = backend.statistics()["kv"].storage
        assert counted.put.outcomes == {Outcome.STORED: 32}
        assert counted.get.outcomes == {Outcome.HIT: 32}


def test_indices_that_do_not_fit_move_nothing(tmp_path: Path) -> None:
    pool = RecordedPool("mha-page_first_direct")
    with attached(options(tmp_path), {"kv": pool}) as backend:
        assert backend.batch_set_v1(KEYS[:2], pool.indices(1)) == [False, False]
        assert backend.batch_get_v2([transfer("kv", KEYS[:2], None)]) == {"kv": [False, False]}
        assert backend.batch_get_v2([transfer("mamba", KEYS[:2], pool.indices(1, 2))]) == {
            "mamba": [False, False]
        }
        assert backend.batch_set_v1([KEYS[0]], pool.indices(99)) == [False], "there is no such page"
        assert backend.batch_set_v1([], pool.indices()) == []


def test_pools_of_a_hybrid_model_move_in_one_call(tmp_path: Path) -> None:
    names = {
        "kv": "mha-page_first_direct",
        "mamba": "mamba-page_first_direct",
        "swa": "swa-page_first_direct",
    }
    pools = {name: RecordedPool(record) for name, record in names.items()}
    with attached(options(tmp_path), pools) as backend:
        written = {name: pool.fill(2, 1) for name, pool in pools.items()}
        works = [transfer(name, [KEYS[0]], pool.indices(2)) for name, pool in pools.items()]
        assert backend.batch_set_v2(works) == {name: [True] for name in pools}
        works = [transfer(name, [KEYS[0], KEYS[1]], pool.indices(4, 5)) for name, pool in pools.items()]
        assert backend.batch_get_v2(works) == {name: [True, False] for name in pools}
        assert {name: pool.page(4) for name, pool in pools.items()} == written


def test_the_answer_names_every_prefix_that_all_pools_can_restore(tmp_path: Path) -> None:
    kv, mamba = RecordedPool("mha-page_first_direct"), RecordedPool("mamba-page_first_direct")
    with attached(options(tmp_path), {"kv": kv, "mamba": mamba}) as backend:
        backend.batch_set_v1(KEYS[:8], kv.indices(*range(8)))
        states = [KEYS[2], KEYS[5]]  # after 3 pages, and after 6
        backend.batch_set_v2([transfer("mamba", states, mamba.indices(0, 1))])
        state = transfer("mamba", [KEYS[9]], policy="trailing_pages")
        found = backend.batch_exists_v2(KEYS[:10], [state])
        assert found.restorable_prefix_pages == [3, 6]
        assert found.kv_hit_pages == 6
        assert found.extra_pool_hit_pages == {"kv": 8, "mamba": 6}
        alone = backend.batch_exists_v2(KEYS[:10])
        assert alone.restorable_prefix_pages == list(range(1, 9))
        groups = transfer("deepseek_v4_c4", [], policy="block_groups")
        assert backend.batch_exists_v2(KEYS[:10], [groups]).kv_hit_pages == 8, "it holds back nobody"
        missing = transfer("swa", KEYS[:2], policy="trailing_pages")
        assert backend.batch_exists_v2(KEYS[:10], [missing]).kv_hit_pages == 0


def test_sets_of_pools_are_intersected() -> None:
    every = [True] * 6
    window = [False, True, True, False, True, True]
    hits = prefix_hits("kv", every, {"swa": (trailing_pages(2), window)})
    assert hits == PrefixHits(6, {"kv": 6, "swa": 6}, [3, 6])
    hits = prefix_hits(
        "kv",
        [True, True, True, True, True, False],
        {"swa": (trailing_pages(2), window), "indexer": (ALL_PAGES, [True] * 4 + [False] * 2)},
    )
    assert hits == PrefixHits(3, {"kv": 5, "swa": 3, "indexer": 4}, [3])
    states, kv, index = [False, False, True, False, True], [True] * 5, [True] * 4
    hits = prefix_hits("kv", kv, {"mamba": (trailing_pages(1), states), "indexer": (ALL_PAGES, index)})
    assert hits == PrefixHits(3, {"kv": 5, "mamba": 5, "indexer": 4}, [3]), "not 4, the least of the longest"
    assert prefix_hits("kv", [False, True], {"swa": (trailing_pages(2), every)}) == PrefixHits(0, {}, [])
    assert prefix_hits("kv", [], {}) == PrefixHits(0, {}, [])


def test_the_generic_path_moves_flat_tensors(tmp_path: Path) -> None:
    pool = RecordedPool("mha-layer_first")
    with attached(options(tmp_path, interface_v1=0), {"kv": pool}) as backend:
        pages = [
            torch.randint(-9, 9, (pool.get_dummy_flat_data_page().numel(),)).bfloat16() for _ in range(3)
        ]
        assert backend.batch_set(KEYS[:3], pages)
        assert backend.set(KEYS[0], pages[0])
        assert backend.batch_exists(KEYS[:5]) == 3
        assert backend.exists(KEYS[2])
        assert not backend.exists(KEYS[3])
        target = [pool.get_dummy_flat_data_page() for _ in range(4)]
        filled = backend.batch_get(KEYS[:4], target)
        assert [page is None for page in filled] == [False, False, False, True]
        assert all(torch.equal(page, wanted) for page, wanted in zip(filled, pages, strict=False))
        assert torch.equal(backend.get(KEYS[1], target[0]), pages[1])
        assert backend.get(KEYS[1], torch.zeros(3)) is None, "a page of another size"
        assert backend.get(KEYS[1]) is None
        assert not backend.batch_set(KEYS[:2], pages[:1])


def test_flat_pages_of_a_storage_that_is_down_are_misses(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def refuse(self: MemoryBackend, binding: object) -> None:
        raise StorageError("down")

    pool = RecordedPool("mha-page_first_direct")
    page = torch.ones_like(pool.get_dummy_flat_data_page())
    with attached(options(tmp_path), {"kv": pool}) as backend:  # its own pages are in place
        with monkeypatch.context() as down:
            down.setattr(MemoryBackend, "open_pool", refuse)
            assert not backend.set(KEYS[0], page)
            assert backend.get(KEYS[0], pool.get_dummy_flat_data_page()) is None
            assert not backend.exists(KEYS[0])
        assert backend.set(KEYS[0], page)
        assert backend.exists(KEYS[0])


def test_pages_are_cleared_and_calls_after_the_end_are_misses(tmp_path: Path) -> None:
    pool = RecordedPool("mla-page_first_direct")
    with attached(options(tmp_path), {"kv": pool}) as backend:
        backend.batch_set_v1(KEYS[:2], pool.indices(0, 1))
        assert backend.clear()
        assert backend.batch_exists(KEYS[:2]) == 0
        backend.close()
        backend.close()
        assert backend.batch_exists(KEYS[:2]) == 0
        assert backend.batch_set_v1(KEYS[:2], pool.indices(0, 1)) == [False, False]
        assert backend.batch_get_v2([transfer("kv", KEYS[:1], pool.indices(0))]) == {"kv": [False]}
        assert backend.batch_exists_v2(KEYS[:2]).restorable_prefix_pages == []
        assert backend.get(KEYS[0], pool.get_dummy_flat_data_page()) is None
        assert not backend.clear()


def test_a_storage_that_raises_as_it_closes_keeps_no_thread(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    async def lost(self: MemoryBackend) -> None:
        raise RuntimeError("connection lost")

    monkeypatch.setattr(MemoryBackend, "aclose", lost)
    with attached(options(tmp_path), {"kv": RecordedPool("mla-page_first_direct")}) as backend:
        backend.close()

    assert not backend._bridge._thread.is_alive()
    assert "could not be closed: RuntimeError('connection lost')" in caplog.text


def test_a_pool_that_is_made_anew_takes_the_place_of_the_old_one(tmp_path: Path) -> None:
    pool, anew = RecordedPool("mha-page_first_direct"), RecordedPool("mha-page_first_direct")
    with attached(options(tmp_path), {"kv": pool}) as backend:
        written = pool.fill(1, 1)
        backend.batch_set_v1(KEYS[:1], pool.indices(1))
        backend.register_mem_pool_host(anew)
        assert backend.batch_get_v1(KEYS[:1], anew.indices(6)) == [True]
        assert anew.page(6) == written


# Ranks.


@pytest.mark.parametrize(
    ("change", "kv", "mamba"),
    [
        ({}, "", ""),
        ({"tp_size": 2, "tp_rank": 1}, "tp1/2", "tp1/2"),
        ({"tp_size": 2, "tp_rank": 1, "is_mla_model": True}, "", "tp1/2"),
        ({"pp_size": 4, "pp_rank": 3, "is_mla_model": True}, "pp3/4", "pp3/4"),
        ({"tp_size": 8, "tp_rank": 7, "pp_size": 2, "attn_cp_size": 2}, *["tp7/8-pp0/2-cp0/2"] * 2),
    ],
    ids=str,
)
def test_a_key_says_which_part_of_a_page_a_rank_has(change: dict[str, Any], kv: str, mamba: str) -> None:
    rank = RankIdentity(storage_config({}, **change))
    assert rank.shard(replicated=rank.replicated) == kv
    assert rank.shard(replicated=False) == mamba


@pytest.mark.engine("object")
def test_with_mla_the_first_rank_writes_and_all_read(tmp_path: Path) -> None:
    name = "mla-page_first_direct"
    pools = [{"kv": RecordedPool(name), "mamba": RecordedPool("mamba-page_first_direct")} for _ in range(2)]
    shared = {"tp_size": 2, "is_mla_model": True}
    extra = options(tmp_path, storage="object", storage_options={"url": f"file://{tmp_path}/bucket"})
    with (
        attached(extra, pools[0], tp_rank=0, **shared) as first,
        attached(extra, pools[1], tp_rank=1, **shared) as second,
    ):
        assert second.batch_set_v1(KEYS[:1], pools[1]["kv"].indices(1)) == [True], "another rank's to write"
        assert first.batch_exists(KEYS[:1]) == 0
        written = pools[0]["kv"].fill(2, 1)
        assert first.batch_set_v1(KEYS[:1], pools[0]["kv"].indices(2)) == [True]
        assert second.batch_get_v1(KEYS[:1], pools[1]["kv"].indices(5)) == [True]
        assert pools[1]["kv"].page(5) == written
        state = [transfer("mamba", KEYS[:1], pools[1]["mamba"].indices(3))]
        assert second.batch_set_v2(state) == {"mamba": [True]}
        assert second.batch_get_v2(state) == {"mamba": [True]}
        assert first.batch_get_v2([transfer("mamba", KEYS[:1], pools[0]["mamba"].indices(3))]) == {
            "mamba": [False]
        }, "states are split by heads, so each rank has its own"


@pytest.mark.parametrize("rank", ["tp_rank", "dp_rank"])
def test_processes_with_files_have_a_folder_each(rank: str, tmp_path: Path) -> None:
    extra = options(tmp_path, storage="file", storage_options={"path": str(tmp_path / "store")})
    size = 2 if rank == "tp_rank" else 1  # with data-parallel attention every process has all heads
    pools = [{"kv": RecordedPool("mha-page_first_direct")} for _ in range(2)]
    with (
        attached(extra, pools[0], tp_size=size) as first,
        attached(extra, pools[1], tp_size=size, **{rank: 1}) as second,
    ):
        first.batch_set_v1(KEYS[:1], pools[0]["kv"].indices(1))
        assert (first.batch_exists(KEYS[:1]), second.batch_exists(KEYS[:1])) == (1, 0)
        with pytest.raises(StorageLockedError):
            AsynchicacheStorage(storage_config(extra, tp_size=size, **{rank: 1}))
    other = "rank-dp0-tp1-pp0-cp0" if rank == "tp_rank" else "rank-dp1-tp0-pp0-cp0"
    assert {path.name for path in (tmp_path / "store").iterdir()} == {"rank-dp0-tp0-pp0-cp0", other}


# Bad input.


@pytest.mark.parametrize(
    ("extra", "message"),
    [
        ({}, "storage is missing.*the least that is needed"),
        ({"storage": "file"}, "weight_version is missing"),
        ({"storage": "file", "weight_version": ""}, "weight_version is empty"),
        ({"storage": "file", "weight_version": "1", "speed": 1}, "'speed' is not an option"),
        ({"storage": "file", "weight_version": "1", "interface_v1": "yes"}, "interface_v1"),
        ({"storage": "file", "weight_version": "1", "max_bytes": 0}, "max_bytes 0"),
        ({"storage": "tape", "weight_version": "1"}, "storage 'tape' is none of the backends found"),
        ({"storage": "file", "weight_version": "1"}, "must name a folder"),
    ],
)
def test_wrong_json_is_refused_and_what_would_do_is_shown(extra: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        AsynchicacheStorage(storage_config(extra))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"model_name": None}, "--served-model-name"),
        ({"dcp_size": 2}, "decode context parallelism"),
        ({"should_split_heads": True}, "tp_lcm_size"),
        ({"is_mla_model": True, "tp_size": 2}, "use hf3fs, redis, mooncake or object"),
    ],
    ids=str,
)
def test_ranks_that_cannot_be_served_are_refused(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(ConfigError, match=message):
        AsynchicacheStorage(storage_config(options(tmp_path), **change))


def test_a_layout_that_cannot_be_addressed_is_refused_by_name(tmp_path: Path) -> None:
    class Unaddressable(RecordedPool):
        def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
            raise ValueError(f"Unsupported layout: {self.layout}")

    class Uneven(RecordedPool):
        def get_page_buffer_meta(self, indices: torch.Tensor) -> tuple[list[int], list[int]]:
            pointers, sizes = super().get_page_buffer_meta(indices)
            return [*pointers[:-1], pointers[-1] + 1], sizes

    for kind, message in ((Unaddressable, "Unsupported layout: page_first"), (Uneven, "not evenly spaced")):
        with attached(options(tmp_path)) as backend:
            with pytest.raises(ConfigError, match=f"{message}.*--hicache-mem-layout page_first_direct"):
                backend.register_mem_pool_host(kind("mha-page_first"))


@pytest.mark.parametrize("layout", ["layer_first", "page_head", "page_first_kv_split"])
def test_states_in_a_layout_that_sglang_has_none_in_are_refused_by_name(layout: str, tmp_path: Path) -> None:
    pool = RecordedPool("mamba-page_first_direct")
    pool.layout = layout
    with attached(options(tmp_path)) as backend:
        with pytest.raises(
            ConfigError, match=f"no states in layout '{layout}'.*--hicache-mem-layout page_first_direct"
        ):
            backend.register_mem_host_pool_v2(pool, "mamba")
        pool.layout = "page_first"
        backend.register_mem_host_pool_v2(pool, "mamba")


def test_options_have_the_defaults_that_are_documented(tmp_path: Path) -> None:
    read = SGLangOptions.of(options(tmp_path, interface_v1=True))
    assert (read.interface_v1, read.storage_limits.deadline, read.max_bytes) == (1, 3.0, 1 << 30)
    read = SGLangOptions.of(options(tmp_path, storage_limits={"retries": 0}))
    assert (read.storage_limits.retries, read.storage_limits.closing) == (0, 3.0)
