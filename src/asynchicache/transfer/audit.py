"""Compares a sample of the pages that return to the device with what had left it. For production.

A page that is sampled on its way to the host is staged, by plain copies in the order of the stream, and
hashed once the transfer has landed. Whenever its host slot is loaded again, the bytes that arrived on the
device are staged and hashed as well, each layer before a fence lets a forward run that may overwrite it. Both
ends are thus read on the device, so that everything between them is covered.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from hashlib import sha256
from typing import NamedTuple, TypeAlias

import torch

from asynchicache.pools.device import DevicePages
from asynchicache.streams.base import Stream
from asynchicache.transfer.plan import Direction, TransferPlan, tensor_parts

MAX_BYTES = 64 << 20
"""Most bytes staged for one transfer; further pages are not compared."""


@dataclass(slots=True, eq=True)
class AuditStatistics:
    """Counts of pages and states since the start.

    Attributes:
        recorded: fingerprinted on their way to the host.
        compared: compared on their way back.
        mismatched: returned with other bytes.
    """

    recorded: int = 0
    compared: int = 0
    mismatched: int = 0


StagedPage: TypeAlias = dict[str, torch.Tensor]
"""A page's bytes in host memory, by tensor, `[layers, bytes]`."""


@dataclass(slots=True, eq=False)
class _Fingerprint:
    """The digest of what one copy wrote to a host slot; None until it has landed. Written once, on the
    loop."""

    digest: bytes | None = None


class _Page(NamedTuple):
    """A sampled page.

    Attributes:
        expected: set by its own copy to the host, or known when its copy to the device is enqueued.
    """

    pool: str
    device_slot: int
    host_slot: int
    expected: _Fingerprint


class PageAudit:
    """The fingerprints of host slots, by pool.

    The content of a slot changes in the order of enqueueing, which is the device's, but copies are reported
    as complete in any order. So `choose` decides, when a copy is enqueued, whose bytes a slot will hold and
    which bytes a load must bring.

    `choose` and `AuditSample.stage` run on the thread that enqueues copies, `AuditSample.digests` on a thread
    that may block, the rest on the loop.
    """

    def __init__(self, devices: Mapping[str, DevicePages], share: float, rng: random.Random) -> None:
        """
        Args:
            devices: by pool.
            share: of the pages that leave the device to sample, 0 to 1.
        """
        self.statistics = AuditStatistics()
        self._devices = devices
        self._share = share
        self._rng = rng
        self._fingerprints: dict[tuple[str, int], _Fingerprint] = {}  # of the copies enqueued last

    def choose(self, plan: TransferPlan) -> AuditSample | None:
        """Sample the pages of a transfer; None if there are none."""
        if plan.direction is Direction.FORK:
            return None
        load = plan.direction is Direction.LOAD
        pages = list(self._limited(self._fingerprinted(plan) if load else self._sampled(plan)))
        if not pages:
            return None
        if not load:
            self._fingerprints.update({(page.pool, page.host_slot): page.expected for page in pages})
        return AuditSample(self, pages, load=load)

    def forget(self, pool: str, host_slots: Iterable[int]) -> None:
        """Drop the fingerprints of slots that will hold something else."""
        if self._fingerprints:
            for slot in host_slots:
                self._fingerprints.pop((pool, slot), None)

    def _fingerprinted(self, plan: TransferPlan) -> Iterable[_Page]:
        """Pages with a known digest; that of a copy in flight is not known, and may never be."""
        if not self._fingerprints:
            return
        for pool, columns in plan.columns.items():
            sources, destinations = (side.tolist() for side in columns)
            for host_slot, device_slot in zip(sources, destinations, strict=True):
                known = self._fingerprints.get((pool, host_slot))
                if known is not None and known.digest is not None:
                    yield _Page(pool, device_slot, host_slot, known)

    def _sampled(self, plan: TransferPlan) -> Iterable[_Page]:
        for pool, columns in plan.columns.items():
            sources, destinations = (side.tolist() for side in columns)
            self.forget(pool, destinations)
            for device_slot, host_slot in zip(sources, destinations, strict=True):
                if self._rng.random() < self._share:
                    yield _Page(pool, device_slot, host_slot, _Fingerprint())

    def _limited(self, pages: Iterable[_Page]) -> Iterable[_Page]:
        left = MAX_BYTES
        for page in pages:
            pool = self._devices[page.pool]
            left -= pool.spec.slot_bytes(pool.page_size)
            if left >= 0:
                yield page

    def allocate_staging(self, page: _Page) -> StagedPage:
        """Host memory for a page's bytes."""
        pool = self._devices[page.pool]
        shapes = {tensor.name: pool.items(tensor.name).shape for tensor in pool.copy_spec.tensors}
        pin = pool.device.type == "cuda"
        return {
            name: torch.empty((layers, nbytes), dtype=torch.uint8, pin_memory=pin)
            for name, (layers, _, nbytes) in shapes.items()
        }

    def stage(self, page: _Page, layers: range, staged: StagedPage) -> None:
        """Copy some layers of a page to the host; they are there once the current stream has got here."""
        pool = self._devices[page.pool]
        for part in tensor_parts(pool.copy_spec, layers):
            items = pool.items(part.tensor)
            # Layer by layer: torch would gather several on the device first, which may have no room.
            for layer in range(part.start, part.stop):
                staged[part.tensor][layer].copy_(items[layer, page.device_slot], non_blocking=True)

    def record(self, page: _Page, digest: bytes) -> None:
        """Set the digest of a page that was copied to the host; counted unless the slot was written again."""
        page.expected.digest = digest
        if self._fingerprints.get((page.pool, page.host_slot)) is page.expected:
            self.statistics.recorded += 1

    def compare(self, page: _Page, digest: bytes) -> str | None:
        """A message if a page that came to the device differs from what had left it."""
        self.statistics.compared += 1
        if digest == page.expected.digest:
            return None
        self.statistics.mismatched += 1
        return (
            f"pool {page.pool!r}: host slot {page.host_slot} came to device slot {page.device_slot} "
            "with other bytes than had left the device"
        )


class AuditSample:
    """Sampled pages of one transfer; made by `PageAudit.choose`."""

    def __init__(self, audit: PageAudit, pages: Sequence[_Page], *, load: bool) -> None:
        self._audit = audit
        self._pages = pages
        self._load = load
        self._staged: list[StagedPage] = [audit.allocate_staging(page) for page in pages]

    def stage(self, stream: Stream, layers: range) -> None:
        """Enqueue copies of some layers of the pages on the device, behind what was enqueued before."""
        stream.launch(partial(self._stage, layers))

    def _stage(self, layers: range) -> None:
        for page, staged in zip(self._pages, self._staged, strict=True):
            self._audit.stage(page, layers, staged)

    def digests(self) -> list[bytes]:
        """SHA-256 of each page, once the copies of every group have landed; blocking."""
        found = []
        for staged in self._staged:
            digest = sha256()
            for copy in staged.values():
                digest.update(copy.numpy().data)
            found.append(digest.digest())
        self._staged = []
        return found

    def finish(self, digests: Sequence[bytes]) -> list[str]:
        """Record the digests, or compare them, on the loop; a message for each mismatch."""
        pairs = zip(self._pages, digests, strict=True)
        if self._load:
            found = [self._audit.compare(page, digest) for page, digest in pairs]
            return [problem for problem in found if problem is not None]
        for page, digest in pairs:
            self._audit.record(page, digest)
        return []
