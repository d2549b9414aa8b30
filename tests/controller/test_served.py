"""How requests are counted, once each."""

from __future__ import annotations

from asynchicache.controller.hit_counters import OTHERS, HitCounters, NamespaceHits
from asynchicache.types import MissReason, Tier


def test_each_request_is_counted_by_tier_reason_and_pool() -> None:
    served = HitCounters()

    served.count(10, 8, Tier.HOST, MissReason.NONE, "kv")
    served.count(7, 0, Tier.DEVICE, MissReason.COLD, "mamba")
    served.count(5, 2, Tier.HOST, MissReason.COLD, "mamba")

    assert (served.requests, served.prompt_tokens) == (3, 22)
    assert {tier: count for tier, count in served.hit_tokens.items() if count} == {Tier.HOST: 10}
    assert {reason: count for reason, count in served.reasons.items() if count} == {
        MissReason.NONE: 1,
        MissReason.COLD: 2,
    }
    assert served.missed_tokens == {("kv", MissReason.NONE): 2, ("mamba", MissReason.COLD): 10}


def test_so_many_namespaces_are_told_apart_and_the_rest_are_one() -> None:
    served = HitCounters()

    for name in ("a", "b", "c", "a", "d"):
        served.count_namespace(name, 10, 4, 2)

    assert served.namespaces == {
        "a": NamespaceHits(20, 8),
        "b": NamespaceHits(10, 4),
        OTHERS: NamespaceHits(20, 8),
    }


def test_a_copy_stays_as_it_was() -> None:
    served = HitCounters()
    served.count(10, 8, Tier.HOST, MissReason.NONE, "kv")
    served.count_namespace("a", 10, 8, 2)
    served.hit_slots["kv", Tier.HOST] += 4
    before = served.copy()
    assert before == served

    served.count(10, 8, Tier.HOST, MissReason.NONE, "kv")
    served.count_namespace("a", 10, 8, 2)
    served.hit_slots["kv", Tier.HOST] += 4

    assert (before.requests, before.hit_tokens[Tier.HOST], before.reasons[MissReason.NONE]) == (1, 8, 1)
    assert before.missed_tokens == {("kv", MissReason.NONE): 2}
    assert (before.namespaces["a"].hit_tokens, before.hit_slots["kv", Tier.HOST]) == (8, 4)
