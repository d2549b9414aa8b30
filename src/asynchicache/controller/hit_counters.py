"""Hit counters; each request is counted once, when its load is decided."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Self

from asynchicache.types import MissReason, Tier

OTHERS = "other"
"""The name for all namespaces beyond those with counters of their own."""


@dataclass(slots=True, eq=True)
class NamespaceHits:
    """Prompt tokens of one namespace, and those served from the cache."""

    prompt_tokens: int = 0
    hit_tokens: int = 0


@dataclass(slots=True, eq=True)
class HitCounters:
    """Hits of requests: `hit_tokens` of `prompt_tokens`, by the farthest tier they came from.

    Attributes:
        reasons: requests by the reason why the hit was not longer.
        hit_slots: by pool and the tier they came from, the pages and states of hits. `STORAGE` counts those
            that the request's own prefetch brought.
        missed_tokens: prompt tokens that were not hits, by the pool that limited the hit (the first pool
            if no other did) and the reason. Reason `NONE`: the tokens after the last restorable page. Without
            those that were cheaper to compute than to read.
        stage_tokens: by stage of a chain of stores, those of `hit_tokens` that came from storage, under the
            farthest stage.
        namespaces: by name, for the first ones seen; the others are counted as `other`.
    """

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    reasons: dict[MissReason, int] = field(default_factory=lambda: dict.fromkeys(MissReason, 0))
    hit_slots: Counter[tuple[str, Tier]] = field(default_factory=Counter)
    missed_tokens: Counter[tuple[str, MissReason]] = field(default_factory=Counter)
    stage_tokens: Counter[str] = field(default_factory=Counter)
    namespaces: dict[str, NamespaceHits] = field(default_factory=dict)

    def count(self, prompt: int, hit: int, tier: Tier, reason: MissReason, pool: str) -> None:
        """Count one request: `hit` of `prompt` tokens, limited by `pool`."""
        self.requests += 1
        self.prompt_tokens += prompt
        self.hit_tokens[tier] += hit
        self.reasons[reason] += 1
        if reason is not MissReason.CHEAPER_TO_COMPUTE:
            self.missed_tokens[pool, reason] += prompt - hit

    def count_namespace(self, name: str, prompt: int, hit: int, most: int) -> None:
        """Count the same request for its namespace; at most `most` namespaces are counted separately."""
        if name not in self.namespaces and len(self.namespaces) >= most:
            name = OTHERS
        served = self.namespaces.setdefault(name, NamespaceHits())
        served.prompt_tokens += prompt
        served.hit_tokens += hit

    def copy(self) -> Self:
        return replace(
            self,
            hit_tokens=dict(self.hit_tokens),
            reasons=dict(self.reasons),
            hit_slots=Counter(self.hit_slots),
            missed_tokens=Counter(self.missed_tokens),
            stage_tokens=Counter(self.stage_tokens),
            namespaces={name: replace(served) for name, served in self.namespaces.items()},
        )
