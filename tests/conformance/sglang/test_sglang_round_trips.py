"""Bytes go from device to host to storage and back through SGLang's own controller and trees."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from sglang_trees import Tree, equal, stand_in_for_kernels, tree

from asynchicache.integrations.sglang.storage import AsynchicacheStorage
from engines import Server, executable, free_port

KINDS = ("full", "mla", "full+mamba", "full+swa")
POOLS = {"full": {"kv"}, "mla": {"kv"}, "full+mamba": {"kv", "mamba"}, "full+swa": {"kv", "swa"}}
TOKENS = list(range(1, 65))


@pytest.fixture(autouse=True, scope="module")
def _kernels() -> None:
    stand_in_for_kernels()


def options(path: Path, **more: Any) -> dict[str, Any]:
    return {
        "backend_name": "asynchicache",
        "module_path": "asynchicache.integrations.sglang.storage",
        "class_name": "AsynchicacheStorage",
        "interface_v1": 1,
        "weight_version": "1",
        "storage": "file",
        "storage_options": {"path": str(path / "store")},
        **more,
    }


def store(kind: str, core: str, path: Path, **more: Any) -> dict[str, list[Any]]:
    """Compute a prefix and wait until it is in storage; its bytes."""
    with tree(kind, core, options(path), **more) as first:
        assert isinstance(first.storage, AsynchicacheStorage)
        assert first.cache._tree_core_backend == core
        computed = first.compute(TOKENS, seed=1)
        first.stored()
        assert set(first.storage.statistics()) == POOLS[kind]
    return computed


@contextmanager
def restarted(kind: str, core: str, path: Path, **more: Any) -> Iterator[Tree]:
    """Another process's tree, as far as caches go: other device memory, nothing in the host's."""
    with tree(kind, core, options(path), **more) as second:
        second.take(16)  # so that slots are others than before
        second.fill(seed=2)
        assert second.match(TOKENS).device_prefix_len == 0
        yield second


@pytest.mark.parametrize("core", ["python", "rust"])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_come_back_from_storage(kind: str, core: str, tmp_path: Path) -> None:
    computed = store(kind, core, tmp_path)
    with restarted(kind, core, tmp_path) as second:
        assert second.prefetch(TOKENS) == len(TOKENS)
        assert second.load(TOKENS) == len(TOKENS)
        assert equal(second.bytes_of(TOKENS), computed)


def test_bytes_come_back_in_layer_first_through_a_copy(tmp_path: Path) -> None:
    computed = store("full", "python", tmp_path, layout="layer_first")
    with restarted("full", "python", tmp_path, layout="layer_first") as second:
        assert second.prefetch(TOKENS) == second.load(TOKENS) == len(TOKENS)
        assert equal(second.bytes_of(TOKENS), computed)
        assert second.storage.statistics()["kv"].staged


def test_bytes_come_back_by_the_generic_path(tmp_path: Path) -> None:
    """Without `interface_v1` SGLang hands over flat tensors."""
    extra = options(tmp_path, interface_v1=0)
    with tree("full", "python", extra) as first:
        computed = first.compute(TOKENS, seed=1)
        first.stored()
    with tree("full", "python", extra) as second:
        second.fill(seed=2)
        assert second.prefetch(TOKENS) == second.load(TOKENS) == len(TOKENS)
        assert equal(second.bytes_of(TOKENS), computed)
        assert set(second.storage.statistics()) == {"kv_flat"}


@pytest.mark.parametrize("kind", ["full+mamba", "full+swa"])
def test_a_prefix_is_as_long_as_all_its_pools_allow(kind: str, tmp_path: Path) -> None:
    """Attention pages of a longer prefix are there, but its state, or its window, is not."""
    longer = [*TOKENS, *range(100, 116)]
    computed = store(kind, "python", tmp_path)
    with tree(kind, "python", options(tmp_path)) as again:
        again.compute(longer, seed=3)
        again.stored()
        other = "mamba" if kind == "full+mamba" else "swa"
        again.forget(other, longer[len(TOKENS) :], longer)
    with restarted(kind, "python", tmp_path) as second:
        assert second.prefetch(longer) == len(TOKENS)
        assert second.load(longer) == len(TOKENS)
        assert equal(second.bytes_of(TOKENS), computed)


def test_salts_and_adapters_never_share_pages(tmp_path: Path) -> None:
    store("full", "python", tmp_path)
    for more in ({"salt": "tenant"}, {"weight_version": "2"}):
        with tree("full", "python", options(tmp_path, **more)) as other:
            assert other.prefetch(TOKENS) == 0
    with tree("full", "python", options(tmp_path)) as same:
        assert same.prefetch(TOKENS) == len(TOKENS)


def test_clearing_forgets_this_models_pages(tmp_path: Path) -> None:
    store("full+mamba", "python", tmp_path)
    with tree("full+mamba", "python", options(tmp_path)) as second:
        assert second.cache.clear_storage_backend()
        assert second.prefetch(TOKENS) == 0


# Faults, between what was stored and what is wanted.


def pages_files(path: Path) -> list[Path]:
    return sorted((path / "store").rglob("*.pages"))


@pytest.mark.parametrize("kind", KINDS)
def test_pages_that_are_gone_are_misses(kind: str, tmp_path: Path) -> None:
    store(kind, "python", tmp_path)
    with restarted(kind, "python", tmp_path) as second:
        for file in pages_files(tmp_path):
            os.truncate(file, 0)  # while it is open: what the index names is not there
        assert second.prefetch(TOKENS) == 0
        assert second.load(TOKENS) == 0
        second.compute(TOKENS, seed=4)
        second.stored()


def test_pages_that_are_damaged_are_misses(tmp_path: Path) -> None:
    computed = store("full", "python", tmp_path)
    with restarted("full", "python", tmp_path) as second:
        for file in pages_files(tmp_path):
            content = bytearray(file.read_bytes())
            content[6000::8192] = bytes(255 - byte for byte in content[6000::8192])
            file.write_bytes(content)
        assert second.prefetch(TOKENS) == 0
        assert second.load(TOKENS) == 0
    with restarted("full", "python", tmp_path) as third:
        assert third.prefetch(TOKENS) == 0
        assert not equal(third.bytes_at(third.take(64), None), computed)


def test_a_backend_that_ends_first_costs_misses(tmp_path: Path) -> None:
    store("full+swa", "python", tmp_path)
    with restarted("full+swa", "python", tmp_path) as second:
        second.storage.close()
        assert second.prefetch(TOKENS) == 0
        second.compute(TOKENS, seed=4)
        second.stored()
        assert second.load(TOKENS) == len(TOKENS), "from the device itself"


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[tuple[Server, str]]:
    """A server, and where it is."""
    port = free_port()
    arguments = ["--bind", "127.0.0.1", "--port", str(port), "--save", "", "--dir", str(tmp_path)]
    ready = "Ready to accept connections"
    with Server([executable("redis-server"), *arguments], ready=ready, port=port) as server:
        yield server, f"redis://127.0.0.1:{port}"


@pytest.mark.parametrize("fault", ["kill", "pause"])
def test_a_server_that_goes_costs_misses(fault: str, redis: tuple[Server, str], tmp_path: Path) -> None:
    server, url = redis
    extra = options(
        tmp_path,
        storage="redis",
        storage_options={"url": url},
        storage_limits={"deadline": 0.5, "closing": 0.5, "cooldown": 0.1},
    )
    with tree("full+mamba", "python", extra) as first:
        computed = first.compute(TOKENS, seed=1)
        first.stored()
    with tree("full+mamba", "python", extra) as second:
        assert second.prefetch(TOKENS, "before") == len(TOKENS)
        assert second.load(TOKENS) == len(TOKENS)
        assert equal(second.bytes_of(TOKENS), computed)
    with tree("full+mamba", "python", extra) as third:
        getattr(server, fault)()
        assert third.prefetch(TOKENS) == 0
        third.compute(TOKENS, seed=4)
        third.stored()
        assert third.load(TOKENS) == len(TOKENS), "what is on the device is as it was"
        if fault == "pause":
            server.resume()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"weight_version": ""}, "weight_version is empty"),
        ({"storage": "tape"}, "storage 'tape' is none of the backends found"),
        ({"speed": 1}, "'speed' is not an option"),
        ({"storage_options": {}}, "must name a folder"),
    ],
)
def test_a_server_with_wrong_options_does_not_start(
    change: dict[str, Any], message: str, tmp_path: Path
) -> None:
    with pytest.raises(Exception, match=message):
        Tree("full", "python", options(tmp_path, **change))
