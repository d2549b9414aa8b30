"""Fingerprints of pages as they leave the device, compared with what comes back: a sample, for production.

A page that is sampled on its way to the host is copied aside by plain copies in the order of the
stream, and hashed once the transfer has landed. Whenever its host slot is loaded again, the bytes that
arrived on the device are copied aside and hashed likewise, each layer before anybody's fence lets a forward
run that may overwrite it. So both ends are looked at on the device, and whatever lies between is covered.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import NamedTuple, TypeAlias

import torch

from asynchicache.kernels.batch import expand_runs
from asynchicache.pools.device import DevicePool
from asynchicache.streams.base import Stream
from asynchicache.transfer.plan import Direction, LayerGroup, TensorPart, TransferPlan

MOST_BYTES = 64 << 20
"""Bytes copied aside for one transfer; what goes beyond is not looked at."""


@dataclass(slots=True)
class AuditStatistics:
    """Pages and states since the start.

    Attributes:
        recorded: fingerprinted on their way to the host.
        compared: compared on their way back.
        mismatched: that came back with other bytes.
    """

    recorded: int = 0
    compared: int = 0
    mismatched: int = 0


Aside: TypeAlias = dict[str, torch.Tensor]
"""A page's bytes in host memory, by tensor, `[layers, bytes]`."""


class _Page(NamedTuple):
    pool: str
    device_slot: int
    host_slot: int


class PageAudit:
    """The fingerprints of host slots, by pool.

    `choose` and `AuditSample.stage` are for the thread that enqueues copies, `AuditSample.digests` for one
    that may block, the rest for the loop.
    """

    def __init__(self, devices: Mapping[str, DevicePool], share: float, rng: random.Random) -> None:
        """
        Args:
            devices: by pool.
            share: of the pages that leave the device, 0 to 1.
            rng: chooses them.
        """
        self.statistics = AuditStatistics()
        self._devices = devices
        self._share = share
        self._rng = rng
        self._digests: dict[tuple[str, int], bytes] = {}
        self._awaited: dict[tuple[str, int], object] = {}  # of whose copy a digest will come

    def choose(self, plan: TransferPlan) -> AuditSample | None:
        """The pages of a transfer to look at; None if there are none."""
        if plan.direction is Direction.FORK:
            return None
        load = plan.direction is Direction.LOAD
        pages = list(self._limited(self._known(plan) if load else self._drawn(plan)))
        if not pages:
            return None
        copy = object()
        if not load:
            self._awaited.update({(page.pool, page.host_slot): copy for page in pages})
        return AuditSample(self, pages, copy, load=load)

    def forget(self, pool: str, host_slots: Iterable[int]) -> None:
        """These slots will hold something else."""
        if self._digests or self._awaited:
            for slot in host_slots:
                self._digests.pop((pool, slot), None)
                self._awaited.pop((pool, slot), None)

    def _known(self, plan: TransferPlan) -> Iterable[_Page]:
        if not self._digests:
            return
        for pool, runs in plan.runs.items():
            sources, destinations = (side.tolist() for side in expand_runs(runs))
            for host_slot, device_slot in zip(sources, destinations, strict=True):
                if (pool, host_slot) in self._digests:
                    yield _Page(pool, device_slot, host_slot)

    def _drawn(self, plan: TransferPlan) -> Iterable[_Page]:
        for pool, runs in plan.runs.items():
            sources, destinations = (side.tolist() for side in expand_runs(runs))
            self.forget(pool, destinations)
            for device_slot, host_slot in zip(sources, destinations, strict=True):
                if self._rng.random() < self._share:
                    yield _Page(pool, device_slot, host_slot)

    def _limited(self, pages: Iterable[_Page]) -> Iterable[_Page]:
        left = MOST_BYTES
        for page in pages:
            pool = self._devices[page.pool]
            left -= pool.nbytes // pool.slots
            if left >= 0:
                yield page

    def room_aside(self, page: _Page) -> Aside:
        """Host memory for a page's bytes, by tensor."""
        pool = self._devices[page.pool]
        shapes = {tensor.name: pool.items(tensor.name).shape for tensor in pool.spec.tensors}
        pin = pool.device.type == "cuda"
        return {
            name: torch.empty((layers, nbytes), dtype=torch.uint8, pin_memory=pin)
            for name, (layers, _, nbytes) in shapes.items()
        }

    def copy_aside(self, page: _Page, part: TensorPart, aside: Aside) -> None:
        """Copy some layers of a page on the device; they are there once the current stream has got here."""
        rows = slice(part.start, part.stop)
        items = self._devices[page.pool].items(part.tensor)[rows, page.device_slot].contiguous()
        aside[part.tensor][rows].copy_(items, non_blocking=True)

    def settle(self, page: _Page, digest: bytes, copy: object, *, load: bool) -> str | None:
        """Remember, unless a later copy went to the same slot, or compare; what is wrong, in words."""
        key = (page.pool, page.host_slot)
        if not load:
            if self._awaited.get(key) is copy:
                self._awaited.pop(key, None)
                self._digests[key] = digest
                self.statistics.recorded += 1
            return None
        self.statistics.compared += 1
        if self._digests.get(key, digest) == digest:
            return None
        self.statistics.mismatched += 1
        return (
            f"pool {page.pool!r}: host slot {page.host_slot} came to device slot {page.device_slot} "
            "with other bytes than had left the device"
        )


class AuditSample:
    """Pages of one transfer that are looked at; made by `PageAudit.choose`."""

    def __init__(self, audit: PageAudit, pages: Sequence[_Page], copy: object, *, load: bool) -> None:
        """`copy`: stands for the transfer."""
        self._audit = audit
        self._pages = pages
        self._copy = copy
        self._load = load
        self._copies: list[Aside] = [audit.room_aside(page) for page in pages]

    def stage(self, stream: Stream, group: LayerGroup) -> None:
        """Enqueue copies of a group's layers of the pages on the device, behind what was enqueued before."""
        stream.launch(partial(self._copy_aside, group.parts))

    def _copy_aside(self, parts: Sequence[TensorPart]) -> None:
        for page, aside in zip(self._pages, self._copies, strict=True):
            for part in parts:
                if part.pool == page.pool:
                    self._audit.copy_aside(page, part, aside)

    def digests(self) -> list[bytes]:
        """SHA-256 of each page, once the copies of every group have landed; blocking."""
        found = []
        for aside in self._copies:
            digest = sha256()
            for copy in aside.values():
                digest.update(copy.numpy().data)
            found.append(digest.digest())
        self._copies = []
        return found

    def settle(self, digests: Sequence[bytes]) -> list[str]:
        """Remember or compare, on the loop; what is wrong, in words."""
        pairs = zip(self._pages, digests, strict=True)
        found = [self._audit.settle(page, digest, self._copy, load=self._load) for page, digest in pairs]
        return [problem for problem in found if problem is not None]
