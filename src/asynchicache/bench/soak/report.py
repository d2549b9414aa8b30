"""What a soak came to: figures, and what was violated."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Self

from rich.console import Group, RenderableType
from rich.markup import escape

from asynchicache.bench.soak.options import SoakOptions
from asynchicache.bench.soak.samples import (
    MOST_DRIFT,
    MOST_HIT_DRIFT,
    MemoryLevel,
    Sample,
    hit_drift,
    hit_rates,
    memory_level,
)
from asynchicache.bench.soak.traffic import Served
from asynchicache.bench.soak.watchdog import LoopWatchdog
from asynchicache.bench.tables import facts
from asynchicache.types import Tier

_MOST_TOLD = 20


@dataclass(frozen=True, slots=True)
class SoakReport:
    """The result of `soak`.

    Attributes:
        minutes: that it ran.
        happened: by name, how often something was done to the cache or its storage.
        memory, hit_drift: None where the run was too short to judge.
        stalls: what blocked the loop, in words.
        starved: how often the machine stopped the loop for longer than the limit.
        violations: what went wrong, in words; empty if nothing did.
    """

    storage: str
    loop: str
    minutes: float
    caches: int
    happened: Mapping[str, int]
    served: Served
    samples: Sequence[Sample]
    memory: MemoryLevel | None
    hit_rates: Sequence[float]
    hit_drift: float | None
    stalls: Sequence[str]
    starved: int
    longest_stall_ms: float
    violations: Sequence[str]

    @classmethod
    def of(
        cls,
        options: SoakOptions,
        served: Served,
        samples: Sequence[Sample],
        *,
        happened: Mapping[str, int],
        caches: int,
        problems: Sequence[str],
        watchdog: LoopWatchdog,
    ) -> Self:
        """Judge a run."""
        rates = hit_rates(samples)
        stalls = [str(stall) for stall in watchdog.stalls]
        memory, drift = memory_level(samples), hit_drift(rates)
        violations = [*served.wrong, *problems, *stalls]
        if memory is not None and memory.drift > MOST_DRIFT:
            violations.append(f"memory moved by {memory.drift:.1%} of its level; {MOST_DRIFT:.0%} at most")
        if drift is not None and drift > MOST_HIT_DRIFT:
            violations.append(f"the hit rate moved by {drift:.3f}; {MOST_HIT_DRIFT} at most")
        if not served.hits:
            violations.append("nothing was hit")
        return cls(
            options.storage,
            options.loop,
            samples[-1].at / 60,
            caches,
            happened,
            served,
            samples,
            memory,
            rates,
            drift,
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
            "hit_rate": served.hits / served.prompt_tokens if served.prompt_tokens else 0.0,
            "hit_rates": list(self.hit_rates),
            "hit_drift": self.hit_drift,
            "tokens_by_tier": {tier.name.lower(): served.hit_tokens[tier] for tier in Tier},
            "checked": served.checked,
            "wrong": len(served.wrong),
            "abandoned": served.abandoned,
            "gave_way": served.gave_way,
            "caches": self.caches,
            "happened": dict(self.happened),
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
        told = [f"[red]violated:[/red] {escape(words)}" for words in self.violations[:_MOST_TOLD]]
        return Group(table, *told)

    def _rows(self, served: Served) -> list[tuple[str, str]]:
        happened = ", ".join(f"{count} {name}" for name, count in sorted(self.happened.items()))
        tiers = " / ".join(f"{served.hit_tokens[tier]:,}" for tier in Tier)
        rate = served.hits / served.prompt_tokens if served.prompt_tokens else 0.0
        return [
            ("minutes", f"{self.minutes:.1f}"),
            ("turns", f"{served.turns:,} ({served.turns / max(self.samples[-1].at, 1):.0f}/s)"),
            ("abandoned, gave way", f"{served.abandoned:,}, {served.gave_way:,}"),
            ("hit rate", f"{rate:.2%}"),
            ("its drift", "too short" if self.hit_drift is None else f"{self.hit_drift:.2%}"),
            ("tokens from device / host / storage", tiers),
            ("pages and states checked", f"{served.checked:,}"),
            ("wrong", f"{len(served.wrong):,}"),
            ("happened", happened),
            ("resident memory", self._memory_words()),
            ("tasks, threads, files at the end", self._left()),
            ("loop blocked, at most", f"{self.longest_stall_ms:.0f} ms, {len(self.stalls)} over the limit"),
            ("loop without a core", f"{self.starved} times over the limit"),
        ]

    def _memory_words(self) -> str:
        if self.memory is None:
            return "too short"
        return f"{self.memory.level / 1e6:.0f} MB, moved by {self.memory.drift:.1%}"

    def _left(self) -> str:
        last = self.samples[-1]
        return f"{last.tasks}, {last.threads}, {last.files}"
