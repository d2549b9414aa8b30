"""Fingerprints of pages as they leave the device, compared with what comes back: a sample, for production.

A page that is sampled on its way to the host is copied aside by a plain copy in the order of the
stream, and hashed once the transfer has landed. Whenever its host slot is loaded again, the bytes that
arrived on the device are copied aside and hashed likewise. So both ends are looked at on the device,
and whatever lies between them (paths, kernels, slots, host memory) is covered.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import NamedTuple

import torch

from asynchicache.kernels.batch import expand_runs
from asynchicache.pools.device import DevicePool
from asynchicache.streams.base import Stream
from asynchicache.transfer.plan import Direction, TransferPlan

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

    def choose(self, plan: TransferPlan) -> AuditSample | None:
        """The pages of a transfer to look at; None if there are none."""
        if plan.direction is Direction.FORK:
            return None
        load = plan.direction is Direction.LOAD
        pages = list(self._limited(self._known(plan) if load else self._drawn(plan)))
        return AuditSample(self, pages, load=load) if pages else None

    def forget(self, pool: str, host_slots: Iterable[int]) -> None:
        """These slots will hold something else."""
        if self._digests:
            for slot in host_slots:
                self._digests.pop((pool, slot), None)

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

    def copy_aside(self, page: _Page) -> list[torch.Tensor]:
        """A page's bytes on the device, by tensor, in host memory once the current stream has got here."""
        pool = self._devices[page.pool]
        copies = []
        for tensor in pool.spec.tensors:
            items = pool.items(tensor.name)[:, page.device_slot].contiguous()
            aside = torch.empty_like(items, device="cpu", pin_memory=pool.device.type == "cuda")
            copies.append(aside.copy_(items, non_blocking=True))
        return copies

    def settle(self, page: _Page, digest: bytes, *, load: bool) -> str | None:
        """Remember or compare; what is wrong, in words."""
        key = (page.pool, page.host_slot)
        if not load:
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

    def __init__(self, audit: PageAudit, pages: Sequence[_Page], *, load: bool) -> None:
        self._audit = audit
        self._pages = pages
        self._load = load
        self._copies: list[list[torch.Tensor]] = []

    def stage(self, stream: Stream) -> None:
        """Enqueue copies of what the pages are on the device, behind what was enqueued before."""
        stream.launch(self._copy_aside)

    def _copy_aside(self) -> None:
        self._copies = [self._audit.copy_aside(page) for page in self._pages]

    def digests(self) -> list[bytes]:
        """SHA-256 of each page, once the copies have landed; blocking."""
        found = []
        for copies in self._copies:
            digest = sha256()
            for copy in copies:
                digest.update(copy.numpy().data)
            found.append(digest.digest())
        self._copies = []
        return found

    def settle(self, digests: Sequence[bytes]) -> list[str]:
        """Remember or compare, on the loop; what is wrong, in words."""
        pairs = zip(self._pages, digests, strict=True)
        found = [self._audit.settle(page, digest, load=self._load) for page, digest in pairs]
        return [problem for problem in found if problem is not None]
