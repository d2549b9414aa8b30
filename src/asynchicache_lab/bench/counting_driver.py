"""A CUDA driver that counts and copies nothing: for the host's share of a load, without a GPU.

Its functions are the C library's, called with the types of the driver's arguments: what is converted, and
whether the interpreter's lock is handed over, is as with the real one. Torch says that it sees a GPU.
"""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import torch

from asynchicache import cuda_driver
from asynchicache.cuda_driver import CudaDriver, Libraries
from asynchicache.kernels.batch import BatchCopy
from asynchicache.kernels.items import PoolItems
from asynchicache.kernels.select import CopyMethods, copy_by_driver
from asynchicache.pools.device import DevicePool
from asynchicache.specs import PoolSpec


class CountedCalls:
    """Calls of the driver: by name, and how many released the interpreter's lock."""

    def __init__(self) -> None:
        self.names: Counter[str] = Counter()
        self.released = 0

    def libraries(self) -> Libraries:
        return Libraries(*(self._library(kind, kind is ctypes.CDLL) for kind in (ctypes.CDLL, ctypes.PyDLL)))

    def _library(self, kind: type[ctypes.CDLL], releases: bool) -> SimpleNamespace:
        library, handles, found = kind(None), count(0x1000), SimpleNamespace()
        for name, types in cuda_driver.ARGUMENTS.items():
            function = library["getpid"]  # takes whatever it is given, and has nothing to do
            function.argtypes = types
            function.restype = partial(self._ended, name, releases)
            setattr(found, name, function)
        for name in ("cuCtxGetCurrent", "cuEventCreate", "cuStreamCreateWithPriority"):
            made = ctypes.PYFUNCTYPE(ctypes.c_int, *cuda_driver.ARGUMENTS[name])
            setattr(found, name, made(partial(_give, handles)))
        return found

    def _ended(self, name: str, releases: bool, result: int) -> int:
        self.names[name] += 1
        self.released += releases
        return 0


def _give(handles: Iterator[int], found: Any, *_: object) -> int:
    found[0] = next(handles)
    return 0


@contextmanager
def counted_cuda() -> Iterator[CountedCalls]:
    """Within, `CudaDevice(0)` is a device of this driver."""
    calls = CountedCalls()
    libraries = calls.libraries()
    torchs: dict[str, Any] = {
        "is_available": lambda: True,
        "device_count": lambda: 1,
        "device": lambda index: nullcontext(),
        "set_device": lambda index: None,
        "stream": lambda stream: nullcontext(),
        "ExternalStream": lambda handle, device: SimpleNamespace(
            cuda_stream=handle, synchronize=lambda: None, query=lambda: True
        ),
    }
    with ExitStack() as stack:
        stack.enter_context(patch.multiple(torch.cuda, **torchs))
        stack.enter_context(patch.object(cuda_driver, "load_libraries", lambda: libraries))
        yield calls


class PagesOfNoGpu(DevicePool):
    """Memory of the host that says it is a GPU's."""

    def __init__(self, spec: PoolSpec, page_size: int, slots: int) -> None:
        super().__init__(spec, page_size, slots)
        self.device = torch.device("cuda:0")


def batches_only(items: PoolItems, *, pinned: bool) -> CopyMethods:
    """The driver's batches, for a pool whose memory is not pinned either."""
    copy: BatchCopy = partial(copy_by_driver, CudaDriver.load(0))
    return CopyMethods(batch=copy)
