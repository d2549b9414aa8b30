"""Functions of the CUDA driver by ctypes, with the types of their arguments: no compiler, and no torch.

A short call keeps the GIL: beside a thread that runs Python, to give it up and take it again costs more than
the call. A call that takes longer releases it.
"""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from ctypes import POINTER, Structure, addressof, byref, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from functools import cache
from itertools import repeat
from typing import Any, NamedTuple

from asynchicache.errors import CallRefusedError, DeviceError

_LIBRARY = "libcuda.so.1"
ARGUMENTS: dict[str, tuple[Any, ...]] = {
    "cuCtxGetCurrent": (POINTER(c_void_p),),
    "cuCtxGetStreamPriorityRange": (POINTER(c_int), POINTER(c_int)),
    "cuCtxSetCurrent": (c_void_p,),
    "cuDeviceGet": (POINTER(c_int), c_int),
    "cuDevicePrimaryCtxRetain": (POINTER(c_void_p), c_int),
    "cuEventCreate": (POINTER(c_void_p), c_uint),
    "cuEventQuery": (c_void_p,),
    "cuEventRecord": (c_void_p, c_void_p),  # event, stream
    "cuEventSynchronize": (c_void_p,),
    # function, blocks and threads by dimension, bytes of shared memory, stream, arguments, extra
    "cuLaunchKernel": (c_void_p, *(c_uint,) * 7, *(c_void_p,) * 3),
    "cuMemHostGetDevicePointer_v2": (POINTER(c_uint64), c_void_p, c_uint),
    "cuMemcpyAsync": (c_uint64, c_uint64, c_size_t, c_void_p),  # to, from, bytes, stream
    "cuMemcpyBatchAsync": (*(c_void_p,) * 3, c_size_t, *(c_void_p,) * 2, c_size_t, c_void_p, c_void_p),
    "cuMemcpyHtoDAsync_v2": (c_uint64, c_void_p, c_size_t, c_void_p),  # to, from, bytes, stream
    "cuModuleGetFunction": (POINTER(c_void_p), c_void_p, c_char_p),
    "cuModuleLoadData": (POINTER(c_void_p), c_char_p),
    "cuStreamCreateWithPriority": (POINTER(c_void_p), c_uint, c_int),
    "cuStreamWaitEvent": (c_void_p, c_void_p, c_uint),  # stream, event, flags
    "cuThreadExchangeStreamCaptureMode": (POINTER(c_int),),
}
"""By function, the types of its arguments (cuda.h), given once: ctypes then converts integers by itself."""

SHORT_BATCH = 64
"""Runs of a batch that the driver enqueues in some tens of microseconds at most."""
_SOURCE_ORDER_STREAM = 1  # CU_MEMCPY_SRC_ACCESS_ORDER_STREAM: sources are read in stream order
_EVENT_FLAGS = 1 | 2  # CU_EVENT_BLOCKING_SYNC, for threads that sleep, not spin; CU_EVENT_DISABLE_TIMING
_NON_BLOCKING = 1  # CU_STREAM_NON_BLOCKING: not ordered with the default stream
_RELAXED = 2  # CU_STREAM_CAPTURE_MODE_RELAXED
_NOT_READY = 600

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


class Libraries(NamedTuple):
    """The driver's library, for calls that release the GIL and for calls that keep it."""

    long: Any
    short: Any


class _Entered(threading.local):
    """Whether a thread is known to have a context."""

    yes = False


class CudaDriver:
    """Calls of the driver for one GPU.

    A thread without a context gets that of this GPU with its first call, and keeps it. Where that is not to
    be, the caller sets the thread's device around the call.
    """

    def __init__(self, index: int, libraries: Libraries) -> None:
        """
        Args:
            index: the GPU's number, as torch counts.
            libraries: others in tests.
        """
        self._index = index
        self._long, self._short = libraries
        self._entered = _Entered()
        self._attributes, self._first = _Attributes(_SOURCE_ORDER_STREAM), c_size_t(0)
        self._failed = c_size_t(0)
        self._of_batches = addressof(self._attributes), addressof(self._first), 1, addressof(self._failed)

    @classmethod
    def load(cls, index: int) -> CudaDriver:
        """
        Raises:
            DeviceError: there is no driver.
        """
        return cls(index, load_libraries())

    @property
    def has_batches(self) -> bool:
        """Whether the driver copies batches: from CUDA 12.8 on."""
        return hasattr(self._long, "cuMemcpyBatchAsync")

    def device_address(self, address: int) -> int:
        """The GPU's address of pinned host memory.

        Raises:
            DeviceError: the memory is not pinned, or was not mapped for the GPU.
        """
        self._enter()
        found = c_uint64()
        code = self._short.cuMemHostGetDevicePointer_v2(byref(found), address, 0)
        if code:
            raise _failure(f"cuMemHostGetDevicePointer of {address:#x}", code)
        return found.value

    # Copies

    def copy_batch(self, destinations: int, sources: int, sizes: int, count: int, stream: int) -> None:
        """Enqueue runs on a stream in one call; they have no order.

        Args:
            destinations, sources, sizes: addresses of int64 `[count]`, which are read before this returns.
            count: 1 at least.
            stream: its handle.

        Raises:
            DeviceError: the driver refused it.
        """
        if not self._entered.yes:
            self._enter()
        library = self._short if count <= SHORT_BATCH else self._long
        code = library.cuMemcpyBatchAsync(destinations, sources, sizes, count, *self._of_batches, stream)
        if code:
            raise _failure(f"cuMemcpyBatchAsync of {count} runs, at run {self._failed.value},", code)

    def upload(self, destination: int, source: int, nbytes: int, stream: int) -> None:
        """Copy pinned host memory to the GPU, in the order of a stream.

        Raises:
            DeviceError: the driver refused it.
        """
        self._enter()
        self._call("cuMemcpyHtoDAsync_v2", destination, source, nbytes, stream)

    def copy_singly(
        self, destinations: Sequence[int], sources: Sequence[int], sizes: Sequence[int], stream: int
    ) -> None:
        """Enqueue each run on a stream by its own call, in order: the baseline for batches and kernels.

        Raises:
            DeviceError: the driver refused one.
        """
        self._enter()
        # No loop in Python, so that the driver's calls are what is measured.
        failed = set(map(self._long.cuMemcpyAsync, destinations, sources, sizes, repeat(stream))) - {0}
        if failed:
            raise _failure(f"cuMemcpyAsync of {len(sizes)} runs", min(failed))

    # Kernels

    def load_function(self, binary: bytes, name: str) -> int:
        """A function of a module in machine code, loaded until the process ends.

        Raises:
            DeviceError: the driver refused it.
        """
        self._enter()
        module, function = c_void_p(), c_void_p()
        self._call("cuModuleLoadData", byref(module), binary)
        self._call("cuModuleGetFunction", byref(function), module, name.encode())
        return function.value or 0

    def launch(self, function: int, blocks: int, threads: int, extra: int, stream: int) -> None:
        """Launch a function on a stream.

        Args:
            function: as `load_function` returns it.
            blocks: how many.
            threads: of each.
            extra: the address of what `cuLaunchKernel` calls so, which names the packed arguments.
            stream: its handle.

        Raises:
            DeviceError: the driver refused it.
        """
        if not self._entered.yes:
            self._enter()
        code = self._short.cuLaunchKernel(function, blocks, 1, 1, threads, 1, 1, 0, stream, None, extra)
        if code:
            raise _failure(f"cuLaunchKernel of {blocks} blocks", code)

    # Streams and events, by their handles

    def make_stream(self, *, urgent: bool) -> int:
        """
        Args:
            urgent: its kernels go before those of other streams.

        Raises:
            DeviceError: the driver makes none, for instance after an error.
        """
        self._enter()
        least, greatest, stream = c_int(), c_int(), c_void_p()
        self._call("cuCtxGetStreamPriorityRange", byref(least), byref(greatest))
        priority = greatest if urgent else least
        self._call("cuStreamCreateWithPriority", byref(stream), _NON_BLOCKING, priority)
        assert stream.value is not None, "only the default stream is 0"
        return stream.value

    def make_event(self) -> int:
        """
        Raises:
            DeviceError: the driver makes none.
        """
        self._enter()
        event = c_void_p()
        self._call("cuEventCreate", byref(event), _EVENT_FLAGS)
        assert event.value is not None
        return event.value

    def record(self, event: int, stream: int) -> None:
        """
        Raises:
            DeviceError: the driver refused it.
        """
        if not self._entered.yes:
            self._enter()
        code = self._short.cuEventRecord(event, stream)
        if code:
            raise _failure("cuEventRecord", code)

    def wait(self, stream: int, event: int) -> None:
        """Make a stream wait for the latest record.

        Raises:
            DeviceError: the driver refused it.
        """
        self._enter()
        self._call("cuStreamWaitEvent", stream, event, 0)

    def query(self, event: int) -> bool:
        """Whether the latest record has been reached.

        Raises:
            DeviceError: something that the device did has failed.
        """
        self._enter()
        code: int = self._short.cuEventQuery(event)
        if code not in (0, _NOT_READY):
            raise _failure("cuEventQuery", code)
        return code == 0

    def synchronize(self, event: int) -> None:
        """Block this thread, without the GIL, until the latest record is reached.

        Raises:
            DeviceError: something that the device did has failed.
        """
        self._enter()
        code = self._long.cuEventSynchronize(event)
        if code:
            raise _failure("cuEventSynchronize", code)

    def _enter(self) -> None:
        if self._entered.yes:
            return
        current = c_void_p()
        self._call("cuCtxGetCurrent", byref(current))
        if current.value is None:
            device, primary = c_int(), c_void_p()
            self._call("cuDeviceGet", byref(device), self._index)
            # Torch keeps the primary context until the process ends, so one more reference changes nothing.
            self._call("cuDevicePrimaryCtxRetain", byref(primary), device)
            self._call("cuCtxSetCurrent", primary)
        self._entered.yes = True

    def _call(self, name: str, *arguments: object) -> None:
        code = getattr(self._short, name)(*arguments)
        if code:
            raise _failure(name, code)


@cache
def load_libraries() -> Libraries:
    """
    Raises:
        DeviceError: there is no driver.
    """
    try:
        return Libraries(_typed(ctypes.CDLL(_LIBRARY)), _typed(ctypes.PyDLL(_LIBRARY)))
    except OSError as error:
        raise DeviceError(f"{_LIBRARY} cannot be loaded: {error}") from error


def _typed(library: ctypes.CDLL) -> ctypes.CDLL:
    """Give the functions of a library the types of their arguments."""
    for name, types in ARGUMENTS.items():
        if hasattr(library, name):  # of batches, drivers before CUDA 12.8 have none
            getattr(library, name).argtypes = types
    return library


def _failure(call: str, code: int) -> DeviceError:
    kind = DeviceError if code in _ERRORS_OF_THE_CONTEXT else CallRefusedError
    return kind(f"{call} returned error {code}")


# Captures of engines


@contextmanager
def relaxed_capture_mode() -> Iterator[None]:
    """CUDA calls of the body do not break a graph capture of another thread.

    In the global mode, torch's default, a capture does not survive a call of any thread that could wait
    (it asks for an event, it pins memory), unless that thread's own mode is relaxed. Torch does this where
    it pins memory itself.
    """
    before = exchange_capture_mode(_RELAXED)
    try:
        yield
    finally:
        exchange_capture_mode(before)


def exchange_capture_mode(mode: int = _RELAXED) -> int:
    """Set this thread's mode; the one before. (CUDA: cuThreadExchangeStreamCaptureMode)"""
    try:
        exchange = load_libraries().short.cuThreadExchangeStreamCaptureMode
    except (DeviceError, AttributeError):  # no driver, hence no capture
        return mode
    swapped = c_int(mode)
    exchange(byref(swapped))
    return swapped.value
