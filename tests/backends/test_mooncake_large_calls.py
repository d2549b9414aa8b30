"""Large calls of Mooncake's client wait for each other, and for nobody who hangs."""

from __future__ import annotations

import math
import threading
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import pytest

from asynchicache.backends.mooncake import MooncakeBackend, MooncakeOptions
from asynchicache.backends.mooncake import large_calls as large_calls_module
from asynchicache.backends.mooncake import store as store_module
from asynchicache.backends.mooncake.large_calls import LARGE_BYTES, LargeCallLimit
from asynchicache.backends.mooncake.store import MooncakeClient

HALF = LARGE_BYTES // 2
FOREVER = 60.0  # seconds; nothing that works waits so long


class Slow:
    """A store whose calls end when the test says so.

    Attributes:
        log: the first key of each call that began.
    """

    def __init__(self) -> None:
        self.log: list[str] = []
        self.may_end = threading.Event()
        self._changed = threading.Condition()

    def batch_get_into_multi_buffers(self, keys: list[str], *_: Any) -> list[int]:
        with self._changed:
            self.log.append(keys[0])
            self._changed.notify_all()
        assert self.may_end.wait(FOREVER)
        return [1] * len(keys)

    batch_put_from_multi_buffers = batch_get_into_multi_buffers

    def wait_for(self, calls: int) -> None:
        with self._changed:
            assert self._changed.wait_for(lambda: len(self.log) >= calls, FOREVER)


class Seats(threading.BoundedSemaphore):
    """A semaphore that tells that somebody has come to it."""

    def __init__(self, value: int) -> None:
        super().__init__(value)
        self.asked: list[threading.Event] = [threading.Event() for _ in range(8)]
        self._number = iter(self.asked)

    def acquire(self, blocking: bool = True, timeout: float | None = None) -> bool:
        next(self._number).set()
        return super().acquire(blocking, timeout)


@pytest.fixture(autouse=True)
def without_mooncake(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(store_module, "_replicate_config", lambda replicas: SimpleNamespace())


@contextmanager
def calls_of(client: MooncakeClient, store: Slow) -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as threads:
        try:
            yield threads
        finally:
            store.may_end.set()


def patient(client: MooncakeClient, monkeypatch: pytest.MonkeyPatch) -> Seats:
    """The turns of the client's reads last for as long as the test."""
    monkeypatch.setattr(large_calls_module, "threading", SimpleNamespace(BoundedSemaphore=Seats))
    client._reads = LargeCallLimit(max_wait=2 * FOREVER)
    seats = client._reads._free
    assert isinstance(seats, Seats)
    return seats


def read(threads: ThreadPoolExecutor, client: MooncakeClient, key: str, size: int) -> Future[list[int]]:
    return threads.submit(client.get, [key], [[0, 0]], [[size, size]])


def test_a_third_large_read_waits_and_small_ones_and_writes_do_not(monkeypatch: pytest.MonkeyPatch) -> None:
    store = Slow()
    client = MooncakeClient(store, None, 1, LARGE_BYTES)  # type: ignore[arg-type]
    seats = patient(client, monkeypatch)
    with calls_of(client, store) as threads:
        first = [read(threads, client, "large", HALF) for _ in range(2)]
        store.wait_for(2)
        third = read(threads, client, "third", HALF)
        assert seats.asked[2].wait(FOREVER)
        small = read(threads, client, "small", HALF - 1)
        store.wait_for(3)
        assert store.log == ["large", "large", "small"]

        store.may_end.set()
        assert [call.result(FOREVER) for call in (*first, third, small)] == [[1]] * 4
        assert client.put(["write"], [[0]], [[LARGE_BYTES]]) == [1]
    assert store.log[-2:] == ["third", "write"]


def test_writes_do_not_wait_for_reads() -> None:
    store = Slow()
    client = MooncakeClient(store, None, 1, LARGE_BYTES)  # type: ignore[arg-type]
    client._reads._patience = client._writes._patience = 2 * FOREVER
    with calls_of(client, store) as threads:
        for _ in range(2):
            read(threads, client, "read", HALF)
        store.wait_for(2)
        threads.submit(client.put, ["write"], [[0]], [[LARGE_BYTES]])
        store.wait_for(3)
    assert store.log == ["read", "read", "write"]


def test_calls_that_hang_hold_up_nobody_for_long() -> None:
    store = Slow()
    client = MooncakeClient(store, None, 1, LARGE_BYTES)  # type: ignore[arg-type]
    client._reads = LargeCallLimit(max_wait=1e-3)
    with calls_of(client, store) as threads:
        for _ in range(4):
            read(threads, client, "large", HALF)
        store.wait_for(4)


def test_a_call_that_raises_gives_its_turn_back() -> None:
    limit = LargeCallLimit(max_wait=1e-3)
    for _ in range(3):
        with pytest.raises(ZeroDivisionError), limit.limited(LARGE_BYTES):
            raise ZeroDivisionError
    assert limit._free.acquire(blocking=False)
    assert limit._free.acquire(blocking=False)


def test_who_went_without_a_turn_gives_none_back() -> None:
    limit = LargeCallLimit(max_wait=1e-3)
    with limit.limited(LARGE_BYTES), limit.limited(LARGE_BYTES):
        with limit.limited(LARGE_BYTES):
            pass
        assert not limit._free.acquire(blocking=False)


@pytest.mark.asyncio
@pytest.mark.parametrize(("protocol", "large"), [("tcp", LARGE_BYTES), ("rdma", math.inf)])
async def test_turns_are_for_tcp(protocol: str, large: float) -> None:
    """Over RDMA a network card moves the bytes, which one call does not fill."""
    store = Slow()
    backend = MooncakeBackend(MooncakeOptions(master="127.0.0.1:1", protocol=protocol), store)  # type: ignore[arg-type]
    client = await backend._client()
    assert client._reads._large_bytes == client._writes._large_bytes == large
    await backend.aclose()
