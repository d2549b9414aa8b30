"""Foreign pages over real backends: bytes come back, and never land in memory that is no longer lent."""

from __future__ import annotations

import asyncio
import mmap
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.errors import ClosedError, ConfigError, StorageError, UsageError
from asynchicache.hashing import ObjectKey
from asynchicache.integrations.page_memory import PageMemory, PagePart, memory_at, tensor_memory
from asynchicache.integrations.page_pool import PagePool
from asynchicache.integrations.page_slots import PlacedSlots, StagedSlots
from asynchicache.integrations.page_store import PageIdentity, PageStore, PageStoreConfig
from asynchicache.layouts import ALIGNMENT
from asynchicache.storage.breaker import BreakerState
from asynchicache.storage.limits import PoolLimits
from asynchicache.storage.protocol import Capabilities, PoolBinding, PoolEngine
from asynchicache.types import Outcome

PAGES = 12
IDENTITY = PageIdentity(
    engine="test", model="toy", weight_version="1", dtype="bfloat16", layout="page_first", shard="tp0/2"
)


def memory_of(nbytes: int, *, shift: int = 0) -> memoryview:
    """Zeros that start `shift` bytes past an aligned address."""
    return memoryview(mmap.mmap(-1, nbytes + ALIGNMENT))[shift : shift + nbytes]


def one_part(nbytes: int = 8192, *, shift: int = 0) -> PageMemory:
    return PageMemory([PagePart(memory_of(PAGES * nbytes, shift=shift), 0, nbytes, nbytes)], PAGES)


def keys_and_values(nbytes: int = 4096, *, shift: int = 0) -> PageMemory:
    """`[2, pages, bytes]`."""
    memory = memory_of(2 * PAGES * nbytes, shift=shift)
    return PageMemory([PagePart(memory, part * PAGES * nbytes, nbytes, nbytes) for part in (0, 1)], PAGES)


def ragged() -> PageMemory:
    """A state: parts of different sizes in different memories."""
    sizes = (4096, 100, 24)
    return PageMemory([PagePart(memory_of(PAGES * size), 0, size, size) for size in sizes], PAGES)


def layer_first(layers: int = 6, nbytes: int = 4096) -> PageMemory:
    memory = memory_of(layers * PAGES * nbytes)
    cuts = [PagePart(memory, layer * PAGES * nbytes, nbytes, nbytes) for layer in range(layers)]
    return PageMemory(cuts, PAGES)


GEOMETRIES = {
    "one part": one_part,
    "keys and values": keys_and_values,
    "unaligned": lambda: keys_and_values(shift=64),
    "odd size": lambda: one_part(1000),
    "ragged": ragged,
    "layer first": layer_first,
}


def pieces(memory: PageMemory, page: int) -> list[np.ndarray]:
    units = range(memory.units)
    return [piece for part in units for piece in memory.unit(part * memory.pages + page)]


def fill(memory: PageMemory, page: int, seed: int) -> bytes:
    """Put random bytes into a page; what they are."""
    content = np.random.default_rng(seed).bytes(memory.page_bytes)
    offset = 0
    for piece in pieces(memory, page):
        piece[:] = np.frombuffer(content, np.uint8, len(piece), offset)
        offset += len(piece)
    return content


def content(memory: PageMemory, page: int) -> bytes:
    return b"".join(piece.tobytes() for piece in pieces(memory, page))


def config(storage: str, path: Path, **options: object) -> PageStoreConfig:
    storage_options = {"path": str(path / "store")} if storage == "file" else {"name": str(path)}
    return PageStoreConfig.of({"storage": storage, "storage_options": storage_options, **options})


@asynccontextmanager
async def opened(
    options: PageStoreConfig,
    memory: PageMemory,
    identity: PageIdentity = IDENTITY,
    *,
    writes: bool = True,
    backend: GatedBackend | None = None,
) -> AsyncIterator[PagePool]:
    store = await PageStore.open(options, backend=backend)
    try:
        yield await store.open_pool("kv", memory, identity, writes=writes)
    finally:
        await store.aclose()


@pytest.mark.asyncio
@pytest.mark.parametrize("storage", ["file", "memory"])
@pytest.mark.parametrize("geometry", GEOMETRIES)
async def test_pages_come_back_as_they_were(storage: str, geometry: str, tmp_path: Path) -> None:
    options = config(storage, tmp_path)
    memory, other = GEOMETRIES[geometry](), GEOMETRIES[geometry]()
    keys = [f"page-{n}" for n in range(5)]
    async with opened(options, memory) as pool:
        assert await pool.exists(keys) == [False] * 5
        written = [fill(memory, page, page) for page in range(5)]
        assert await pool.put(keys, range(5)) == [Outcome.STORED] * 5
        assert await pool.put(keys[:2], [0, 1]) == [Outcome.EXISTS] * 2
    async with opened(options, other) as pool:
        assert await pool.exists([*keys, "other"]) == [True] * 5 + [False]
        places = [9, 0, 7, 11, 3]
        outcomes = await pool.get([*keys, "other"], [*places, 5])
        assert outcomes == [Outcome.HIT] * 5 + [Outcome.MISS]
        assert [content(other, place) for place in places] == written
        assert not any(content(other, 5)), "a miss leaves its page alone"
        assert await pool.clear() == 5 * other.units
        assert await pool.exists(keys) == [False] * 5


@pytest.mark.parametrize(
    ("memory", "units", "staged_because"),
    [
        (one_part(), 1, None),
        (keys_and_values(), 2, None),
        (keys_and_values(shift=64), 2, "does not start on a multiple of 4096"),
        (one_part(1000), 1, "1000 bytes are not a multiple of 4096"),
        (ragged(), 1, "3 parts that are not equal blocks"),
        (layer_first(), 1, "6 parts that are not equal blocks"),
        (PageMemory([PagePart(memory_of(1 << 17), 0, 8192, 4096)], PAGES), 1, "do not lie back to back"),
    ],
)
@pytest.mark.asyncio
async def test_pages_are_moved_in_place_where_they_can_be(
    memory: PageMemory,
    units: int,
    staged_because: str | None,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
) -> None:
    assert memory.units == units
    async with opened(config("file", tmp_path), memory) as pool:
        assert pool.staged == (staged_because is not None)
        assert pool.statistics().staged == pool.staged
    assert (staged_because in caplog.text) if staged_because else not caplog.text


@pytest.mark.asyncio
async def test_what_is_stored_does_not_depend_on_where_memory_happens_to_lie(tmp_path: Path) -> None:
    aligned, shifted = keys_and_values(), keys_and_values(shift=64)
    async with opened(config("file", tmp_path), aligned) as pool:
        written = fill(aligned, 3, 1)
        assert await pool.put([b"k"], [3]) == [Outcome.STORED]
    async with opened(config("file", tmp_path), shifted) as pool:
        assert await pool.get([b"k"], [7]) == [Outcome.HIT]
        assert content(shifted, 7) == written
    async with opened(config("file", tmp_path, zero_copy=False), aligned) as pool:
        assert pool.staged
        assert await pool.get([b"k"], [2]) == [Outcome.HIT]
        assert content(aligned, 2) == written


@pytest.mark.asyncio
async def test_more_pages_than_staging_slots_pass_through(tmp_path: Path) -> None:
    memory = one_part(1000)
    async with opened(config("file", tmp_path, staging_bytes=1), memory) as pool:
        written = [fill(memory, page, page) for page in range(PAGES)]
        keys = [str(page) for page in range(PAGES)]
        assert await pool.put(keys, range(PAGES)) == [Outcome.STORED] * PAGES
        back = list(reversed(range(PAGES)))
        both = await asyncio.gather(pool.get(keys[:6], back[:6]), pool.get(keys[6:], back[6:]))
        assert both == [[Outcome.HIT] * 6] * 2
        assert [content(memory, page) for page in back] == written


@pytest.mark.asyncio
@pytest.mark.parametrize(
    "change",
    [
        {"engine": "other"},
        {"model": "other"},
        {"weight_version": "2"},
        {"dtype": "float16"},
        {"layout": "page_first_direct"},
        {"shard": "tp1/2"},
        {"shard": ""},
        {"salt": "tenant"},
    ],
    ids=str,
)
async def test_pages_of_another_identity_are_not_there(change: dict[str, str], tmp_path: Path) -> None:
    memory = one_part()
    async with opened(config("memory", tmp_path), memory) as pool:
        await pool.put(["k"], [0])
    async with opened(config("memory", tmp_path), memory, replace(IDENTITY, **change)) as pool:
        assert await pool.exists(["k"]) == [False]
        assert await pool.get(["k"], [1]) == [Outcome.MISS]
    async with opened(config("memory", tmp_path), one_part(4096)) as pool:
        assert await pool.exists(["k"]) == [False], "pages of another size"
    async with opened(config("memory", tmp_path), memory) as pool:
        assert await pool.exists(["k", b"k"]) == [True, False], "text and bytes are different keys"
        assert await pool.exists(["k\udcff"]) == [False], "text of which no UTF-8 can be made is a key too"


@pytest.mark.asyncio
async def test_one_rank_writes_what_all_have(tmp_path: Path) -> None:
    memory, shared = one_part(), replace(IDENTITY, shard="")
    async with opened(config("memory", tmp_path), memory, shared, writes=False) as pool:
        assert await pool.put(["k"], [0]) == [Outcome.EXISTS]
        assert await pool.exists(["k"]) == [False]
    async with opened(config("memory", tmp_path), memory, shared) as pool:
        assert await pool.put(["k"], [0]) == [Outcome.STORED]
    async with opened(config("memory", tmp_path), memory, shared, writes=False) as pool:
        assert await pool.get(["k"], [1]) == [Outcome.HIT]
        assert await pool.clear() == 0
        assert await pool.exists(["k"]) == [True]


@pytest.mark.asyncio
async def test_keys_are_never_part_of_a_path(tmp_path: Path) -> None:
    memory = one_part()
    hostile = ["../../escape", "a/b", "", "\0", "x" * 10_000, b"\xff\0/"]
    async with opened(config("file", tmp_path), memory) as pool:
        written = [fill(memory, page, page) for page in range(len(hostile))]
        assert await pool.put(hostile, range(6)) == [Outcome.STORED] * 6
        assert await pool.get(hostile, range(6, 12)) == [Outcome.HIT] * 6
        assert [content(memory, page) for page in range(6, 12)] == written
    names = {path.name for path in await asyncio.to_thread(lambda: list(tmp_path.rglob("*")))}
    assert not any("escape" in name or "xxx" in name for name in names)


class GatedEngine:
    """A memory engine whose calls wait for a gate, and move bytes after it."""

    capabilities = Capabilities(durable=False, checks=True)

    def __init__(self, backend: GatedBackend, engine: PoolEngine) -> None:
        self._backend, self._engine = backend, engine
        self.exists, self.delete, self.clear = engine.exists, engine.delete, engine.clear
        self.aclose = engine.aclose

    async def get(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        await self._backend.arrive(len(keys))
        return await self._engine.get(keys, slots)

    async def put(self, keys: Sequence[ObjectKey], slots: Sequence[int]) -> list[Outcome]:
        await self._backend.arrive(len(keys))
        return await self._engine.put(keys, slots)


class GatedBackend:
    """Real memory storage behind a gate; `calls` has the pages of each call that came to it."""

    name = "gated"

    def __init__(self) -> None:
        self.store = MemoryStore()
        self._inner = MemoryBackend(self.store)
        self.gate, self.arrived = asyncio.Event(), asyncio.Event()
        self.gate.set()
        self.calls: list[int] = []
        self.dead = False

    async def arrive(self, pages: int) -> None:
        self.calls.append(pages)
        self.arrived.set()
        await self.gate.wait()
        if self.dead:
            raise OSError("gone")

    async def open_pool(self, binding: PoolBinding) -> GatedEngine:
        return GatedEngine(self, await self._inner.open_pool(binding))

    def close_gate(self) -> None:
        self.gate.clear()
        self.arrived.clear()
        self.calls.clear()

    async def aclose(self) -> None:
        await self._inner.aclose()


def gated(*, zero_copy: bool, **limits: float) -> PageStoreConfig:
    return PageStoreConfig(storage="memory", zero_copy=zero_copy, storage_limits=PoolLimits(**limits))


@pytest.mark.asyncio
@pytest.mark.parametrize("zero_copy", [True, False])
async def test_equal_reads_and_writes_are_made_once(zero_copy: bool) -> None:
    backend, memory = GatedBackend(), keys_and_values()
    async with opened(gated(zero_copy=zero_copy), memory, backend=backend) as pool:
        written = fill(memory, 0, 1)
        backend.close_gate()
        puts = [asyncio.create_task(pool.put(["k"], [0])) for _ in range(3)]
        await backend.arrived.wait()
        backend.gate.set()
        assert sorted((await asyncio.gather(*puts)), key=str) == [
            [Outcome.EXISTS],
            [Outcome.EXISTS],
            [Outcome.STORED],
        ]
        assert backend.calls == [2], "one call, with both units of the page"
        backend.close_gate()
        gets = [asyncio.create_task(pool.get(["k", "k"], [page, page + 1])) for page in (2, 5, 8)]
        await backend.arrived.wait()
        backend.gate.set()
        assert await asyncio.gather(*gets) == [[Outcome.HIT] * 2] * 3
        assert backend.calls == [2]
        assert [content(memory, page) for page in (2, 3, 5, 6, 8, 9)] == [written] * 6
        assert pool.statistics().joined == 2 * 2 + 5 * 2


@pytest.mark.asyncio
async def test_a_late_read_never_lands_in_pages_that_were_given_back() -> None:
    backend, memory = GatedBackend(), one_part()
    options = gated(zero_copy=False, deadline=0.01, failures=1000)
    async with opened(options, memory, backend=backend) as pool:
        fill(memory, 0, 1)
        await pool.put(["k"], [0])
        backend.close_gate()
        assert await pool.get(["k"], [5]) == [Outcome.TIMEOUT]
        mine = fill(memory, 5, 2)
        backend.gate.set()
        assert await pool.get(["k"], [6]) == [Outcome.HIT]
        assert content(memory, 5) == mine
        assert content(memory, 6) == content(memory, 0)
    assert pool.statistics().storage.lingering == 0


@pytest.mark.asyncio
async def test_a_server_that_hangs_for_ever_does_not_hold_up_its_callers() -> None:
    backend, memory = GatedBackend(), one_part()
    options = replace_config(gated(zero_copy=False, deadline=0.01, closing=0.01), staging_bytes=1)
    async with opened(options, memory, backend=backend) as pool:
        backend.close_gate()
        keys = [str(page) for page in range(PAGES)]
        assert await pool.get(keys, range(PAGES)) == [Outcome.TIMEOUT] * PAGES, "there are two slots"
        assert await pool.put(["k"], [0]) == [Outcome.REJECTED]
        assert await pool.get(["k"], [0]) == [Outcome.TIMEOUT]


@pytest.mark.asyncio
async def test_pages_can_be_forgotten_one_by_one(tmp_path: Path) -> None:
    memory = keys_and_values()
    async with opened(config("file", tmp_path), memory) as pool:
        await pool.put(["a", "b"], [0, 1])
        assert await pool.delete(["a", "never"]) == [Outcome.HIT, Outcome.MISS]
        assert await pool.exists(["a", "b"]) == [False, True]
    async with opened(config("file", tmp_path), memory, writes=False) as pool:
        assert await pool.delete(["b"]) == [Outcome.MISS]
        assert await pool.exists(["b"]) == [True]


@pytest.mark.asyncio
async def test_staging_slots_come_back_after_late_calls() -> None:
    backend, memory = GatedBackend(), one_part()
    options = replace_config(gated(zero_copy=False, deadline=0.01, failures=1000), staging_bytes=1)
    async with opened(options, memory, backend=backend) as pool:
        backend.close_gate()
        late = [await pool.get([str(n)], [n]) for n in range(2)]  # there are two slots
        assert late == [[Outcome.TIMEOUT]] * 2
        waiting = asyncio.create_task(pool.get(["k"], [3]))
        await asyncio.sleep(0)
        backend.gate.set()
        assert await waiting == [Outcome.MISS]


def replace_config(options: PageStoreConfig, **changes: object) -> PageStoreConfig:
    names = options.__struct_fields__
    return PageStoreConfig(**({name: getattr(options, name) for name in names} | changes))


@pytest.mark.asyncio
@pytest.mark.parametrize("call", ["get", "put"])
async def test_a_call_in_place_ends_when_its_pages_are_free(call: str) -> None:
    backend, memory = GatedBackend(), one_part()
    options = gated(zero_copy=True, deadline=0.01, failures=1000)
    async with opened(options, memory, backend=backend) as pool:
        backend.close_gate()
        task = asyncio.create_task(getattr(pool, call)(["k"], [5]))
        await backend.arrived.wait()
        while not pool.statistics().storage.lingering:  # noqa: ASYNC110 - nothing tells of a deadline
            await asyncio.sleep(0.001)
        assert not task.done(), "the deadline has passed, but the engine has the page"
        backend.gate.set()
        assert await task == [Outcome.TIMEOUT]


@pytest.mark.asyncio
@pytest.mark.parametrize("zero_copy", [True, False])
async def test_a_cancelled_caller_gets_its_pages_back_first(zero_copy: bool) -> None:
    backend, memory = GatedBackend(), one_part()
    async with opened(gated(zero_copy=zero_copy), memory, backend=backend) as pool:
        fill(memory, 0, 1)
        await pool.put(["k"], [0])
        backend.close_gate()
        task = asyncio.create_task(pool.get(["k"], [5]))
        await backend.arrived.wait()
        for _ in range(3):
            task.cancel()
            await asyncio.sleep(0)
        assert not task.done()
        backend.gate.set()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert content(memory, 5) == content(memory, 0), "the read has ended"


@pytest.mark.asyncio
async def test_a_damaged_page_is_told_and_then_gone() -> None:
    backend, memory = GatedBackend(), keys_and_values()
    async with opened(gated(zero_copy=True), memory, backend=backend) as pool:
        fill(memory, 0, 1)
        await pool.put(["k"], [0])
        first = next(iter(backend.store))
        header, page = backend.store.read(first)
        backend.store.drop(first)
        backend.store.write(first, header, page[:-1] + bytes([page[-1] ^ 1]))
        assert await pool.get(["k"], [1]) == [Outcome.CORRUPT], "one of the two units is enough"
        assert await pool.exists(["k"]) == [False]
        assert await pool.put(["k"], [0]) == [Outcome.STORED]
        assert await pool.get(["k"], [1]) == [Outcome.HIT]


@pytest.mark.asyncio
async def test_a_dead_backend_costs_misses_and_opens_the_breaker() -> None:
    backend, memory = GatedBackend(), one_part()
    async with opened(gated(zero_copy=True, failures=2), memory, backend=backend) as pool:
        backend.dead = True
        assert await pool.get(["k"], [0]) == [Outcome.FAILED]
        assert await pool.put(["k"], [0]) == [Outcome.FAILED]
        assert pool.statistics().storage.breaker is BreakerState.OPEN
        assert await pool.exists(["k"]) == [False]
        assert await pool.get(["k"], [0]) != [Outcome.HIT]


@pytest.mark.asyncio
async def test_closing_ends_calls_that_hang_and_refuses_new_ones() -> None:
    backend, memory = GatedBackend(), one_part()
    store = await PageStore.open(gated(zero_copy=True, closing=0.01), backend=backend)
    pool = await store.open_pool("kv", memory, IDENTITY)
    backend.close_gate()
    task = asyncio.create_task(pool.get(["k"], [0]))
    await backend.arrived.wait()
    await store.aclose()
    assert (await task)[0] in (Outcome.TIMEOUT, Outcome.FAILED)
    for refused in (pool.exists(["k"]), pool.get(["k"], [0]), pool.put(["k"], [0]), pool.clear()):
        with pytest.raises(ClosedError, match="closed"):
            await refused
    with pytest.raises(ClosedError, match="closed"):
        await store.open_pool("more", memory, IDENTITY)
    await store.aclose()


class StrangeBackend(MemoryBackend):
    """One that opens pools as the test says."""

    def __init__(self, opening: Callable[[], Awaitable[object]]) -> None:
        super().__init__(MemoryStore())
        self.opening: Callable[[], Awaitable[object]] | None = opening

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:  # type: ignore[override]
        if self.opening is not None:
            return await self.opening()  # type: ignore[return-value]
        return await super().open_pool(binding)


async def hang() -> None:
    await asyncio.Event().wait()


async def burn() -> None:
    raise ValueError("nonsense")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("opening", "words"),
    [
        (hang, "took longer than 0.02 s"),
        (burn, r"failed: ValueError\('nonsense'\)"),
        (partial(asyncio.sleep, 0, 42), "failed: AttributeError"),
    ],
)
@pytest.mark.parametrize("zero_copy", [True, False])
async def test_a_pool_that_cannot_be_opened_is_an_error(
    opening: Callable[[], Awaitable[object]],
    words: str,
    zero_copy: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    closed: list[str] = []
    kind = PlacedSlots if zero_copy else StagedSlots
    monkeypatch.setattr(kind, "close", lambda slots: closed.append(slots.layout.pool.name))
    backend = StrangeBackend(opening)
    store = await PageStore.open(gated(zero_copy=zero_copy, opening=0.02), backend=backend)
    with pytest.raises(StorageError, match=f"storage 'memory': opening pool 'kv' {words}"):
        await store.open_pool("kv", one_part(), IDENTITY)
    assert closed == ["kv"], "the host's memory is given back"
    backend.opening = None
    pool = await store.open_pool("kv", one_part(), IDENTITY)  # nothing was left behind
    assert await pool.put(["k"], [0]) == [Outcome.STORED]
    await store.aclose()


@pytest.mark.asyncio
async def test_pools_of_one_store_are_apart(tmp_path: Path) -> None:
    store = await PageStore.open(config("file", tmp_path))
    memories = {"kv": keys_and_values(), "mamba": ragged()}
    pools = {name: await store.open_pool(name, memory, IDENTITY) for name, memory in memories.items()}
    written = {}
    for name, pool in pools.items():
        written[name] = fill(memories[name], 0, len(name))
        assert await pool.put(["same key"], [0]) == [Outcome.STORED]
    for name, pool in pools.items():
        assert await pool.get(["same key"], [1]) == [Outcome.HIT]
        assert content(memories[name], 1) == written[name]
    assert {name: pool.units for name, pool in store.statistics().items()} == {"kv": 2, "mamba": 1}
    assert await store.clear() == 3
    with pytest.raises(ConfigError, match="'kv' is open already"):
        await store.open_pool("kv", memories["kv"], IDENTITY)
    await store.aclose()


@pytest.mark.asyncio
async def test_misuse_is_refused_by_name(tmp_path: Path) -> None:
    async with opened(config("memory", tmp_path), one_part()) as pool:
        with pytest.raises(UsageError, match="2 keys for 1 pages"):
            await pool.get(["a", "b"], [1])
        for page in (-1, PAGES):
            with pytest.raises(UsageError, match=f"no page {page}; it has {PAGES}"):
                await pool.put(["a"], [page])
        with pytest.raises(UsageError, match="key 5 of pool 'kv' must be text or bytes"):
            await pool.exists([5])  # type: ignore[list-item]
        assert await pool.get([], []) == []
        assert await pool.exists([]) == []
    store = await PageStore.open(config("memory", tmp_path))
    with pytest.raises(ConfigError, match="pool name 'KV'"):
        await store.open_pool("KV", one_part(), IDENTITY)
    await store.aclose()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "storage is missing"),
        ({"storage": "file", "speed": 1}, "'speed' is not an option"),
        ({"storage": "file", "io_threads": 0}, "io_threads 0"),
        ({"storage": "file", "staging_bytes": 0}, "staging_bytes 0"),
        ({"storage": "file", "io_threads": "8"}, "io_threads"),
        ({"storage": "file", "storage_limits": {"patience": 1}}, "patience.*the options are"),
        ({"storage": "file", "storage_limits": {"deadline": 0}}, "deadline 0"),
    ],
)
def test_options_that_do_not_fit_are_refused(options: dict[str, object], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        PageStoreConfig.of(options)


def test_geometries_that_cannot_be_are_refused() -> None:
    good = memory_of(PAGES * 4096)
    for part, message in (
        (PagePart(good, 0, 100, 200), "200 bytes"),
        (PagePart(good, 1, 4096, 4096), "do not fit"),
        (PagePart(good, 0, 4096, 0), "0 bytes"),
        (PagePart(memoryview(bytes(PAGES * 4096)), 0, 4096, 4096), "read-only"),
    ):
        with pytest.raises(ConfigError, match=message):
            PageMemory([part], PAGES)
    with pytest.raises(ConfigError, match="0 pages"):
        PageMemory([PagePart(good, 0, 4096, 4096)], 0)
    with pytest.raises(ConfigError, match="no memory"):
        memory_at(0, 10)
    with pytest.raises(ConfigError, match="contiguous=False"):
        tensor_memory(torch.zeros(4, 4).T)
    with pytest.raises(ConfigError, match="shape"):
        PageMemory.of_view(memoryview(bytearray(100)))
    for name in ("model", "weight_version", "engine"):
        with pytest.raises(ConfigError, match=f"{name} is empty"):
            replace(IDENTITY, **{name: ""})


def test_tensors_and_views_are_pages() -> None:
    tensor = torch.arange(2 * 3 * 8, dtype=torch.int32).reshape(2, 3, 8)
    pair = PageMemory.of_tensor(tensor, parts=2)
    assert (pair.pages, pair.page_bytes) == (3, 64)
    assert content(pair, 1) == tensor[:, 1].contiguous().numpy().tobytes()
    alone = PageMemory.of_tensor(tensor)
    assert (alone.pages, content(alone, 1)) == (2, tensor[1].numpy().tobytes())
    with pytest.raises(ConfigError, match="no 3 parts"):
        PageMemory.of_tensor(tensor, parts=3)
    view = PageMemory.of_view(memoryview(tensor.numpy()))
    assert (view.pages, content(view, 1)) == (2, content(alone, 1))
