"""Baselines of `bench transfer`: one large plain copy, and single copies."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from typing import Self

import numpy as np
import torch

from asynchicache.cuda_driver import CudaDriver
from asynchicache.kernels.batch import RunBatch, memmove_batch
from asynchicache.pools.slabs import Pinner, Slab
from asynchicache.transfer.plan import Direction
from asynchicache_lab.bench.copy_rig import CopyRig

MAX_SINGLES = 4096
"""Single copies of one loop. Each costs microseconds whatever follows, so more would say the same."""


@dataclass(frozen=True, slots=True, eq=False)
class PlainMemory:
    """Memory of the same kinds as a rig's tiers, as large as its device pool.

    Attributes:
        source, destination: uint8 `[nbytes]`.
    """

    source: torch.Tensor
    destination: torch.Tensor

    @classmethod
    @contextmanager
    def beside(cls, rig: CopyRig, direction: Direction) -> Iterator[Self]:
        """For the duration of the block. Host memory is pinned as the pool's is: a GPU may reach what the
        driver allocates by larger pages, and faster."""
        there = rig.memory.device
        nbytes = there.slots * there.spec.slot_bytes(there.page_size)
        with closing(Slab(nbytes)) as slab:
            if rig.memory.host.pinned and (pinner := Pinner.of(rig.device.name)):
                slab.pin(pinner, 0, nbytes)
            host, on_cpu = slab.tensor.fill_(1), there.device.type == "cpu"
            device = Slab(nbytes).tensor if on_cpu else torch.empty_like(host, device=there.device)
            device.fill_(1)
            yield cls(host, device) if direction is Direction.LOAD else cls(device, host)

    @property
    def nbytes(self) -> int:
        return self.source.numel()

    def copy(self) -> None:
        """Copy everything at once with torch."""
        self.destination.copy_(self.source, non_blocking=True)

    def singles(self, run_bytes: int, seed: int) -> RunBatch:
        """Up to `MAX_SINGLES` runs of `run_bytes`, in random order."""
        rng, there = random.Random(seed), self.nbytes // run_bytes
        number = min(MAX_SINGLES, there)
        order = [np.array(rng.sample(range(there), number), np.int64) * run_bytes for _ in range(2)]
        return RunBatch.of(
            order[1] + self.destination.data_ptr(),
            order[0] + self.source.data_ptr(),
            np.full(number, run_bytes, np.int64),
            (self.source, self.destination),
        )


def single_copier(device: torch.device) -> Callable[[RunBatch], None]:
    """Return a function that copies runs one by one at the lowest cost: driver calls, or `memmove` on a CPU.

    Raises:
        DeviceError: the driver is not available.
    """
    if device.type == "cpu":
        return memmove_batch
    driver = CudaDriver.load(device.index or 0)

    def copy(batch: RunBatch) -> None:
        to, of, sizes = (column.tolist() for column in (batch.destinations, batch.sources, batch.sizes))
        driver.copy_singly(to, of, sizes, torch.cuda.current_stream().cuda_stream)

    return copy
