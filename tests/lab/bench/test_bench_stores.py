"""`bench stores` counts what the engines' own code would send, and plans with it."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest

from asynchicache.cli.main import main
from asynchicache.errors import ConfigError
from asynchicache.replay.trace import TraceRequest, read_trace
from asynchicache_lab.bench.stores.fleet import Fleet, LoneCache, NodeCache, Router
from asynchicache_lab.bench.stores.options import StoresOptions
from asynchicache_lab.bench.stores.run import run_stores
from cli.readable import assert_readable

BLOCK = 64
FRAMES = {"kv": 4096, "mamba": 8192}


def trace_of(folder: Path, prompts: list[list[int]]) -> Path:
    """A trace of prompts, one a second, given as ids of blocks."""
    path = folder / "trace.jsonl.gz"
    with gzip.open(path, "wt") as file:
        for number, ids in enumerate(prompts):
            line = {
                "timestamp_ms": 1000 * number,
                "input_length": BLOCK * len(ids) + 1,
                "block_size": BLOCK,
                "hash_ids": ids,
            }
            file.write(json.dumps(line) + "\n")
    return path


def options(path: Path, **given: object) -> StoresOptions:
    sizes = {"page_bytes": FRAMES["kv"], "state_bytes": FRAMES["mamba"]}
    return StoresOptions(trace=str(path), nodes=2, tokens_s=1000, roam=1.0, **sizes, **given)


def play(given: StoresOptions, kind: type[NodeCache] = NodeCache, *, shared: bool = True):
    fleet = Fleet(given, read_trace(Path(given.trace)))
    return fleet.play(kind, shared=shared, progress=lambda done, total: None)


LONG = list(range(512))
"""A prompt of 32k tokens in pages of 64."""


def test_a_cold_prompt_costs_an_object_store_what_the_engine_sends(tmp_path: Path) -> None:
    """17 PUTs, and a list for each group of each pool, as docs/howto/object_store.md has counted."""
    cold = [number + 1000 for number in LONG]
    traffic = play(options(trace_of(tmp_path, [LONG, cold]))).traffic  # the second one counts
    assert traffic.asked_pages == 2 * 512
    assert (traffic.asked_groups, traffic.put_objects) == (2 * 8, 16 + 1)
    assert (traffic.put_pages, traffic.got_pages) == (512 + 1, 0)
    assert traffic.put_bytes == 512 * FRAMES["kv"] + FRAMES["mamba"]


def test_a_prompt_of_another_node_comes_from_the_store(tmp_path: Path) -> None:
    """By chance of the seed each prompt of many goes to one of two nodes, which have it from the store."""
    path = trace_of(tmp_path, [LONG] * 8)
    shared, own, alone = (
        play(options(path)),
        play(options(path), shared=False),
        play(options(path), LoneCache),
    )
    assert shared.store_tokens + own.hit_tokens + alone.hit_tokens > 0
    assert shared.hit_rate > 0.99
    assert shared.hit_rate >= own.hit_rate == alone.hit_rate
    assert shared.traffic.put_pages == 0, "the first half has stored it"


def test_a_node_that_never_saw_a_prompt_reads_it(tmp_path: Path) -> None:
    reads = [play(options(trace_of(tmp_path, [LONG, [*LONG, 1000]]), seed=seed)).traffic for seed in range(8)]
    far = [one for one in reads if one.got_pages]
    assert 0 < len(far) < len(reads), "some go to the node that has it"
    assert {(one.got_pages, one.got_objects) for one in far} == {(512 + 1, 16 + 1)}
    assert {one.put_pages for one in reads} == {1 + 1}, "the new page, and its state"


def test_what_is_written_once_is_not_written_selectively(tmp_path: Path) -> None:
    path = trace_of(tmp_path, [[number + 1000 * turn for number in LONG] for turn in range(4)])
    assert play(options(path)).traffic.put_pages == 2 * 513
    assert play(options(path, write_policy="write_through_selective")).traffic.put_pages == 0


def test_figures_decide_servers(tmp_path: Path) -> None:
    path = trace_of(tmp_path, [[number + 1000 * turn for number in LONG] for turn in range(4)])

    def plan(**given: object):
        return run_stores(options(path, **given), lambda done, total: None).engines

    few = plan()["redis"]
    assert_readable(run_stores(options(path), lambda done, total: None).present())
    small = plan(rate=("redis.gb=0.001",))["redis"]
    assert small.servers > few.servers
    assert small.limit == "capacity"
    assert plan(rate=("hf3fs.requests_s=1",))["hf3fs"].limit == "requests", (
        "one service of names is not enough"
    )
    assert plan()["object"].requests_s < few.requests_s / 20
    assert plan(headroom=1e6)["redis"].servers > few.servers


def test_rates_of_a_bench_are_taken(tmp_path: Path) -> None:
    path = trace_of(tmp_path, [LONG, [*LONG, 1000]])
    result = tmp_path / "redis.json"
    result.write_text(json.dumps({"engine": "redis", "put_mb_s": 0.001, "get_mb_s": 0.002}))
    given = options(path, measured=(str(result),))
    taken = given.figures()["redis"]
    assert (taken.put_mb_s, taken.get_mb_s) == (0.001, 0.002)
    assert run_stores(given, lambda done, total: None).engines["redis"].limit == "bytes"


def test_the_router_goes_to_the_prefix_or_to_who_has_least(tmp_path: Path) -> None:
    router = Router(StoresOptions(nodes=3, roam=0.0))
    sent = [router.choose(TraceRequest(64 * count, [(start, count)]), known) for start, count, known in SENT]
    assert sent == [0, 1, 2, 0, 1, 1]


SENT = [(0, 9, 0), (100, 5, 0), (200, 8, 0), (0, 10, 9), (0, 20, 1), (100, 6, 5)]
"""First block, blocks, and how many of them are known: one that shares its first block only is not bound."""


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ({"rate": ("redis=3",)}, "must be one of"),
        ({"rate": ("redis.gb=-1",)}, "must be a number above 0"),
        ({"measured": ("/nowhere.json",)}, "must be the JSON of bench storage"),
        ({"page_size": 48}, "must divide a block, 64 tokens"),
    ],
)
def test_bad_input(tmp_path: Path, given: dict[str, object], rule: str) -> None:
    path = trace_of(tmp_path, [LONG, LONG])
    with pytest.raises(ConfigError, match=rule):
        run_stores(options(path, **given), lambda done, total: None)


def test_a_trace_without_times_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="has one request"):
        run_stores(options(trace_of(tmp_path, [LONG])), lambda done, total: None)


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = trace_of(tmp_path, [LONG, [*LONG, 1000]])
    assert main(["bench", "stores", "--nodes", "2", "--trace", str(path), "--json", "-"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert set(found["engines"]) == {"file", "redis", "object", "mooncake", "hf3fs"}
    for one in found["engines"].values():
        assert {"requests_s", "bytes_s", "objects", "cost_day", "hit_rate"} <= set(one)
