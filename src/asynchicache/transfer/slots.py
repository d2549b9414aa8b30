"""The slot numbers of transfers where kernels read them: in place on a CPU, in a ring on a GPU."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from typing import Protocol

import numpy as np
import torch

from asynchicache.cuda_driver import CudaDriver
from asynchicache.errors import CallRefusedError, DeviceError
from asynchicache.streams.base import Event
from asynchicache.transfer.plan import Slots


class SlotRegion(Protocol):
    """Room for the slot numbers of one transfer."""

    def upload(self, columns: Sequence[Slots], stream: int) -> list[int]:
        """Where the device finds each column, in the order of a stream.

        Raises:
            DeviceError: the driver refused it.
        """
        ...

    def end(self, event: Event | None) -> None:
        """The last work that reads them is enqueued: all has run once `event` is reached, or by now."""
        ...


class SlotsInPlace:
    """Slot numbers of a CPU's kernels; its own region, since it holds nothing but the last columns."""

    def __init__(self) -> None:
        self._columns: Sequence[Slots] = ()

    def reserve(self, numbers: int) -> SlotRegion:
        return SlotsInPlace()

    def upload(self, columns: Sequence[Slots], stream: int) -> list[int]:
        self._columns = [np.ascontiguousarray(column) for column in columns]
        return [column.ctypes.data for column in self._columns]

    def end(self, event: Event | None) -> None:
        """Nothing: they are freed with the work that reads them."""


class SlotRing:
    """A ring in pinned host memory, and one on the GPU. Nothing is allocated once it is made."""

    def __init__(self, device: torch.device, numbers: int) -> None:
        """
        Args:
            numbers: it holds so many.

        Raises:
            DeviceError: there is no memory for it, or no driver.
        """
        self._driver = CudaDriver.load(device.index or 0)
        try:
            self._pinned = torch.empty(numbers, dtype=torch.int64, pin_memory=True)
            self._there = torch.empty(numbers, dtype=torch.int64, device=device)
            # Torch may give memory that work on its own stream still reads; our streams do not wait for that.
            torch.cuda.current_stream(device).synchronize()
        except RuntimeError as error:  # torch's error of memory is one
            raise DeviceError(f"no room for {numbers} slot numbers: {error}") from error
        self._numbers = self._pinned.numpy()
        self._taken: deque[_RingRegion] = deque()  # oldest first
        self._next = 0

    def reserve(self, numbers: int) -> SlotRegion | None:
        """Room for so many; None if there is none before earlier transfers have ended."""
        while self._taken and self._taken[0].over():
            self._taken.popleft()
        start = self._room(numbers)
        if start is None:
            return None
        self._next = start + numbers
        self._taken.append(_RingRegion(self, start))
        return self._taken[-1]

    def _room(self, numbers: int) -> int | None:
        size, oldest = len(self._numbers), self._taken[0].start if self._taken else None
        if oldest is None:
            return 0 if numbers <= size else None
        if self._next <= oldest:  # the taken part goes round the end
            return self._next if self._next + numbers <= oldest else None
        if self._next + numbers <= size:
            return self._next
        return 0 if numbers <= oldest else None

    def upload(self, start: int, columns: Sequence[Slots], stream: int) -> list[int]:
        """Copy columns to the GPU in one call, `start` numbers from the ring's begin."""
        at = start
        for column in columns:
            self._numbers[at : at + len(column)] = column
            at += len(column)
        to, of = (ring.data_ptr() + 8 * start for ring in (self._there, self._pinned))
        self._driver.upload(to, of, 8 * (at - start), stream)
        ends = np.cumsum([8 * len(column) for column in columns]).tolist()
        return [to, *(to + end for end in ends[:-1])]


class _RingRegion:
    """Numbers of a ring from `start` on."""

    def __init__(self, ring: SlotRing, start: int) -> None:
        self.start = start
        self._ring = ring
        self._ended = False
        self._event: Event | None = None

    def upload(self, columns: Sequence[Slots], stream: int) -> list[int]:
        return self._ring.upload(self.start, columns, stream)

    def end(self, event: Event | None) -> None:
        self._ended, self._event = True, event

    def over(self) -> bool:
        """Whether nothing reads them any more."""
        if not self._ended or self._event is None:
            return self._ended
        try:
            return self._event.query()
        except CallRefusedError:
            return False  # not told: another time
        except DeviceError:  # the GPU runs nothing any more
            return True
