"""`ls`, `clear` and `gc` over stores that caches have filled: by model, weights and namespace."""

from __future__ import annotations

import asyncio
import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

import msgspec
import pytest

from asynchicache import HybridCache
from asynchicache.backends.mooncake import MooncakeOptions
from asynchicache.backends.mooncake.engine import LABEL_BYTES
from asynchicache.backends.mooncake.joining import join
from asynchicache.backends.mooncake.store import MooncakeClient
from asynchicache.cli.main import main
from asynchicache.hashing import namespace_id, namespace_seed
from asynchicache.layouts import HEADER_BYTES
from asynchicache.storage.labels import PoolLabel
from cache.engine import SPEC, Engine, config
from engines import module
from storage.file_stores import SLOTS_AT
from storage.mooncake_cluster import Cluster, cluster, own_network
from storage.redis_servers import RedisServer

PROMPT = list(range(100, 120))
PAGES = 6
"""Five of attention, and a state."""

WEEK = 7 * 86400.0


class Store:
    """A store that caches fill."""

    def __init__(
        self, engine: str, path: Path, server: RedisServer | None = None, cluster: Cluster | None = None
    ) -> None:
        self.server = server
        self.cluster = cluster
        self.path = path
        self.url = str(path) if engine == "file" else f"file://{path}"
        if server is not None:
            self.url = server.url
        options = {"path": str(path)} if engine == "file" else {"url": self.url}
        self.where = [self.url]
        if engine == "hf3fs":
            metadata = server.url if server is not None else str(path.parent / "names")
            options = {"path": str(path), "metadata": metadata, "capacity_bytes": 1 << 20}
            self.where = [f"hf3fs://{path}", f"--option=metadata={metadata}"]
        if cluster is not None:
            options = cluster.options(namespace=path.parent.name)
            words = {**options, "admin": f"127.0.0.1:{cluster.admin_port}"}
            self.where = [f"mooncake://{words.pop('master')}"]
            self.where += [f"--option={name}={value}" for name, value in words.items()]
        self.options: dict[str, Any] = {"storage": engine, "storage_options": options}

    @contextmanager
    def mooncake(self, last: str) -> Iterator[tuple[MooncakeClient, list[str]]]:
        """A client, and the names of objects that end so."""
        assert self.cluster is not None
        with urlopen(f"http://127.0.0.1:{self.cluster.admin_port}/get_all_keys") as answer:
            names = answer.read().decode().split()
        store = join(MooncakeOptions.of(self.options["storage_options"]))
        yield (
            MooncakeClient(store, None, 1),
            [name for name in names if re.fullmatch(f"{self.path.parent.name}:.*{last}", name)],
        )
        store.close()

    def fill(self, weights: str, namespaces: tuple[str | None, ...] = (None,), seconds: float = WEEK) -> None:
        async def serve() -> None:
            chosen = config(weight_version=weights, storage_limits={"label_seconds": seconds}, **self.options)
            async with HybridCache.open(SPEC, chosen) as cache:
                for namespace in namespaces:
                    await Engine(cache).serve(PROMPT, namespace=namespace)

        asyncio.run(serve())

    def hits(self, weights: str, namespace: str | None = None) -> int:
        async def serve() -> int:
            async with HybridCache.open(SPEC, config(weight_version=weights, **self.options)) as cache:
                async with cache.request([*PROMPT, 1], namespace=namespace) as request:
                    return (await request.prefetch()).tokens

        return asyncio.run(serve())

    def damage(self) -> None:
        """Change a bit in the last page of the largest file or value."""
        if self.options["storage"] == "hf3fs":
            with changing(next(self.path.glob("*.kv.pages"))) as data:
                data[HEADER_BYTES] ^= 1
            return
        if self.server is not None:
            with module("redis").Redis.from_url(self.url) as client:
                name = max(client.keys("*.kv.*"), key=client.strlen)
                client.setrange(name, client.strlen(name) - 1, b"\xa5")
            return
        if self.cluster is not None:
            with self.mooncake(r"[.]kv[.]\w{80}") as (client, names):
                with client.memory(client.store.get_size(names[-1])) as memory:
                    client.read(names[-1], memory)
                    client.replace(names[-1], bytes(memory[:-1]) + b"\xa5")
            return
        if self.options["storage"] == "file":
            path = next(iter(self.path.glob("kv-*/00000.pages")))
            with changing(path) as data:
                data[SLOTS_AT] ^= 1
            return
        path = max(
            (one for one in self.path.glob("*.kv/**/*") if one.is_file()), key=lambda one: one.stat().st_size
        )
        with changing(path) as data:
            data[-1] ^= 1

    def relabel(self, change: Callable[[PoolLabel], bytes | None]) -> None:
        """Write the labels anew, or remove them."""
        if self.server is not None:
            with module("redis").Redis.from_url(self.url) as client:
                for name in client.keys("*.label"):
                    data = change(msgspec.json.decode(client.get(name), type=PoolLabel))
                    client.delete(name) if data is None else client.set(name, data)
        if self.cluster is not None:
            with self.mooncake("[.]label") as (client, names):
                for name in names:
                    with client.memory(LABEL_BYTES) as memory:
                        old = client.read(name, memory)
                    data = change(msgspec.json.decode(old or b"", type=PoolLabel))
                    client.remove([name]) if data is None else client.replace(name, data.ljust(LABEL_BYTES))
        for path in [*self.path.glob("*/label.json"), *self.path.glob("*.label")]:
            data = change(msgspec.json.decode(path.read_bytes(), type=PoolLabel))
            path.unlink() if data is None else path.write_bytes(data)


SHARED = [
    pytest.param("object", marks=pytest.mark.engine("object")),
    pytest.param("redis", marks=pytest.mark.engine("redis")),
    pytest.param("mooncake", marks=pytest.mark.engine("mooncake")),
    "hf3fs",
    pytest.param("hf3fs-redis", marks=pytest.mark.engine("redis")),
]


SOON = [
    *SHARED[:2],
    pytest.param("mooncake", marks=[pytest.mark.engine("mooncake"), pytest.mark.soak]),
    *SHARED[3:],
]
"""For rules of the verbs: a client of Mooncake takes a second to join or to leave."""


@pytest.fixture(params=["file", *SHARED])
def store(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Store]:
    with ExitStack() as stack:
        server = stack.enter_context(RedisServer(tmp_path)) if "redis" in request.param else None
        made = stack.enter_context(made_cluster()) if request.param == "mooncake" else None
        yield Store(request.param.removesuffix("-redis"), tmp_path / "pages", server, made)


@contextmanager
def made_cluster() -> Iterator[Cluster]:
    with own_network(), cluster() as made:
        yield made


@contextmanager
def changing(path: Path) -> Iterator[bytearray]:
    """The bytes of a file, to be changed."""
    data = bytearray(path.read_bytes())
    yield data
    path.write_bytes(data)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, Any]:
    code = main([*arguments, "--json", "-"])
    return code, json.loads(capsys.readouterr().out)


def test_ls_says_whose_pages_they_are(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.fill("w1", (None, "tenant"))
    store.fill("w2")

    code, found = run(capsys, "ls", *store.where)

    assert code == 0
    assert found["pages"] == 3 * PAGES
    assert {(one["pool"], one["weight_version"], one["pages"]) for one in found["pools"]} == {
        ("kv", "w1", 10),
        ("mamba", "w1", 2),
        ("kv", "w2", 5),
        ("mamba", "w2", 1),
    }
    assert all(one["model"] == SPEC.model and one["state"] == "live" for one in found["pools"])
    assert found["bytes"] > 0
    assert all(0 < one["until"] - time.time() <= WEEK for one in found["pools"])
    tenant = namespace_id(namespace_seed("tenant")).hex()
    assert {one["namespaces"].get(tenant) for one in found["pools"]} == {5, 1, None}
    _, one = run(capsys, "ls", *store.where, "--namespace", "tenant")
    assert one["pages"] == PAGES
    assert 0 < 3 * one["bytes"] <= found["bytes"]
    if store.options["storage"] in ("object", "redis"):  # others have pages with padding, or more than pages
        assert 3 * one["bytes"] == found["bytes"]
    assert one["bytes"] == sum(pool["bytes"] for pool in one["pools"])
    assert main(["ls", *store.where, "--version", "w2"]) == 0
    shown = capsys.readouterr().out
    assert "w2" in shown
    assert "w1" not in shown


@pytest.mark.parametrize("store", ["file", *SOON], indirect=True)
def test_ls_of_a_namespace_says_no_bytes_where_it_knows_none(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.fill("w1", (None, "tenant"))
    store.relabel(lambda label: None)

    _, found = run(capsys, "ls", *store.where, "--namespace", "tenant")

    assert (found["pages"], found["bytes"], [one["bytes"] for one in found["pools"]]) == (6, None, [None] * 2)
    assert main(["ls", *store.where, "--namespace", "tenant"]) == 0
    assert "?" in capsys.readouterr().out
    _, whole = run(capsys, "ls", *store.where)
    known = [one["bytes"] is not None for one in [whole, *whole["pools"]]]
    assert known == [store.options["storage"] in ("file", "object", "hf3fs")] * 3  # they have sizes


def test_verify_reads_every_page(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.fill("w1", (None, "tenant"))

    code, whole = run(capsys, "verify", *store.where)
    store.damage()
    damaged_code, damaged = run(capsys, "verify", *store.where)

    assert (code, whole["pages"], whole["corrupt"]) == (0, 2 * PAGES, 0)
    assert whole["bytes"] > 0
    assert (damaged_code, damaged["pages"], damaged["corrupt"]) == (1, 2 * PAGES - 1, 1)


def test_gc_removes_what_nobody_uses_any_more(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.fill("old", seconds=1e-3)
    store.fill("new")

    _, would = run(capsys, "gc", *store.where, "--dry-run")
    assert run(capsys, "ls", *store.where)[1]["pages"] == 2 * PAGES
    code, result = run(capsys, "gc", *store.where, "--per-second", "1000")

    assert code == 0
    assert (would["pools"], would["dry_run"]) == (result["pools"], True)
    assert (result["pages"], len(result["pools"]), len(result["kept"])) == (PAGES, 2, 2)
    if store.options["storage"] == "hf3fs":
        assert len(list(store.path.glob("*.pages"))) == 2
    assert (store.hits("old"), store.hits("new")) == (0, 20)
    assert run(capsys, "gc", *store.where)[1]["pools"] == []


@pytest.mark.parametrize("store", SHARED[:1], indirect=True)
def test_gc_removes_claims_that_processes_left_when_they_were_killed(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    store.fill("new")
    group = next(path for path in store.path.glob("*.kv/*") if path.is_dir())
    (group / ".claim").mkdir(exist_ok=True)
    old, young, foreign = (group / ".claim" / name for name in ("00abcdefgh", "01abcdefgh", "notes"))
    for path in (old, young, foreign):
        path.write_bytes(b"{}")
    for path in (old, foreign):
        os.utime(path, (time.time() - 3700, time.time() - 3700))

    run(capsys, "gc", *store.where, "--dry-run")
    run(capsys, "gc", *store.where, "--pool", "mamba")
    assert old.exists()
    _, result = run(capsys, "gc", *store.where)

    assert [path.exists() for path in (old, young, foreign)] == [False, True, True]
    assert (result["pages"], len(result["kept"])) == (0, 2)
    assert store.hits("new") == 20


@pytest.fixture
def renewed(store: Store, monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """While a verb pauses, somebody begins to use all pools; how long the pauses were."""
    pauses = []

    async def renew(seconds: float) -> None:
        pauses.append(seconds)
        change = msgspec.structs.replace
        store.relabel(lambda label: msgspec.json.encode(change(label, until=time.time() + WEEK)))

    monkeypatch.setattr("asynchicache.cli.stores._pause", renew)
    return pauses


@pytest.mark.parametrize("store", SOON, indirect=True)
def test_gc_stops_where_a_pool_came_back_into_use_meanwhile(
    store: Store, renewed: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    store.fill("old", seconds=1e-3)

    code, result = run(capsys, "gc", *store.where, "--per-second", "2")

    assert (code, result["pools"], len(result["kept"])) == (0, [], 2)
    assert 0 < result["pages"] <= 5
    assert [seconds * 2 for seconds in renewed] == [result["pages"]]
    found = run(capsys, "ls", *store.where)[1]
    assert {(one["pool"], one["state"]) for one in found["pools"]} == {("kv", "live"), ("mamba", "live")}
    assert found["pages"] == PAGES - result["pages"]


@pytest.mark.parametrize("store", ["hf3fs"], indirect=True)
@pytest.mark.usefixtures("renewed")
def test_gc_lists_no_pool_as_removed_that_it_left(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.fill("old", seconds=1e-3)

    assert main(["gc", *store.where, "--per-second", "2"]) == 0

    assert capsys.readouterr().out.count("in use again") == 2


@pytest.mark.parametrize("store", SOON, indirect=True)
def test_clear_leaves_the_label_of_a_pool_that_came_back_into_use_meanwhile(
    store: Store, renewed: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    store.fill("old", seconds=1e-3)

    _, result = run(capsys, "clear", *store.where, "--everything", "--per-second", "2")

    assert (result["pages"], sum(renewed) * 2) == (PAGES, PAGES)
    found = run(capsys, "ls", *store.where)[1]
    assert (found["pages"], [one["state"] for one in found["pools"]]) == (0, ["live"] * 2)


@pytest.mark.parametrize("store", ["file", *SOON], indirect=True)
@pytest.mark.parametrize("change", ["missing", "damaged", "newer", "later"])
def test_gc_leaves_alone_what_it_does_not_know(
    store: Store, change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    store.fill("old", seconds=1e-3)
    changes: dict[str, Callable[[PoolLabel], bytes | None]] = {
        "missing": lambda label: None,
        "damaged": lambda label: b"\xff{",
        "newer": lambda label: msgspec.json.encode(msgspec.structs.replace(label, format=2, until=0.0)),
        "later": lambda label: msgspec.json.encode(
            msgspec.structs.replace(label, written=label.written + 86400)
        ),
    }
    store.relabel(changes[change])

    code = main(["gc", *store.where])

    shown = capsys.readouterr()
    assert code == (1 if change == "later" else 0)
    assert "a clock is wrong" in shown.err or change != "later"
    assert run(capsys, "ls", *store.where)[1]["pages"] == PAGES
    assert store.hits("old") == 20


@pytest.mark.parametrize("store", [one for one in SOON if one != "hf3fs"], indirect=True)
def test_gc_with_a_clock_that_is_ahead_removes_nothing(
    store: Store, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Labels of a week look expired then. Files have no clock but that of their machine."""
    store.fill("new")
    now = time.time()
    monkeypatch.setattr("asynchicache.cli.stores.time.time", lambda: now + 2 * WEEK)

    assert main(["gc", *store.where]) == 1

    assert "from that of the store" in capsys.readouterr().err
    assert store.hits("new") == 20


def test_clear_takes_a_namespace_a_model_or_weights(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.fill("w1", (None, "tenant"))
    store.fill("w2", ("tenant",))

    assert run(capsys, "clear", *store.where, "--model", "another")[1]["pools"] == []
    _, result = run(capsys, "clear", *store.where, "--namespace", "tenant", "--version", "w1", "--dry-run")
    assert (result["pages"], run(capsys, "ls", *store.where)[1]["pages"]) == (PAGES, 3 * PAGES)
    _, result = run(capsys, "clear", *store.where, "--namespace", "tenant", "--version", "w1")

    assert (result["pages"], result["bytes"]) == (PAGES, None)
    assert (store.hits("w1"), store.hits("w1", "tenant"), store.hits("w2", "tenant")) == (20, 0, 20)
    run(capsys, "clear", *store.where, "--model", SPEC.model)
    assert run(capsys, "ls", *store.where)[1]["pools"] == []


def test_a_file_store_that_is_in_use_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = Store("file", tmp_path / "pages")

    async def beside() -> list[int]:
        async with HybridCache.open(SPEC, config(**store.options)) as cache:
            await Engine(cache).serve(PROMPT)
            return [await asyncio.to_thread(main, [verb, store.url]) for verb in ("ls", "gc")]

    assert asyncio.run(beside()) == [1, 1]
    assert "is open already" in capsys.readouterr().err
    assert store.hits("test") == 20


@pytest.mark.parametrize("store", SHARED, indirect=True)
def test_a_shared_store_is_cleaned_beside_a_cache(store: Store, capsys: pytest.CaptureFixture[str]) -> None:
    store.fill("old", seconds=1e-3)

    async def beside() -> int:
        async with HybridCache.open(SPEC, config(weight_version="new", **store.options)) as cache:
            await Engine(cache).serve(PROMPT)
            assert await asyncio.to_thread(main, ["gc", *store.where]) == 0
            async with cache.request([*PROMPT, 1]) as request:
                return (await request.prefetch()).tokens

    assert asyncio.run(beside()) == 20
    assert "removed" in capsys.readouterr().out
    assert run(capsys, "ls", *store.where)[1]["pages"] == PAGES


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["verify", "s3://bucket/x", "--repair"], 2, "for file stores"),
        (["verify", "/nowhere", "--model", "m"], 2, "leave filters out"),
        (["ls", "hf3fs:///nowhere"], 2, "option metadata is missing"),
        (["ls", "hf3fs:///nowhere", "--option=metadata=/nowhere"], 1, "/nowhere does not exist"),
        (["ls", "mooncake://somewhere"], 2, "must be host:port"),
        (["ls", "mooncake://127.0.0.1:1", "--option", "admin=127.0.0.1:1"], 1, "--metrics_port"),
        (["ls", "mooncake://127.0.0.1:1", "--option", "tenant=a"], 1, "do not list what tenants have"),
        (["ls"], 2, "required: PATH"),
        (["ls", "/nowhere/at/all"], 1, "does not exist"),
        (["gc", "/nowhere", "--per-second", "-1"], 2, "--per-second"),
    ],
)
def test_bad_input(arguments: list[str], code: int, words: str, capsys: pytest.CaptureFixture[str]) -> None:
    try:
        found = main(arguments)
    except SystemExit as error:
        found = int(str(error.code))
    assert found == code
    assert words in capsys.readouterr().err


@pytest.mark.parametrize("store", SOON, indirect=True)
def test_what_clear_removes_beside_a_running_cache_is_written_again(
    store: Store, capsys: pytest.CaptureFixture[str]
) -> None:
    """With its label, so that the next verb knows whose it is."""
    clear = ["clear", *store.where, "--model", SPEC.model]

    async def serve() -> None:
        async with HybridCache.open(SPEC, config(weight_version="w1", **store.options)) as cache:
            await Engine(cache).serve(PROMPT)
            assert await cache.sync()
            assert await asyncio.to_thread(main, clear) == 0
            capsys.readouterr()
            assert await cache.sync()

    asyncio.run(serve())

    _, found = run(capsys, "ls", *store.where)
    assert found["pages"] == PAGES
    assert {one["state"] for one in found["pools"]} == {"live"}
