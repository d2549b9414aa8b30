"""Which ways of copying a GPU is found to have, by what its driver says."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from asynchicache.cuda_driver import CudaDriver
from asynchicache.errors import DeviceError
from asynchicache.kernels import select
from asynchicache.kernels.select import copy_methods

ITEMS = SimpleNamespace(
    host=[torch.zeros(1, 2, 1, 8)], device=[SimpleNamespace(device=torch.device("cuda:0"))]
)


class _Driver:
    """Of a GPU that calls host memory by addresses `offset` further on, and has no more to say."""

    def __init__(self, offset: int, *, has_batches: bool = True) -> None:
        self.has_batches = has_batches
        self._offset = offset

    def device_address(self, address: int) -> int:
        return address + self._offset

    def copy_batch(self, batch: object) -> None:
        raise AssertionError


@pytest.fixture(autouse=True)
def _no_triton(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "_triton_kernels", lambda items, driver, lacking: object())
    select._warn.cache_clear()


def _load(monkeypatch: pytest.MonkeyPatch, driver: _Driver | DeviceError) -> None:
    def load(index: int) -> _Driver:
        if isinstance(driver, DeviceError):
            raise driver
        return driver

    monkeypatch.setattr(CudaDriver, "load", load)


def test_a_gpu_that_calls_host_memory_as_the_host_does_has_them_all(monkeypatch: pytest.MonkeyPatch) -> None:
    _load(monkeypatch, _Driver(0))

    found = copy_methods(ITEMS, pinned=True)

    assert found.lacking == {}
    assert None not in (found.batch, found.kernels)


@pytest.mark.parametrize(
    ("driver", "reason"),
    [(_Driver(4096), "by another address"), (DeviceError("cannot be loaded"), "cannot be loaded")],
)
def test_one_that_does_not_is_left_with_plain_copies(
    driver: _Driver | DeviceError, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    _load(monkeypatch, driver)

    found = copy_methods(ITEMS, pinned=True)

    assert (found.batch, found.kernels) == (None, None)
    assert set(found.lacking) == {"batch", "kernel"}
    assert all(reason in said for said in found.lacking.values())


def test_an_old_driver_has_no_batches_which_is_said_once(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Not for each pool, nor for each length that is measured."""
    _load(monkeypatch, _Driver(0, has_batches=False))
    why = "the driver is older than CUDA 12.8; a newer one has them"

    for _ in range(2):
        found = copy_methods(ITEMS, pinned=True)

    assert (found.batch, found.lacking) == (None, {"batch": why})
    assert found.kernels is not None
    assert [record.getMessage() for record in caplog.records] == [f"no copies by batch: {why}"]


def test_memory_that_is_not_pinned_is_no_matter_of_the_driver(monkeypatch: pytest.MonkeyPatch) -> None:
    _load(monkeypatch, DeviceError("cannot be loaded"))

    assert set(copy_methods(ITEMS, pinned=False).lacking.values()) == {"host memory is not pinned"}
