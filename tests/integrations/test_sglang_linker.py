"""The linker as SGLang's scheduler calls it, over recorded signatures; `make engines-e2e` runs it all."""

from __future__ import annotations

import inspect
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch

from asynchicache import CacheConfig
from asynchicache.errors import ConfigError
from asynchicache.integrations.sglang.device_pools import DevicePools, device_pools
from asynchicache.integrations.sglang.linker import AsynchicacheLinker, linker_options
from asynchicache.integrations.sglang.linker_seam import StandInLoadCounter, follow_paths
from asynchicache.integrations.sglang.options import RankIdentity
from asynchicache.integrations.sglang.waiting import hold_requests
from integrations.sglang_engine import StandInEngine
from integrations.sglang_pools import storage_config

SEAM = json.loads((Path(__file__).parents[1] / "data" / "seams" / "sglang-0.5.23.json").read_text())
LINKER = "sglang.srt.mem_cache.unified_cache.unified_cache_linker"
PAGE = 4
HASHES = [f"{number:064x}" for number in range(1, 9)]


class NoEvent:
    """An event of a device whose work is done when it is asked for."""

    def record(self) -> None:
        """There is nothing to wait for."""

    def synchronize(self) -> None:
        """It was reached."""


class BareLinker(AsynchicacheLinker):
    """The linker over memory that is described here, and not by SGLang."""

    def __init__(self, described: DevicePools, config: CacheConfig) -> None:
        self._begin(described, config, SimpleNamespace(Event=NoEvent))


def params(**more: Any) -> SimpleNamespace:
    """`CacheInitParams` of a model with keys and values, windows or states."""
    generator = torch.Generator().manual_seed(1)

    def tokens(layers: int) -> list[torch.Tensor]:
        return [torch.rand(17 * PAGE, 2, 8, generator=generator) for _ in range(layers)]

    def pool(layers: int) -> SimpleNamespace:
        return SimpleNamespace(
            k_buffer=tokens(layers), v_buffer=tokens(layers), layer_num=layers, start_layer=0
        )

    kvcache = pool(2)
    if more.get("windows"):
        kvcache = SimpleNamespace(
            full_kv_pool=pool(1), swa_kv_pool=pool(1), layers_mapping={0: (0, True), 1: (0, False)}
        )
    if more.get("states"):
        kvcache = SimpleNamespace(full_kv_pool=pool(1), full_attention_layer_id_mapping={1: 0}, start_layer=0)
    states = SimpleNamespace(conv=[torch.rand(1, 9, 6, 3)], temporal=torch.rand(1, 9, 2, 4, 4))
    return SimpleNamespace(
        page_size=PAGE,
        token_to_kv_pool_allocator=SimpleNamespace(get_kvcache=lambda: kvcache),
        req_to_token_pool=SimpleNamespace(mamba_map={0: 0}, mamba_pool=SimpleNamespace(mamba_cache=states)),
        swa_retain_window=2 * PAGE,
        sliding_window_size=2 * PAGE,
        sidecar_draft_device_pools=(),
        mtp_draft_device_pools=(),
    )


def described(given: SimpleNamespace, *components: str) -> DevicePools:
    return device_pools(given, ["FULL", *components], model="toy", identity="test")


def transfer(name: str, keys: Sequence[str], indices: torch.Tensor | None = None) -> SimpleNamespace:
    return SimpleNamespace(name=name, keys=list(keys), device_indices=indices)


def slots(*pages: int) -> torch.Tensor:
    """SGLang's indices of the tokens of some pages."""
    return torch.cat([torch.arange(page * PAGE, (page + 1) * PAGE) for page in pages])


def config(**more: Any) -> CacheConfig:
    return linker_options({"host_bytes": "1MiB", **more}, RankIdentity(storage_config({})))


@pytest.fixture
def hybrid() -> Iterator[tuple[BareLinker, SimpleNamespace]]:
    """A linker of a model with states, and SGLang's memory."""
    given = params(states=True)
    linker = BareLinker(described(given, "MAMBA"), config())
    yield linker, given
    linker.close()


def offload(linker: BareLinker, hashes: Sequence[str], pages: Sequence[int], state: int) -> bool:
    linker.path_of(hashes, slots(*pages))
    last = transfer("mamba", hashes[-1:], torch.tensor([state]))
    if not linker.offload([transfer("kv", hashes[-1:], slots(pages[-1])), last]):
        return False
    linker._bridge.drain()
    assert linker.num_completed_offloads() == 1
    return linker.pop_completed_offload()


@pytest.mark.parametrize("name", SEAM[f"{LINKER}:UnifiedCacheLinker"]["abstract"])
def test_every_method_takes_what_sglang_gives(name: str) -> None:
    recorded = SEAM[f"{LINKER}:UnifiedCacheLinker"]["methods"][name]
    parameters = inspect.signature(getattr(AsynchicacheLinker, name)).parameters.values()
    assert [each.name + ("" if each.default is each.empty else "=") for each in parameters] == recorded


@pytest.mark.parametrize("name", ["update_producer", "complete", "fail", "finish", "reset"])
def test_loads_are_counted_as_sglang_counts_them(name: str) -> None:
    recorded = SEAM[f"{LINKER}:LayerWiseLoadCounter"]["methods"][name]
    assert list(inspect.signature(getattr(StandInLoadCounter, name)).parameters) == recorded


def test_pages_and_states_come_back_layer_by_layer(hybrid: tuple[BareLinker, SimpleNamespace]) -> None:
    linker, given = hybrid
    kv = given.token_to_kv_pool_allocator.get_kvcache().full_kv_pool.k_buffer[0]
    temporal = given.req_to_token_pool.mamba_pool.mamba_cache.temporal
    keys, state = kv[slots(1, 2)].clone(), temporal[:, 3].clone()
    assert offload(linker, HASHES[:2], (1, 2), 3)
    kv.zero_()
    temporal.zero_()

    linker.path_before([])
    assert linker.lookup("r", [transfer("kv", HASHES[:4]), transfer("mamba", HASHES[3:4])]) == [2]
    assert linker.load(
        "r", [transfer("kv", HASHES[:2], slots(7, 5)), transfer("mamba", HASHES[1:2], torch.tensor([8]))]
    )
    index = linker.start_layer_wise_loading()
    assert linker.finish_layer_wise_loading(index)
    assert torch.equal(kv[slots(7, 5)], keys)
    assert torch.equal(temporal[:, 8], state)
    assert linker.start_layer_wise_loading() == -1


def test_only_the_end_is_loaded_of_what_the_device_has(hybrid: tuple[BareLinker, SimpleNamespace]) -> None:
    linker, given = hybrid
    kv = given.token_to_kv_pool_allocator.get_kvcache().full_kv_pool.v_buffer[0]
    last = kv[slots(3)].clone()
    assert offload(linker, HASHES[:3], (1, 2, 3), 1)

    linker.path_before(HASHES[:2])
    assert linker.lookup("r", [transfer("kv", HASHES[2:4])]) == [1]
    assert linker.load("r", [transfer("kv", HASHES[2:3], slots(9))])
    assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading())
    assert torch.equal(kv[slots(9)], last)


def test_nothing_is_loaded_without_a_promise(hybrid: tuple[BareLinker, SimpleNamespace]) -> None:
    linker, _ = hybrid
    assert linker.lookup("cold", [transfer("kv", HASHES[:2])]) == []
    assert linker.load("never seen", [transfer("kv", HASHES[:2], slots(1, 2))]) is False
    assert linker.cancel_queued_load("never seen") is False
    assert linker.start_layer_wise_loading() == -1


def test_a_queued_load_is_cancelled(hybrid: tuple[BareLinker, SimpleNamespace]) -> None:
    linker, _ = hybrid
    assert offload(linker, HASHES[:1], (1,), 1)
    assert linker.lookup("r", [transfer("kv", HASHES[:1])]) == [1]
    assert linker.load("r", [transfer("kv", HASHES[:1], slots(4))])
    assert linker.cancel_queued_load("r")
    assert linker.start_layer_wise_loading() == -1
    assert linker._linked.promises == 0


def test_a_load_that_fails_is_reported_after_the_forward(
    hybrid: tuple[BareLinker, SimpleNamespace],
) -> None:
    linker, _ = hybrid
    assert offload(linker, HASHES[:1], (1,), 1)
    assert linker.lookup("r", [transfer("kv", HASHES[:1])]) == [1]
    assert linker.load("r", [transfer("kv", HASHES[:1], slots(400))])  # there is no such page
    assert linker.finish_layer_wise_loading(linker.start_layer_wise_loading()) is False
    assert linker._linked.promises == 0


def read_by(linker: BareLinker, rid: str) -> list[int]:
    """What is found for a request that waits until all was read for it."""
    while linker.reading(rid):
        linker._bridge.drain()
    return linker.lookup(rid, [transfer("kv", HASHES[:4])])


@pytest.fixture
def restarted(tmp_path: Path) -> Iterator[BareLinker]:
    """A linker over a folder in which another one has left the first two pages."""
    where = {"storage": "file", "storage_options": {"path": str(tmp_path)}, "weight_version": "1"}
    before = BareLinker(described(params()), config(**where))
    before.path_of(HASHES[:2], slots(1, 2))
    assert before.offload([transfer("kv", HASHES[:2], slots(1, 2))])
    before.close()
    linker = BareLinker(described(params()), config(**where))
    yield linker
    linker.close()


def test_a_request_that_arrives_has_what_was_read_while_it_was_held(restarted: BareLinker) -> None:
    restarted.arrive("r")
    assert restarted.lookup("r", [transfer("kv", HASHES[:4])]) == []
    assert list(restarted._reads) == ["r"]
    assert read_by(restarted, "r") == [2]
    assert restarted.load("r", [transfer("kv", HASHES[:2], slots(7, 5))])
    assert restarted.finish_layer_wise_loading(restarted.start_layer_wise_loading())
    assert restarted._linked.promises == 1, "kept until it has had its turn"
    restarted.forget("r")
    restarted._bridge.drain()
    assert restarted._linked.promises == 0
    assert restarted.lookup("s", [transfer("kv", HASHES[:2])]) == [2]
    assert not restarted._reads


@pytest.mark.parametrize("why", ["looked up again", "forgotten", "reset", "not held"])
def test_nobody_waits_for_storage_otherwise(why: str, restarted: BareLinker) -> None:
    restarted.holds = why != "not held"
    if why != "looked up again":
        restarted.arrive("r")
    assert restarted.lookup("r", [transfer("kv", HASHES[:4])]) == []
    if why == "reset":
        restarted.reset()
    elif why == "forgotten":
        restarted.forget("r")
        restarted.forget("r")
    assert not restarted.reading("r")
    assert bool(restarted._reads) == (why == "not held"), "it is read for all the same"


def test_an_offload_without_a_path_or_pages_is_refused(hybrid: tuple[BareLinker, SimpleNamespace]) -> None:
    linker, _ = hybrid
    assert linker.offload([transfer("kv", HASHES[:1], slots(1))]) is False
    linker.path_of(HASHES[:1], slots(1))
    assert linker.offload([transfer("mamba", HASHES[:1], torch.tensor([1]))]) is False
    linker.path_of(HASHES[:1], slots(500))
    assert linker.offload([transfer("kv", HASHES[:1], slots(500))])
    linker._bridge.drain()
    assert linker.num_completed_offloads() == 1
    assert linker.pop_completed_offload() is False


@pytest.mark.parametrize("promised", [False, True])
def test_reset_empties_host_memory(promised: bool, hybrid: tuple[BareLinker, SimpleNamespace]) -> None:
    linker, _ = hybrid
    assert offload(linker, HASHES[:2], (1, 2), 1)
    if promised:
        assert linker.lookup("r", [transfer("kv", HASHES[:2])]) == [2]
    linker.reset()
    assert linker.num_completed_offloads() == 0
    assert linker.lookup("r", [transfer("kv", HASHES[:2])]) == []
    assert offload(linker, HASHES[:1], (1,), 1)
    assert linker.lookup("r", [transfer("kv", HASHES[:1])]) == [1]


def test_pages_of_other_weights_are_not_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither before SGLang resets, nor by a promise from before; they are again when the weights return."""
    engine, given = StandInEngine(monkeypatch, "v1"), params(states=True)
    linker = BareLinker(described(given, "MAMBA"), config())
    found = {}
    try:
        for version in ("v1", "v2", "v1"):
            if version != engine.serving.weight_version:
                engine.update(version, flush=False)
                found["mixed"] = linker.lookup("r", [transfer("kv", HASHES[:2])])
                linker.reset()
            found[version] = linker.lookup("r", [transfer("kv", HASHES[:2])])
            assert offload(linker, HASHES[:2], (1, 2), 1)
            assert linker.lookup("s", [transfer("kv", HASHES[:2])]) == [2]
    finally:
        linker.close()
    assert found == {"v1": [], "v2": [], "mixed": []}


# Device memory.


def test_pools_of_windows_and_states_are_described() -> None:
    windows = described(params(windows=True), "SWA")
    assert [(pool.name, pool.coverage.pages) for pool in windows.spec.pools] == [("kv", None), ("swa", 2)]
    assert [pool.tensors[0].layers for pool in windows.spec.pools] == [(1,), (0,)]
    assert windows.tokens_per_page == {"kv": PAGE, "swa": PAGE}

    states = described(params(states=True), "MAMBA")
    assert [tensor.name for tensor in states.spec.pools[1].tensors] == ["conv0", "temporal"]
    assert states.tokens_per_page == {"kv": PAGE, "mamba": 1}
    assert states.spec.layers == 2


@pytest.mark.parametrize("kind", ["component", "draft", "scales", "side", "shape"])
def test_memory_that_is_not_supported_is_refused_by_name(kind: str) -> None:
    given, components = params(states=kind == "side"), ["FULL"]
    pool = given.token_to_kv_pool_allocator.get_kvcache()
    if kind == "component":
        components.append("C128")
    elif kind == "draft":
        given.sidecar_draft_device_pools = (pool,)
    elif kind == "scales":
        pool.k_scale_buffer = pool.k_buffer
    elif kind == "side":
        components.append("MAMBA")
        given.req_to_token_pool.ngram_pool = SimpleNamespace(enabled=True)
    else:
        pool.k_buffer = [torch.rand(4, 2, 2, 4, 8)]
    with pytest.raises(ConfigError, match="use the HiCacheStorage backend"):
        device_pools(given, components, model="toy", identity="test")


# Options.


def test_each_rank_has_a_folder_and_keys_of_its_own() -> None:
    rank = RankIdentity(storage_config({}, tp_rank=1, tp_size=2))
    options = linker_options(
        {"weight_version": "1", "storage": "file", "storage_options": {"path": "/pages"}}, rank
    )
    assert options.storage_options == {"path": "/pages/rank-dp0-tp1-pp0-cp0"}
    assert (options.rank, options.ranks, options.page_keys) == (1, 2, True)


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"host_byte": 1}, "host_byte"),
        ({"device": "cuda"}, "device cannot be set here"),
        ({"storage": "file", "storage_options": {"path": "/pages"}}, "weight_version"),
    ],
)
def test_wrong_options_name_the_flag(given: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=f"--unified-cache-external-linker-config.*{message}"):
        linker_options(given, RankIdentity(storage_config({})))


# What SGLang's wrapper does not pass on.


class Wrapper:
    """`UnifiedCacheLinkerWrapper`, as far as it is followed."""

    def __init__(self, cache: Any, cache_linker: Any) -> None:
        self.cache, self.cache_linker = cache, cache_linker

    def release_request(self, rid: str) -> None: ...

    def _tail_hashes(self, key: Any, result: Any, device_hit_len: int) -> list[str]:
        return list(key)

    def _offload_node(self, node_id: int, transfers: list[Any]) -> None:
        self.cache_linker.offload(transfers)


@pytest.mark.parametrize("name", ["_tail_hashes", "_offload_node"])
def test_the_wrapper_that_is_followed_is_sglangs(name: str) -> None:
    recorded = SEAM[f"{LINKER}:UnifiedCacheLinkerWrapper.{name}"]["signature"]
    assert list(inspect.signature(getattr(Wrapper, name)).parameters) == recorded


def test_linkers_are_told_the_path_before_what_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sglang.srt.mem_cache.unified_radix_cache")
    module.UnifiedCacheLinkerWrapper = Wrapper  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    follow_paths()
    follow_paths()
    core = SimpleNamespace(
        get_prefix_hash_values=lambda node: ["a"],
        get_hash_values=lambda node: ["b"],
        collect_full_device_indices=lambda node, root: torch.arange(8),
    )
    cache = SimpleNamespace(tree_core=core, root_node_handle=lambda: 0)
    told: list[Any] = []
    linker = SimpleNamespace(
        path_before=told.append,
        path_of=lambda hashes, table: told.append((hashes, len(table))),
        offload=told.append,
    )
    wrapper = module.UnifiedCacheLinkerWrapper(cache, linker)
    assert wrapper._tail_hashes(["c"], SimpleNamespace(last_device_node=5), 8) == ["c"]
    assert wrapper._tail_hashes(["c"], SimpleNamespace(last_device_node=0), 0) == ["c"]
    wrapper._offload_node(5, ["transfers"])
    assert told == [["a", "b"], [], (["a", "b"], 8), ["transfers"]]

    other = module.UnifiedCacheLinkerWrapper(cache, SimpleNamespace(offload=told.append))
    assert other._tail_hashes(["c"], SimpleNamespace(last_device_node=5), 8) == ["c"]
    other._offload_node(5, ["of another linker"])
    assert told[-1] == ["of another linker"]


def test_a_wrapper_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sglang.srt.mem_cache.unified_radix_cache")
    module.UnifiedCacheLinkerWrapper = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    monkeypatch.setitem(sys.modules, "sglang", ModuleType("sglang"))
    with pytest.raises(ConfigError, match=r"sglang==0\.5\.23"):
        follow_paths()


class Reader:
    """What a wrapper asks of a linker that reads for requests."""

    def __init__(self) -> None:
        self.known: set[str] = set()
        self.forgotten: list[str] = []

    def arrive(self, rid: str) -> None:
        self.known.add(rid)

    def reading(self, rid: str) -> bool:
        return rid in self.known

    def forget(self, rid: str) -> None:
        self.forgotten.append(rid)


class Request:
    """One of SGLang's, as far as its scheduler's methods here use it."""

    def __init__(self, rid: str) -> None:
        self.rid = rid
        self.looked_up = 0

    def init_next_round_input(self, tree_cache: Any, *, cow_mamba: bool) -> None:
        assert not cow_mamba  # nothing is allocated for who waits
        self.looked_up += 1


def scheduler_of(monkeypatch: pytest.MonkeyPatch, linker: Any, reduce: Any = lambda tensor, op: None) -> Any:
    """A scheduler that admits all of its queue, over a tree with this linker."""
    tree = ModuleType("sglang.srt.mem_cache.unified_radix_cache")
    tree.UnifiedCacheLinkerWrapper = Wrapper  # type: ignore[attr-defined]
    module = ModuleType("sglang.srt.managers.scheduler")

    class Scheduler:
        def __init__(self) -> None:
            self.tree_cache = SimpleNamespace()
            self.waiting_queue: list[Request] = []
            self.asked: list[str] = []
            self.came_meanwhile: list[Request] = []

        def _prefetch_kvcache(self, req: Request, storage_hit_end: int | None = None) -> None:
            self.asked.append(req.rid)

        def _get_new_batch_prefill_raw(self, running_batch: Any) -> list[str]:
            admitted = [req.rid for req in self.waiting_queue[:1]]
            self.waiting_queue = self.waiting_queue[1:] + self.came_meanwhile
            return admitted

        def add(self, *rids: str) -> None:
            for rid in rids:
                self.waiting_queue.append(Request(rid))
                self._prefetch_kvcache(self.waiting_queue[-1])

        def step(self) -> list[str]:
            return self._get_new_batch_prefill_raw(running_batch=None)

        def queue(self) -> list[str]:
            return [req.rid for req in self.waiting_queue]

    module.Scheduler = Scheduler  # type: ignore[attr-defined]
    for one in (tree, module, ModuleType("sglang")):
        monkeypatch.setitem(sys.modules, one.__name__, one)
    for _ in range(2):
        follow_paths()
        hold_requests()
    scheduler = Scheduler()
    cache = SimpleNamespace(_all_reduce_attn_groups=reduce)
    scheduler.tree_cache.linker = tree.UnifiedCacheLinkerWrapper(cache, linker)
    return scheduler


def test_requests_are_held_in_their_place_until_they_are_read_for(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader()
    scheduler = scheduler_of(monkeypatch, reader)
    scheduler.add("a", "b", "c", "d")
    assert [req.looked_up for req in scheduler.waiting_queue] == [1] * 4
    assert scheduler.asked == []
    reader.known -= {"b", "d"}
    scheduler.came_meanwhile = [Request("e")]
    assert scheduler.step() == ["b"]
    assert scheduler.queue() == ["a", "c", "d", "e"]
    scheduler.came_meanwhile = []
    reader.known.clear()
    assert [scheduler.step() for _ in range(4)] == [["a"], ["c"], ["d"], ["e"]]
    assert reader.forgotten == ["b", "a", "c", "d"], "each when it has its turn; e has not arrived"


def test_who_was_not_held_once_is_not_held_later(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader()
    scheduler = scheduler_of(monkeypatch, reader)
    scheduler.add("a", "b")
    reader.known.clear()
    assert scheduler.step() == ["a"]
    reader.known = {"b"}
    assert scheduler.step() == ["b"]


def test_a_request_waits_for_all_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    others = [1]

    def reduce(tensor: torch.Tensor, op: Any) -> None:
        assert op == torch.distributed.ReduceOp.MAX
        tensor.clamp_(min=others[0])

    reader = Reader()
    scheduler = scheduler_of(monkeypatch, reader, reduce)
    scheduler.add("a")
    reader.known.clear()
    assert scheduler.step() == []
    assert scheduler.queue() == ["a"]
    others[0] = 0
    assert scheduler.step() == ["a"]


def test_who_leaves_the_queue_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader()
    scheduler = scheduler_of(monkeypatch, reader)
    scheduler.add("a")
    wrapper = scheduler.tree_cache.linker
    wrapper.release_request("a")
    wrapper.release_request("a")
    assert reader.forgotten == ["a"]
    assert wrapper.arrivals.held(["a"]) == set()


def test_who_is_ready_keeps_what_was_read_until_its_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    reader = Reader()
    scheduler = scheduler_of(monkeypatch, reader)
    scheduler.add("a", "b", "c")
    reader.known.clear()
    assert scheduler.step() == ["a"]
    assert reader.forgotten == ["a"]
    scheduler.tree_cache.linker.release_request("c")
    assert reader.forgotten == ["a", "c"]


def test_other_caches_are_asked_as_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    scheduler = scheduler_of(monkeypatch, SimpleNamespace())
    scheduler.add("of another linker")
    assert scheduler.step() == ["of another linker"]
    scheduler.tree_cache.linker = None
    scheduler.add("of hicache")
    assert scheduler.step() == ["of hicache"]
    assert scheduler.asked == ["of another linker", "of hicache"]


def test_a_scheduler_of_another_version_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    module = ModuleType("sglang.srt.managers.scheduler")
    module.Scheduler = SimpleNamespace  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, module.__name__, module)
    with pytest.raises(ConfigError, match=r"sglang==0\.5\.23"):
        hold_requests()
