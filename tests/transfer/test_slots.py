"""The ring of slot numbers: one upload a transfer, and no number overwritten while it is read."""

from __future__ import annotations

import ctypes
import random
from types import SimpleNamespace

import numpy as np
import pytest
import torch

from asynchicache.cuda_driver import CudaDriver
from asynchicache.errors import CallRefusedError, DeviceError
from asynchicache.transfer import slots
from asynchicache.transfer.slots import SlotRing

SIZE = 20


class _Event:
    reached = False

    def query(self) -> bool:
        return self.reached


class _Broken(_Event):
    def query(self) -> bool:
        raise DeviceError("cuda:0 failed")


class _Silent(_Event):
    def query(self) -> bool:
        raise CallRefusedError("cuEventQuery returned error 2")


@pytest.fixture
def uploads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int, int, int]]:
    """Where both rings are in host memory, what was uploaded."""
    done: list[tuple[int, int, int, int]] = []

    def upload(*upload: int) -> None:
        ctypes.memmove(*upload[:3])
        done.append(upload)

    stream = SimpleNamespace(synchronize=lambda: None)
    played = SimpleNamespace(
        int64=torch.int64,
        empty=lambda number, **_: torch.zeros(number, dtype=torch.int64),
        cuda=SimpleNamespace(current_stream=lambda device: stream),
    )
    monkeypatch.setattr(slots, "torch", played)
    monkeypatch.setattr(CudaDriver, "load", lambda index: SimpleNamespace(upload=upload))
    return done


def _ring() -> SlotRing:
    return SlotRing(torch.device("cuda:0"), SIZE)


def _at(address: int, count: int) -> list[int]:
    return (ctypes.c_int64 * count).from_address(address)[:]


def test_the_slots_of_all_pools_go_up_in_one_call(uploads: list[tuple[int, int, int, int]]) -> None:
    ring = _ring()
    assert ring.reserve(3) is not None
    region = ring.reserve(7)
    assert region is not None
    columns = [np.arange(count) + 10 * count for count in (3, 1, 3)]

    addresses = region.upload(columns, 7)

    assert [_at(address, len(column)) for address, column in zip(addresses, columns, strict=True)] == [
        column.tolist() for column in columns
    ]
    assert [(nbytes, stream) for _, _, nbytes, stream in uploads] == [(7 * 8, 7)]


def test_what_is_read_is_not_overwritten(uploads: list[tuple[int, int, int, int]]) -> None:
    """Whatever ends in whatever order, and however often the ring goes round."""
    rng, ring, live, refused = random.Random(3), _ring(), [], 0
    for number in range(400):
        count = rng.randint(1, 12)
        region = ring.reserve(count)
        if region is None:
            refused += 1
            assert live, "an empty ring has room"
        else:
            (address,) = region.upload([np.full(count, number)], 0)
            live.append((region, address, [number] * count, _Event()))
        assert all(_at(address, len(numbers)) == numbers for _, address, numbers, _ in live)
        while live and (region is None or rng.random() < 0.6):
            ended, _, _, event = live.pop(rng.randrange(len(live)))
            ended.end(event)
            event.reached = True
            if region is None and rng.random() < 0.5:
                break
    assert 20 < refused < 380
    assert len(uploads) == 400 - refused


def test_room_comes_back_when_the_last_work_has_run(uploads: list[tuple[int, int, int, int]]) -> None:
    ring, event = _ring(), _Event()
    region = ring.reserve(SIZE)
    assert region is not None
    assert ring.reserve(1) is None, "it is not even enqueued"
    region.end(event)
    assert ring.reserve(1) is None
    event.reached = True
    again = ring.reserve(SIZE)
    assert again is not None
    again.end(None)  # nothing was enqueued
    last = ring.reserve(SIZE)
    assert last is not None
    last.end(_Broken())
    assert ring.reserve(SIZE) is not None, "a device that failed reads nothing"
    assert ring.reserve(SIZE + 1) is None


def test_a_region_of_which_the_driver_does_not_say_that_it_is_over_is_kept(
    uploads: list[tuple[int, int, int, int]],
) -> None:
    ring = _ring()
    region = ring.reserve(SIZE)
    assert region is not None
    region.end(_Silent())

    assert ring.reserve(1) is None


def test_without_memory_for_a_ring_the_error_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(number: int, **_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(CudaDriver, "load", lambda index: None)
    monkeypatch.setattr(slots, "torch", SimpleNamespace(int64=torch.int64, empty=refuse))

    with pytest.raises(DeviceError, match="no room for 20 slot numbers: CUDA out of memory"):
        _ring()
