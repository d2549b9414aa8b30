"""Requests wait in SGLang's queue for what storage has of them, and are told of when they arrive.

A linker's `lookup` can only say what can be loaded now. SGLang's scheduler lets requests wait for storage of
HiCache and of LMCache, and asks no linker; so two of its methods are wrapped where it looks them up.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from functools import wraps
from typing import Any

import torch

from asynchicache.errors import ConfigError
from asynchicache.integrations.sglang.seam import SUPPORTED

_SCHEDULER = "sglang.srt.managers.scheduler"
_ARRIVAL, _ADMISSION = "_prefetch_kvcache", "_get_new_batch_prefill_raw"


class Arrivals:
    """Requests that arrived and have not had their turn, for which a linker may read.

    Args:
        cache: SGLang's tree, through which ranks agree.
        linker: one with `arrive`, `reading` and `forget`; others are let alone.

    Attributes:
        reads: whether the linker is such a one.
    """

    def __init__(self, cache: Any, linker: Any) -> None:
        self._cache, self._linker = cache, linker
        self._held: set[str] = set()
        self._ready: set[str] = set()
        self.reads = hasattr(linker, "reading")

    def add(self, rid: str) -> None:
        """A request has come, and is looked up next."""
        self._held.add(rid)
        self._linker.arrive(rid)

    def held(self, rids: Sequence[str]) -> set[str]:
        """Return those of the waiting requests for which a rank still reads; the same on all ranks."""
        waiting = [rid for rid in rids if rid in self._held]
        if not waiting:
            return set()
        reading = torch.tensor([self._linker.reading(rid) for rid in waiting], dtype=torch.int)
        self._cache._all_reduce_attn_groups(reading, torch.distributed.ReduceOp.MAX)  # noqa: SLF001
        found = {rid for rid, one in zip(waiting, reading.tolist(), strict=True) if one}
        self._ready.update(set(waiting) - found)
        self._held.difference_update(self._ready)
        return found

    def wait_still(self, rids: Sequence[str]) -> None:
        """Forget the requests that no longer wait: they have had their turn."""
        for rid in self._ready.difference(rids):
            self.forget(rid)

    def forget(self, rid: str) -> None:
        """A request was aborted, or has had its turn."""
        if rid in self._held or rid in self._ready:
            self._held.discard(rid)
            self._ready.discard(rid)
            self._linker.forget(rid)


def hold_requests() -> None:
    """Make SGLang's scheduler tell linkers of requests that arrive, and hold those that they read for.

    Trees without a linker that reads for requests see no difference. Without a scheduler in this process
    there is nothing to do. Later calls do nothing.

    Raises:
        ConfigError: SGLang is another version.
    """
    module = sys.modules.get(_SCHEDULER)
    if module is None or hasattr(module.Scheduler, "asynchicache_holds"):
        return
    scheduler: Any = module.Scheduler
    if not (hasattr(scheduler, _ARRIVAL) and hasattr(scheduler, _ADMISSION)):
        raise ConfigError(f"this linker is made for sglang=={SUPPORTED}; another version is installed")
    _tell_arrivals(scheduler)
    _hold(scheduler)
    scheduler.asynchicache_holds = True


def _tell_arrivals(scheduler: Any) -> None:
    prefetch = getattr(scheduler, _ARRIVAL)

    @wraps(prefetch)
    def arrive(self: Any, req: Any, *arguments: Any, **named: Any) -> Any:
        arrivals = _arrivals_of(self)
        if arrivals is None:
            return prefetch(self, req, *arguments, **named)
        arrivals.add(req.rid)
        req.init_next_round_input(self.tree_cache, cow_mamba=False)  # looks it up
        return None

    setattr(scheduler, _ARRIVAL, arrive)


def _hold(scheduler: Any) -> None:
    admit = getattr(scheduler, _ADMISSION)

    @wraps(admit)
    def admit_ready(self: Any, *arguments: Any, **named: Any) -> Any:
        arrivals = _arrivals_of(self)
        if arrivals is None:
            return admit(self, *arguments, **named)
        waiting = self.waiting_queue
        rids = [req.rid for req in waiting]
        held = arrivals.held(rids)
        self.waiting_queue = [req for req in waiting if req.rid not in held]
        try:
            return admit(self, *arguments, **named)
        finally:
            arrivals.wait_still([req.rid for req in self.waiting_queue])
            if held:
                behind = [req for req in waiting if req.rid in held]
                self.waiting_queue = _in_order([*behind, *self.waiting_queue], rids)
                time.sleep(0)  # an idle scheduler polls, and would keep the interpreter from whoever reads

    setattr(scheduler, _ADMISSION, admit_ready)


def _in_order(requests: Sequence[Any], rids: Sequence[str]) -> list[Any]:
    """Requests as they were in the queue, and then those that came to it meanwhile."""
    places = {rid: place for place, rid in enumerate(rids)}
    return sorted(requests, key=lambda req: places.get(req.rid, len(places)))


def _arrivals_of(scheduler: Any) -> Arrivals | None:
    """Those of a linker that reads for requests."""
    arrivals: Arrivals | None = getattr(getattr(scheduler.tree_cache, "linker", None), "arrivals", None)
    return arrivals if arrivals is not None and arrivals.reads else None
