"""Where prompts that wait leave the one that is computed."""

from __future__ import annotations

from array import array

import pytest

from asynchicache.integrations.transformers.generation import GenerationJob
from asynchicache.integrations.transformers.sampling import GREEDY
from asynchicache.integrations.transformers.sharing import PromptSharing, common_tokens
from asynchicache.integrations.transformers.stopping import StopRule

pytestmark = pytest.mark.asyncio


def job(tokens: list[int], salt: str | None = None) -> GenerationJob:
    return GenerationJob(array("q", tokens), GREEDY, StopRule(1, (), (), None), namespace=None, salt=salt)


@pytest.mark.parametrize(
    ("one", "other", "most", "common"),
    [([1, 2, 3], [1, 2, 4], 3, 2), ([1, 2], [1, 2, 3], 2, 2), ([5], [6], 1, 0), ([5], [5], 0, 0)],
)
async def test_common_tokens(one: list[int], other: list[int], most: int, common: int) -> None:
    assert common_tokens(array("q", one), array("q", other), most) == common


async def test_the_cut_is_where_most_part_and_then_the_next() -> None:
    sharing, first = PromptSharing(page_size=2), job([*range(10)])
    for tokens in ([0, 1, 2, 3, 9, 9], [0, 1, 2, 3, 8], [*range(9)], [7]):
        sharing.join(job(tokens))

    assert sharing.cut(first, 0) == 4
    assert sharing.cut(first, 4) == 8
    assert sharing.cut(first, 8) is None


async def test_a_prompt_that_is_the_beginning_of_another_keeps_a_token_to_compute() -> None:
    sharing, first = PromptSharing(page_size=2), job([*range(10)])
    sharing.join(job([*range(8)]))

    assert sharing.cut(first, 0) == 6


async def test_others_salts_and_those_that_left_are_no_reason() -> None:
    sharing, first = PromptSharing(page_size=2), job([*range(10)])
    other = job([*range(10)])
    sharing.join(job([*range(10)], salt="b"))
    sharing.join(other)
    sharing.leave(other)
    sharing.leave(other)

    assert sharing.cut(first, 0) is None
