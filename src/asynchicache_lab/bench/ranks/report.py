"""What `bench ranks` measured."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Self

from rich.console import Group, RenderableType
from rich.table import Table

from asynchicache.reports import add_figures, facts

PAIRS = {
    "decode": "decode step",
    "decode_cpu": "its CPU",
    "prefill": "prefill step",
    "prefill_cpu": "its CPU",
    "landed": "until its copies have ended",
    "request_cpu": "CPU of a request",
}
"""What is measured with a group and with one rank, and its name for people."""


@dataclass(frozen=True, slots=True)
class Spread:
    """Median and 99th percentile, in microseconds; 0 if nothing was measured."""

    p50: float
    p99: float

    @classmethod
    def of(cls, seconds: Sequence[float]) -> Self:
        if not seconds:
            return cls(0.0, 0.0)
        ordered = sorted(seconds)
        return cls(*(1e6 * ordered[int(share * (len(ordered) - 1))] for share in (0.5, 0.99)))


@dataclass(frozen=True, slots=True)
class Pair:
    """The same part with a group of ranks and with a cache of one rank, in turns."""

    group: Spread
    alone: Spread

    @property
    def added_us(self) -> float:
        """What the group adds to the median."""
        return self.group.p50 - self.alone.p50


@dataclass(frozen=True, slots=True)
class RanksReport:
    """All times are the leader's, in microseconds.

    Attributes:
        ranks, requests: of the run.
        failure: why the group has failed; empty if it has not.
        hit_tokens, alone_hit_tokens: of all requests, with the group and with one rank: the same.
        decode: a step that loads nothing: `mark`, and the send.
        prefill: a step that loads a conversation's past: `load`, `mark`, and the send.
        decode_cpu, prefill_cpu: of these, processor time of the loop's thread.
        landed: from `load` until its copies have ended, on all ranks.
        request_cpu: processor time of the loop's thread for a whole request, decode steps included.
        question, load, publish: from an entry of the log to the last rank's answer. `question`: what storage
            has. `load`: the copy of a step. `publish`: backups and storage writes of a request's new pages.
        log_bytes: bytes of the log for each request.
        collective: an all-reduce (gloo, MIN of 14 int64) over as many processes.
    """

    ranks: int
    requests: int
    failure: str
    hit_tokens: int
    alone_hit_tokens: int
    decode: Pair
    prefill: Pair
    decode_cpu: Pair
    prefill_cpu: Pair
    landed: Pair
    request_cpu: Pair
    question: Spread
    load: Spread
    publish: Spread
    log_bytes: float
    collective: Spread

    @property
    def ok(self) -> bool:
        return not self.failure and self.hit_tokens == self.alone_hit_tokens

    def as_json(self) -> dict[str, object]:
        added = {f"{part}_added_us": getattr(self, part).added_us for part in PAIRS}
        return {"ok": self.ok, **asdict(self), **added}

    def present(self) -> RenderableType:
        steps = Table("the leader, p50", title=f"{self.ranks} ranks, {self.requests} requests")
        add_figures(steps, "one rank\nus", "group\nus", "added\nus")
        for part, name in PAIRS.items():
            pair: Pair = getattr(self, part)
            steps.add_row(name, *(f"{one:,.0f}" for one in (pair.alone.p50, pair.group.p50, pair.added_us)))
        answers = Table("until the last rank has answered")
        add_figures(answers, "p50\nus", "p99\nus")
        for name, one in (
            ("question", self.question),
            ("load", self.load),
            ("publish", self.publish),
            ("all-reduce of gloo", self.collective),
        ):
            answers.add_row(name, f"{one.p50:,.0f}", f"{one.p99:,.0f}")
        state = self.failure or "whole"
        return Group(
            steps, answers, facts([("log of a request", f"{self.log_bytes:,.0f} B"), ("group", state)])
        )
