"""The Mooncake engine on a healthy cluster: memory, keys, damage, options, and the whole cache above it."""

from __future__ import annotations

import asyncio
import sys
import threading
from contextlib import AsyncExitStack
from itertools import count

import pytest

from asynchicache import HybridCache, Tier
from asynchicache.backends.mooncake import MooncakeOptions, open_backend
from asynchicache.backends.mooncake import backend as backend_module
from asynchicache.backends.mooncake.codes import MooncakeCode
from asynchicache.backends.mooncake.engine import LABEL, LABEL_BYTES
from asynchicache.backends.mooncake.store import MooncakeClient, MooncakeStore, address_of
from asynchicache.errors import ClosedError, ConfigError, StorageError, UsageError
from asynchicache.ports import AsyncioPort
from asynchicache.types import Outcome
from cache.engine import LONG, LONG_SPEC, SPEC, Engine, config, long_turn
from engines import Server, free_port
from storage.mooncake_cluster import (
    Cluster,
    Watched,
    backend_of,
    binding_of,
    cluster,
    open_bench,
    own_network,
)

HIT, MISS, STORED, CORRUPT = Outcome.HIT, Outcome.MISS, Outcome.STORED, Outcome.CORRUPT

on_mooncake = pytest.mark.engine("mooncake")
namespaces = (f"test-{number}" for number in count())


@on_mooncake
@pytest.mark.asyncio
async def test_a_namespace_keeps_pages_apart(mooncake: Cluster, mooncake_store: MooncakeStore) -> None:
    async with (
        backend_of(mooncake, mooncake_store, namespace=next(namespaces)) as mine,
        backend_of(mooncake, mooncake_store, namespace=next(namespaces)) as yours,
    ):
        my_bench, your_bench = await open_bench(mine), await open_bench(yours)
        await my_bench.put(my_bench.keys(1), [0])

        assert await your_bench.get(your_bench.keys(1), [0]) == [MISS]
        assert await my_bench.get(my_bench.keys(1), [1]) == [HIT]


@on_mooncake
@pytest.mark.asyncio
async def test_clear_stays_in_its_namespace(mooncake: Cluster, mooncake_store: MooncakeStore) -> None:
    benches = {}
    async with AsyncExitStack() as stack:
        for namespace in ("a.b", "a.bc", "axb", "xa.b"):
            backend = await stack.enter_async_context(
                backend_of(mooncake, mooncake_store, namespace=namespace)
            )
            benches[namespace] = (backend, bench := await open_bench(backend))
            await bench.put(bench.keys(1, 2), [0, 1])
            await bench.get(bench.keys(1), [2])  # a lease does not keep it

        assert await benches["a.b"][0].clear() == 2
        assert await benches["a.b"][0].clear() == 0

        there = {
            name: sum(await bench.engine.exists(bench.keys(1, 2))) for name, (_, bench) in benches.items()
        }
    assert there == {"a.b": 0, "a.bc": 2, "axb": 2, "xa.b": 2}


@on_mooncake
@pytest.mark.asyncio
async def test_a_label_is_replaced_even_while_somebody_reads_it(
    mooncake: Cluster, mooncake_store: MooncakeStore
) -> None:
    namespace = next(namespaces)
    async with backend_of(mooncake, mooncake_store, namespace=namespace) as backend:
        bench = await open_bench(backend)
        await bench.put(bench.keys(1), [0])
        name = f"{namespace}:{bench.keys(1)[0].text().rpartition('.')[0]}.{LABEL}"
        client = await backend.client()
        for words in (b"one", b"two, longer"):
            await bench.engine.label(words)
            with client.memory(LABEL_BYTES) as memory:
                assert (client.read(name, memory) or b"").rstrip() == words  # it has a lease now
        assert await bench.engine.clear() == 1
        assert client.exists([name]) == [1]
        assert await backend.clear() == 0
        assert client.exists([name]) == [0]


@pytest.mark.asyncio
async def test_closing_waits_for_a_clear_that_is_still_joining(monkeypatch: pytest.MonkeyPatch) -> None:
    joining, may_fail = threading.Event(), threading.Event()

    def join(options: MooncakeOptions) -> MooncakeStore:
        joining.set()
        may_fail.wait()
        raise StorageError(f"no master at {options.master}")

    monkeypatch.setattr(backend_module, "join", join)
    backend = open_backend({"master": "127.0.0.1:1"}, AsyncioPort(threads=1))
    clear = asyncio.create_task(backend.clear())
    await asyncio.to_thread(joining.wait)
    closing = asyncio.create_task(backend.aclose())
    await asyncio.sleep(0)
    may_fail.set()

    await closing
    with pytest.raises(StorageError, match="no master"):
        await clear


@on_mooncake
@pytest.mark.asyncio
async def test_every_address_lies_in_registered_memory(
    mooncake: Cluster, mooncake_store: MooncakeStore
) -> None:
    store = Watched(mooncake_store)
    async with backend_of(mooncake, store, namespace=next(namespaces)) as backend:
        bench = await open_bench(backend)
        keys = bench.keys(*range(32))
        await bench.put(keys, range(32))
        assert await bench.get(keys, range(32)) == [HIT] * 32

    regions = store.arguments["register_buffer"]
    calls = store.arguments["batch_put_from_multi_buffers"] + store.arguments["batch_get_into_multi_buffers"]
    moved = [
        piece
        for _, pointers, sizes, *_ in calls
        for pair in zip(pointers, sizes, strict=True)
        for piece in zip(*pair, strict=True)
    ]
    assert len(moved) == 2 * 2 * 32
    for address, size in moved:
        assert any(base <= address and address + size <= base + length for base, length in regions)
    assert {base for base, _ in regions} == {base for (base,) in store.arguments["unregister_buffer"]}


@on_mooncake
@pytest.mark.asyncio
async def test_a_state_of_many_pieces_is_one_object(mooncake: Cluster, mooncake_store: MooncakeStore) -> None:
    async with backend_of(mooncake, mooncake_store, namespace=next(namespaces)) as backend:
        bench = await open_bench(backend, binding_of("mamba", page_bytes=(20 << 20) + 77, slots=2))
        keys = bench.keys(1)

        assert await bench.put(keys, [0]) == [STORED]
        assert await bench.get(keys, [1]) == [HIT]
        assert await bench.engine.delete(keys) == [HIT]


@on_mooncake
@pytest.mark.asyncio
async def test_a_slot_that_is_not_there_is_refused(mooncake: Cluster, mooncake_store: MooncakeStore) -> None:
    async with backend_of(mooncake, mooncake_store, namespace=next(namespaces)) as backend:
        bench = await open_bench(backend)
        for slot in (-1, 32):
            with pytest.raises(UsageError, match="slots 0 to 31"):
                await bench.engine.get(bench.keys(1), [slot])


@on_mooncake
@pytest.mark.asyncio
async def test_a_pool_is_opened_once_and_its_memory_let_go(
    mooncake: Cluster, mooncake_store: MooncakeStore
) -> None:
    async with backend_of(mooncake, mooncake_store, namespace=next(namespaces)) as backend:
        binding = binding_of()
        bench = await open_bench(backend, binding)
        with pytest.raises(StorageError, match="pool 'kv', shard '' is open"):
            await backend.open_pool(binding_of())
        async with backend_of(mooncake, mooncake_store) as other:
            with pytest.raises(StorageError, match="does not register"):
                await other.open_pool(binding)

        await bench.engine.aclose()
        with pytest.raises(ClosedError, match="closed"):
            await bench.engine.get([], [])
        again = await open_bench(backend, binding)
        assert await again.put(again.keys(1), [0]) == [STORED]
    with pytest.raises(ClosedError, match="closed"):
        await backend.open_pool(binding_of("mamba"))


@on_mooncake
@pytest.mark.asyncio
@pytest.mark.parametrize("grown", [0, 1])
async def test_what_is_not_a_page_is_dropped_and_comes_again(
    mooncake: Cluster, mooncake_store: MooncakeStore, grown: int
) -> None:
    """Somebody else's object under our key: of our size, or larger."""
    namespace = next(namespaces)
    async with backend_of(mooncake, mooncake_store, namespace=namespace) as backend:
        bench = await open_bench(backend)
        keys = bench.keys(1, 2)
        _, pages = bench.binding.regions()
        pages[:] = b"x" * len(pages)
        size = bench.binding.header_bytes + bench.binding.page_bytes + grown
        name = f"{namespace}:{keys[0].text()}"
        client = MooncakeClient(mooncake_store, None, 1)
        assert client.put([name], [[address_of(pages)]], [[size]]) == [MooncakeCode.OK]
        await bench.put(keys[1:], [5])

        assert await bench.get(keys, [8, 9]) == [CORRUPT, HIT]

        assert await bench.engine.exists(keys) == bytes([0, 1])
        assert await bench.put(keys[:1], [0]) == [STORED]
        assert await bench.get(keys, [8, 9]) == [HIT, HIT]


@on_mooncake
@pytest.mark.asyncio
async def test_a_small_object_under_our_key_is_no_hit(
    mooncake: Cluster, mooncake_store: MooncakeStore
) -> None:
    namespace = next(namespaces)
    async with backend_of(mooncake, mooncake_store, namespace=namespace) as backend:
        bench = await open_bench(backend)
        (key,) = bench.keys(1)
        address = address_of(bench.binding.page(0))
        MooncakeClient(mooncake_store, None, 1).put([f"{namespace}:{key.text()}"], [[address]], [[100]])

        assert await bench.get([key], [1]) == [Outcome.FAILED]


@on_mooncake
@pytest.mark.asyncio
async def test_a_full_cluster_evicts_and_rejects_and_never_gives_other_bytes() -> None:
    """64 MiB hold less than these 96 pages; what `exists` says may be over when `get` asks."""
    with own_network(), cluster() as full:
        await fill(full)


async def fill(full: Cluster) -> None:
    async with backend_of(full) as backend:
        bench = await open_bench(backend, binding_of(page_bytes=1 << 20, slots=16))
        outcomes = []
        for first in range(0, 96, 8):
            outcomes += await bench.put(bench.keys(*range(first, first + 8)), range(8))
        there = await bench.engine.exists(bench.keys(*range(96)))
        got = []
        for first in range(0, 96, 8):
            got += await bench.get(bench.keys(*range(first, first + 8)), range(8, 16))

    assert set(outcomes) <= {STORED, Outcome.REJECTED}
    assert set(got) == {HIT, MISS}
    assert got.count(HIT) <= 64
    assert sum(there) >= got.count(HIT)


@on_mooncake
@pytest.mark.asyncio
async def test_a_long_prompt_of_a_hybrid_model_takes_few_calls(
    mooncake: Cluster, mooncake_store: MooncakeStore
) -> None:
    namespace, counts = next(namespaces), []
    for hit in (0, 32_768):
        store = Watched(mooncake_store)
        async with (
            backend_of(mooncake, store, namespace=namespace) as backend,
            HybridCache.open(LONG_SPEC, config(**LONG), storage=backend) as cache,
        ):
            assert await long_turn(cache, range(32_769)) == (hit, True)
        names = ("batch_is_exist", "batch_put_from_multi_buffers", "batch_get_into_multi_buffers")
        counts.append([store.count(name) for name in names])

    (asked, put, _), (asked_again, _, got) = counts
    assert (asked <= 6, put <= 8, asked_again <= 8, got <= 20) == (True,) * 4, counts


@on_mooncake
@pytest.mark.asyncio
async def test_the_whole_cache_finds_its_pages_after_a_restart(mooncake: Cluster) -> None:
    options = config(storage="mooncake", storage_options=mooncake.options(namespace=next(namespaces)))
    prompt = list(range(1, 21))
    async with HybridCache.open(SPEC, options) as cache:
        assert (await Engine(cache).serve(prompt)).tokens == 0

    async with HybridCache.open(SPEC, options) as cache:
        hit = await Engine(cache).serve([*prompt, 7, 8, 9])

    assert hit.by_tier == {Tier.STORAGE: 20}


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("options", "rule"),
    [
        ({}, "master='' must be host:port"),
        ({"master": "somewhere"}, "master='somewhere' must be host:port"),
        ({"master": "host:99999"}, "must be host:port"),
        ({"master": 5}, "master=5 must be text"),
        ({"segment_bytes": 1000}, "segment_bytes=1000 must be 0, or at least 16777216"),
        ({"segment_bytes": -1}, "segment_bytes=-1 must be 0, or at least"),
        ({"soft_pin_seconds": 86401}, "soft_pin_seconds=86401 must be at most 86400"),
        ({"tenant": ""}, "tenant='' must be text that matches"),
        ({"threads": 0}, "threads=0 must be a whole number above 0"),
        ({"replicas": -1}, "replicas=-1 must be a whole number above 0"),
        ({"namespace": "a/b"}, "namespace='a/b' must be text that matches"),
        ({"namespace": ""}, "namespace='' must be"),
        ({"open_seconds": 0}, "open_seconds=0 must be a number above 0"),
        ({"rdma": True}, r"has no option 'rdma'"),
    ],
)
async def test_bad_options_are_refused(options: dict[str, object], rule: str) -> None:
    port = AsyncioPort(threads=1)
    with pytest.raises(ConfigError, match=rule):
        open_backend({"master": "127.0.0.1:50051", **options} if options else {}, port)
    await port.aclose()


@on_mooncake
@pytest.mark.asyncio
async def test_a_closed_port_is_said_at_once(mooncake: Cluster) -> None:
    async with backend_of(mooncake, master=f"127.0.0.1:{free_port()}") as backend:
        for _ in range(2):
            with pytest.raises(StorageError, match=r"no Mooncake master answers at 127\.0\.0\.1:"):
                await open_bench(backend)


@pytest.mark.asyncio
async def test_a_missing_wheel_is_said_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mooncake.store", None)
    port = AsyncioPort(threads=1)
    backend = open_backend({"master": "127.0.0.1:50051"}, port)
    with pytest.raises(StorageError, match=r"asynchicache\[mooncake-non-cuda\] or, .* libibverbs1"):
        await backend.open_pool(binding_of())
    await backend.aclose()
    await port.aclose()


MUTE = """
import socket, sys, threading
server = socket.create_server(("127.0.0.1", int(sys.argv[1])))
print("listening", flush=True)
threading.Event().wait()
"""


@on_mooncake
@pytest.mark.asyncio
async def test_a_port_that_answers_nothing_costs_the_deadline(mooncake: Cluster) -> None:
    port = free_port()
    with Server([sys.executable, "-c", MUTE, str(port)], ready="listening"):
        async with backend_of(mooncake, master=f"127.0.0.1:{port}", open_seconds=1.0) as backend:
            with pytest.raises(StorageError, match=r"not within 1 s; is that a Mooncake master\?"):
                await open_bench(backend)


@on_mooncake
@pytest.mark.asyncio
async def test_what_mooncake_refuses_is_said_in_its_words(
    mooncake: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MC_STORE_CLIENT_SETUP_RETRIES", "1")
    async with backend_of(mooncake, protocol="pigeon") as backend:
        with pytest.raises(StorageError, match=r"unsupported_protocol protocol=pigeon"):
            await open_bench(backend)
