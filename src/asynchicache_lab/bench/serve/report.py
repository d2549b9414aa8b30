"""The result of `bench serve`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median, quantiles
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from asynchicache.reports import add_figures, facts
from asynchicache_lab.bench.serve.clients import ServeTurn
from asynchicache_lab.bench.serve.options import ServeBenchOptions
from asynchicache_lab.bench.serve.plain import PlainTurn

ServedRounds = list[list[ServeTurn | None]]
"""Turns by round and client; None where there was no answer."""


@dataclass(slots=True, eq=False)
class ServeReport:
    """The result of one run.

    Attributes:
        cached, uncached, outage: the turns with the cache, without hits, and with killed storage.
        plain: plain transformers' answers to the first clients, by client and round.
        rss_bytes: resident memory of the cached server after each round of `cached`, then of `outage`.
        errors: requests without an answer.
        unhandled: lines of the servers' logs about unhandled errors.
    """

    options: ServeBenchOptions
    cached: ServedRounds = field(default_factory=list)
    uncached: ServedRounds = field(default_factory=list)
    outage: ServedRounds = field(default_factory=list)
    plain: list[list[PlainTurn]] = field(default_factory=list)
    rss_bytes: list[int] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    unhandled: list[str] = field(default_factory=list)

    @property
    def ok(self) -> bool:
        return self.tokens_equal and not self.errors and not self.unhandled

    @property
    def tokens_equal(self) -> bool:
        """Whether all answers equal the uncached server's, and these equal those of plain transformers."""
        expected = _tokens(self.uncached)
        plain = [[turn.tokens for turn in turns] for turns in zip(*self.plain, strict=True)]
        checked = [turns[: len(self.plain)] for turns in expected]
        return _tokens(self.cached) == _tokens(self.outage) == expected and (not plain or plain == checked)

    @property
    def ttft_ratio(self) -> float:
        """Median over later rounds of the ratio of mean TTFT without hits to mean TTFT with hits."""
        later = zip(self.uncached[1:], self.cached[1:], strict=True)
        return median(fmean(_ttft(without)) / fmean(_ttft(having)) for without, having in later)

    @property
    def rss_growth(self) -> float:
        """Relative memory growth of the server from the end of the first play to that of the second."""
        return self.rss_bytes[-1] / self.rss_bytes[self.options.num_rounds - 1] - 1

    def as_json(self) -> dict[str, Any]:
        options = self.options
        return {
            "clients": options.num_clients,
            "storage": options.storage,
            "prompt_tokens": options.prompt_tokens,
            "cached_tokens": _cached(self.cached),
            "ceiling_tokens": options.ceiling,
            "hit_rate": _cached(self.cached) / options.prompt_tokens,
            "ceiling": options.ceiling / options.prompt_tokens,
            "tokens_equal": self.tokens_equal,
            "ttft_ratio": self.ttft_ratio,
            "rounds": [self._round(number) for number in range(options.num_rounds)],
            "outage": {
                "cached_tokens": _cached(self.outage),
                "rounds": [{"hit_rate": self._hit_rate(self.outage, n)} for n in range(options.num_rounds)],
            },
            "plain_prefill_ms": [
                fmean(t.prefill_ms for t in turns) for turns in zip(*self.plain, strict=True)
            ],
            "rss_bytes": self.rss_bytes,
            "rss_growth": self.rss_growth,
            "errors": self.errors,
            "unhandled": self.unhandled,
        }

    def _round(self, number: int) -> dict[str, Any]:
        cached, uncached = _ttft(self.cached[number]), _ttft(self.uncached[number])
        return {
            "hit_rate": self._hit_rate(self.cached, number),
            "ceiling": self.options.kept(number) / self.options.prompt(number),
            "ttft_ms": _summary(cached),
            "uncached_ttft_ms": _summary(uncached),
            "ratio": fmean(uncached) / fmean(cached),
        }

    def _hit_rate(self, rounds: ServedRounds, number: int) -> float:
        tokens = self.options.num_clients * self.options.prompt(number)
        return _cached(rounds[number : number + 1]) / tokens

    def present(self) -> RenderableType:
        """The report as tables."""
        problems = [
            f"[red]violated:[/red] {escape(problem)}" for problem in [*self.errors, *self.unhandled][:10]
        ]
        if not self.tokens_equal:
            problems.append("[red]violated:[/red] answers differ from those of the uncached model")
        return Group(self._rounds_table(), self._summary_table(), *problems)

    def _rounds_table(self) -> Table:
        table = Table(title=f"{self.options.num_clients} clients at once")
        add_figures(table, "round", "hit rate", "ceiling", "TTFT, ms", "uncached,\nms", "ratio")
        add_figures(table, "storage\nkilled")
        for number in range(self.options.num_rounds):
            row = self._round(number)
            table.add_row(
                str(number),
                f"{row['hit_rate']:.2%}",
                f"{row['ceiling']:.2%}",
                f"{row['ttft_ms']['mean']:,.0f}",
                f"{row['uncached_ttft_ms']['mean']:,.0f}",
                f"{row['ratio']:.1f}",
                f"{self._hit_rate(self.outage, number):.2%}",
            )
        return table

    def _summary_table(self) -> Table:
        memory = f"{self.rss_bytes[-1] / 1e6:,.0f} MB, {self.rss_growth:+.1%} in the second play"
        return facts(
            [
                ("cached tokens", f"{_cached(self.cached):,} of {self.options.ceiling:,} at best"),
                ("later turns' first token", f"{self.ttft_ratio:.1f} times as early as without hits"),
                ("answers equal", "yes" if self.tokens_equal else "[red]no[/red]"),
                ("server's memory", memory),
                ("requests that failed", f"{len(self.errors):,}"),
                ("unhandled errors", f"{len(self.unhandled):,}"),
            ]
        )


def _tokens(rounds: ServedRounds) -> list[list[list[int] | None]]:
    return [[None if turn is None else turn.tokens for turn in turns] for turns in rounds]


def _cached(rounds: ServedRounds) -> int:
    return sum(turn.cached_tokens for turns in rounds for turn in turns if turn is not None)


def _ttft(turns: Sequence[ServeTurn | None]) -> list[float]:
    return [turn.ttft_ms for turn in turns if turn is not None]


def _summary(times: Sequence[float]) -> dict[str, float]:
    tenths = quantiles(times, n=10, method="inclusive") if len(times) > 1 else [times[0]] * 9
    return {"mean": fmean(times), "p50": tenths[4], "p90": tenths[8]}
