"""The search: many seeds on several processors, what they did, and what they found, cut down."""

from __future__ import annotations

import gc
import multiprocessing
import signal
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Self

import torch

from asynchicache.testing.chaos.run import ScriptReport, run_script
from asynchicache.testing.chaos.script import Script
from asynchicache.testing.chaos.shrink import Shrinker
from asynchicache.testing.chaos.workload import draw_script

BATCH = 20
"""Seeds that a process is given at once."""


@dataclass(frozen=True, slots=True)
class Finding:
    """A seed that found something.

    Attributes:
        seed: replays it.
        violations: what is wrong, in words.
        script: the least script that was found to do the same, or None.
    """

    seed: int
    violations: list[str]
    script: Script | None = None


@dataclass(slots=True, eq=False)
class Findings:
    """What seeds did, added up.

    Attributes:
        seeds: how many were run.
        operations, faults, served, costs: as of a `Ledger`.
        families: runs by the pools of their model.
        violations: of the seeds that found something, in order.
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


def run_seeds(seeds: Sequence[int]) -> Findings:
    """Run some seeds, one after the other."""
    found = Findings()
    with quick_collection():
        for seed in seeds:
            script = draw_script(seed)
            found.add(script, run_script(script))
    return found


@contextmanager
def quick_collection() -> Iterator[None]:
    """Let each run's garbage be looked for without going through all modules each time."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def search(seeds: Sequence[int], jobs: int, advance: Callable[[int, int], object]) -> Findings:
    """Run many seeds.

    Args:
        seeds: whose scripts.
        jobs: processes; 1 runs them here.
        advance: told how many are done, of how many.
    """
    batches = [seeds[start : start + BATCH] for start in range(0, len(seeds), BATCH)]
    found = Findings()
    for some in _carry_out(batches, jobs):
        found.merge(some)
        advance(found.seeds, len(seeds))
    return found


def _carry_out(batches: Sequence[Sequence[int]], jobs: int) -> Iterator[Findings]:
    if jobs == 1 or len(batches) == 1:
        yield from map(run_seeds, batches)
        return
    # Spawned: a process that was forked while torch has threads may hang.
    context = multiprocessing.get_context("spawn")
    others = set(multiprocessing.active_children())
    with ProcessPoolExecutor(jobs, mp_context=context, initializer=_begin) as pool:
        with _interrupts_held():
            futures = [pool.submit(run_seeds, batch) for batch in batches]
        try:
            for done in as_completed(futures):
                yield done.result()
        except BaseException:  # the caller left: waiting for the rest could take hours
            pool.shutdown(wait=False, cancel_futures=True)
            for process in set(multiprocessing.active_children()) - others:
                process.terminate()
            raise


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Hold SIGINT back in this thread. Processes that it starts meanwhile never see one, so that Ctrl-C in a
    terminal, which signals all of them, is handled by the first process alone."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGINT])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _begin() -> None:
    torch.set_num_threads(1)


def reduce(finding: Finding) -> Finding:
    """The same finding, with a script that is as small as it could be made."""
    script = draw_script(finding.seed)
    report = run_script(script)
    if not report.violations:
        return finding
    with quick_collection():
        smaller, _ = Shrinker().shrink(script, report)
    return Finding(finding.seed, report.violations, smaller)
