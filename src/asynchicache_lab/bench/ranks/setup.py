"""What all processes of `bench ranks` open alike: pools, sizes, and the collective."""

from __future__ import annotations

import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import distributed

from asynchicache.config import CacheConfig, PrefetchOptions, PrefetchPolicy
from asynchicache.ranks.options import RankLimits
from asynchicache.specs import ModelSpec
from asynchicache.testing.specs import synthetic_spec
from asynchicache_lab.bench.ranks.options import RanksOptions

TOKEN = "bench ranks"  # noqa: S105  the socket lies in a folder of this user
LIMITS = RankLimits(joining=120.0, silence=60.0)
COLLECTIVE_INTS = 14
"""SGLang reduces as many int64 in each step of its scheduler: counts of acknowledgements and queues."""

_AT_ONCE = 2  # conversations that fit on the device, so that others come back from the host
_STATES = 8
_JOIN_SECONDS = 120


def model(options: RanksOptions) -> ModelSpec:
    """Attention and states with a few bytes per layer: the group is measured, and not copying."""
    return synthetic_spec(options.page_size)


def config(options: RanksOptions, rank: int, ranks: int) -> CacheConfig:
    """Host memory holds everything, and the device two conversations, so that every turn loads its past."""
    pages = options.pages + 1
    return CacheConfig(
        device_slots={"kv": _AT_ONCE * pages, "mamba": _STATES},
        host_slots={"kv": options.conversations * pages, "mamba": options.conversations * pages},
        prefetch=PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE),
        storage="memory",
        weight_version="bench",
        rank=rank,
        ranks=ranks,
    )


class Collective:
    """The all-reduce that keeps ranks alike where each decides for itself: gloo, MIN of 14 int64."""

    def __init__(self, folder: Path, rank: int, ranks: int) -> None:
        distributed.init_process_group(
            "gloo",
            init_method=f"file://{folder / 'collective'}",
            rank=rank,
            world_size=ranks,
            timeout=timedelta(seconds=_JOIN_SECONDS),
        )

    def run(self, times: int) -> list[float]:
        """Reduce `times` times; the seconds of each. Blocks."""
        seconds = []
        values = torch.ones(COLLECTIVE_INTS, dtype=torch.int64)
        for _ in range(times):
            started = time.perf_counter()
            distributed.all_reduce(values, op=distributed.ReduceOp.MIN)
            seconds.append(time.perf_counter() - started)
        return seconds

    def close(self) -> None:
        distributed.destroy_process_group()
