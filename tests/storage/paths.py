"""Conversations with one beginning, stored one after another as the core stores them, and what is left."""

from __future__ import annotations

from collections.abc import Sequence

from asynchicache.storage.protocol import OptionalVerbs
from asynchicache.testing.backends import PoolUnderTest

SHARED, OWN = 8, 8


def path(conversation: int, shared: int = SHARED, own: int = OWN) -> list[int]:
    """Numbers of the pages of a conversation: those that all begin with, then its own."""
    return [*range(shared), *range(1000 * (conversation + 1), 1000 * (conversation + 1) + own)]


async def touch(bench: PoolUnderTest, numbers: Sequence[int]) -> None:
    """Say that a path was used: its end first, its beginning last."""
    await OptionalVerbs(bench.engine).touch(bench.keys(*reversed(numbers)))


async def converse(benches: Sequence[PoolUnderTest], conversation: int, lengths: Sequence[int] = ()) -> None:
    """Store a conversation: what is there of its path is used, the rest is put, then all of it is used.

    Args:
        benches: its pools; the first has every page of the path, the others those at the ends of `lengths`.
        conversation: its number.
        lengths: pages of the prefixes that have a state.
    """
    whole = path(conversation)
    for index, bench in enumerate(benches):
        numbers = whole if not index else [whole[length - 1] for length in lengths]
        await touch(bench, numbers)
        fresh = [
            n
            for n, there in zip(numbers, await bench.engine.exists(bench.keys(*numbers)), strict=True)
            if not there
        ]
        await bench.put(bench.keys(*fresh), range(len(fresh)))
    for index, bench in enumerate(benches):
        await touch(bench, whole if not index else [whole[length - 1] for length in lengths])


async def prefix(bench: PoolUnderTest, numbers: Sequence[int]) -> int:
    """How many pages of a path are there, from its beginning on."""
    found = bytes(await bench.engine.exists(bench.keys(*numbers)))
    return len(found) - len(found.lstrip(b"\1"))
