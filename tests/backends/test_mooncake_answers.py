"""Answers of Mooncake's store without one code for each key: none is believed, and nobody waits for ever."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest

from asynchicache.backends.mooncake import MooncakeBackend, MooncakeOptions
from asynchicache.backends.mooncake import store as store_module
from asynchicache.backends.mooncake.codes import MooncakeCode
from asynchicache.errors import StorageError
from asynchicache.testing.backends import PoolUnderTest
from asynchicache.types import Outcome
from storage.mooncake_cluster import open_bench

pytestmark = pytest.mark.asyncio


class Counting:
    """A store that answers each call with as many codes as the test says, and moves nothing.

    Attributes:
        codes: how many codes a call for so many keys gets.
        code: which one.
        entered: a call has come.
        gate: calls go on once it is set.
    """

    def __init__(self) -> None:
        self.codes: Callable[[int], int] = lambda keys: keys
        self.code = MooncakeCode.OK
        self.entered = threading.Event()
        self.gate = threading.Event()
        self.gate.set()

    def register_buffer(self, buffer_ptr: int, size: int) -> int:
        return MooncakeCode.OK

    def unregister_buffer(self, buffer_ptr: int) -> int:
        return MooncakeCode.OK

    def batch_is_exist(self, keys: list[str], *_: object) -> list[int]:
        count = self.codes(len(keys))
        self.entered.set()
        self.gate.wait()
        return [self.code] * count

    batch_get_into_multi_buffers = batch_put_from_multi_buffers = batch_remove = batch_is_exist


@asynccontextmanager
async def opened(
    monkeypatch: pytest.MonkeyPatch, master: str = "127.0.0.1:1"
) -> AsyncIterator[tuple[Counting, PoolUnderTest]]:
    monkeypatch.setattr(store_module, "_replicate_config", lambda replicas: SimpleNamespace())
    store = Counting()
    backend = MooncakeBackend(MooncakeOptions(master=master), store)  # type: ignore[arg-type]
    try:
        yield store, await open_bench(backend)
    finally:
        store.gate.set()
        await backend.aclose()


CALLS: dict[str, Callable[[PoolUnderTest], Awaitable[object]]] = {
    "exists": lambda bench: bench.engine.exists(bench.keys(1, 2)),
    "get": lambda bench: bench.engine.get(bench.keys(1, 2), [0, 1]),
    "put": lambda bench: bench.engine.put(bench.keys(1, 2), [0, 1]),
    "delete": lambda bench: bench.engine.delete(bench.keys(1, 2)),
}


@pytest.mark.parametrize("codes", [0, 1, 3])
@pytest.mark.parametrize("call", CALLS)
async def test_too_few_or_too_many_codes_are_an_error(
    call: str, codes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with opened(monkeypatch) as (store, bench):
        store.codes = lambda keys: codes
        with pytest.raises(StorageError, match=f"{codes} codes for 2 keys"):
            await CALLS[call](bench)


async def test_who_waits_for_a_put_of_another_is_told_that_its_answer_was_too_short(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The keys that had no code were never settled, and their second writer hung."""
    async with opened(monkeypatch) as (store, bench):
        store.gate.clear()
        store.codes = lambda keys: 1  # enough for the second call, which writes one key itself
        first = asyncio.create_task(bench.put(bench.keys(1, 2), [0, 1]))
        await asyncio.to_thread(store.entered.wait)
        store.entered.clear()
        second = asyncio.create_task(bench.put(bench.keys(1, 2, 3), [2, 3, 4]))
        await asyncio.to_thread(store.entered.wait)  # so it has found the claims of the first
        store.gate.set()

        with pytest.raises(StorageError, match="1 codes for 2 keys"):
            await first
        assert await second == [Outcome.FAILED, Outcome.FAILED, Outcome.STORED]
        store.codes = lambda keys: keys
        assert await bench.put(bench.keys(1, 2), [0, 1]) == [Outcome.STORED] * 2


async def test_one_call_at_a_time_looks_for_the_master_that_leads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each looks for 4 seconds, in a thread that others wait for."""
    async with opened(monkeypatch, "etcd://127.0.0.1:1") as (store, bench):
        store.code = MooncakeCode.RPC_FAIL
        with pytest.raises(StorageError, match="RPC_FAIL"):
            await CALLS["exists"](bench)
        store.gate.clear()
        store.entered.clear()
        looking = asyncio.create_task(bench.get(bench.keys(1, 2), [0, 1]))
        await asyncio.to_thread(store.entered.wait)
        with pytest.raises(StorageError, match="RPC_FAIL"):
            await CALLS["exists"](bench)  # else it would wait for the gate
        assert await bench.put(bench.keys(1, 2), [2, 3]) == [Outcome.FAILED] * 2
        store.code = MooncakeCode.OK
        store.gate.set()
        await looking
        assert await bench.put(bench.keys(1, 2), [2, 3]) == [Outcome.STORED] * 2
