"""The parts of `torch.cuda` and of the driver that streams and events need, kept to CUDA's rules.

Work runs at once here, so that nothing is said of order; that needs a GPU. What can be seen is who is asked
for what, on which thread and device, and what becomes of errors.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from ctypes import CFUNCTYPE, PYFUNCTYPE, c_int, c_int64, memmove
from functools import partial
from itertools import count
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from asynchicache import cuda_driver
from asynchicache.cuda_driver import Libraries
from asynchicache.streams import cuda

OUT_OF_MEMORY, INVALID_CONTEXT, INVALID_HANDLE, ILLEGAL_ADDRESS = 2, 201, 400, 700


class PlayedCuda:
    """Two GPUs. A call makes a context on the thread's current device, 0 at first, as the runtime's do.

    Attributes:
        contexts: devices that have one.
        calls_left: that succeed; no later one does, as after an error of a kernel.
        refused: functions of the driver that do nothing, for want of memory.
        asked: names of calls and contexts, in their order.
        released: names of driver calls for which the GIL was released.
        runs: of batches, how many.
        made: events of the driver.
        priorities: of the driver's streams, by handle.
    """

    def __init__(self) -> None:
        self.contexts: set[int] = set()
        self.calls_left = sys.maxsize
        self.refused: set[str] = set()
        self.asked: list[str] = []  # threads append at once, and could not count
        self.released: list[str] = []
        self.runs: list[int] = []
        self.made = 0
        self.priorities: dict[int, int] = {}
        self.devices: dict[int, int] = {}  # of streams, and of the driver's events, by handle
        self._handles = count(0x5000)
        self._thread = threading.local()

    @property
    def counted(self) -> Counter[str]:
        """How often what was asked, so far."""
        return Counter(self.asked)

    @property
    def current(self) -> int:
        return getattr(self._thread, "device", 0)

    @current.setter
    def current(self, index: int) -> None:
        self._thread.device = index

    def call(self, name: str = "other") -> None:
        self.asked.append(name)
        self.contexts.add(self.current)
        self.calls_left -= 1
        if self.calls_left < 0:
            raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def device(self, index: int) -> AbstractContextManager[None]:
        self.asked.append("device")
        return self.on(index)

    @property
    def context(self) -> int | None:
        """The thread's, as the driver sees it."""
        return getattr(self._thread, "context", None)

    @contextmanager
    def on(self, index: int) -> Iterator[None]:
        if index != self.current:  # cudaSetDevice makes the context
            self._thread.context = index
        before, self.current = self.current, index
        try:
            yield
        finally:
            self.current = before  # as `_maybe_exchange_device`, without a context

    def current_stream(self) -> PlayedStream | None:
        return getattr(self._thread, "streams", {}).get(self.current)

    def stream(self, stream: PlayedStream) -> AbstractContextManager[None]:
        self.asked.append("stream")
        return self._with_stream(stream)

    @contextmanager
    def _with_stream(self, stream: PlayedStream) -> Iterator[None]:
        streams = self._thread.__dict__.setdefault("streams", {})
        device, before = self.current, streams.get(stream.device.index)
        if device != stream.device.index:  # torch sets the device, there and back
            self.contexts.add(device)
        self.current = stream.device.index
        streams[self.current] = stream
        try:
            yield
        finally:
            streams[self.current], self.current = before, device

    def is_current_stream_capturing(self) -> bool:
        self.call()
        stream = self.current_stream()
        return stream is not None and stream.captured

    @contextmanager
    def graph(self, graph: object, stream: PlayedStream, capture_error_mode: str) -> Iterator[None]:
        assert capture_error_mode == "thread_local"
        self.call()  # synchronizes the current device
        with self.stream(stream):
            stream.captured = True
            yield
            stream.captured = False
            if stream.invalidated:
                raise RuntimeError("CUDA error: operation failed due to a previous error during capture")

    def set_device(self, index: int) -> None:
        self.current = self._thread.context = index
        self.contexts.add(index)

    # The driver

    def _driver_call(self, name: str) -> int:
        """The code of a call that needs a context."""
        if self.context is None:
            return INVALID_CONTEXT
        try:
            self.call(name)
        except RuntimeError:
            return ILLEGAL_ADDRESS
        return 0

    def cuCtxGetCurrent(self, found) -> int:  # noqa: N802
        found[0] = None if self.context is None else 0xC0 + self.context
        return 0

    def cuCtxSetCurrent(self, context: int) -> int:  # noqa: N802
        self._thread.context = context - 0xC0
        return 0

    def cuDeviceGet(self, found, ordinal: int) -> int:  # noqa: N802
        found[0] = ordinal
        return 0

    def cuDevicePrimaryCtxRetain(self, found, device: int) -> int:  # noqa: N802
        found[0] = 0xC0 + device
        return 0

    def cuCtxGetStreamPriorityRange(self, least, greatest) -> int:  # noqa: N802
        least[0], greatest[0] = 0, -5
        return 0

    def cuStreamCreateWithPriority(self, found, flags: int, priority: int) -> int:  # noqa: N802
        assert flags == 1, "not ordered with the default stream"
        found[0] = handle = next(self._handles)
        self.priorities[handle], self.devices[handle] = priority, self.context
        return self._driver_call("other")

    def cuEventCreate(self, found, flags: int) -> int:  # noqa: N802
        assert flags == 3, "blocking, without a time"
        self.made += 1
        found[0] = handle = next(self._handles)
        self.devices[handle] = self.context
        return self._driver_call("other")

    def cuEventRecord(self, event: int, stream: int) -> int:  # noqa: N802
        if self.devices.get(event, -1) != self.devices[stream]:
            return INVALID_HANDLE
        return self._driver_call("record")

    def cuStreamWaitEvent(self, stream: int, event: int, flags: int) -> int:  # noqa: N802
        assert flags == 0
        if event not in self.devices:
            return INVALID_HANDLE
        return self._driver_call("wait")

    def cuEventQuery(self, event: int) -> int:  # noqa: N802
        return self._driver_call("query") if event in self.devices else INVALID_HANDLE

    def cuEventSynchronize(self, event: int) -> int:  # noqa: N802
        return self._driver_call("synchronize") if event in self.devices else INVALID_HANDLE

    def cuMemcpyBatchAsync(self, to, of, sizes, count, attributes, first, number, failed, stream) -> int:  # noqa: N802
        assert stream in self.devices
        columns = ((c_int64 * count).from_address(column) for column in (to, of, sizes))
        for run in zip(*columns, strict=True):
            memmove(*run)
        self.runs.append(count)
        return self._driver_call("batch")

    def cuLaunchKernel(self, function, *launch) -> int:  # noqa: N802
        assert launch[-3] in self.devices, "the stream"
        return self._driver_call("kernel")

    def cuThreadExchangeStreamCaptureMode(self, mode) -> int:  # noqa: N802
        mode[0], self._thread.mode = self.mode, mode[0]
        return 0

    @property
    def mode(self) -> int:
        """The thread's way with captures of others: 0 is global, 2 relaxed."""
        return getattr(self._thread, "mode", 0)

    def libraries(self) -> Libraries:
        """With C's own conversion of arguments."""
        long, short = SimpleNamespace(), SimpleNamespace()
        for name, types in cuda_driver.ARGUMENTS.items():
            if hasattr(self, name):
                setattr(short, name, PYFUNCTYPE(c_int, *types)(partial(self._short, name)))
                setattr(long, name, CFUNCTYPE(c_int, *types)(partial(self._long, name)))
        return Libraries(long, short)

    def _short(self, name: str, *arguments: object) -> int:
        return OUT_OF_MEMORY if name in self.refused else getattr(self, name)(*arguments)

    def _long(self, name: str, *arguments: object) -> int:
        self.released.append(name)
        return self._short(name, *arguments)

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it in the place of `torch.cuda`'s."""
        monkeypatch.setattr(cuda, "_idle", defaultdict(deque))
        PlayedStream.runtime = PlayedEvent.runtime = self
        libraries = self.libraries()
        monkeypatch.setattr(cuda_driver, "load_libraries", lambda: libraries)
        names = ("device", "set_device", "stream", "current_stream", "graph", "is_current_stream_capturing")
        replaced: dict[str, object] = {name: getattr(self, name) for name in names}
        replaced |= {"is_available": lambda: True, "device_count": lambda: 2}
        replaced |= {"Stream": PlayedStream, "Event": PlayedEvent}
        replaced["ExternalStream"] = lambda handle, device: PlayedStream(device, handle)
        replaced["CUDAGraph"] = lambda: SimpleNamespace(replay=self.call)
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)


class PlayedStream:
    """`torch.cuda.Stream`, which has `POOL` for each device and hands them out in turns
    (c10/cuda/CUDAStream.cpp, kStreamsPerPool)."""

    POOL = 32
    runtime: PlayedCuda
    handed: ClassVar[Counter[int]] = Counter()

    def __init__(self, index: int, handle: int = 0) -> None:
        self.device = SimpleNamespace(index=index)
        if not handle:
            with self.runtime.on(index):
                self.runtime.call()
            handle = 1 + index * self.POOL + self.handed[index] % self.POOL
            self.handed[index] += 1
        self.cuda_stream = handle
        self.runtime.devices[handle] = index
        self.captured = self.invalidated = False

    def synchronize(self) -> None:
        with self.runtime.on(self.device.index):
            self.runtime.call("drain")

    def query(self) -> bool:
        with self.runtime.on(self.device.index):
            self.runtime.call()
        return True

    def wait_event(self, event: PlayedEvent) -> None:
        event.wait(self)


class PlayedEvent:
    """`torch.cuda.Event`, as `c10/cuda/CUDAEvent.h` has it: its first record makes it."""

    runtime: PlayedCuda

    def __init__(self, *, blocking: bool, external: bool = False) -> None:
        assert blocking
        self._external = external
        self._device: int | None = None

    def record(self, stream: PlayedStream) -> None:
        assert self._device in (None, stream.device.index), "an event stays on its device"
        with self.runtime.on(stream.device.index):
            self.runtime.call("record")
        self._device = stream.device.index

    def wait(self, stream: PlayedStream) -> None:
        if self._device is None:
            return
        with self.runtime.on(stream.device.index):
            self.runtime.call("wait")
        if stream.captured and not self._external:
            stream.invalidated = True
            raise RuntimeError("CUDA error: dependency created on uncaptured work in another stream")

    def query(self) -> bool:
        if self._device is not None:
            self.runtime.call("query")
        return True

    def synchronize(self) -> None:
        if self._device is not None:
            self.runtime.call("synchronize")
