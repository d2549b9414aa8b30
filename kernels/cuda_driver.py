"""Functions of the CUDA driver that torch does not offer, by ctypes: no compiler, and the GIL is released."""

from __future__ import annotations

import ctypes
from ctypes import Structure, byref, c_int, c_size_t, c_uint, c_uint64, c_void_p
from itertools import repeat
from typing import Any

import numpy as np
import torch

from asynchicache.errors import CallRefusedError, DeviceError
from asynchicache.kernels.batch import RunBatch

_LIBRARY = "libcuda.so.1"
_COPY_ARGUMENTS = (c_uint64, c_uint64, c_size_t, c_void_p)  # of cuMemcpyAsync: to, from, bytes, stream
_SOURCE_ORDER_STREAM = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in stream order

_ERRORS_OF_THE_CONTEXT = {3, 4, 46, 101, 201, 214, 226, 700, 702, *range(709, 721), 999}
"""Codes that every later call returns too (cuda.h, CUresult): the memory or the context is broken. Any other
says that this call was not carried out."""


class _Location(Structure):
    """CUmemLocation."""

    _fields_ = (("type", c_int), ("id", c_int))


class _Attributes(Structure):
    """CUmemcpyAttributes; zeros let the driver find out where the memory is."""

    _fields_ = (
        ("source_access_order", c_int),
        ("source_hint", _Location),
        ("destination_hint", _Location),
        ("flags", c_uint),
    )


class CudaDriver:
    """The driver's library. Its calls act on the calling thread's context: that of torch's current device."""

    def __init__(self, library: Any) -> None:
        """`library`: as `ctypes.CDLL` returns it; another one in tests."""
        self._library = library

    @classmethod
    def load(cls) -> CudaDriver:
        """
        Raises:
            DeviceError: there is no driver.
        """
        try:
            return cls(ctypes.CDLL(_LIBRARY))
        except OSError as error:
            raise DeviceError(f"{_LIBRARY} cannot be loaded: {error}") from error

    @property
    def has_batches(self) -> bool:
        """Whether the driver copies batches: from CUDA 12.8 on."""
        return hasattr(self._library, "cuMemcpyBatchAsync")

    def device_address(self, address: int) -> int:
        """The GPU's address of pinned host memory.

        Raises:
            DeviceError: the memory is not pinned, or was not mapped for the GPU.
        """
        self._enter_context()
        found = c_uint64()
        code = self._library.cuMemHostGetDevicePointer_v2(byref(found), c_void_p(address), c_uint(0))
        if code != 0:
            raise _failure(f"cuMemHostGetDevicePointer of {address:#x}", code)
        return found.value

    def copy_batch(self, batch: RunBatch) -> None:
        """Enqueue a batch on torch's current stream in one call; its copies have no order.

        Raises:
            DeviceError: the driver refused it.
        """
        if not len(batch.sizes):
            return
        self._enter_context()
        columns = [
            np.ascontiguousarray(column) for column in (batch.destinations, batch.sources, batch.sizes)
        ]
        attributes, first, failed = _Attributes(_SOURCE_ORDER_STREAM), c_size_t(0), c_size_t(0)
        code = self._library.cuMemcpyBatchAsync(
            *(c_void_p(column.ctypes.data) for column in columns),
            c_size_t(len(batch.sizes)),
            byref(attributes),
            byref(first),
            c_size_t(1),
            byref(failed),
            c_void_p(torch.cuda.current_stream().cuda_stream),
        )
        if code != 0:
            raise _failure(f"cuMemcpyBatchAsync of {len(batch.sizes)} runs, at run {failed.value},", code)

    def copy_singly(self, batch: RunBatch) -> None:
        """Enqueue each run of a batch on torch's current stream by its own call, in order: the baseline for
        batches and kernels.

        Raises:
            DeviceError: the driver refused one.
        """
        self._enter_context()
        function = self._library.cuMemcpyAsync
        function.argtypes, function.restype = _COPY_ARGUMENTS, c_int
        stream = torch.cuda.current_stream().cuda_stream
        columns = (column.tolist() for column in (batch.destinations, batch.sources, batch.sizes))
        # No loop in Python, so that the driver's calls are what is measured.
        failed = set(map(function, *columns, repeat(stream))) - {0}
        if failed:
            raise _failure(f"cuMemcpyAsync of {len(batch.sizes)} runs", min(failed))

    def _enter_context(self) -> None:
        """Give this thread a context if it has none, because it has not called torch's runtime yet.

        Raises:
            DeviceError: the driver refused it.
        """
        current = c_void_p()
        self._call("cuCtxGetCurrent", byref(current))
        if current.value is not None:
            return
        device, primary = c_int(), c_void_p()
        self._call("cuDeviceGet", byref(device), c_int(torch.cuda.current_device()))
        # Torch keeps the primary context until the process ends, so one more reference changes nothing.
        self._call("cuDevicePrimaryCtxRetain", byref(primary), device)
        self._call("cuCtxSetCurrent", primary)

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise _failure(name, code)


def _failure(call: str, code: int) -> DeviceError:
    kind = DeviceError if code in _ERRORS_OF_THE_CONTEXT else CallRefusedError
    return kind(f"{call} returned error {code}")
