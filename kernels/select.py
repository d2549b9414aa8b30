"""Which methods of copying pages a device has."""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from typing import Protocol, TypeAlias

import torch

from asynchicache.cuda_driver import CudaDriver
from asynchicache.errors import DeviceError
from asynchicache.kernels.batch import BatchCopy, RunBatch, memmove_batch
from asynchicache.kernels.items import PoolItems
from asynchicache.kernels.pointers import shared_address
from asynchicache.kernels.reference import ReferenceKernels

logger = logging.getLogger(__name__)


class PageKernels(Protocol):
    """Copies many pages of one pool by their slots."""

    def copy(
        self, rows: range, host_slots: int, device_slots: int, pages: int, *, to_device: bool, stream: int
    ) -> None:
        """Copy pages whose slots are known to exist and to have no duplicates.

        Args:
            rows: which rows of the pool's items.
            host_slots, device_slots: addresses on the device of int64 `[pages]`.
            pages: how many.
            to_device: from the host, or to it.
            stream: handle of the one to run on.
        """
        ...


@dataclass(frozen=True, slots=True)
class CopyMethods:
    """Methods besides plain copies.

    Attributes:
        kernels: copies many pages by their slots, or None.
        batch: copies batches of runs, or None.
        lacking: why a method is None, by its name.
    """

    kernels: PageKernels | None = None
    batch: BatchCopy | None = None
    lacking: dict[str, str] = field(default_factory=dict)


FindMethods: TypeAlias = Callable[..., CopyMethods]
"""As `copy_methods`."""


def copy_methods(items: PoolItems, *, pinned: bool) -> CopyMethods:
    """The methods of the device that holds `items`; what a GPU lacks is warned of once.

    Args:
        items: the pool's.
        pinned: whether host memory is pinned; on a GPU only plain copies can use other memory.
    """
    device = items.device[0].device
    if device.type == "cpu":
        return CopyMethods(ReferenceKernels(items), memmove_batch)
    if not pinned:
        reason = "host memory is not pinned"
        return CopyMethods(lacking={"kernel": reason, "batch": reason})
    lacking: dict[str, str] = {}
    found = CopyMethods(*_gpu_methods(items, device.index or 0, lacking), lacking)
    for path, reason in lacking.items():
        _warn(path, reason)
    return found


@cache
def _warn(path: str, reason: str) -> None:
    logger.warning("no copies by %s: %s", path, reason)


def _gpu_methods(
    items: PoolItems, index: int, lacking: dict[str, str]
) -> tuple[PageKernels | None, BatchCopy | None]:
    try:
        driver = CudaDriver.load(index)
        for tensor in items.host:
            shared_address(tensor.data_ptr(), driver)
    except DeviceError as error:
        lacking |= dict.fromkeys(("kernel", "batch"), str(error))
        return None, None
    if not driver.has_batches:
        lacking["batch"] = "the driver is older than CUDA 12.8; a newer one has them"
    batch = partial(copy_by_driver, driver) if driver.has_batches else None
    return _triton_kernels(items, driver, lacking), batch


def copy_by_driver(driver: CudaDriver, batch: RunBatch, stream: int) -> None:
    """Enqueue a batch on a stream in one call; with its first argument, a `BatchCopy`."""
    table, start, stop, _, _ = batch
    to = table.address + 8 * start
    driver.copy_batch(to, to + table.step, to + 2 * table.step, stop - start, stream)


def compile_kernels(index: int) -> None:
    """Compile what `copy_methods` loads for a GPU, if it can be; blocks for seconds, once on a machine."""
    if not torch.cuda.is_available():
        return
    with suppress(ImportError, DeviceError):  # said when they are to be loaded
        from asynchicache.kernels.triton_copy import compiled

        for to_device in (False, True):
            compiled(_capability(index), to_device)


def _capability(index: int) -> int:
    major, minor = torch.cuda.get_device_capability(index)
    return 10 * major + minor


def _triton_kernels(items: PoolItems, driver: CudaDriver, lacking: dict[str, str]) -> PageKernels | None:
    try:
        from asynchicache.kernels.triton_copy import CudaLaunch, TritonKernels

        index = items.device[0].device.index or 0
        with torch.cuda.device(index):
            return TritonKernels(items, driver, CudaLaunch(driver, _capability(index)))
    except ImportError as error:  # Triton is optional
        lacking["kernel"] = f"Triton cannot be imported: {error}; pip install triton"
    except DeviceError as error:
        lacking["kernel"] = str(error)
    return None
