"""Replay a trace with several policies and sizes of memory, and say which size reaches a target."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import msgspec
from rich.console import Group, RenderableType
from rich.table import Table

from asynchicache.replay.curves import render
from asynchicache.replay.options import ReplayOptions
from asynchicache.replay.report import ReplayReport
from asynchicache.replay.run import run_replay
from asynchicache.reports import Advance, add_figures


@dataclass(frozen=True, slots=True)
class ComparedRun:
    """One replay of a comparison.

    Attributes:
        policy, share: the order of eviction, and the memory as a share of what the trace's `kv` takes.
        memory_tokens: the same memory, as tokens whose `kv` takes as many bytes.
        hit_rate, request_hit_rate: of the replay.
        states_kept, tokens_per_end: states in memory at its end, and cached tokens for each end of a path.
    """

    policy: str
    share: float
    memory_tokens: int
    hit_rate: float
    request_hit_rate: float
    states_kept: int
    tokens_per_end: int


@dataclass(frozen=True, slots=True)
class SizeAdvice:
    """The smallest memory of a comparison that reaches the target.

    Attributes:
        policy, share, hit_rate: of the run.
        host_tokens: pages of the host, in tokens; the host holds what the device does.
        states: recurrent states beside them; 0 without such a pool.
        tokens_per_state: the option of that name; 0 without such a pool.
        device_tokens: the least that the device needs: the longest prompt.
    """

    policy: str
    share: float
    hit_rate: float
    host_tokens: int
    states: int
    tokens_per_state: int
    device_tokens: int

    def __str__(self) -> str:
        split = f", and {self.states:,} states (tokens_per_state={self.tokens_per_state})"
        return (
            f"{self.hit_rate:.2%} with {self.policy!r} and {self.share:.3g} of the working set: a host for "
            f"{self.host_tokens:,} tokens{split if self.states else ''}; a device for "
            f"{self.device_tokens:,} tokens at least, and more for requests that run at once"
        )


@dataclass(frozen=True, slots=True)
class Comparison:
    """The result of `replay --compare`.

    Attributes:
        title: the trace.
        ceiling: the hit rate of attention alone if nothing is lost.
        target: the share of the best hit rate that advice is for.
        rows: one for each policy and share.
        advice: the smallest memory that reaches the target; None if the comparison is empty.
        report: path of the HTML file, or empty.
        problems: findings of the planner's own check.
    """

    title: str
    ceiling: float
    target: float
    rows: Sequence[ComparedRun]
    advice: SizeAdvice
    report: str
    problems: Sequence[str]

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, object]:
        return asdict(self)

    def by_policy(self) -> Mapping[str, Sequence[ComparedRun]]:
        """The rows of each policy, by share."""
        found: dict[str, list[ComparedRun]] = {}
        for row in self.rows:
            found.setdefault(row.policy, []).append(row)
        return found

    def present(self) -> RenderableType:
        curves = self.by_policy()
        table = Table("share", title=f"{self.title}: hit rates by memory", title_justify="left")
        add_figures(table, "memory, tokens", *curves)
        for same_share in zip(*curves.values(), strict=True):
            rates = (f"{row.hit_rate:.2%}" for row in same_share)
            table.add_row(f"{same_share[0].share:g}", f"{same_share[0].memory_tokens:,}", *rates)
        advice = f"{self.target:.0%} of the best: {self.advice}"
        where = [f"report: {self.report}"] if self.report else []
        return Group(
            table,
            f"ceiling of attention alone: {self.ceiling:.2%}",
            advice,
            *where,
            *self.problems,
        )


def run_comparison(options: ReplayOptions, progress: Advance) -> Comparison:
    """Replay a trace once for each policy and share.

    Raises:
        ConfigError: the trace cannot be read, or does not fit the options.
    """
    cases = [(policy, share) for policy in options.policies for share in options.memory_shares]
    runs: list[tuple[str, float, ReplayReport]] = []
    for done, (policy, share) in enumerate(cases):
        one = msgspec.structs.replace(options, policy=policy, memory_share=share)
        runs.append((policy, share, run_replay(one, _part(progress, done, len(cases)))))
    rows = [_row(policy, share, report) for policy, share, report in runs]
    comparison = Comparison(
        title=Path(options.trace).name,
        ceiling=runs[0][2].ceiling,
        target=options.target,
        rows=rows,
        advice=_advice(rows, options, runs[0][2]),
        report=options.report,
        problems=[problem for _, _, report in runs for problem in report.problems],
    )
    if options.report:
        curves = {
            policy: [(row.memory_tokens, row.hit_rate) for row in part]
            for policy, part in comparison.by_policy().items()
        }
        page = render(comparison.title, comparison.ceiling, curves, str(comparison.advice))
        Path(options.report).write_text(page, encoding="utf-8")
    return comparison


def _part(progress: Advance, done: int, count: int) -> Advance:
    """Advance of one replay of several."""
    return lambda at, total: progress(done * total + at, count * total)


def _row(policy: str, share: float, report: ReplayReport) -> ComparedRun:
    tokens = int(share * report.working_set["kv"] * report.block_size)
    return ComparedRun(
        policy,
        share,
        tokens,
        report.hit_rate,
        report.request_hit_rate,
        report.states_kept,
        report.tokens_per_end,
    )


def _advice(rows: Sequence[ComparedRun], options: ReplayOptions, report: ReplayReport) -> SizeAdvice:
    wanted = options.target * max(row.hit_rate for row in rows)
    row = min(
        (row for row in rows if row.hit_rate >= wanted),
        key=lambda row: (row.memory_tokens, -row.hit_rate),
    )
    per_state = row.tokens_per_end if row.states_kept else 0
    return SizeAdvice(
        row.policy,
        row.share,
        row.hit_rate,
        max(row.memory_tokens - row.states_kept * options.state_tokens, 0),
        row.states_kept,
        per_state,
        report.longest_prompt,
    )
