"""Verbs that an engine may have: asked for through every wrapper, also when they are younger than it."""

from __future__ import annotations

import ast
import random
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path

import pytest
import torch

import asynchicache.storage.protocol as protocol
import asynchicache_lab
from asynchicache.errors import StorageError
from asynchicache.hashing import ObjectKey
from asynchicache.ports import AsyncioPort
from asynchicache.storage.binding import SlotBinding
from asynchicache.storage.divided import DividedPool, DividedStorage, StoredPart
from asynchicache.storage.guard import GuardedPool
from asynchicache.storage.protocol import (
    OPTIONAL_VERBS,
    OptionalVerbs,
    PoolBinding,
    PoolEngine,
    StorageBackend,
    has_verb,
)
from asynchicache.testing.backends import OPTIONAL_CALLS, fingerprint_of, slab_of
from asynchicache.testing.faults import CALLS, FaultRates, Faulty, Latency, Persistent
from asynchicache.types import Outcome
from asynchicache_lab.bench.storage.controller import WatchedBackend
from house.sources import nodes, parse, shipped
from storage.plain_engine import PlainEngine

SOURCE = Path(protocol.__file__).parents[1]
NEW = "describe"
"""A verb that is not there yet."""


class Required(PlainEngine):
    """The verbs that every engine has, and nothing else; notes its calls."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[str] = []

    async def exists(self, keys: Sequence[ObjectKey]) -> bytearray:
        self.asked.append("exists")
        return await super().exists(keys)


class Everything(Required):
    """Every optional verb too, and the one that is not there yet."""

    full = degraded = True

    async def touch(self, keys: Sequence[ObjectKey]) -> None:
        self.asked.append("touch")

    async def confirm(self, keys: Sequence[ObjectKey]) -> bytearray:
        self.asked.append("confirm")
        return bytearray(len(keys))

    async def claim(self, keys: Sequence[ObjectKey], seconds: float) -> list[Outcome]:
        self.asked.append("claim")
        return [Outcome.MISS] * len(keys)

    async def label(self, label: bytes) -> None:
        self.asked.append("label")

    async def leaving(self, pages: int) -> list[ObjectKey]:
        self.asked.append("leaving")
        return []

    async def describe(self) -> str:
        self.asked.append(NEW)
        return "whole"


class NeverEvicts(Everything):
    evicts = False


class ByDelegation:
    """Somebody's wrapper that looks everything up in what it wraps."""

    def __init__(self, engine: PoolEngine) -> None:
        self._engine = engine

    def __getattr__(self, name: str) -> object:
        return getattr(self._engine, name)


class Single:
    """A backend with one engine."""

    name = "single"

    def __init__(self, engine: PoolEngine) -> None:
        self._engine = engine

    async def open_pool(self, binding: PoolBinding) -> PoolEngine:
        return self._engine

    async def aclose(self) -> None:
        pass


class Rows:
    """Slots of a pool, as `storage.divided` sees them; nothing is read from them here."""

    layout = slab_of("kv", 5000, 8).layout

    def items(self, name: str) -> torch.Tensor:
        return torch.empty(0)


def binding() -> SlotBinding:
    return SlotBinding(slab_of("kv", 5000, 8), fingerprint_of("w"))


def divided(backend: StorageBackend) -> StorageBackend:
    parts = [StoredPart(binding(), Rows(), {})] * 2
    return DividedStorage(backend, {"kv": DividedPool(Rows(), parts)}, AsyncioPort(threads=1))


def faulty(backend: StorageBackend, **rates: float) -> Faulty:
    return Faulty(backend, FaultRates(**rates), random.Random(0))


WRAPPERS: dict[str, Callable[[StorageBackend], StorageBackend]] = {
    "none": lambda backend: backend,
    "persistent": Persistent,
    "slow": lambda backend: Latency(backend, 0.0),
    "faulty": faulty,
    "timed": WatchedBackend,
    "all": lambda backend: WatchedBackend(Persistent(Latency(faulty(backend), 0.0))),
}
AROUND = pytest.mark.parametrize("around", WRAPPERS.values(), ids=WRAPPERS)
AROUND_OR_DIVIDED = pytest.mark.parametrize(
    "around", [*WRAPPERS.values(), divided, lambda backend: Latency(divided(backend), 0.0)]
)


async def opened(around: Callable[[StorageBackend], StorageBackend], engine: PoolEngine) -> PoolEngine:
    return await around(Single(engine)).open_pool(binding())


@AROUND_OR_DIVIDED
@pytest.mark.asyncio
async def test_an_engine_is_asked_for_the_verbs_that_it_has(
    around: Callable[[StorageBackend], StorageBackend],
) -> None:
    engine = Everything()
    verbs = OptionalVerbs(await opened(around, engine))
    keys = [binding().key(bytes(40))]

    assert await verbs.confirm(keys) == b"\0"
    await verbs.touch(keys)

    assert list(dict.fromkeys(engine.asked)) == ["confirm", "touch"]
    assert (verbs.evicts, verbs.full, verbs.degraded) == (True, True, True)
    assert not OptionalVerbs(await opened(around, NeverEvicts())).evicts


@AROUND_OR_DIVIDED
@pytest.mark.asyncio
async def test_an_engine_without_them_works_and_a_wrapper_does_not_pretend_that_it_has_them(
    around: Callable[[StorageBackend], StorageBackend],
) -> None:
    engine = Required()
    wrapped = await opened(around, engine)
    guard = GuardedPool(wrapped, binding(), AsyncioPort(threads=1))
    keys = [binding().key(bytes(40))]

    assert (await guard.exists(keys, fresh=True)).outcomes == [Outcome.HIT]
    await guard.touch(keys)

    assert set(engine.asked) == {"exists"}
    assert not guard.touchable
    assert (guard.statistics().touch.pages, guard.statistics().full) == (0, False)
    await guard.aclose()


@pytest.mark.asyncio
async def test_a_verb_counts_however_an_engine_comes_by_it() -> None:
    engine = Everything()
    guard = GuardedPool(ByDelegation(engine), binding(), AsyncioPort(threads=1))

    assert (await guard.exists([binding().key(bytes(40))], fresh=True)).outcomes == [Outcome.MISS]
    assert guard.touchable
    engine.touch = None  # type: ignore[assignment]  # none today
    assert not OptionalVerbs(ByDelegation(engine)).evicts
    await guard.aclose()


@AROUND
@pytest.mark.asyncio
async def test_a_new_verb_passes_through_wrappers_that_do_not_know_it(
    around: Callable[[StorageBackend], StorageBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(protocol, "OPTIONAL_VERBS", (*OPTIONAL_VERBS, NEW))
    engine = Everything()
    wrapped = await opened(around, engine)

    describe: Callable[[], Awaitable[str]] = getattr(wrapped, NEW)
    assert await describe() == "whole"
    assert engine.asked == [NEW]
    assert not has_verb(await opened(around, Required()), NEW)


@pytest.mark.asyncio
async def test_faults_strike_every_verb() -> None:
    keys = [binding().key(bytes(40))] * 2
    for verb in OPTIONAL_VERBS:
        engine = Everything()
        faults = faulty(Single(engine), raises=1.0)
        wrapped = OptionalVerbs(await faults.open_pool(binding()))
        with pytest.raises(StorageError, match="made to raise"):
            await OPTIONAL_CALLS[verb](wrapped, keys)
        faults.rates = FaultRates(fail=1.0)
        with pytest.raises(StorageError, match=f"{verb} has no other word"):
            await OPTIONAL_CALLS[verb](wrapped, keys)
        assert engine.asked == []
        faults.rates = FaultRates(lie=1.0)
        answer = await OPTIONAL_CALLS[verb](wrapped, keys)
        assert answer == {"confirm": b"\1\1", "claim": [Outcome.MISS] * 2, "leaving": []}.get(verb)
    assert set(OPTIONAL_VERBS) < set(CALLS)


def test_the_conformance_suite_calls_each_verb_and_has_a_test_of_it() -> None:
    suite = ast.parse((SOURCE / "testing" / "backends.py").read_text())
    tested = {
        node.attr
        for node in ast.walk(suite)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "OptionalVerbs(bench.engine)"
    }

    assert set(OPTIONAL_CALLS) == set(OPTIONAL_VERBS)
    assert set(OPTIONAL_VERBS) <= tested


def names_a_verb(tree: ast.Module) -> bool:
    """Whether a module knows an optional verb of engines: defines it, or asks for it."""
    for node in nodes(tree):
        if isinstance(node, ast.AsyncFunctionDef) and node.name in OPTIONAL_VERBS:
            if "ObjectKey" in ast.unparse(node.args):
                return True
        elif isinstance(node, ast.Name | ast.alias):
            name = node.id if isinstance(node, ast.Name) else node.name
            if name in ("OptionalVerbs", "has_verb"):
                return True
    return False


def test_few_files_know_a_verb() -> None:
    """A new one is written into these, and into the engines that have it."""
    core = {f"storage/{name}.py" for name in ("protocol", "guard", "divided", "chain")}
    core |= {"testing/backends.py", "chaos/storage.py"}  # ask for each; and claims, which no memory needs
    roots = [SOURCE, *map(Path, asynchicache_lab.__path__)]
    files = [
        (path.relative_to(root).as_posix(), text) for root in roots for path, text in shipped(root).items()
    ]

    found = {name for name, text in files if names_a_verb(parse(text))}

    assert {name for name in found if not name.startswith("backends/")} == core
