"""Backends of others that open, close or describe themselves wrongly: an error says so, and nothing hangs."""

from __future__ import annotations

import asyncio
import sys
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import replace
from importlib.metadata import EntryPoint
from pathlib import Path
from types import ModuleType

import pytest

from asynchicache import HybridCache, ModelSpec, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.errors import CacheError, ConfigError, StorageError
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.storage import deadlines
from asynchicache.storage.divided import DividedStorage
from asynchicache.storage.limits import PoolLimits
from asynchicache.storage.protocol import Capabilities, PoolBinding, PoolEngine
from asynchicache.testing.faults import Latency
from asynchicache.types import MissReason
from cache.engine import SPEC, Engine, config

SOON = 0.02
"""A limit for what never ends."""

LIMITS = PoolLimits(opening=0.5)
"""Long enough for one that opens, on a busy machine."""

PROMPT = list(range(100, 120))


async def hang() -> None:
    await asyncio.Event().wait()


async def stubborn() -> None:
    """Hangs, and listens only when it is cancelled once more."""
    with suppress(asyncio.CancelledError):
        await hang()
    await hang()


async def burn() -> None:
    raise OSError("on fire")


async def give_up() -> None:
    raise asyncio.CancelledError


@pytest.fixture
def short_grace(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadlines, "GRACE_SECONDS", SOON)


class StrangeBackend(MemoryBackend):
    """One that opens or closes as the test says."""

    def __init__(self) -> None:
        super().__init__(MemoryStore())
        self.opening: Callable[[], Awaitable[object]] | None = None
        self.closing: Callable[[], Awaitable[object]] | None = None

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:  # type: ignore[override]
        if self.opening is not None:
            return await self.opening()  # type: ignore[return-value]
        return await super().open_pool(binding)

    async def aclose(self) -> None:
        if self.closing is not None:
            await self.closing()
        await super().aclose()


def register(monkeypatch: pytest.MonkeyPatch, value: str, **names: object) -> None:
    """Let a package register backend `strange` as `value`; `names` are in its module `stranger`."""
    module = ModuleType("stranger")
    vars(module).update(names)
    monkeypatch.setitem(sys.modules, "stranger", module)
    entry = EntryPoint("strange", value, "asynchicache.backends")
    monkeypatch.setattr("asynchicache.config.entry_points", lambda group: [entry])


def raising(*_: object) -> None:
    raise KeyError("endpoint")


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("value", "names", "error", "words"),
    [
        ("stranger:missing", {}, ConfigError, "'stranger:missing' names nothing"),
        ("what is this?", {}, ConfigError, "names nothing"),
        ("stranger:number", {"number": 5}, ConfigError, "names 5, no function"),
        ("no_such_module:open", {}, ConfigError, "cannot be imported: No module named 'no_such_module'$"),
        ("stranger:open", {"open": raising}, StorageError, r"failed: KeyError\('endpoint'\)"),
        ("stranger:open", {"open": lambda *_: None}, ConfigError, "gave None, which is no StorageBackend"),
    ],
)
async def test_a_package_that_registers_nonsense_is_named(
    value: str,
    names: dict[str, object],
    error: type[CacheError],
    words: str,
    monkeypatch: pytest.MonkeyPatch,
):
    register(monkeypatch, value, **names)
    with pytest.raises(error, match=f"storage 'strange'.*{words}"):
        async with HybridCache.open(SPEC, config(storage="strange")):
            pass


@pytest.mark.asyncio
async def test_a_package_that_cannot_be_imported_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path):
    (tmp_path / "wrong_package.py").write_text("this is no Python")
    monkeypatch.syspath_prepend(tmp_path)
    register(monkeypatch, "wrong_package:open_backend")
    with pytest.raises(StorageError, match="importing storage 'strange' failed: SyntaxError"):
        async with HybridCache.open(SPEC, config(storage="strange")):
            pass


@pytest.mark.asyncio
async def test_nobody_can_take_the_place_of_an_engine_of_ours(monkeypatch: pytest.MonkeyPatch):
    entry = EntryPoint("memory", "stranger:open", "asynchicache.backends")
    monkeypatch.setattr("asynchicache.config.entry_points", lambda group: [entry])
    async with HybridCache.open(SPEC, config(storage="memory")) as cache:
        await Engine(cache).serve(PROMPT)


@pytest.mark.asyncio
@pytest.mark.parametrize(
    ("opening", "words"),
    [
        (hang, "took longer than 0.5 s"),
        (stubborn, "took longer than 0.5 s"),
        (burn, r"failed: OSError\('on fire'\)"),
        (give_up, "cancelled itself"),
        (lambda: asyncio.sleep(0), "failed: AttributeError"),  # it opens None
    ],
)
@pytest.mark.usefixtures("short_grace")
async def test_a_pool_that_cannot_be_opened_is_an_error(opening: Callable[[], Awaitable[object]], words: str):
    backend = StrangeBackend()
    async with HybridCache.open(SPEC, config(storage_limits=LIMITS)) as cache:
        backend.opening = opening
        with pytest.raises(StorageError, match=f"storage 'memory': opening pool 'kv' {words}"):
            await cache.attach_storage(backend)
        backend.opening = None
        await cache.attach_storage(backend)  # nothing was left behind
        await Engine(cache).serve(PROMPT)
        await cache.flush()
        assert (await Engine(cache).serve([*PROMPT, 1])).by_tier == {Tier.STORAGE: 20}


@pytest.mark.asyncio
@pytest.mark.parametrize("closing", [hang, stubborn, burn, give_up])
@pytest.mark.usefixtures("short_grace")
async def test_a_backend_that_cannot_close_does_not_keep_the_cache_open(
    closing: Callable[[], Awaitable[object]], monkeypatch: pytest.MonkeyPatch
):
    backend = StrangeBackend()
    backend.closing = closing
    register(monkeypatch, "stranger:open", open=lambda options, port: backend)
    async with HybridCache.open(
        SPEC, config(storage="strange", storage_limits=PoolLimits(closing=SOON))
    ) as cache:
        await Engine(cache).serve(PROMPT)
        assert await cache.detach_storage() is True
        await cache.attach_storage("strange")  # and once more, when the cache closes
    assert len(backend.store) == 6


@pytest.mark.asyncio
async def test_what_is_no_backend_is_refused():
    async with HybridCache.open(SPEC, config()) as cache:
        with pytest.raises(ConfigError, match="storage 5 is no StorageBackend: it lacks name, "):
            await cache.attach_storage(5)  # type: ignore[arg-type]
        with pytest.raises(ConfigError, match=r"Nameless.* is no StorageBackend: it lacks name$"):
            await cache.attach_storage(Nameless())  # type: ignore[arg-type]


class Nameless:
    """A backend but for its name."""

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:
        return await MemoryBackend(MemoryStore()).open_pool(binding)

    async def aclose(self) -> None:
        pass


@pytest.mark.parametrize("wrap", [lambda one: Latency(one, 0.0), lambda one: DividedStorage(one, {}, None)])
def test_wrappers_name_what_a_backend_lacks(wrap: Callable[[object], object]) -> None:
    with pytest.raises(ConfigError, match=r"is no StorageBackend: it lacks name$"):
        wrap(Nameless())


@pytest.mark.asyncio
async def test_options_that_nobody_would_read_are_refused():
    async with HybridCache.open(SPEC, config()) as cache:
        with pytest.raises(ConfigError, match="for a backend that is named"):
            await cache.attach_storage(MemoryBackend(MemoryStore()), {"capacity_bytes": 1})
        with pytest.raises(ConfigError, match="must be a table or a list, each of it a table"):
            await cache.attach_storage("memory", ["capacity_bytes"])  # type: ignore[arg-type]
        assert await cache.detach_storage() is False


@pytest.mark.asyncio
@pytest.mark.parametrize("option", ["weight_version", "salt"])
async def test_names_that_are_no_text_are_refused(option: str):
    named = config(**{option: "half a pair: \ud800"}, storage="memory")
    with pytest.raises(ConfigError, match="is no text: surrogates not allowed"):
        async with HybridCache.open(SPEC, named):
            pass


@pytest.mark.asyncio
async def test_a_namespace_that_is_no_text_is_refused():
    async with HybridCache.open(SPEC, config()) as cache:
        for names in ({"namespace": "\ud800"}, {"salt": "\udfff"}):
            with pytest.raises(ConfigError, match="is no text"):
                cache.request(PROMPT, **names)


@pytest.mark.asyncio
async def test_a_pool_that_storage_cannot_name_leaves_the_folder_unlocked(tmp_path: Path):
    keys = TensorSpec("keys", (0,), (1,), "uint8")
    spec = ModelSpec("m", 4, 1, (PoolSpec("kv", (keys,)),))
    folder = {"device_slots": {"kv": 4}, "storage": "file", "storage_options": {"path": str(tmp_path)}}
    with pytest.raises(ConfigError, match=r"shard '7/10+' of pool 'kv' must be"):
        async with HybridCache.open(spec, config(**folder, rank=7, ranks=10**40)):
            pass
    async with HybridCache.open(spec, config(**folder)) as cache:
        assert cache.statistics().storage["kv"].running == 0


class SuspendingBackend(MemoryBackend):
    """Its engines say that they never suspend, and hang in every `get`."""

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:  # type: ignore[override]
        engine = await super().open_pool(binding)
        engine.get = lambda keys, slots: hang()  # type: ignore[method-assign,assignment,return-value]
        return engine


@pytest.mark.asyncio
async def test_an_engine_that_suspends_though_it_says_it_never_does_has_failed():
    backend = SuspendingBackend(MemoryStore())
    async with HybridCache.open(SPEC, config(), storage=backend) as cache:
        await Engine(cache).serve(PROMPT)
        await cache.flush()
        hit = await Engine(cache).serve([*PROMPT, 1])
        assert (hit.tokens, hit.reason) == (0, MissReason.STORAGE_FAILED)
        assert cache.statistics().storage["kv"].get.errors > 0
        assert cache.verify() == []


@pytest.mark.parametrize("name", ["batch_pages", "batch_keys", "concurrency"])
@pytest.mark.parametrize("value", [0, -1, 1.5, "4", None, True])
def test_capabilities_that_let_no_call_through_are_refused(name: str, value: object):
    good = Capabilities(durable=False, checks=True)
    with pytest.raises(ConfigError, match=f"capability {name}"):
        replace(good, **{name: value})  # type: ignore[arg-type]
