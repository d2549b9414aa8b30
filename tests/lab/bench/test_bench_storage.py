"""`bench storage`: what it says of an engine and of the limit beside it, and that it looks at bytes."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest

from asynchicache.backends.file import open_backend
from asynchicache.cli.main import main
from asynchicache.errors import ConfigError, StorageError
from asynchicache.ports import AsyncioPort
from asynchicache.types import Outcome
from asynchicache_lab.bench.rounds import there_and_back
from asynchicache_lab.bench.storage import run
from asynchicache_lab.bench.storage.controller import open_controller_bench
from asynchicache_lab.bench.storage.file import engine_options, neighbours, open_limit
from asynchicache_lab.bench.storage.limits import Setup
from asynchicache_lab.bench.storage.options import StorageBenchOptions
from asynchicache_lab.bench.storage.pages import BenchPages
from asynchicache_lab.bench.storage.registry import LIMITS
from asynchicache_lab.bench.storage.report import RoundSample
from asynchicache_lab.bench.storage.run import run_storage
from engines import module
from storage.redis_servers import RedisServer

SMALL = ["--page-bytes", "8192", "--pages", "12", "--batch-bytes", "32768", "--depth", "2", "--rounds", "2"]
KEYS = {
    "engine",
    "page_bytes",
    "put_mb_s",
    "get_mb_s",
    "exists_keys_s",
    "limit",
    "cpu_us_per_page",
    "loop_stall_ms",
}


@pytest.fixture(autouse=True)
def few_lookups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_EXISTS_KEYS", 1000)


@pytest.mark.parametrize("engine", sorted({"file", "memory"} & LIMITS.keys()))
def test_an_engine_is_measured_beside_its_limit(
    engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = main(["bench", "storage", "--engine", engine, *SMALL, "--folder", str(tmp_path), "--json", "-"])

    result = json.loads(capsys.readouterr().out)
    assert code == 0
    assert result.keys() >= KEYS
    assert (result["engine"], result["page_bytes"], result["batch_pages"]) == (engine, 8192, 4)
    assert result["wrong_pages"] == 0
    assert result["server_us_per_page"] == {"put": None, "get": None}
    for speeds in (result, result["limit"]):
        assert speeds["put_mb_s"] > 0
        assert speeds["get_mb_s"] > 0
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("engine", ["file", "memory"])
def test_through_a_whole_cache(engine: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--engine", engine, *SMALL, "--folder", str(tmp_path), "--through-controller"]
    assert main(["bench", "storage", *arguments, "--json", "-"]) == 0

    result = json.loads(capsys.readouterr().out)
    assert result["wrong_pages"] == 0
    assert result["through_controller"].keys() == {
        f"{limit}{name}_mb_s" for limit in ("", "limit_") for name in ("put", "get")
    } | {"put_ratio", "get_ratio"}
    assert all(value > 0 for value in result["through_controller"].values())


def test_each_side_is_first_as_often_as_last() -> None:
    assert there_and_back(["engine", "limit", "other"]) == [
        *["engine", "limit", "other"],
        *["other", "limit", "engine"],
    ]


def test_turns_beside_each_other_are_compared() -> None:
    """A disk that slows down by half from turn to turn is slower for both."""
    options = StorageBenchOptions(engine="memory", page_bytes=8192, pages=4, rounds=2)
    report = asyncio.run(run_storage(options, lambda done, total: None))
    assert {len(samples) for samples in report.samples.values()} == {4}
    report.samples.clear()
    first, second, third, last = (RoundSample(seconds, 1.0, 1000) for seconds in (1.0, 2.0, 4.0, 8.0))
    report.add({"engine put": [first, last], "limit put": [second, third]})
    assert report.ratio("engine put", "limit put") == (2.0 + 0.5) / 2


def test_a_store_may_be_measured_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module("obstore")
    place = ["--option", f"url=file://{tmp_path}"]
    for _ in range(2):
        assert main(["bench", "storage", "--engine", "object", *place, *SMALL, "--json", "-"]) == 0
        assert json.loads(capsys.readouterr().out)["wrong_pages"] == 0
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == ["FORMAT"]


@pytest.mark.asyncio
async def test_wrong_bytes_through_a_cache_are_counted(tmp_path: Path) -> None:
    port = AsyncioPort(threads=2)
    backend = open_backend({"path": tmp_path}, port)
    async with open_controller_bench(backend, 8192, 5, 0, port) as bench:
        await bench.put(1)
        bench.content[2, 0, 0] ^= 1
        _, wrong = await bench.get(1)
        assert wrong == 1
        with pytest.raises(StorageError, match="prefetch brought"):
            await bench.get(1)  # forgotten meanwhile
    await backend.aclose()
    await port.aclose()


def test_an_option_reaches_the_engine(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ["--folder", str(tmp_path), "--option", "direct=false", "--option", "speed=9"]
    with pytest.raises(SystemExit) as caught:
        main(["bench", "storage", *SMALL, *arguments])

    assert caught.value.code == 2
    assert "no option 'speed'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"page_bytes": 5000}, "--page-bytes 5000: must be a multiple of 4096"),
        ({"pages": 0}, "--pages 0"),
        ({"option": ("direct",)}, "--option direct: must be name=value"),
        ({"option": ("=3",)}, "--option =3: must be name=value"),
    ],
)
def test_options_are_checked(options: dict[str, object], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        StorageBenchOptions(**options)  # type: ignore[arg-type]


def test_the_place_of_the_store_is_the_benchs_own(tmp_path: Path) -> None:
    options = StorageBenchOptions(pages=1, folder=str(tmp_path), option=(f"path={tmp_path}",))
    with pytest.raises(ConfigError, match="say --folder"):
        asyncio.run(run_storage(options, lambda done, total: None))


def test_an_engine_that_keeps_too_little_is_told_so(tmp_path: Path) -> None:
    options = StorageBenchOptions(
        page_bytes=8192, pages=4, folder=str(tmp_path), option=("capacity_bytes=560000",)
    )
    with pytest.raises(StorageError, match="of 4 pages were rejected, not stored"):
        asyncio.run(run_storage(options, lambda done, total: None))


def test_wrong_bytes_are_counted() -> None:
    pages = BenchPages(4096, 5, seed=1)
    assert pages.wrong() == 0
    pages.memory(3)[17] ^= 1
    assert pages.wrong() == 1
    pages.erase()
    assert pages.wrong() == 5


@pytest.mark.asyncio
async def test_the_raw_file_is_the_stores_own(tmp_path: Path) -> None:
    """What it writes lies where the pool's first pages did, in one file or more, and it reads it back."""
    pages = BenchPages(1 << 20, 6, seed=2)
    port = AsyncioPort(threads=1)
    backend = open_backend(engine_options({}, tmp_path), port)
    engine = await backend.open_pool(pages.binding)
    keys = pages.keys(0, range(6))
    assert await engine.put(keys, range(6)) == [Outcome.STORED] * 6
    pages.memory(3)[:8] = b"the raw "
    limit = await open_limit(Setup(1 << 20, 6, pages.memory, {}, tmp_path, port, pages.pool))
    try:
        await limit.put([3])
        pages.erase()
        assert await engine.get(keys, range(6)) == [*[Outcome.HIT] * 3, Outcome.CORRUPT, *[Outcome.HIT] * 2]
        await limit.get([5, 0, 1, 3])
        assert bytes(pages.memory(3)[:8]) == b"the raw "
        assert pages.wrong() == 1
    finally:
        await limit.aclose()
        await backend.aclose()
        await port.aclose()


@pytest.mark.parametrize(
    ("indices", "runs"),
    [
        ([], []),
        ([3], [[3]]),
        ([0, 1, 2, 5, 7, 8], [[0, 1, 2], [5], [7, 8]]),
        ([8, 9, 10, 11], [[8, 9], [10, 11]]),
    ],
)
def test_neighbours_in_a_file_of_ten_slots_go_in_one_call(
    indices: Sequence[int], runs: list[list[int]]
) -> None:
    assert list(neighbours(indices, 10)) == runs


@pytest.mark.engine("redis")
def test_redis_is_measured_beside_redis_py(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    module("hiredis")
    with RedisServer(tmp_path) as server:
        option = ["--option", f"url={server.url}"]
        code = main(["bench", "storage", "--engine", "redis", *SMALL, *option, "--json", "-"])
        with module("redis").Redis.from_url(server.url) as client:
            left = client.dbsize()

    result = json.loads(capsys.readouterr().out)
    assert (code, result["wrong_pages"], left) == (0, 0, 0)
    assert result["limit"]["title"] == "redis-py with hiredis, one pipeline a batch"
    assert [other["title"] for other in result["beside"]] == [
        "redis-py with hiredis, one MSET or MGET a batch",
        "redis-py with hiredis, a SET or GET a page, gathered",
    ]
    for other in (*result["beside"], {**result, "title": ""}):
        assert min(other[f"{name}_{unit}"] for name in ("put", "get") for unit in ("ratio", "mb_s")) > 0
    assert result["server_us_per_page"].keys() == {"put", "get"}
    assert None not in result["server_us_per_page"].values()


@pytest.mark.asyncio
@pytest.mark.engine("redis")
@pytest.mark.parametrize(("policy", "evicts"), [("allkeys-lru", True), ("noeviction", False)])
async def test_a_full_server_that_evicts_is_left_to_it(tmp_path: Path, policy: str, evicts: bool) -> None:
    redis, port = module("redis"), AsyncioPort(threads=1)
    memory = BenchPages(8192, 1, seed=0).memory

    async def is_left_to_it() -> bool:
        setup = Setup(8192, 1, memory, {"url": server.url}, tmp_path, port, "bench")
        limit = await LIMITS["redis"].open(setup)
        await limit.aclose()
        return limit.evicts

    limits = ["--maxmemory", "8mb", "--maxmemory-policy", policy]
    with RedisServer(tmp_path, *limits) as server, redis.Redis.from_url(server.url) as filler:
        assert not await is_left_to_it()
        for number in range(500):
            with suppress(redis.exceptions.OutOfMemoryError):
                filler.set(f"old {number}", bytes(32768))
        assert await is_left_to_it() == evicts
    await port.aclose()


@pytest.mark.parametrize(
    ("option", "words"), [((), "say which server"), (("url=redis://x", "namespace=a"), "has one of its own")]
)
def test_the_redis_bench_needs_a_server(option: tuple[str, ...], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        asyncio.run(run_storage(StorageBenchOptions(engine="redis", option=option), lambda done, total: None))
