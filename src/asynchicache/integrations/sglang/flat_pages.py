"""SGLang's generic path: pages as flat tensors, with one more copy than the in-place path."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from asynchicache.errors import UsageError
from asynchicache.integrations.bridge import LoopBridge
from asynchicache.integrations.page_memory import ByteArray, PageMemory
from asynchicache.integrations.page_pool import PagePool
from asynchicache.pools.slabs import Slab
from asynchicache.types import Outcome

SCRATCH_PAGES = 128
"""Pages per direction: the most that SGLang passes in one call."""

_STORED = (Outcome.STORED, Outcome.EXISTS)


def scratch_memory(page_bytes: int) -> PageMemory:
    """Allocate buffers for one batch of reads, followed by one batch of writes."""
    slab = Slab(2 * SCRATCH_PAGES * page_bytes)
    view = slab.memory.cast("B", (2 * SCRATCH_PAGES, page_bytes))
    return PageMemory.of_view(view, owner=slab)


class FlatPages:
    """Copies pages of a pool to and from tensors. Methods block; each direction runs one call at a time.

    Args:
        bridge: runs the pool's event loop.
        pool: a pool over `scratch_memory`.
    """

    def __init__(self, bridge: LoopBridge, pool: PagePool) -> None:
        self.pool = pool
        self.page_bytes = pool.memory.page_bytes
        self._bridge = bridge
        self._reads, self._writes = threading.Lock(), threading.Lock()

    def get(self, keys: Sequence[str], targets: Sequence[torch.Tensor]) -> list[bool]:
        """Fill `targets[i]` with page `keys[i]`; return for each whether it was filled.

        Raises:
            UsageError: a target is not a contiguous host tensor of one page.
        """
        with self._reads:
            return self._in_batches(keys, targets, self._get)

    def put(self, keys: Sequence[str], values: Sequence[torch.Tensor]) -> list[bool]:
        """Store `values[i]` as page `keys[i]`; return for each whether storage has it.

        Raises:
            UsageError: as `get`.
        """
        with self._writes:
            return self._in_batches(keys, values, self._put)

    def _in_batches(
        self, keys: Sequence[str], tensors: Sequence[torch.Tensor], move: _FlatCall
    ) -> list[bool]:
        done: list[bool] = []
        for start in range(0, len(keys), SCRATCH_PAGES):
            views = [self._view(tensor) for tensor in tensors[start : start + SCRATCH_PAGES]]
            done += move(keys[start : start + SCRATCH_PAGES], views)
        return done

    def _get(self, keys: Sequence[str], views: Sequence[ByteArray]) -> list[bool]:
        nbytes = len(keys) * self.page_bytes
        outcomes = self._bridge.call(self.pool.get(keys, range(len(keys))), nbytes=nbytes)
        for page, (view, outcome) in enumerate(zip(views, outcomes, strict=True)):
            if outcome is Outcome.HIT:
                np.copyto(view, self.pool.memory.unit(page)[0])
        return [outcome is Outcome.HIT for outcome in outcomes]

    def _put(self, keys: Sequence[str], views: Sequence[ByteArray]) -> list[bool]:
        pages = range(SCRATCH_PAGES, SCRATCH_PAGES + len(keys))
        for page, view in zip(pages, views, strict=True):
            np.copyto(self.pool.memory.unit(page)[0], view)
        nbytes = len(keys) * self.page_bytes
        outcomes = self._bridge.call(self.pool.put(keys, pages), nbytes=nbytes)
        return [outcome in _STORED for outcome in outcomes]

    def _view(self, tensor: Any) -> ByteArray:
        if not isinstance(tensor, torch.Tensor) or tensor.device.type != "cpu" or not tensor.is_contiguous():
            raise UsageError(
                f"a page is given as {type(tensor).__name__}; a contiguous host tensor is needed"
            )
        view: ByteArray = tensor.detach().view(torch.uint8).reshape(-1).numpy()
        if view.nbytes != self.page_bytes:
            raise UsageError(f"a page of {view.nbytes} bytes; this pool's have {self.page_bytes}")
        return view


_FlatCall = Callable[[Sequence[str], Sequence[ByteArray]], list[bool]]
