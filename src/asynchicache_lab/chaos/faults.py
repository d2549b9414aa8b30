"""Faults outside storage: copies, notifications, slot allocation, memory and the clock; counted by kind."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from asynchicache.errors import CapacityError
from asynchicache.planner.observer import Observer
from asynchicache.pools.slabs import Slab
from asynchicache.streams.base import Event, Graph, Stream
from asynchicache.streams.drivers import DriverStep, SeededDriver
from asynchicache.streams.emulated import EmulatedDevice
from asynchicache.testing.seeded import COPY_SECONDS
from asynchicache.transfer.plan import Direction
from asynchicache.tree.node import SlotPlace
from asynchicache_lab.chaos.script import DeviceFaults

SlotBytes: TypeAlias = npt.NDArray[np.uint8]

KINDS = (
    *(f"storage.{name}" for name in ("fail", "raises", "hang", "late", "partial", "lie", "swap", "drop")),
    *(f"storage.{name}" for name in ("stall", "restart", "lose", "forget", "detach", "clear", "claimed")),
    *(f"transfer.{name}" for name in ("fail", "partial", "never", "lie", "stall")),
    *(f"notification.{name}" for name in ("lost", "late")),
    "allocation.refused",
    "memory.refused",
    "clock.jump",
    "request.abort",
    "client.cancel",
    "cache.close",
    "cache.crash",
)
"""Everything that can go wrong in a run, by the name that it is counted under."""

SLOWER = 100
"""How many times as long something takes that stalls."""

_COPIES = frozenset(direction.value for direction in Direction)


class ChaosDriver(SeededDriver):
    """Runs stream work in virtual time. Some work is late, and some copies never end."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, rng: random.Random, faults: DeviceFaults, draws: FaultDraws
    ) -> None:
        super().__init__(loop, rng, mean_seconds=COPY_SECONDS)
        self._chaos_loop = loop
        self._faults = faults
        self._draws = draws
        self._handed = 0

    def lane(self, name: str) -> Callable[[DriverStep], None]:
        hand_over = super().lane(name)
        return partial(self._perhaps, hand_over) if name in _COPIES else hand_over

    def _perhaps(self, hand_over: Callable[[DriverStep], None], run: DriverStep) -> None:
        number, self._handed = self._handed, self._handed + 1
        if number == self._faults.never:
            self._draws.count("transfer.never")
        elif self._draws.occurs("transfer.stall", self._faults.stall):
            delay = self._draws.chance.expovariate(1 / (COPY_SECONDS * SLOWER))
            self._chaos_loop.call_later(delay, hand_over, run)
        else:
            hand_over(run)


class FaultDraws:
    """Draws faults at given rates, and counts them.

    Attributes:
        chance: source of randomness.
        counted: number of faults, by kind.
    """

    def __init__(self, chance: random.Random, counted: Counter[str]) -> None:
        self.chance = chance
        self.counted = counted

    def count(self, kind: str) -> None:
        self.counted[kind] += 1

    def occurs(self, kind: str, rate: float) -> bool:
        """Draw whether a fault happens now, at the given rate; count it if it does."""
        if not rate or self.chance.random() >= rate:
            return False
        self.count(kind)
        return True


class ChaosDevice:
    """An emulated device with faulty copies and notifications; everything else works.

    Attributes:
        memory: slots of both tiers, where copies may write a wrong byte; set when the cache is opened.
        lied: whether a copy wrote a wrong byte.
    """

    def __init__(
        self, loop: asyncio.AbstractEventLoop, rng: random.Random, faults: DeviceFaults, draws: FaultDraws
    ) -> None:
        self._inner = EmulatedDevice(ChaosDriver(loop, rng, faults, draws))
        self._loop = loop
        self._faults = faults
        self._draws = draws
        self._copies = 0
        self.memory: Sequence[SlotBytes] = ()
        self.lied = False

    @property
    def name(self) -> str:
        return self._inner.name

    @property
    def error(self) -> BaseException | None:
        return self._inner.error

    def stream(self, name: str, *, urgent: bool = False) -> Stream:
        inner = self._inner.stream(name, urgent=urgent)
        return ChaosStream(inner, self) if name in _COPIES else inner

    def event(self, *, external: bool = False) -> Event:
        return self._inner.event(external=external)

    def owns(self, part: Event | Stream) -> bool:
        return self._inner.owns(part.inner if isinstance(part, ChaosStream) else part)

    def capture(self, stream: Stream) -> AbstractContextManager[Graph]:
        return self._inner.capture(_bare(stream))

    def own_thread(self) -> None:
        self._inner.own_thread()

    def yield_to_streams(self) -> None:
        self._inner.yield_to_streams()

    def notify(
        self,
        stream: Stream,
        event: Event,
        reached: Callable[[BaseException | None], None],
        *,
        late: bool = False,
    ) -> None:
        if self._draws.occurs("notification.lost", self._faults.lost):
            return
        if self._draws.occurs("notification.late", self._faults.late):
            delay = self._draws.chance.expovariate(1 / (COPY_SECONDS * SLOWER))
            reached = partial(self._tell_late, delay, reached)
        self._inner.notify(_bare(stream), event, reached, late=late)

    def _tell_late(
        self, delay: float, reached: Callable[[BaseException | None], None], error: BaseException | None
    ) -> None:
        self._loop.call_later(delay, reached, error)

    def close(self) -> None:
        self._inner.close()

    def spoil(self, work: Callable[[], object], stream: str) -> Callable[[], object]:
        """Return the next copy's work, with a fault if one is due."""
        number, self._copies = self._copies, self._copies + 1
        faults = self._faults
        if number == faults.fail:
            return partial(self._break, "transfer.fail")
        if number == faults.partial:
            return partial(self._break, "transfer.partial", work)
        # The cache does not audit copies within the device, so it could not notice a wrong byte there.
        if faults.lie is not None and number >= faults.lie and stream != Direction.FORK.value:
            return partial(self._lie, work)
        return work

    def _break(self, kind: str, work: Callable[[], object] | None = None) -> None:
        """Fail the device. If `work` is given, do half of that copy first."""
        self._draws.count(kind)
        if work is not None:
            before = [memory.copy() for memory in self.memory]
            work()
            for memory, old in zip(self.memory, before, strict=True):
                memory[..., ::2] = old[..., ::2]
        raise RuntimeError("made to fail")

    def _lie(self, work: Callable[[], object]) -> None:
        """Copy, but write one wrong byte."""
        before = [memory.copy() for memory in self.memory]
        work()
        for memory, old in zip(self.memory, before, strict=True):
            written = np.argwhere(memory != old)
            if len(written):
                memory[tuple(self._draws.chance.choice(written))] ^= 1
                self._draws.count("transfer.lie")
                self.lied = True
                return


class ChaosStream:
    """A copy stream of a `ChaosDevice`."""

    def __init__(self, inner: Stream, device: ChaosDevice) -> None:
        self.inner = inner
        self._device = device

    @property
    def name(self) -> str:
        return self.inner.name

    @property
    def handle(self) -> int:
        return self.inner.handle

    def launch(self, work: Callable[[], object]) -> None:
        self.inner.launch(self._device.spoil(work, self.name))

    def current(self) -> AbstractContextManager[object]:
        return self.inner.current()

    def record(self, event: Event) -> None:
        self.inner.record(event)

    def wait_event(self, event: Event) -> None:
        self.inner.wait_event(event)


def _bare(stream: Stream) -> Stream:
    return stream.inner if isinstance(stream, ChaosStream) else stream


class RoomRefusals(Observer):
    """Refuses some slot allocations, as if all slots were in use."""

    def __init__(self, draws: FaultDraws, rate: float) -> None:
        self._draws = draws
        self._rate = rate

    def may_take(self, counts: Mapping[SlotPlace, int]) -> bool:
        return not (any(counts.values()) and self._draws.occurs("allocation.refused", self._rate))


@contextmanager
def refusing_memory(draws: FaultDraws, piece: int) -> Iterator[None]:
    """Refuse memory for slab number `piece` of those allocated next."""
    made = iter(range(piece + 1))

    def refuse(nbytes: int) -> None:
        if next(made, None) == piece:
            draws.count("memory.refused")
            raise CapacityError(f"no room for a slab of {nbytes} bytes: made to fail")

    Slab.on_allocate = refuse
    try:
        yield
    finally:
        Slab.on_allocate = None
