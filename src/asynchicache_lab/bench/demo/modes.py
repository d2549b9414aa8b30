"""The demo's four modes of serving the same conversations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from asynchicache.config import CacheConfig, PrefetchOptions
from asynchicache.types import PrefetchPolicy
from asynchicache_lab.bench.demo.options import DemoOptions


@dataclass(frozen=True, slots=True)
class Mode:
    """One mode.

    Attributes:
        name: name in the results.
        blurb: a one-sentence description.
        config: returns the cache's configuration for given options and storage folder; None: no cache.
        reopens: whether the cache is closed and reopened before every round.
    """

    name: str
    blurb: str
    config: Callable[[DemoOptions, Path], CacheConfig] | None = None
    reopens: bool = False


def _tiered(options: DemoOptions, folder: Path) -> CacheConfig:
    """Device and host hold a quarter and a half of all pages, so that all three tiers serve hits."""
    return _config(
        options, folder, states=max(3, options.num_clients // 2), host_states=2 * options.num_clients
    )


def _states_on_device(options: DemoOptions, folder: Path) -> CacheConfig:
    """Like the tiered cache, but states are lost when the device evicts them, so storage is of no use."""
    config = _config(options, folder, states=max(2, options.num_clients * 6 // 10), host_states=0)
    return msgspec.structs.replace(config, storage=None, storage_options={})


def _config(options: DemoOptions, folder: Path, *, states: int, host_states: int) -> CacheConfig:
    everything = options.num_clients * options.pages
    device_pages = max(2 * options.pages, everything // 4)
    return CacheConfig(
        device_slots={"kv": device_pages, "mamba": states},
        host_slots={"kv": 2 * device_pages, "mamba": host_states},
        prefetch=PrefetchOptions(policy=PrefetchPolicy.WAIT_COMPLETE),
        storage="file",
        storage_options={"path": str(folder)},
        weight_version=f"demo-{options.seed}",
        seed=options.seed,
    )


MODES = (
    Mode("uncached", "Every prompt is computed from its first token on."),
    Mode(
        "no_offload",
        "Attention pages in device and host memory, states on the device only, where not all clients' fit.",
        _states_on_device,
    ),
    Mode("hybrid", "Pages and states in device memory, host memory and files.", _tiered),
    Mode("restart", "As hybrid, but the server starts anew before every round.", _tiered, reopens=True),
)
