"""What counts as token ids."""

from __future__ import annotations

from array import array

import numpy as np
import pytest
import torch

from asynchicache.errors import InvalidTokensError
from asynchicache.types import token_array


@pytest.mark.parametrize(
    "tokens",
    [
        [3, 0, 7],
        (3, 0, 7),
        range(3),
        iter([3, 0, 7]),
        np.array([3, 0, 7], np.int32),
        np.array([3, 0, 7], np.uint64),
        torch.tensor([3, 0, 7]),
        array("i", [3, 0, 7]),
        memoryview(array("q", [3, 0, 7])),
    ],
    ids=lambda tokens: type(tokens).__name__,
)
def test_runs_of_integers_are_tokens(tokens):
    ids = token_array(tokens)

    assert ids.typecode == "q"
    assert ids.tolist() in ([3, 0, 7], [0, 1, 2])


def test_an_array_of_64_bit_ids_is_not_copied():
    ids = array("q", [1, 2])

    assert token_array(ids) is ids


def test_the_largest_id():
    assert token_array([2**63 - 1])[0] == 2**63 - 1


@pytest.mark.parametrize(
    ("tokens", "message"),
    [
        ([], "tokens are empty"),
        (array("q"), "tokens are empty"),
        (np.array([], np.int64), "tokens are empty"),
        ([1, -2, 3], "token id -2 is negative"),
        (array("q", [-1]), "token id -1 is negative"),
        ([2**63], r"above 2\*\*63 - 1"),
        (np.array([2**63], np.uint64), r"above 2\*\*63 - 1"),
        ([1.5], "not a flat run of integers"),
        (np.array([1.0]), "not a flat run of integers"),
        ("text", "tokenise it first, and pass the token ids"),
        ({"input_ids": [1, 2]}, "pass the ids in 'input_ids'"),
        (b"12345678", "tokens are bytes"),
        (bytearray(8), "tokens are bytes"),
        ([[1, 2]], "a list of 1 prompts: pass \\[0\\]"),
        (np.array([[1, 2]]), r"2 dimensions, \[1, 2\]; a prompt has 1: pass \[0\], its only row"),
        (
            torch.zeros(3, 2, dtype=torch.long),
            r"2 dimensions, \[3, 2\]; a prompt has 1, one prompt a request",
        ),
        (torch.tensor(5), "0 dimensions"),
        (7, "not a flat run of integers"),
        (None, "not a flat run of integers"),
    ],
    ids=repr,
)
def test_anything_else_is_refused_by_name(tokens, message):
    with pytest.raises(InvalidTokensError, match=message):
        token_array(tokens)
