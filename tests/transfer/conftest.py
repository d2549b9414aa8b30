"""A small hybrid model's pools, transfers on every kind of emulated device, and gates to hold copies back."""

from __future__ import annotations

import asyncio
import random
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass, field

import pytest
import torch

from asynchicache.pools.device import DevicePool
from asynchicache.pools.host import HostPool
from asynchicache.ports import AsyncioPort
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.streams.base import Event
from asynchicache.streams.drivers import InlineDriver, SeededDriver, ThreadDriver
from asynchicache.streams.emulated import EmulatedDevice, EmulatedStream
from asynchicache.streams.reactor import CompletionReactor
from asynchicache.transfer.copies import PoolMemory
from asynchicache.transfer.local import AHEAD_BYTES, LocalTransfers
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.types import PoolTransfer, Tier, trailing_pages

LAYERS = 6  # layer 5 has no cache
PAGE_SIZE = 3
KV = PoolSpec(
    "kv",
    (
        TensorSpec("keys", (1, 2, 4), (3, 5), "bfloat16"),
        TensorSpec("values", (1, 2, 4), (3, 7), "bfloat16"),
        TensorSpec("scales", (2,), (), "float32"),
    ),
)
DSA = PoolSpec("dsa", (TensorSpec("index_keys", (4,), (5,), "uint8"),), slots_of="kv")
MAMBA = PoolSpec(
    "mamba",
    (
        TensorSpec("conv", (0, 3), (7, 3), "bfloat16"),
        TensorSpec("recurrent", (0, 3), (2, 3, 5), "float32"),
    ),
    coverage=trailing_pages(1),
    per_token=False,
)
SLOTS = {"kv": (12, 10), "dsa": (12, 10), "mamba": (5, 4)}  # on the device, on the host

Contents = dict[tuple[str, str, Tier], torch.Tensor]
"""Bytes by pool, tensor and tier, `[layers, slots, item_bytes]`."""


class Gate:
    """An event that is recorded, and reached when the gate is opened. For thread drivers only."""

    def __init__(self, device: EmulatedDevice) -> None:
        self._opened = threading.Event()
        stream = device.stream("gate")
        stream.launch(self._opened.wait)
        self.event: Event = device.event()
        stream.record(self.event)

    def open(self) -> None:
        self._opened.set()


class _SteppedStream(EmulatedStream):
    """Runs a launch for each permit."""

    __slots__ = ("permits",)

    def launch(self, work: Callable[[], object]) -> None:
        def stepped() -> None:
            self.permits.acquire()
            work()

        super().launch(stepped)


class SteppedDevice(EmulatedDevice):
    """Its streams for loads run one launch, and so one layer group, for each `step`."""

    def __init__(self) -> None:
        super().__init__(ThreadDriver())
        self.permits = threading.Semaphore(0)

    def stream(self, name: str, *, urgent: bool = False) -> EmulatedStream:
        if name != Direction.LOAD.value:
            return super().stream(name)
        stream = _SteppedStream(self._machine, name)
        stream.permits = self.permits
        return stream

    def step(self, launches: int = 1) -> None:
        self.permits.release(launches)


@dataclass
class Rig:
    """Transfers and what they stand on, with shorthands."""

    device: EmulatedDevice
    transfers: LocalTransfers
    reactor: CompletionReactor
    memories: Mapping[str, PoolMemory]
    outcomes: list[BaseException | None] = field(default_factory=list)
    _gates: list[Gate] = field(default_factory=list)

    def done(self, error: BaseException | None) -> None:
        self.outcomes.append(error)

    def gate(self) -> Gate:
        self._gates.append(Gate(self.device))
        return self._gates[-1]

    def let_go(self) -> None:
        """Hold nothing back any more, so that a test that failed in between can be torn down."""
        for gate in self._gates:
            gate.open()
        if isinstance(self.device, SteppedDevice):
            self.device.step(1000)

    def contents(self) -> Contents:
        """A copy of every byte."""
        found: Contents = {}
        for pool, memory in self.memories.items():
            for tensor in memory.device.spec.tensors:
                found[pool, tensor.name, Tier.DEVICE] = memory.device.items(tensor.name).clone()
                found[pool, tensor.name, Tier.HOST] = memory.host.items(tensor.name).flatten(2).clone()
        return found

    def randomize(self, seed: int) -> None:
        """Fill both tiers with random bytes, NaNs among them."""
        generator = torch.Generator().manual_seed(seed)
        for memory in self.memories.values():
            for tensor in memory.device.spec.tensors:
                for items in (memory.device.items(tensor.name), memory.host.items(tensor.name)):
                    items.copy_(torch.randint(0, 256, items.shape, dtype=torch.uint8, generator=generator))


OpenRig = Callable[..., AbstractAsyncContextManager[Rig]]


def make_memories() -> dict[str, PoolMemory]:
    return {
        spec.name: PoolMemory(
            DevicePool(spec, PAGE_SIZE, SLOTS[spec.name][0], poison=True),
            HostPool(spec, PAGE_SIZE, SLOTS[spec.name][1], pin=False),
        )
        for spec in (KV, DSA, MAMBA)
    }


def _device(driver: str, seed: int) -> EmulatedDevice:
    match driver:
        case "thread":
            return EmulatedDevice(ThreadDriver())
        case "inline":
            return EmulatedDevice(InlineDriver())
        case "stepped":
            return SteppedDevice()
    loop = asyncio.get_running_loop()
    return EmulatedDevice(SeededDriver(loop, random.Random(seed), mean_seconds=1e-5))


@asynccontextmanager
async def _open_rig(
    driver: str = "thread", *, seed: int = 0, group_bytes: int = 1, ahead_bytes: int = AHEAD_BYTES
) -> AsyncIterator[Rig]:
    port = AsyncioPort(threads=1)
    device = _device(driver, seed)
    reactor = CompletionReactor(port, sweep_seconds=0.01)
    memories = make_memories()
    inline = driver in ("inline", "seeded")
    transfers = LocalTransfers(
        device,
        memories,
        LAYERS,
        port,
        reactor,
        group_bytes=group_bytes,
        ahead_bytes=ahead_bytes,
        submit_inline=inline,
    )
    rig = Rig(device, transfers, reactor, memories)
    rig.randomize(seed)
    try:
        yield rig
    finally:
        rig.let_go()
        await transfers.aclose(10)
        await reactor.aclose(10)
        device.close()
        for memory in memories.values():
            memory.host.close()
        await port.aclose()


@pytest.fixture
def open_rig() -> OpenRig:
    """`async with open_rig(driver, seed=..., group_bytes=...) as rig`; drivers: thread, inline,
    seeded, stepped.
    """
    return _open_rig


@pytest.fixture
def operation() -> Callable[..., CacheOperation]:
    """`operation(Direction.LOAD, kv=([0, 1], [4, 5]), mamba=([0], [2]))`."""

    def build(direction: Direction, /, **slots: tuple[Sequence[int], Sequence[int]]) -> CacheOperation:
        transfers = tuple(PoolTransfer(pool, *sides) for pool, sides in slots.items())
        return CacheOperation(direction, transfers)

    return build


@pytest.fixture
def carry_out() -> Callable[[Contents, CacheOperation], None]:
    """The model of an operation: one page of one tensor at a time, at once."""

    def copy(contents: Contents, operation: CacheOperation) -> None:
        direction = operation.direction
        for transfer in operation.transfers:
            for name in {key[1] for key in contents if key[0] == transfer.pool}:
                source = contents[transfer.pool, name, direction.source]
                destination = contents[transfer.pool, name, direction.destination]
                for here, there in zip(transfer.sources, transfer.destinations, strict=True):
                    destination[:, there] = source[:, here]

    return copy
