"""The result of a replay: hit rates by tier, evictions, kept states, and causes of misses."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table

from asynchicache.replay.player import Miss, ReplayedRequest
from asynchicache.reports import add_figures, facts
from asynchicache.types import MissReason, Tier

REMEDIES: Mapping[str, str] = {
    "partial_block": "nothing: no whole page",
    "cold": "nothing: never asked before",
    "device_capacity": "more device slots",
    "evicted": "more slots",
    "not_kept": "branch points, or a spacing",
}
"""By the reason of a miss, what would have helped."""


@dataclass(frozen=True, slots=True)
class ReplayReport:
    """One replay.

    Attributes:
        title: title of the tables; not in the JSON.
        requests, prompt_tokens, trace_seconds: totals of the trace.
        skipped: requests without a prompt, or cut off at the end of the file, which were left out.
        hit_rate: share of prompt tokens served from the cache.
        request_hit_rate: share of requests with a hit.
        ceiling: the hit rate if a hit needed only attention pages and none were lost.
        tokens_by_tier, hit_rate_by_tier: by the farthest tier that any pool of the hit came from.
        working_set: by pool, the slots that the whole trace would fill.
        slots: by pool, device and host slots.
        evicted_pages: attention pages evicted from the device.
        evicted: evicted slots by pool and tier.
        block_size, longest_prompt: of the trace, in tokens.
        tokens_per_end: cached tokens for each end of a path at the end, the split that the trace asks for.
        states_kept: recurrent states in memory at the end.
        misses: computed tokens by pool and reason (`REMEDIES`).
        reasons: number of requests by `MissReason`.
        problems: findings of the planner's own check at the end.
        seconds: duration of the replay.
    """

    title: str
    requests: int
    skipped: int
    prompt_tokens: int
    trace_seconds: float
    hit_rate: float
    request_hit_rate: float
    ceiling: float
    tokens_by_tier: Mapping[str, int]
    hit_rate_by_tier: Mapping[str, float]
    working_set: Mapping[str, int]
    slots: Mapping[str, Mapping[str, int]]
    evicted_pages: int
    evicted: Mapping[str, Mapping[str, int]]
    states_kept: int
    block_size: int
    longest_prompt: int
    tokens_per_end: int
    misses: Mapping[str, Mapping[str, int]]
    reasons: Mapping[str, int]
    problems: Sequence[str]
    seconds: float

    @property
    def ok(self) -> bool:
        return not self.problems

    def as_json(self) -> dict[str, object]:
        return {name: value for name, value in asdict(self).items() if name != "title"}

    def present(self) -> RenderableType:
        """The report as tables."""
        problems = map(escape, self.problems)
        return Group(escape(self.title), self._summary(), self._pools(), self._losses(), *problems)

    def _summary(self) -> Table:
        return facts(
            [
                ("requests", f"{self.requests:,}"),
                *([("left out: no prompt, or cut off", f"{self.skipped:,}")] if self.skipped else []),
                ("prompt tokens", f"{self.prompt_tokens:,}"),
                ("hit rate", f"{self.hit_rate:.2%}"),
                *((f"  from {tier}", f"{rate:.2%}") for tier, rate in self.hit_rate_by_tier.items()),
                ("ceiling", f"{self.ceiling:.2%}"),
                ("requests with a hit", f"{self.request_hit_rate:.2%}"),
                ("states kept", f"{self.states_kept:,}"),
                ("seconds", f"{self.seconds:.1f}"),
            ]
        )

    def _pools(self) -> Table:
        table = Table("pool", title="slots", title_justify="left")
        add_figures(table, "working set", "device", "host", "evicted,\ndevice", "evicted,\nhost")
        for name, needed in self.working_set.items():
            slots, evicted = self.slots[name], self.evicted[name]
            numbers = needed, slots["device"], slots["host"], evicted["device"], evicted["host"]
            table.add_row(name, *(f"{number:,}" for number in numbers))
        return table

    def _losses(self) -> Table:
        table = Table("pool", "why", title="what was computed", title_justify="left")
        add_figures(table, "of the prompts")
        table.add_column("what would have helped")
        for pool, reasons in self.misses.items():
            for reason, tokens in reasons.items():
                table.add_row(pool, reason, f"{tokens / self.prompt_tokens:.2%}", REMEDIES[reason])
        return table


@dataclass(slots=True, eq=False)
class ReplayTally:
    """Sums up the results of requests."""

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: int = 0
    hits: int = 0
    by_tier: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    misses: Counter[Miss] = field(default_factory=Counter)
    reasons: Counter[MissReason] = field(default_factory=Counter)

    def add(self, served: ReplayedRequest) -> None:
        self.requests += 1
        self.prompt_tokens += served.prompt_tokens
        self.hit_tokens += served.hit_tokens
        self.hits += served.hit_tokens > 0
        self.by_tier[served.tier] += served.hit_tokens
        self.misses.update(served.misses)
        self.reasons[served.reason] += 1

    def missed(self) -> dict[str, dict[str, int]]:
        """Missed tokens by pool and reason, without zeros."""
        table: dict[str, dict[str, int]] = {}
        for (pool, reason), tokens in self.misses.items():
            if tokens:
                table.setdefault(pool, {})[reason] = tokens
        return table
