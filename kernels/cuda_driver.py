"""Functions of the CUDA driver that torch does not offer, by ctypes: no compiler.

A short call keeps the GIL: beside a thread that runs Python, to give it up and take it again costs more than
the call. A call that takes longer releases it.
"""

from __future__ import annotations

import ctypes
import threading
from ctypes import POINTER, Structure, addressof, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from itertools import repeat
from typing import Any

import numpy as np
import torch

from asynchicache.errors import CallRefusedError, DeviceError
from asynchicache.kernels.batch import RunBatch

_LIBRARY = "libcuda.so.1"
_ARGUMENTS = {
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxSetCurrent": (c_void_p,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    # function, blocks and threads by dimension, bytes of shared memory, stream, arguments, extra
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, *(c_void_p,) * 3),
    "cuMemHostGetDevicePointer_v2": (POINTER(c_uint64), c_void_p, c_uint),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),  # to, from, bytes, stream
    "cuMemcpyBatchAsync": (*(c_void_p,) * 3, c_size_t, *(c_void_p,) * 2, c_size_t, c_void_p, c_void_p),
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
}
"""By function, the types of its arguments (cuda.h), given once: ctypes then converts integers by itself."""

SHORT_BATCH = 64
"""Runs of a batch that the driver enqueues in some tens of microseconds at most."""
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
    """The driver's library. Its calls act on the calling thread's context: that of torch's current device.

    A thread that has called it stays on that device.
    """

    def __init__(self, library: Any, short: Any = None) -> None:
        """
        Args:
            library: as `ctypes.CDLL` returns it; another one in tests.
            short: the same, as `ctypes.PyDLL` returns it, for short calls. Default: `library`.
        """
        self._library, self._short = _typed(library), _typed(library if short is None else short)
        self._thread = threading.local()
        self._attributes, self._first = _Attributes(_SOURCE_ORDER_STREAM), c_size_t(0)
        self._constant = addressof(self._attributes), addressof(self._first), 1

    @classmethod
    def load(cls) -> CudaDriver:
        """
        Raises:
            DeviceError: there is no driver.
        """
        try:
            return cls(ctypes.CDLL(_LIBRARY), ctypes.PyDLL(_LIBRARY))
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
        code = self._short.cuMemHostGetDevicePointer_v2(byref(found), address, 0)
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
        failed = c_size_t(0)
        library = self._short if len(batch.sizes) <= SHORT_BATCH else self._library
        code = library.cuMemcpyBatchAsync(
            *(column.ctypes.data for column in columns),
            len(batch.sizes),
            *self._constant,
            byref(failed),
            torch.cuda.current_stream().cuda_stream,
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
        stream = torch.cuda.current_stream().cuda_stream
        columns = (column.tolist() for column in (batch.destinations, batch.sources, batch.sizes))
        # No loop in Python, so that the driver's calls are what is measured.
        failed = set(map(function, *columns, repeat(stream))) - {0}
        if failed:
            raise _failure(f"cuMemcpyAsync of {len(batch.sizes)} runs", min(failed))

    def load_function(self, binary: bytes, name: str) -> int:
        """A function of a module in machine code, loaded on torch's current device until the process ends.

        Raises:
            DeviceError: the driver refused it.
        """
        self._enter_context()
        module, function = c_void_p(), c_void_p()
        self._call("cuModuleLoadData", byref(module), binary)
        self._call("cuModuleGetFunction", byref(function), module, name.encode())
        return function.value or 0

    def launch(self, function: int, blocks: int, threads: int, extra: int) -> None:
        """Launch a function on torch's current stream.

        Args:
            function: as `load_function` returns it.
            blocks: how many.
            threads: of each.
            extra: the address of what `cuLaunchKernel` calls so, which names the packed arguments.

        Raises:
            DeviceError: the driver refused it.
        """
        self._enter_context()
        stream = torch.cuda.current_stream().cuda_stream
        code = self._short.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, None, extra)
        if code != 0:
            raise _failure(f"cuLaunchKernel of {blocks} blocks", code)

    def _enter_context(self) -> None:
        """Give this thread a context if it has none, because it has not called torch's runtime yet.

        Raises:
            DeviceError: the driver refused it.
        """
        if getattr(self._thread, "entered", False):
            return
        current = c_void_p()
        self._call("cuCtxGetCurrent", byref(current))
        if current.value is None:
            device, primary = c_int(), c_void_p()
            self._call("cuDeviceGet", byref(device), torch.cuda.current_device())
            # Torch keeps the primary context until the process ends, so one more reference changes nothing.
            self._call("cuDevicePrimaryCtxRetain", byref(primary), device)
            self._call("cuCtxSetCurrent", primary)
        self._thread.entered = True

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._library, name)(*arguments)
        if code != 0:
            raise _failure(name, code)


def _typed(library: Any) -> Any:
    """Give the functions of a library that has them without it the types of their arguments."""
    if isinstance(library, ctypes.CDLL):
        for name, types in _ARGUMENTS.items():
            if hasattr(library, name):  # of batches, drivers before CUDA 12.8 have none
                getattr(library, name).argtypes = types
    return library


def _failure(call: str, code: int) -> DeviceError:
    kind = DeviceError if code in _ERRORS_OF_THE_CONTEXT else CallRefusedError
    return kind(f"{call} returned error {code}")
