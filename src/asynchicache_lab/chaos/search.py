"""Run many seeds on several processors, sum up their operations, and shrink what they find."""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Self, TypeVar

import torch

from asynchicache_lab.chaos.paged import with_engine_memory
from asynchicache_lab.chaos.run import ScriptReport, run_script
from asynchicache_lab.chaos.script import Script
from asynchicache_lab.chaos.shrink import Shrinker
from asynchicache_lab.chaos.workload import draw_script

T = TypeVar("T")

BATCH = 20
"""Seeds that a process is given at once."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A seed with violations.

    Attributes:
        seed: replays the run.
        violations: descriptions of what went wrong.
        script: the smallest script found with the same violation, or None.
    """

    seed: int
    violations: list[str]
    script: Script | None = None


@dataclass(slots=True, eq=False)
class Findings:
    """Totals over many seeds.

    Attributes:
        seeds: number of seeds run.
        operations, faults, served, costs: sums over ledgers, see `Ledger`.
        families: number of runs by the pools of their model.
        violations: the seeds with violations, in order.
        cpu_seconds: processor time of all runs.
    """

    seeds: int = 0
    operations: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)
    served: Counter[str] = field(default_factory=Counter)
    costs: Counter[str] = field(default_factory=Counter)
    families: Counter[str] = field(default_factory=Counter)
    violations: list[Finding] = field(default_factory=list)
    cpu_seconds: float = 0.0

    def add(self, script: Script, report: ScriptReport) -> None:
        self.seeds += 1
        self.operations += report.ledger.operations
        self.faults += report.ledger.faults
        self.served += report.ledger.served
        self.costs += report.ledger.costs
        self.families[script.model.family] += 1
        self.cpu_seconds += report.seconds
        if report.violations:
            self.violations.append(Finding(script.seed, report.violations))

    def merge(self, other: Self) -> None:
        self.seeds += other.seeds
        for name in ("operations", "faults", "served", "costs", "families"):
            getattr(self, name).update(getattr(other, name))
        self.violations = sorted([*self.violations, *other.violations], key=lambda found: found.seed)
        self.cpu_seconds += other.cpu_seconds


def run_seeds(seeds: Sequence[int], *, paged: bool = False) -> Findings:
    """Run some seeds, one after the other. `paged`: an engine owns the device memory."""
    found = Findings()
    with quick_collection():
        for seed in seeds:
            script = script_of(seed, paged=paged)
            found.add(script, run_script(script))
    return found


def script_of(seed: int, *, paged: bool) -> Script:
    """The script of a seed. `paged`: for an engine that owns the device memory."""
    script = draw_script(seed)
    return with_engine_memory(script) if paged else script


@contextmanager
def quick_collection() -> Iterator[None]:
    """Speed up each run's garbage collection by excluding the objects of loaded modules."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def search(
    seeds: Sequence[int], jobs: int, advance: Callable[[int, int], object], *, paged: bool = False
) -> Findings:
    """Run many seeds.

    Args:
        seeds: the seeds to run.
        jobs: number of processes; 1 runs them in this process.
        advance: called with the number of finished seeds and the total.
        paged: an engine owns the device memory.
    """
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    found = Findings()
    for some in carry_out(partial(run_seeds, paged=paged), batches, jobs):
        found.merge(some)
        advance(found.seeds, len(seeds))
    return found


def carry_out(run: Callable[[Sequence[int]], T], batches: Sequence[Sequence[int]], jobs: int) -> Iterator[T]:
    """What `run` returns for each batch of seeds, in `jobs` processes; one runs them in this process."""
    if jobs == 1 or len(batches) == 1:
        yield from map(run, batches)
        return
    # Spawn, because a process forked while torch has threads may hang.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin) as pool:
        with _interrupts_held():
            futures = [pool.submit(run, batch) for batch in batches]
        try:
            for done in as_completed(futures):
                yield done.result()
        except BaseException:  # do not wait for the rest, which could take hours
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Block SIGINT in this thread. Processes started meanwhile inherit that, so that Ctrl-C in a terminal,
    which signals all processes, is handled by the parent only."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    torch.set_num_threads(1)


def reduce(finding: Finding, *, paged: bool = False) -> Finding:
    """Return the finding with a shrunk script."""
    script = script_of(finding.seed, paged=paged)
    report = run_script(script)
    if not report.violations:
        return finding
    with quick_collection():
        smaller, _ = Shrinker().shrink(script, report)
    return Finding(finding.seed, report.violations, smaller)
