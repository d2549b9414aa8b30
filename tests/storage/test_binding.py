"""The header of a page: what it says, and that any damage is seen."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest

from asynchicache.errors import ConfigError, UsageError
from asynchicache.layouts import ALIGNMENT
from asynchicache.storage.binding import SlotBinding, read_header
from asynchicache.storage.protocol import PoolBinding
from asynchicache.testing.backends import fingerprint_of, slab_of
from asynchicache.types import Outcome

PAGE_BYTES = 5000


def binding_of(
    pool: str = "kv", *, weights: str = "w1", shard: str = "0/2", page_bytes: int = PAGE_BYTES
) -> SlotBinding:
    return SlotBinding(slab_of(pool, page_bytes, 4), fingerprint_of(weights), shard)


@pytest.fixture
def binding() -> SlotBinding:
    return binding_of()


def sealed(binding: SlotBinding, name: bytes = b"d") -> None:
    """Fill and seal slot 0."""
    binding.page(0)[:PAGE_BYTES] = bytes(range(250)) * 20
    binding.seal(0, binding.key(name * 40))


def test_it_is_what_engines_expect(binding: SlotBinding) -> None:
    as_engines_see_it: PoolBinding = binding

    assert as_engines_see_it.header_bytes % ALIGNMENT == 0
    assert len(binding.header(1)) == binding.header_bytes
    assert len(binding.page(1)) == binding.slot_bytes == 8192
    assert (binding.pool, binding.shard, binding.page_bytes) == ("kv", "0/2", PAGE_BYTES)


def test_a_sealed_page_is_a_hit(binding: SlotBinding) -> None:
    sealed(binding)

    assert binding.check(0, binding.key(b"d" * 40)) is Outcome.HIT


def test_a_header_says_what_was_sealed(binding: SlotBinding) -> None:
    sealed(binding)

    found = read_header(binding.header(0))

    assert found is not None
    assert (found.key, found.page_bytes) == (binding.key(b"d" * 40), PAGE_BYTES)
    assert binding.identify(bytes(binding.header(0))) == found.key


def test_any_byte_of_the_header_counts(binding: SlotBinding) -> None:
    sealed(binding)
    key = binding.key(b"d" * 40)
    used = max(place for place, byte in enumerate(binding.header(0)) if byte) + 1
    for place in range(used):
        binding.header(0)[place] ^= 0x40

        assert binding.check(0, key) is Outcome.CORRUPT, place
        assert binding.identify(binding.header(0)) is None, place
        binding.header(0)[place] ^= 0x40
    assert binding.check(0, key) is Outcome.HIT


@pytest.mark.parametrize("place", [0, 1, 2500, PAGE_BYTES - 1])
def test_any_byte_of_the_page_counts(binding: SlotBinding, place: int) -> None:
    sealed(binding)
    binding.page(0)[place] ^= 1

    assert binding.check(0, binding.key(b"d" * 40)) is Outcome.CORRUPT


def test_padding_does_not_count(binding: SlotBinding) -> None:
    sealed(binding)
    binding.page(0)[PAGE_BYTES:] = b"x" * (binding.slot_bytes - PAGE_BYTES)

    assert binding.check(0, binding.key(b"d" * 40)) is Outcome.HIT


def test_another_page_is_corrupt(binding: SlotBinding) -> None:
    sealed(binding)

    assert binding.check(0, binding.key(b"e" * 40)) is Outcome.CORRUPT


@pytest.mark.parametrize(
    "stranger",
    [binding_of("swa"), binding_of(weights="w2"), binding_of(shard="1/2"), binding_of(page_bytes=5001)],
    ids=["pool", "weights", "shard", "length"],
)
def test_a_page_of_another_pool_is_corrupt(binding: SlotBinding, stranger: SlotBinding) -> None:
    sealed(stranger)
    binding.header(0)[:] = stranger.header(0)
    binding.page(0)[:] = stranger.page(0)

    assert binding.check(0, binding.key(b"d" * 40)) is Outcome.CORRUPT
    assert binding.identify(binding.header(0)) is None
    assert read_header(binding.header(0)) is not None


@pytest.mark.parametrize("junk", [b"", bytes(4096), b"\xff" * 4096, b"AHC-PAGE" + bytes(4088)])
def test_junk_is_no_header(binding: SlotBinding, junk: bytes) -> None:
    assert read_header(junk) is None
    assert binding.identify(junk) is None


def test_only_its_own_pages_are_sealed(binding: SlotBinding) -> None:
    with pytest.raises(UsageError, match="no page of pool 'kv', shard '0/2'"):
        binding.seal(0, binding_of("swa").key(b"d" * 40))
    with pytest.raises(UsageError):
        binding.seal(0, binding.key(b"short"))


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lambda binding: binding.header(0).__setitem__(3, 0), "header is damaged"),
        (lambda binding: sealed(binding, b"e"), "it holds"),
        (lambda binding: binding.page(0).__setitem__(0, 99), "bytes are damaged"),
    ],
)
def test_the_log_says_why(
    binding: SlotBinding,
    caplog: pytest.LogCaptureFixture,
    damage: Callable[[SlotBinding], object],
    reason: str,
) -> None:
    sealed(binding)
    damage(binding)
    with caplog.at_level(logging.DEBUG, "asynchicache.storage.binding"):
        binding.check(0, binding.key(b"d" * 40))

    assert reason in caplog.text


def test_names_that_no_key_may_hold_are_refused() -> None:
    slab = slab_of("kv", 10, 1)
    with pytest.raises(ConfigError, match="7 bytes; 32"):
        SlotBinding(slab, b"too few")
    with pytest.raises(ConfigError, match=r"'\.\./up'"):
        SlotBinding(slab, fingerprint_of("w"), "../up")
    with pytest.raises(ConfigError, match="1 to 64"):
        SlotBinding(slab_of("k" * 65, 10, 1), fingerprint_of("w"))


def test_what_seal_returns_is_all_that_an_engine_has_to_keep(binding: SlotBinding) -> None:
    key = binding.key(b"k" * 40)
    checksum = binding.seal(0, key)
    header = bytes(binding.header(0))
    binding.header(0)[:] = bytes(len(header))

    assert binding.restore(0, key, bytes(8)) is Outcome.CORRUPT
    assert bytes(binding.header(0)) == bytes(len(header))
    assert binding.restore(0, key, checksum) is Outcome.HIT
    assert bytes(binding.header(0)) == header
    binding.page(0)[3] ^= 1
    assert binding.restore(0, key, checksum) is Outcome.CORRUPT


def test_a_page_of_another_pool_is_not_restored(binding: SlotBinding) -> None:
    checksum = binding.seal(0, binding.key(b"k" * 40))
    stranger = binding.key(b"k" * 40)._replace(fingerprint=b"f" * 32)
    assert binding.restore(0, stranger, checksum) is Outcome.CORRUPT


@pytest.mark.parametrize(
    "other", [{"pool": "swa"}, {"weights": "w2"}, {"shard": "1/2"}], ids=["pool", "weights", "shard"]
)
def test_a_page_of_another_is_none_however_well_it_was_sealed(other: dict[str, str]) -> None:
    """An engine may bring the page of another pool, whole and with its own header."""
    binding, stranger = binding_of(), binding_of(**other)
    sealed(stranger)
    for mine, theirs in ((binding.page(0), stranger.page(0)), (binding.header(0), stranger.header(0))):
        mine[:] = theirs
    key = stranger.key(b"d" * 40)

    assert stranger.check(0, key) is Outcome.HIT
    assert binding.check(0, key) is Outcome.CORRUPT
    assert binding.check(0, binding.key(b"d" * 40)) is Outcome.CORRUPT
    sealed(binding)
    assert binding.check(0, key) is Outcome.CORRUPT, "nor is one of its own the other's"
