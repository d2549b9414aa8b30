"""The part of `torch.cuda` that streams and events need, kept to the CUDA runtime's rules.

Work runs at once here, so that nothing is said of order; that needs a GPU. What can be seen is who is asked
for what, on which thread and device, and what becomes of errors.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter, defaultdict, deque
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from types import SimpleNamespace
from typing import ClassVar

import pytest
import torch

from asynchicache.streams import cuda


class PlayedCuda:
    """Two GPUs. A call makes a context on the thread's current device, 0 at first, as the runtime's do.

    Attributes:
        contexts: devices that have one.
        calls_left: that succeed; no later one does, as after an error of a kernel.
        asked: names of calls and contexts, in their order.
        made: events.
    """

    def __init__(self) -> None:
        self.contexts: set[int] = set()
        self.calls_left = sys.maxsize
        self.asked: list[str] = []  # threads append at once, and could not count
        self.made = 0
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

    @contextmanager
    def on(self, index: int) -> Iterator[None]:
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

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Put it in the place of `torch.cuda`'s."""
        monkeypatch.setattr(cuda, "_idle", defaultdict(deque))
        PlayedStream.runtime = PlayedEvent.runtime = self
        names = ("device", "stream", "current_stream", "graph", "is_current_stream_capturing")
        replaced: dict[str, object] = {name: getattr(self, name) for name in names}
        replaced |= {"is_available": lambda: True, "device_count": lambda: 2}
        replaced |= {"Stream": PlayedStream, "Event": PlayedEvent}
        replaced["CUDAGraph"] = lambda: SimpleNamespace(replay=self.call)
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)


class PlayedStream:
    """`torch.cuda.Stream`, which has `POOL` for each device and hands them out in turns
    (c10/cuda/CUDAStream.cpp, kStreamsPerPool)."""

    POOL = 32
    runtime: PlayedCuda
    handed: ClassVar[Counter[int]] = Counter()

    def __init__(self, index: int) -> None:
        with self.runtime.on(index):
            self.runtime.call()
        self.device = SimpleNamespace(index=index)
        self.cuda_stream = 1 + index * self.POOL + self.handed[index] % self.POOL
        self.handed[index] += 1
        self.captured = self.invalidated = False

    def synchronize(self) -> None:
        with self.runtime.on(self.device.index):
            self.runtime.call()

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
        self.runtime.made += 1
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
