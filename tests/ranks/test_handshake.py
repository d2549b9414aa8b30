"""A group forms of ranks that fit, with the least sizes of all; others are refused by name."""

from __future__ import annotations

import pytest

from asynchicache.errors import RankError
from asynchicache.ranks.handshake import Members
from asynchicache.ranks.messages import PROTOCOL, Hello

BUILD = {"page_size": "16", "weight_version": "a"}


def hello(rank: int = 1, **changes: object) -> Hello:
    fields: dict[str, object] = {
        "protocol": PROTOCOL,
        "token": "secret",
        "rank": rank,
        "build": BUILD,
        "slots": {"kv": (8, 40)},
    }
    return Hello(**(fields | changes))  # type: ignore[arg-type]


def members(ranks: int = 3) -> Members:
    return Members("secret", BUILD, {"kv": (10, 20)}, ranks)


def test_the_least_sizes_are_agreed() -> None:
    group = members()
    group.join(hello(1))
    assert list(group.missing) == [2]
    group.join(hello(2, slots={"kv": (12, 15)}))
    assert not group.missing
    assert group.agreed({}) == {"kv": (8, 15)}


@pytest.mark.parametrize(
    ("rank", "changes", "words"),
    [
        (1, {"protocol": 99}, f"rank 1 speaks protocol 99, this group {PROTOCOL}"),
        (3, {}, "rank 3 is none of the followers 1 to 2"),
        (0, {}, "rank 0 is none of the followers"),
        (
            2,
            {"build": BUILD | {"page_size": "64"}},
            "differs from rank 0 in page_size: '64', not '16'",
        ),
        (2, {"build": {}}, "rank 2 differs from rank 0 in page_size: None, not '16'"),
        (2, {"build": BUILD | {"more": "1"}}, "rank 2 differs from rank 0 in more: '1', not None"),
        (2, {"slots": {"mamba": (1, 1)}}, r"rank 2 has slots of \['mamba'\], rank 0 of \['kv'\]"),
    ],
)
def test_what_does_not_fit_is_named(rank: int, changes: dict[str, object], words: str) -> None:
    with pytest.raises(RankError, match=words):
        members().join(hello(rank, **changes))


def test_a_rank_joins_once() -> None:
    group = members()
    group.join(hello(1))
    with pytest.raises(RankError, match="rank 1 joined twice"):
        group.join(hello(1))


def test_the_token_is_compared() -> None:
    assert members().admits(hello())
    assert not members().admits(hello(token="guess"))
