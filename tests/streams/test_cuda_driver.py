"""Calls of the CUDA driver; a library with the prototypes of `cuda.h` refuses what the driver does."""

from __future__ import annotations

import ctypes
import threading
from ctypes import CFUNCTYPE, POINTER, c_int, c_size_t, c_uint, c_uint64, c_void_p

import numpy as np
import pytest
import torch

from asynchicache import cuda_driver
from asynchicache.cuda_driver import SHORT_BATCH, CudaDriver, Libraries, _Attributes
from asynchicache.errors import CallRefusedError, DeviceError

INVALID_VALUE, INVALID_CONTEXT = 1, 201
STREAM, PRIMARY = 0x51, 0xC0
PINNED = range(0x1000, 0x3000), range(0x3000, 0x5000)  # two registrations, one behind the other
DEVICE = range(0x9000, 0xB000)


class _Library:
    """`libcuda` as of CUDA 12.8, with one GPU, whose number is 1.

    A context is a thread's own. A copy must not leave the registration, or the allocation, that it begins in.
    """

    def __init__(self) -> None:
        self.batches: list[tuple[list[int], list[int], list[int]]] = []
        self.singles: list[tuple[int, int, int]] = []
        self._current = threading.local()
        self.cuCtxGetCurrent = CFUNCTYPE(c_int, POINTER(c_void_p))(self._get_current)
        self.cuDeviceGet = CFUNCTYPE(c_int, POINTER(c_int), c_int)(self._get_device)
        self.cuDevicePrimaryCtxRetain = CFUNCTYPE(c_int, POINTER(c_void_p), c_int)(self._retain_primary)
        self.cuCtxSetCurrent = CFUNCTYPE(c_int, c_void_p)(self._set_current)
        self.cuMemHostGetDevicePointer_v2 = CFUNCTYPE(c_int, POINTER(c_uint64), c_void_p, c_uint)(
            self._device_pointer
        )
        self.cuMemcpyBatchAsync = CFUNCTYPE(
            c_int, *(c_void_p,) * 3, c_size_t, *(c_void_p,) * 2, c_size_t, *(c_void_p,) * 2
        )(self._copy_batch)
        self.cuMemcpyAsync = CFUNCTYPE(c_int, c_uint64, c_uint64, c_size_t, c_void_p)(self._copy)

    def _get_current(self, context) -> int:
        context[0] = getattr(self._current, "context", None)
        return 0

    def _get_device(self, device, ordinal: int) -> int:
        device[0] = 1
        return 0 if ordinal == 0 else 101  # CUDA_ERROR_INVALID_DEVICE

    def _retain_primary(self, context, device: int) -> int:
        context[0] = PRIMARY
        return 0 if device == 1 else 101

    def _set_current(self, context: int) -> int:
        self._current.context = context
        return 0 if context == PRIMARY else INVALID_CONTEXT

    def _has_context(self) -> bool:
        return getattr(self._current, "context", None) == PRIMARY

    def _device_pointer(self, found, address: int, flags: int) -> int:
        if not self._has_context():
            return INVALID_CONTEXT
        found[0] = address
        return 0 if flags == 0 and any(address in run for run in PINNED) else INVALID_VALUE

    def _copy_batch(self, to, of, sizes, count, attributes, first, number, failed, stream) -> int:
        at = c_size_t.from_address(failed)
        at.value = 2**64 - 1
        if not self._has_context():
            return INVALID_CONTEXT
        order, index = (c_uint.from_address(pointer).value for pointer in (attributes, first))
        if stream != STREAM or not 0 < number <= count or not 1 <= order <= 3 or index != 0:
            return INVALID_VALUE
        read = [(c_uint64 * count).from_address(pointer)[:] for pointer in (to, of, sizes)]
        for at.value, (*addresses, size) in enumerate(zip(*read, strict=True)):
            if not all(_within_one(address, size) for address in addresses):
                return INVALID_VALUE
        self.batches.append((read[0], read[1], read[2]))
        return 0

    def _copy(self, to: int, of: int, size: int, stream: int) -> int:
        if not self._has_context():
            return INVALID_CONTEXT
        if stream != STREAM or not all(_within_one(address, size) for address in (to, of)):
            return INVALID_VALUE
        self.singles.append((to, of, size))
        return 0


def _within_one(address: int, size: int) -> bool:
    return size > 0 and any(
        address in memory and address + size - 1 in memory for memory in (*PINNED, DEVICE)
    )


@pytest.fixture
def library() -> _Library:
    return _Library()


def _driver(library: _Library, short: _Library | None = None, index: int = 0) -> CudaDriver:
    return CudaDriver(index, Libraries(library, short or library))


def _copy(driver: CudaDriver, *runs: tuple[int, int, int]) -> None:
    """Runs of (source, destination, bytes)."""
    sources, destinations, sizes = np.array(runs, np.int64).T.copy()
    driver.copy_batch(*(one.ctypes.data for one in (destinations, sources, sizes)), len(runs), STREAM)


def test_attributes_lie_as_in_the_header() -> None:
    offsets = [getattr(_Attributes, name).offset for name, _ in _Attributes._fields_]
    assert (offsets, ctypes.sizeof(_Attributes)) == ([0, 4, 12, 20], 24)


def test_a_batch_is_one_call_of_the_driver(library: _Library) -> None:
    driver = _driver(library)

    _copy(driver, (0x1000, 0x9000, 5), (0x2000, 0x9800, 6))

    assert library.batches == [([0x9000, 0x9800], [0x1000, 0x2000], [5, 6])]
    assert driver.has_batches
    assert driver.device_address(0x1008) == 0x1008


def test_a_thread_that_has_made_no_other_call_can_copy(library: _Library) -> None:
    driver, failures = _driver(library), []

    def copy() -> None:
        try:
            _copy(driver, (0x1000, 0x9000, 5))
        except DeviceError as error:
            failures.append(error)

    for _ in range(2):
        thread = threading.Thread(target=copy)
        thread.start()
        thread.join()

    assert failures == []
    assert len(library.batches) == 2


def test_what_the_driver_refuses_is_an_error(library: _Library) -> None:
    driver = _driver(library)

    with pytest.raises(DeviceError, match="of 2 runs, at run 1, returned error 1"):
        _copy(driver, (0x1000, 0x9000, 5), (0x2FFF, 0x9800, 2))
    with pytest.raises(DeviceError, match="cuMemHostGetDevicePointer of 0x5 returned error 1"):
        driver.device_address(5)
    library._current.context = None
    with pytest.raises(DeviceError, match="cuDeviceGet returned error 101"):
        _driver(library, index=9).device_address(0x1000)


def test_a_short_batch_keeps_the_gil_and_a_thread_enters_its_context_once(library: _Library) -> None:
    short, asked = _Library(), []
    short.cuCtxGetCurrent = lambda context: asked.append(context) or 0
    library._current.context = short._current.context = PRIMARY
    driver = _driver(library, short)

    for runs in (1, SHORT_BATCH, SHORT_BATCH + 1):
        _copy(driver, *[(0x1000 + 4 * run, 0x9000 + 4 * run, 4) for run in range(runs)])

    assert [len(sizes) for _, _, sizes in short.batches] == [1, SHORT_BATCH]
    assert [len(sizes) for _, _, sizes in library.batches] == [SHORT_BATCH + 1]
    assert len(asked) == 1


def test_types_are_given_to_a_library_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By them a call converts Python's integers, and refuses what is none. Here of the C library."""
    monkeypatch.setitem(cuda_driver.ARGUMENTS, "strlen", (c_void_p,))
    typed = cuda_driver._typed(ctypes.CDLL(None))
    assert typed.strlen.argtypes == (c_void_p,)
    with pytest.raises(ctypes.ArgumentError):
        typed.strlen(1.5)


@pytest.mark.parametrize(("code", "refused"), [(1, True), (2, True), (801, True), (700, False), (719, False)])
def test_only_an_error_of_the_context_is_not_one_of_the_call(
    library: _Library, code: int, refused: bool
) -> None:
    library.cuMemcpyBatchAsync = lambda *_: code

    with pytest.raises(DeviceError, match=f"error {code}$") as caught:
        _copy(_driver(library), (0x1000, 0x9000, 5))
    assert isinstance(caught.value, CallRefusedError) is refused


def test_single_copies_are_a_call_each(library: _Library) -> None:
    driver = _driver(library)

    driver.copy_singly([0x9000, 0x9800], [0x1000, 0x2000], [5, 6], STREAM)

    assert library.singles == [(0x9000, 0x1000, 5), (0x9800, 0x2000, 6)]
    assert library.batches == []
    with pytest.raises(DeviceError, match="cuMemcpyAsync of 2 runs returned error 1"):
        driver.copy_singly([0x9800, 0x9000], [0x2FFF, 0x1000], [2, 5], STREAM)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a driver")
def test_without_a_driver_the_error_says_so() -> None:
    with pytest.raises(DeviceError, match=r"libcuda\.so\.1 cannot be loaded"):
        CudaDriver.load(0)
