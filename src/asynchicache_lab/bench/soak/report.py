"""The result of a soak: figures and violations."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from rich.console import Group, RenderableType
from rich.markup import escape

from asynchicache.reports import facts
from asynchicache.types import Tier
from asynchicache_lab.bench.soak.options import SoakOptions
from asynchicache_lab.bench.soak.samples import (
    MAX_DRIFT,
    MAX_HIT_DRIFT,
    MemoryLevel,
    ProcessSample,
    hit_drift,
    hit_rates,
    memory_level,
    model_gap,
)
from asynchicache_lab.bench.soak.traffic import SoakCounters
from asynchicache_lab.bench.soak.watchdog import LoopWatchdog

_MAX_VIOLATIONS = 20

MAX_GAP = 0.01
"""How far the hit rate may be from the model's."""


@dataclass(frozen=True, slots=True)
class SoakReport:
    """The result of `soak`.

    Attributes:
        minutes: duration of the run.
        happened: by name, the number of events and faults applied to the cache or its storage.
        unwritten: by reason, pages and states that were not written to storage or the host as they should.
        memory, hit_drift: None if the run was too short to judge.
        model_gap: hit rate minus the model's, after the first minute; None if the run was too short.
        stalls: descriptions of what blocked the loop.
        starved: number of times that the machine stopped the loop for longer than the limit.
        violations: descriptions of what went wrong; empty if nothing did.
    """

    storage: str
    loop: str
    minutes: float
    caches: int
    happened: Mapping[str, int]
    unwritten: Mapping[str, int]
    served: SoakCounters
    samples: Sequence[ProcessSample]
    memory: MemoryLevel | None
    hit_rates: Sequence[float]
    hit_drift: float | None
    model_gap: float | None
    stalls: Sequence[str]
    starved: int
    longest_stall_ms: float
    violations: Sequence[str]

    @classmethod
    def of(
        cls,
        options: SoakOptions,
        served: SoakCounters,
        samples: Sequence[ProcessSample],
        *,
        happened: Mapping[str, int],
        unwritten: Mapping[str, int],
        caches: int,
        problems: Sequence[str],
        watchdog: LoopWatchdog,
    ) -> Self:
        """Judge a run."""
        rates = hit_rates(samples)
        stalls = [str(stall) for stall in watchdog.stalls]
        memory, drift = memory_level(samples), hit_drift(rates)
        violations = [*served.wrong, *problems, *stalls]
        if memory is not None and memory.drift > MAX_DRIFT:
            violations.append(f"memory moved by {memory.drift:.1%} of its level; {MAX_DRIFT:.0%} at most")
        if drift is not None and drift > MAX_HIT_DRIFT:
            violations.append(f"the hit rate moved by {drift:.3f}; {MAX_HIT_DRIFT} at most")
        gap = model_gap(samples)
        if gap is not None and not options.fault_seconds and abs(gap) > MAX_GAP:
            violations.append(f"the hit rate is {gap:+.2%} from the model's; {MAX_GAP:.0%} at most")
        if not served.hits:
            violations.append("nothing was hit")
        return cls(
            options.storage,
            options.loop,
            samples[-1].at / 60,
            caches,
            happened,
            unwritten,
            served,
            samples,
            memory,
            rates,
            drift,
            gap,
            stalls,
            watchdog.starved,
            watchdog.longest * 1e3,
            violations,
        )

    @property
    def ok(self) -> bool:
        return not self.violations

    def as_json(self) -> dict[str, object]:
        served, last = self.served, self.samples[-1]
        return {
            "storage": self.storage,
            "loop": self.loop,
            "minutes": self.minutes,
            "turns": served.turns,
            "turns_s": served.turns / last.at if last.at else 0.0,
            "hit_rate": self._share(served.hits),
            "model_hit_rate": self._share(served.models.judged.hit_tokens),
            "model_gap": self.model_gap,
            "short_of_model": {reason: self._share(tokens) for reason, tokens in served.short.items()},
            "not_durable": served.not_durable,
            "over_model": self._share(served.over),
            "model_memory_hit_rate": self._share(served.models.judged.memory_tokens),
            "undivided_hit_rate": self._share(served.models.undivided.hit_tokens),
            "hit_rates": list(self.hit_rates),
            "hit_drift": self.hit_drift,
            "tokens_by_tier": {tier.name.lower(): served.hit_tokens[tier] for tier in Tier},
            "checked": served.checked,
            "wrong": len(served.wrong),
            "abandoned": served.abandoned,
            "gave_way": served.gave_way,
            "caches": self.caches,
            "happened": dict(self.happened),
            "unwritten": dict(self.unwritten),
            "rss_bytes": asdict(self.memory) | {"drift": self.memory.drift} if self.memory else None,
            "tasks": last.tasks,
            "threads": last.threads,
            "files": last.files,
            "longest_stall_ms": self.longest_stall_ms,
            "stalls": len(self.stalls),
            "starved": self.starved,
            "samples": [asdict(sample) for sample in self.samples[:: max(len(self.samples) // 60, 1)]],
            "violations": list(self.violations),
        }

    def present(self) -> RenderableType:
        served = self.served
        table = facts(self._rows(served), f"soak: {self.storage}, {self.loop}")
        violations = [f"[red]violated:[/red] {escape(words)}" for words in self.violations[:_MAX_VIOLATIONS]]
        return Group(table, *violations)

    def _share(self, tokens: int) -> float:
        """Share of all prompt tokens that were hits."""
        return tokens / self.served.prompt_tokens if self.served.prompt_tokens else 0.0

    def _rows(self, served: SoakCounters) -> list[tuple[str, str]]:
        tiers = " / ".join(f"{served.hit_tokens[tier]:,}" for tier in Tier)
        models = served.models
        return [
            ("minutes", f"{self.minutes:.1f}"),
            ("turns", f"{served.turns:,} ({served.turns / max(self.samples[-1].at, 1):.0f}/s)"),
            ("abandoned, gave way", f"{served.abandoned:,}, {served.gave_way:,}"),
            ("hit rate", f"{self._share(served.hits):.2%}"),
            ("the model's", f"{self._share(models.judged.hit_tokens):.2%}"),
            ("above it after a minute", _points(self.model_gap)),
            ("hits shorter than the model's, by reason", self._short()),
            ("the model's, of storage with one bound", f"{self._share(models.undivided.hit_tokens):.2%}"),
            ("its drift", _points(self.hit_drift)),
            ("tokens from device / host / storage", tiers),
            ("pages and states checked", f"{served.checked:,}"),
            ("wrong", f"{len(served.wrong):,}"),
            ("happened", _counts(self.happened)),
            ("not written in time", _counts(self.unwritten)),
            ("resident memory", self._memory_words()),
            ("tasks, threads, files at the end", self._left()),
            ("loop blocked, at most", f"{self.longest_stall_ms:.0f} ms, {len(self.stalls)} over the limit"),
            ("loop without a core", f"{self.starved} times over the limit"),
        ]

    def _short(self) -> str:
        return ", ".join(
            f"{reason} {self._share(tokens):.2%}" for reason, tokens in self.served.short.most_common()
        )

    def _memory_words(self) -> str:
        if self.memory is None:
            return "too short"
        return f"{self.memory.level / 1e6:.0f} MB, moved by {self.memory.drift:.1%}"

    def _left(self) -> str:
        last = self.samples[-1]
        return f"{last.tasks}, {last.threads}, {last.files}"


def _points(rate: float | None) -> str:
    return "too short" if rate is None else f"{rate:.2%}"


def _counts(counts: Mapping[str, int]) -> str:
    return ", ".join(f"{count:,} {name}" for name, count in sorted(counts.items()))
