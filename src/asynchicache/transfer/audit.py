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


@dataclass(slots=True, eq=True)
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


@dataclass(slots=True, eq=False)
class _Fingerprint:
    """What one copy wrote to a host slot; None until it has landed. Written once, on the loop."""

    digest: bytes | None = None


class _Page(NamedTuple):
    """One to look at.

    Attributes:
        expected: written by its own copy to the host, or known when its copy to the device is enqueued.
    """

    pool: str
    device_slot: int
    host_slot: int
    expected: _Fingerprint


class PageAudit:
    """The fingerprints of host slots, by pool.

    What a slot holds changes in the order of enqueueing, which is the device's, while copies settle in any:
    so `choose` says which copy's bytes a slot has, and which a load is to bring.

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
        self._fingerprints: dict[tuple[str, int], _Fingerprint] = {}  # of the copies enqueued last

    def choose(self, plan: TransferPlan) -> AuditSample | None:
        """The pages of a transfer to look at; None if there are none."""
        if plan.direction is Direction.FORK:
            return None
        load = plan.direction is Direction.LOAD
        pages = list(self._limited(self._known(plan) if load else self._drawn(plan)))
        if not pages:
            return None
        if not load:
            self._fingerprints.update({(page.pool, page.host_slot): page.expected for page in pages})
        return AuditSample(self, pages, load=load)

    def forget(self, pool: str, host_slots: Iterable[int]) -> None:
        """These slots will hold something else."""
        if self._fingerprints:
            for slot in host_slots:
                self._fingerprints.pop((pool, slot), None)

    def _known(self, plan: TransferPlan) -> Iterable[_Page]:
        """Not what a copy that has not landed yet brings: it may never be known."""
        if not self._fingerprints:
            return
        for pool, runs in plan.runs.items():
            sources, destinations = (side.tolist() for side in expand_runs(runs))
            for host_slot, device_slot in zip(sources, destinations, strict=True):
                known = self._fingerprints.get((pool, host_slot))
                if known is not None and known.digest is not None:
                    yield _Page(pool, device_slot, host_slot, known)

    def _drawn(self, plan: TransferPlan) -> Iterable[_Page]:
        for pool, runs in plan.runs.items():
            sources, destinations = (side.tolist() for side in expand_runs(runs))
            self.forget(pool, destinations)
            for device_slot, host_slot in zip(sources, destinations, strict=True):
                if self._rng.random() < self._share:
                    yield _Page(pool, device_slot, host_slot, _Fingerprint())

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
        """Copy some layers of a page to the host; they are there once the current stream has got here.

        One by one, as together they would first be gathered on the device, which may have no room.
        """
        items = self._devices[page.pool].items(part.tensor)
        for layer in range(part.start, part.stop):
            aside[part.tensor][layer].copy_(items[layer, page.device_slot], non_blocking=True)

    def remember(self, page: _Page, digest: bytes) -> None:
        """What a copy to the host has written, unless a later one went to the same slot."""
        page.expected.digest = digest
        if self._fingerprints.get((page.pool, page.host_slot)) is page.expected:
            self.statistics.recorded += 1

    def compare(self, page: _Page, digest: bytes) -> str | None:
        """What is wrong with a page that came to the device, in words."""
        self.statistics.compared += 1
        if digest == page.expected.digest:
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
        if self._load:
            found = [self._audit.compare(page, digest) for page, digest in pairs]
            return [problem for problem in found if problem is not None]
        for page, digest in pairs:
            self._audit.remember(page, digest)
        return []
