"""Names of namespaces, kept for as long as somebody may ask."""

from __future__ import annotations

from asynchicache.controller.namespaces import PLAIN, Namespace, Namespaces
from asynchicache.hashing import namespace_seed

SPARE = 1024


def test_a_seed_is_named_as_it_was_made() -> None:
    names = Namespaces(set())

    seed = names.seed("tenant", "salt")
    assert seed == namespace_seed("tenant", "salt")
    assert names.named(seed) == Namespace("tenant", "salt") == ("tenant", "salt")
    assert names.named(b"another") == PLAIN == (None, None)


def test_the_plain_namespace_is_not_renamed() -> None:
    names = Namespaces(set())
    names.remember(names.seed(None, None), Namespace("mine"))

    assert names.seed(None, None) == b""
    assert names.named(b"") == PLAIN


def test_names_without_a_root_go_when_there_are_many_and_the_newest_stays() -> None:
    roots: set[bytes] = set()
    names = Namespaces(roots)
    seeds = [names.seed(f"tenant {number}", None) for number in range(SPARE)]
    roots.update(seeds[:100])
    assert names.named(seeds[-1]).name == "tenant 1023"

    newest = names.seed("one more", None)

    assert [names.named(seed).name for seed in (seeds[0], seeds[99], newest)] == [
        "tenant 0",
        "tenant 99",
        "one more",
    ]
    assert all(names.named(seed) == PLAIN for seed in seeds[100:])


def test_the_more_names_are_needed_the_more_are_kept_without_need() -> None:
    """So that a cache of many tenants does not look through them at each request."""
    roots: set[bytes] = set()
    names = Namespaces(roots)
    seeds = [names.seed(f"tenant {number}", None) for number in range(SPARE)]
    roots.update(seeds[:199])
    names.seed("one more", None)  # 200 are left

    more = [names.seed(f"later {number}", None) for number in range(SPARE + 200)]
    assert names.named(more[0]).name == "later 0"
    names.seed("too many", None)
    assert names.named(more[0]) == PLAIN
    assert names.named(seeds[198]).name == "tenant 198"
