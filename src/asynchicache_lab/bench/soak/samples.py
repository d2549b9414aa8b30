"""Samples of a running soak (memory, tasks, files, threads, hits), and whether they stay flat."""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from asynchicache_lab.bench.soak.traffic import SoakCounters

SETTLE_SECONDS = 60.0
"""Memory and hit rates are judged from here on."""

_LEVEL_SECONDS = 15.0
MAX_DRIFT = 0.05
MAX_HIT_DRIFT = 0.05


@dataclass(frozen=True, slots=True)
class ProcessSample:
    """One sample of the process.

    Attributes:
        at: seconds since the start.
        rss: resident bytes.
        tasks, threads, files: counts in the process; files are open descriptors.
        turns, prompt_tokens, hit_tokens: totals since the start.
        model_tokens: hit tokens of the model since the start.
    """

    at: float
    rss: int
    tasks: int
    threads: int
    files: int
    turns: int
    prompt_tokens: int
    hit_tokens: int
    model_tokens: int


def look(at: float, served: SoakCounters) -> ProcessSample:
    """Take a sample now."""
    return ProcessSample(
        at,
        _resident(),
        len(asyncio.all_tasks()),
        _threads(),
        _open_files(),
        served.turns,
        served.prompt_tokens,
        served.hits,
        served.models.hit_tokens,
    )


def _threads() -> int:
    """Number of threads, without those of the loop's default executor: it creates them under load and keeps
    them."""
    return sum(not thread.name.startswith("asyncio_") for thread in threading.enumerate())


def _open_files() -> int:
    """Number of open descriptors, without those that briefly read kernel statistics."""
    count = 0
    for link in Path("/proc/self/fd").iterdir():
        with suppress(OSError):  # closed meanwhile
            count += not str(link.readlink()).startswith("/proc/")
    return count


def _resident() -> int:
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


@dataclass(frozen=True, slots=True)
class MemoryLevel:
    """Resident bytes after the first minute, and their later range.

    Attributes:
        level, lowest, highest, last: medians of quarters of a minute.
    """

    level: float
    lowest: float
    highest: float
    last: float

    @property
    def drift(self) -> float:
        """Largest deviation from the level, as a share of it."""
        return max(self.highest - self.level, self.level - self.lowest) / self.level


def memory_level(samples: Sequence[ProcessSample]) -> MemoryLevel | None:
    """Compute the level; None unless the samples exceed 75 seconds."""
    quarters: dict[int, list[int]] = {}
    for sample in samples:
        if sample.at >= SETTLE_SECONDS:
            quarters.setdefault(int(sample.at / _LEVEL_SECONDS), []).append(sample.rss)
    if len(quarters) < 2:
        return None
    medians = [median(quarters[number]) for number in sorted(quarters)]
    return MemoryLevel(medians[0], min(medians), max(medians), medians[-1])


def hit_rates(samples: Sequence[ProcessSample]) -> list[float]:
    """The hit rate of each whole minute."""
    rates = []
    first: ProcessSample | None = None
    for sample in samples:
        if first is None:
            first = sample
        elif sample.at - first.at >= SETTLE_SECONDS:
            prompts = sample.prompt_tokens - first.prompt_tokens
            rates.append((sample.hit_tokens - first.hit_tokens) / prompts if prompts else 0.0)
            first = sample
    return rates


def hit_drift(rates: Sequence[float]) -> float | None:
    """Difference of the means of the second and first half, without the first minute; None if fewer than two
    minutes remain."""
    settled = rates[1:]
    if len(settled) < 2:
        return None
    half = len(settled) // 2
    return abs(fmean(settled[-half:]) - fmean(settled[:half]))


def model_gap(samples: Sequence[ProcessSample]) -> float | None:
    """Hit rate minus the model's, after the first minute; None if there were no requests then."""
    settled = [sample for sample in samples if sample.at >= SETTLE_SECONDS]
    if not settled or settled[-1].prompt_tokens == settled[0].prompt_tokens:
        return None
    first, last = settled[0], settled[-1]
    above = (last.hit_tokens - last.model_tokens) - (first.hit_tokens - first.model_tokens)
    return above / (last.prompt_tokens - first.prompt_tokens)
