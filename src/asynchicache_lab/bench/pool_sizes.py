"""Tier sizes of benches that play conversations."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolSizes:
    """Tier sizes of a bench.

    Attributes:
        pages: device slots for attention pages.
        states, windows: device slots for recurrent states and for sliding-window pages; 0: no such pool.
        window_pages: pages of one window.
        host_ratio: host slots per device slot.
        offload_states: whether states are backed up to the host.
    """

    pages: int
    states: int = 0
    windows: int = 0
    window_pages: int = 1
    host_ratio: float = 1.0
    offload_states: bool = True

    def slots(self) -> dict[str, tuple[int, int]]:
        """Device and host slots by pool."""
        device = {"kv": self.pages, "mamba": self.states, "swa": self.windows}
        on_host = {name for name in device if name != "mamba" or self.offload_states}
        return {
            name: (count, math.ceil(count * self.host_ratio) if name in on_host else 0)
            for name, count in device.items()
            if count
        }
