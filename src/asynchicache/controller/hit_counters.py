"""What requests were given, counted once for each: when it is settled what is loaded for it."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, field, replace
from typing import Self

from asynchicache.types import MissReason, Tier

OTHERS = "other"
"""Stands for every namespace beyond those that are counted apart."""


@dataclass(slots=True, eq=True)
class NamespaceHits:
    """Prompt tokens of one namespace, and those of them that were served from the cache."""

    prompt_tokens: int = 0
    hit_tokens: int = 0


@dataclass(slots=True, eq=True)
class HitCounters:
    """What requests were given: `hit_tokens` of `prompt_tokens`, by the farthest tier they came from.

    Attributes:
        reasons: requests by why they were not given more.
        hit_slots: by pool and tier, the pages and states that hits consisted of, where they lay before
            the request; `STORAGE` is what its own prefetch brought.
        missed_tokens: prompt tokens that were not given, by the pool that kept the hit from being longer
            (the first one where no other did) and why. Those of reason `NONE` are the tokens behind the last
            page that can be given.
        namespaces: by name, for the first of them; the rest are `other`.
    """

    requests: int = 0
    prompt_tokens: int = 0
    hit_tokens: dict[Tier, int] = field(default_factory=lambda: dict.fromkeys(Tier, 0))
    reasons: dict[MissReason, int] = field(default_factory=lambda: dict.fromkeys(MissReason, 0))
    hit_slots: Counter[tuple[str, Tier]] = field(default_factory=Counter)
    missed_tokens: Counter[tuple[str, MissReason]] = field(default_factory=Counter)
    namespaces: dict[str, NamespaceHits] = field(default_factory=dict)

    def count(self, prompt: int, hit: int, tier: Tier, reason: MissReason, pool: str) -> None:
        """One request: `hit` of `prompt` tokens, and the pool that kept it from being more."""
        self.requests += 1
        self.prompt_tokens += prompt
        self.hit_tokens[tier] += hit
        self.reasons[reason] += 1
        self.missed_tokens[pool, reason] += prompt - hit

    def count_namespace(self, name: str, prompt: int, hit: int, most: int) -> None:
        """The same request, for its namespace; no more than `most` of them are told apart."""
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
            namespaces={name: replace(served) for name, served in self.namespaces.items()},
        )
