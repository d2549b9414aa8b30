"""Page digests: published vectors, and a chain written down naively."""

from __future__ import annotations

import hashlib
import random
import struct
from array import array
from fnmatch import fnmatchcase

import pytest

from asynchicache.errors import ConfigError
from asynchicache.hashing import (
    DIGEST_BYTES,
    NAMESPACE_BYTES,
    NO_NAMESPACE,
    ObjectKey,
    namespace_id,
    namespace_seed,
    page_digests,
    pool_fingerprint,
    tail_digests,
)

FIRST = "cf97adeedb59e05bfd73a2b4c2a8885708c4f4f70c84c64b27120e72ab733b72"
SECOND = "4ebfa8a1f3c341517621838c6e1b9aa350307e3f00b3cbd1a07ef740f54396d6"
WIDE = "e189a93a5d2d3d79172a9aa46acb688a6b459d5c12c94f42ac3a51500cf502d3"
LORA_A = "407c773a7c02b33bd4a62af6bf5fc77997c2c8067811ecf2b39e3839c3f4284b"
FIRST_UNDER_LORA_A = "e4f68dc4af99b6de199d5a048add282da40aa4ef97942ce9eca321bccada9376"
SALT_S = "c825a7fb5423c8a6cc5990d09f8ca69181b05fdffd804c10db403e9e52699f6b"


def hexes(tokens: list[int], page_size: int, prior: bytes = b"") -> list[str]:
    """The hashes; what stands before each is its namespace."""
    digests = page_digests(array("q", tokens), page_size, prior)
    assert all(digest[:NAMESPACE_BYTES] == namespace_id(prior) for digest in digests)
    return [digest[NAMESPACE_BYTES:].hex() for digest in digests]


def naive(tokens: list[int], page_size: int, prior: bytes = b"") -> list[bytes]:
    """The definition, one token at a time."""
    digests = []
    namespace, prior = namespace_id(prior), prior[-32:]
    for start in range(0, len(tokens) - page_size + 1, page_size):
        page = tokens[start : start + page_size]
        wide = any(token >= 2**32 for token in page)
        text = prior + (b"\xff" if wide else b"")
        for token in page:
            text += struct.pack("<Q" if wide else "<I", token)
        prior = hashlib.sha256(text).digest()
        digests.append(namespace + prior)
    return digests


# Vectors of SGLang's `get_hash_str` and `storage_namespace_seed`


def test_a_chain_of_two_pages():
    assert hexes([1, 2, 3, 4, 5, 6, 7, 8], 4) == [FIRST, SECOND]


def test_a_chain_can_be_continued():
    assert hexes([5, 6, 7, 8], 4, NO_NAMESPACE + bytes.fromhex(FIRST)) == [SECOND]


def test_a_page_with_an_id_of_more_than_32_bits():
    assert hexes([1 << 33, 2], 2) == [WIDE]


def test_namespaces():
    assert namespace_seed("lora-a").hex() == LORA_A
    assert namespace_seed(None, "s").hex() == SALT_S
    assert hexes([1, 2, 3, 4], 4, namespace_seed("lora-a")) == [FIRST_UNDER_LORA_A]


def test_no_namespace_is_the_plain_chain():
    assert namespace_seed(None) == b""
    assert hexes([1, 2, 3, 4], 4, namespace_seed(None)) == [FIRST]


# Against the definition


@pytest.mark.parametrize("seed", range(20))
def test_digests_follow_the_definition(seed):
    generator = random.Random(seed)
    page_size = generator.choice([1, 2, 3, 16, 64])
    wide = generator.choice([0.0, 0.02, 0.5])
    tokens = [
        generator.getrandbits(63 if generator.random() < wide else 32)
        for _ in range(generator.randrange(6 * page_size))
    ]
    prior = generator.choice([b"", generator.randbytes(32), generator.randbytes(DIGEST_BYTES)])

    assert page_digests(array("q", tokens), page_size, prior) == naive(tokens, page_size, prior)


@pytest.mark.parametrize("token", [0, 2**31, 2**32 - 1, 2**32, 2**63 - 1])
def test_ids_at_the_edges(token):
    assert page_digests(array("q", [7, token]), 2) == naive([7, token], 2)


def test_a_wide_page_does_not_widen_its_neighbours():
    tokens = [1, 2, 2**40, 4, 5, 6]

    assert page_digests(array("q", tokens), 2) == naive(tokens, 2)


def test_a_tail_shorter_than_a_page_is_left_out():
    assert hexes([1, 2, 3, 4, 5], 4) == [FIRST]
    assert hexes([1, 2, 3], 4) == []
    assert hexes([], 4) == []


def test_a_buffer_will_do():
    key = array("q", [1, 2, 3, 4]).tobytes()

    assert page_digests(memoryview(key), 4) == page_digests(array("q", [1, 2, 3, 4]), 4)


# Names built from digests


def test_parts_of_a_namespace_do_not_run_into_each_other():
    seeds = [
        namespace_seed(extra, salt)
        for extra, salt in [("ab", "c"), ("a", "bc"), ("abc", None), (None, "abc"), ("abc", ""), ("", "abc")]
    ]

    assert len(set(seeds)) == len(seeds)


PARTS = {
    "model": "m", "weight_version": "1", "identity": "i", "pool": "kv", "layout": "l",
    "page_size": 64, "sharding": "s", "salt": "",
}  # fmt: skip


@pytest.mark.parametrize("part", PARTS)
def test_every_part_of_a_fingerprint_matters(part):
    other = 65 if part == "page_size" else "other"

    assert pool_fingerprint(**PARTS) != pool_fingerprint(**{**PARTS, part: other})
    assert pool_fingerprint(**PARTS) == pool_fingerprint(**PARTS)
    assert len(pool_fingerprint(**PARTS)) == 32


def test_parts_of_a_fingerprint_do_not_run_into_each_other():
    assert pool_fingerprint(**{**PARTS, "model": "ab", "weight_version": "c"}) != pool_fingerprint(
        **{**PARTS, "model": "a", "weight_version": "bc"}
    )


def test_an_object_key_is_a_safe_name():
    key = ObjectKey(b"\x01" * 32, NO_NAMESPACE + bytes.fromhex(FIRST), "kv", "1/2")

    assert key.text() == f"{'01' * 16}.kv.1-2.{'00' * 8}{FIRST}"
    assert key._replace(shard="").text() == f"{'01' * 16}.kv.{'00' * 8}{FIRST}"
    assert set(key.text()) <= set("abcdefghijklmnopqrstuvwxyz0123456789.-_")


@pytest.mark.parametrize(
    "others", [("1/2", "1-2"), ("a-/b", "a/-b", "a--b", "a//b"), ("tp0/2-pp1/2", "tp0-2/pp1-2")]
)
def test_two_shards_never_share_a_name(others):
    keys = [ObjectKey(b"\x01" * 32, NO_NAMESPACE + bytes.fromhex(FIRST), "kv", shard) for shard in others]

    assert len({key.text() for key in keys}) == len({key.pattern() for key in keys}) == len(others)


def test_a_pattern_is_for_the_keys_of_one_pool():
    key = ObjectKey(b"\x01" * 32, NO_NAMESPACE + bytes.fromhex(FIRST), "kv", "1/2")

    assert fnmatchcase(key._replace(digest=bytes(DIGEST_BYTES)).text(), key.pattern())
    for other in ({"pool": "swa"}, {"shard": "2/2"}, {"shard": ""}, {"fingerprint": bytes(32)}):
        assert not fnmatchcase(key._replace(**other).text(), key.pattern())


def test_a_pattern_is_for_the_keys_of_one_namespace():
    alice, bob = (namespace_seed(name, "salt") for name in ("alice", "bob"))
    keys = [
        ObjectKey(b"\x01" * 32, digest, "kv")
        for seed in (alice, bob, b"")
        for digest in page_digests(array("q", range(8)), 2, seed)
    ]

    for seed in (alice, bob, b""):
        matching = [fnmatchcase(key.text(), keys[0].pattern(namespace_id(seed))) for key in keys]
        assert matching == [key.namespace == namespace_id(seed) for key in keys]
        assert matching.count(True) == 4


def test_pages_that_follow_the_same_page_have_the_digests_of_whole_pages():
    keys = [array("q", [5, *run]) for run in ([6, -1], [-1, -1], [6, 1 << 40])]

    assert tail_digests([key.tobytes() for key in keys], bytes.fromhex(FIRST)) == [
        page_digests(key, 3, bytes.fromhex(FIRST))[0] for key in keys
    ]


@pytest.mark.parametrize("names", [(1, None), (None, b"salt")])
def test_names_that_are_no_strings_are_refused(names):
    with pytest.raises(ConfigError, match="must be a string, or None"):
        namespace_seed(*names)
