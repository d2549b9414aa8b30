"""A rig for each driver, so that one suite states what all of them must do; and broken devices."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Iterator

import pytest
import pytest_asyncio
import torch

from asynchicache.streams.base import Device, Stream
from asynchicache.streams.cuda import CudaDevice
from asynchicache.streams.drivers import Driver, InlineDriver, SeededDriver, ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.testing.devices import LossyDevice

PATIENCE = 30.0
KINDS = [
    "threads",
    "inline",
    "seeded",
    pytest.param(
        "cuda",
        marks=[pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")],
    ),
]


class Rig:
    """A device, and the few things that tests do differently from driver to driver."""

    def __init__(self, kind: str, device: Device) -> None:
        self.kind = kind
        self.device = device

    def tensor(self, *values: int) -> torch.Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device.name)

    def enqueue(self, streams: list[Stream], build: Callable[[], object]) -> None:
        """Call `build`; where work can be held back, none of it runs before `build` has returned."""
        if self.kind == "inline":  # what becomes ready inside work waits for that work
            self.device.stream("opener").launch(build)
        elif self.kind == "threads":
            self._enqueue_behind_gate(streams, build)
        else:  # a seeded driver needs the loop to run on; CUDA cannot be held back
            build()

    def _enqueue_behind_gate(self, streams: list[Stream], build: Callable[[], object]) -> None:
        gate, opener, opened = threading.Event(), self.device.stream("opener"), self.device.event()
        opener.launch(gate.wait)
        opener.record(opened)
        for stream in streams:
            stream.wait_event(opened)
        try:
            build()
        finally:
            gate.set()

    async def finished(self, *streams: Stream) -> list[BaseException | None]:
        """What `notify` says of each stream, when everything enqueued so far has run."""
        return [await self._finished(stream) for stream in streams]

    async def _finished(self, stream: Stream) -> BaseException | None:
        loop = asyncio.get_running_loop()
        told: asyncio.Future[BaseException | None] = loop.create_future()
        notify(self.device, stream, lambda error: _call(loop, told.set_result, error))
        return await told


def notify(device: Device, stream: Stream, reached: Callable[[BaseException | None], object]) -> None:
    """Have the device call `reached` when all that is enqueued on `stream` now has run."""
    event = device.event()
    stream.record(event)
    device.notify(stream, event, reached)


def _call(loop: asyncio.AbstractEventLoop, call: Callable[..., object], *args: object) -> None:
    loop.call_soon_threadsafe(call, *args)


def make_device(kind: str) -> Device:
    if kind == "cuda":
        return CudaDevice(0)
    drivers: dict[str, Callable[[], Driver]] = {
        "threads": ThreadDriver,
        "inline": InlineDriver,
        "seeded": lambda: SeededDriver(asyncio.get_running_loop(), random.Random(7), mean_seconds=1e-7),
    }
    return EmulatedDevice(drivers[kind]())


@pytest_asyncio.fixture(params=KINDS)
async def rig(request: pytest.FixtureRequest) -> AsyncIterator[Rig]:
    made = Rig(request.param, make_device(request.param))
    yield made
    made.device.close()


@pytest.fixture
def lossy() -> type[LossyDevice]:
    return LossyDevice


class Stuck:
    """A thread-driven device, one of whose streams stands still until `free`."""

    def __init__(self) -> None:
        self.device = EmulatedDevice(ThreadDriver())
        self.stream = self.device.stream("stuck")
        self._gate = threading.Event()
        self.stream.launch(self._gate.wait)

    def free(self) -> None:
        """Let the stream go on, and wait until it has told of everything enqueued so far."""
        told = threading.Event()
        notify(self.device, self.stream, lambda error: told.set())
        self._gate.set()
        assert told.wait(PATIENCE)

    def close(self) -> None:
        self._gate.set()
        self.device.close()


@pytest.fixture
def stuck() -> Iterator[Stuck]:
    made = Stuck()
    yield made
    made.close()


class Releases:
    """Release hooks that write down how they were called."""

    def __init__(self) -> None:
        self.calls: list[tuple[object, BaseException | None]] = []
        self._changed = asyncio.Event()

    def hook(self, label: object) -> Callable[[BaseException | None], None]:
        def release(error: BaseException | None) -> None:
            self.calls.append((label, error))
            self._changed.set()

        return release

    async def wait(self, count: int) -> None:
        """Return once `count` hooks were called."""
        async with asyncio.timeout(PATIENCE):
            while len(self.calls) < count:
                self._changed.clear()
                await self._changed.wait()

    @property
    def labels(self) -> list[object]:
        return [label for label, _ in self.calls]

    @property
    def errors(self) -> set[BaseException | None]:
        return {error for _, error in self.calls}


@pytest.fixture
def releases() -> Releases:
    return Releases()
