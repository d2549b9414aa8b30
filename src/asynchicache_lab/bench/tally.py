"""Hit statistics of a run of turns, with the keys common to all hit benches."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from asynchicache.reports import Advance, add_figures, facts
from asynchicache.types import Tier
from asynchicache_lab.simulator import TurnHits


class HitLimit(NamedTuple):
    """The best possible hit rate, and the key of its entry in the report."""

    key: str
    hit_rate: float


@dataclass(frozen=True, slots=True)
class HitReport:
    """The result of a hit bench.

    Attributes:
        title: title of its tables.
        hit_rate: share of prompt tokens served from the cache.
        round_rates: hit rate of each round.
        limit: the best possible hit rate.
        tokens_by_tier: served tokens, by the farthest tier that any of their pools came from.
        turns, turns_s: number of turns, and turns per second, checks included.
        verified_pages, wrong_pages: number of pages and states compared byte by byte, and of those that
            differed.
        problems: findings of the cache's own check at the end.
    """

    title: str
    hit_rate: float
    round_rates: Sequence[float]
    limit: HitLimit
    tokens_by_tier: Mapping[str, int]
    turns: int
    turns_s: float
    verified_pages: int
    wrong_pages: int
    problems: Sequence[str]

    @property
    def ok(self) -> bool:
        return not self.wrong_pages and not self.problems

    def as_json(self) -> dict[str, object]:
        return {
            "hit_rate": self.hit_rate,
            self.limit.key: self.limit.hit_rate,
            "rounds": [{"hit_rate": rate} for rate in self.round_rates],
            "tokens_by_tier": dict(self.tokens_by_tier),
            "turns": self.turns,
            "turns_s": self.turns_s,
            "verified_pages": self.verified_pages,
            "wrong_pages": self.wrong_pages,
            "problems": list(self.problems),
        }

    def present(self) -> RenderableType:
        rounds = Table(title=self.title)
        add_figures(rounds, "round", "hit rate")
        for number, rate in enumerate(self.round_rates):
            rounds.add_row(str(number), f"{rate:.2%}")
        return Group(rounds, self._summary())

    def _summary(self) -> Table:
        return facts(
            [
                ("hit rate", f"{self.hit_rate:.4%}"),
                (self.limit.key.replace("_", " "), f"{self.limit.hit_rate:.4%}"),
                *((f"tokens from {tier}", f"{tokens:,}") for tier, tokens in self.tokens_by_tier.items()),
                ("turns/s", f"{self.turns_s:,.0f}"),
                ("pages and states verified", f"{self.verified_pages:,}"),
                ("wrong", f"{self.wrong_pages:,}"),
                *(("problem", escape(problem)) for problem in self.problems),
            ]
        )


class HitTally:
    """Sums up turns and reports progress."""

    def __init__(self, rounds: int, turns: int, progress: Advance) -> None:
        self._prompt = [0] * rounds
        self._hit = [0] * rounds
        self._by_tier = dict.fromkeys(Tier, 0)
        self._verified = self._wrong = self._done = 0
        self._turns = turns
        self._progress = progress
        self._started = time.perf_counter()

    def add(self, round_: int, turn: TurnHits) -> None:
        self._prompt[round_] += turn.prompt_tokens
        self._hit[round_] += turn.hit_tokens
        for tier, tokens in turn.by_tier.items():
            self._by_tier[tier] += tokens
        self._verified += turn.verified
        self._wrong += turn.wrong
        self._done += 1
        self._progress(self._done, self._turns)

    def report(self, title: str, limit: HitLimit, problems: Sequence[str]) -> HitReport:
        """The report of all turns so far."""
        return HitReport(
            title=title,
            hit_rate=sum(self._hit) / sum(self._prompt),
            round_rates=[hit / prompt for hit, prompt in zip(self._hit, self._prompt, strict=True)],
            limit=limit,
            tokens_by_tier={tier.name.lower(): tokens for tier, tokens in self._by_tier.items()},
            turns=self._done,
            turns_s=self._done / (time.perf_counter() - self._started),
            verified_pages=self._verified,
            wrong_pages=self._wrong,
            problems=problems,
        )
