"""The byte oracle: right bytes pass, and every kind of wrong ones is seen."""

import random
from array import array
from itertools import pairwise

import pytest
import torch

from asynchicache.hashing import page_digests
from asynchicache.testing.oracle import ByteOracle
from asynchicache.testing.specs import synthetic_spec
from asynchicache_lab.bench.synthetic import Transcript, draw_tokens

PAGE = 64
SLOTS = 8
DIGESTS = [bytes([number]) * 32 for number in range(1, 5)]


@pytest.fixture
def memory() -> dict[tuple[str, str], torch.Tensor]:
    spec = synthetic_spec(PAGE)
    return {
        (pool.name, tensor.name): torch.zeros(
            len(tensor.layers), SLOTS, *((PAGE,) if pool.per_token else ()), *tensor.shape, dtype=torch.uint8
        )
        for pool in spec.pools
        for tensor in pool.tensors
    }


@pytest.fixture
def oracle(memory: dict[tuple[str, str], torch.Tensor]) -> ByteOracle:
    return ByteOracle(synthetic_spec(PAGE), lambda pool, tensor: memory[pool, tensor])


@pytest.mark.parametrize("pool", ["kv", "mamba"])
def test_what_was_written_is_right_wherever_it_lies(oracle: ByteOracle, pool: str) -> None:
    oracle.write(pool, [5, 0, 3], DIGESTS[:3])

    assert oracle.count_wrong(pool, [5, 0, 3], DIGESTS[:3]) == 0
    assert oracle.count_wrong(pool, [3], DIGESTS[2:3]) == 0
    assert oracle.count_wrong(pool, [], []) == 0


def test_slots_of_other_pages_are_wrong(oracle: ByteOracle) -> None:
    oracle.write("kv", [0, 1, 2], DIGESTS[:3])

    assert oracle.count_wrong("kv", [0, 2, 1], DIGESTS[:3]) == 2
    assert oracle.count_wrong("kv", [0, 1, 7], DIGESTS[:3]) == 1


def test_one_flipped_byte_is_seen(oracle: ByteOracle, memory: dict[tuple[str, str], torch.Tensor]) -> None:
    oracle.write("kv", [0, 1], DIGESTS[:2])
    memory["kv", "values"][1, 1, PAGE - 1] ^= 1

    assert oracle.count_wrong("kv", [0, 1], DIGESTS[:2]) == 1


def test_layers_and_tensors_have_bytes_of_their_own(
    oracle: ByteOracle, memory: dict[tuple[str, str], torch.Tensor]
) -> None:
    oracle.write("kv", [0], DIGESTS[:1])
    parts = [layer[0].flatten() for name in ("keys", "values") for layer in memory["kv", name]]

    assert len({bytes(part.tolist()) for part in parts}) == 4


def test_a_transcript_has_the_digests_of_its_whole_pages() -> None:
    transcript = Transcript(4)
    tokens = array("q", range(19))
    for start in range(0, 19, 5):
        transcript.extend(tokens[start : start + 5])

    assert transcript.tokens == tokens
    assert transcript.digests == page_digests(tokens, 4)


def test_tokens_follow_from_the_seed() -> None:
    first, again = (draw_tokens(random.Random(3), 7, 100) for _ in range(2))

    assert first == again
    assert [b - a for a, b in pairwise(first)] == [1] * 99
