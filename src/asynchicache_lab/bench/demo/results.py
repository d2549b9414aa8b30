"""The demo's results, for JSON, tables and the report."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from statistics import fmean
from typing import NamedTuple

from asynchicache.types import Tier

MUST_REACH_CEILING = ("hybrid", "restart")
"""Modes that lose nothing: whatever falls out of one tier is in the next."""


class ServedPrompt(NamedTuple):
    """One request.

    Attributes:
        prompt_tokens, hit_tokens: length of the prompt, and tokens of it that the cache served.
        by_tier: served tokens, by the farthest tier that any of their pools came from.
        ttft_ms: milliseconds from the request's arrival to its first token.
        tokens: generated ids.
    """

    prompt_tokens: int
    hit_tokens: int
    by_tier: Mapping[Tier, int]
    ttft_ms: float
    tokens: Sequence[int]


class RoundResult(NamedTuple):
    """One round of one mode: the hit rate and the mean time to first token."""

    hit_rate: float
    ttft_ms: float


@dataclass(frozen=True, slots=True)
class ModeResult:
    """The results of one mode; times are milliseconds to the first token.

    Attributes:
        rounds: results by round.
        tokens_by_tier: served tokens, by the farthest tier that any of their pools came from.
        tokens_equal: whether all generated tokens equal those of the model without a cache.
    """

    hit_rate: float
    rounds: Sequence[RoundResult]
    ttft_p50: float
    ttft_p90: float
    tokens_by_tier: Mapping[str, int]
    tokens_equal: bool

    @classmethod
    def of(cls, rounds: Sequence[Sequence[ServedPrompt]], *, tokens_equal: bool) -> ModeResult:
        """Summarise the requests of every round."""
        served = [request for round_ in rounds for request in round_]
        times = sorted(request.ttft_ms for request in served)
        return cls(
            hit_rate=_hit_rate(served),
            rounds=[RoundResult(_hit_rate(r), fmean(s.ttft_ms for s in r)) for r in rounds],
            ttft_p50=_quantile(times, 0.5),
            ttft_p90=_quantile(times, 0.9),
            tokens_by_tier={t.name.lower(): sum(s.by_tier.get(t, 0) for s in served) for t in Tier},
            tokens_equal=tokens_equal,
        )

    def as_json(self) -> dict[str, object]:
        return {
            "hit_rate": self.hit_rate,
            "rounds": [round_._asdict() for round_ in self.rounds],
            "ttft_ms": {"p50": self.ttft_p50, "p90": self.ttft_p90},
            "tokens_by_tier": dict(self.tokens_by_tier),
            "tokens_equal": self.tokens_equal,
        }


class Sample(NamedTuple):
    """What went on in one interval.

    Attributes:
        seconds: its end, since the beginning.
        running, waiting: conversations in flight at its end.
        by_tier: served prompt tokens of the answers that began in it.
        prompt_tokens: prompt tokens of these.
        ttft_ms: their mean time to first token; None if there were none.
        gap_ms: the longest time for which the event loop did not come round.
    """

    seconds: float
    running: int
    waiting: int
    by_tier: dict[str, int]
    prompt_tokens: int
    ttft_ms: float | None
    gap_ms: float


@dataclass(slots=True, eq=False)
class CrowdResult:
    """What became of the clients.

    Attributes:
        clients: how many there were at once.
        answers, hung_up: answers that were read to their end, and those whose client left.
        samples, moments: the intervals, and what happened at which second.
        warm_hit_rate: hit rate of the first answers after the restart.
        problems: what must not be, in words.
    """

    clients: int
    answers: int = 0
    hung_up: int = 0
    samples: list[Sample] = field(default_factory=list)
    moments: list[tuple[float, str]] = field(default_factory=list)
    warm_hit_rate: float = 0.0
    problems: list[str] = field(default_factory=list)

    def as_json(self) -> dict[str, object]:
        return {
            "clients": self.clients,
            "answers": self.answers,
            "hung_up": self.hung_up,
            "warm_hit_rate": self.warm_hit_rate,
            "longest_gap_ms": max((sample.gap_ms for sample in self.samples), default=0.0),
            "samples": [sample._asdict() for sample in self.samples],
            "moments": [{"seconds": seconds, "what": what} for seconds, what in self.moments],
        }


@dataclass(frozen=True, slots=True)
class DemoResult:
    """The results of all modes.

    Attributes:
        model: description of the model.
        workload: description of the workload.
        ceiling: the hit rate if the cache loses nothing.
        modes: results by mode name.
        crowd: the second act, many clients at once; None if it was left out.
        report: path of the HTML report.
        seconds: duration of the demo.
    """

    model: str
    workload: str
    ceiling: Fraction
    modes: Mapping[str, ModeResult]
    crowd: CrowdResult | None
    report: str
    seconds: float

    @property
    def violations(self) -> list[str]:
        """Descriptions of failed checks."""
        found = [
            f"{name}: other tokens than uncached" for name, m in self.modes.items() if not m.tokens_equal
        ]
        for name in MUST_REACH_CEILING:
            rate = self.modes[name].hit_rate
            if rate < float(self.ceiling) - 1e-9:
                found.append(f"{name}: hit rate {rate:.6f} is below the ceiling {float(self.ceiling):.6f}")
        return found + (self.crowd.problems if self.crowd else [])

    def as_json(self) -> dict[str, object]:
        return {
            "model": self.model,
            "workload": self.workload,
            "ceiling": float(self.ceiling),
            "modes": {name: mode.as_json() for name, mode in self.modes.items()},
            "crowd": self.crowd.as_json() if self.crowd else None,
            "report": self.report,
            "seconds": self.seconds,
            "violations": self.violations,
        }


def _hit_rate(served: Sequence[ServedPrompt]) -> float:
    return sum(s.hit_tokens for s in served) / sum(s.prompt_tokens for s in served)


def _quantile(ordered: Sequence[float], share: float) -> float:
    return ordered[min(int(share * len(ordered)), len(ordered) - 1)]
