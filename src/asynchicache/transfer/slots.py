"""The slots of one transfer: copied, and looked at while they are few. Integers only."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from asynchicache.errors import UsageError
from asynchicache.types import PoolTransfer

Slots: TypeAlias = npt.NDArray[np.int64]

FEW = 64
"""Up to so many slots Python's own loops are quicker than numpy, which takes microseconds to begin."""


def slot_numbers(slots: Slots | Sequence[int]) -> Slots:
    """`slots` as an array; no copy where they are an `array('q')` already."""
    return np.asarray(slots, np.int64)


def slot_array(slots: Sequence[int]) -> array[int]:
    """A copy of `slots`.

    Raises:
        UsageError: they are no run of 64-bit integers.
    """
    # Most are lists, and that is quicker to see.
    if type(slots) is not list and isinstance(slots, _NO_RUNS):
        raise _no_run(slots)
    try:
        return array("q", slots)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"slots are not a run of 64-bit integers: {error}") from None


_NO_RUNS = bytes, bytearray, memoryview, set, frozenset


def _no_run(slots: object) -> UsageError:
    """An array would take the bits of bytes for 64-bit numbers, and a set's in no order that pairs them."""
    if isinstance(slots, (set, frozenset)):
        return UsageError(f"slots {slots!r} are not a run of 64-bit integers, but a set: it has no order")
    return UsageError("slots are not a run of 64-bit integers, but bytes: pass their numbers")


def copied(transfer: PoolTransfer) -> tuple[str, array[int], array[int]]:
    """
    Raises:
        UsageError: it has another form, sides of unequal length, or what is no run of 64-bit integers.
    """
    try:
        pool, given, taken = transfer
    except (TypeError, ValueError):
        raise UsageError(f"{transfer!r} must be a PoolTransfer") from None
    if not isinstance(pool, str):
        raise UsageError(f"pool {pool!r} must be the name of one")
    sources, destinations = slot_array(given), slot_array(taken)
    if len(sources) != len(destinations):
        raise UsageError(f"pool {pool!r}: {len(sources)} sources for {len(destinations)} destinations")
    return pool, sources, destinations


def looked_at(
    pool: str, sources: array[int], destinations: array[int], one_tier: bool
) -> tuple[int, int, bool]:
    """The highest of each side, -1 of none; True if nothing is written twice, nor also read where both sides
    are of one tier; False if that takes more than a quick look.

    Raises:
        UsageError: a slot is negative.
    """
    count = len(sources)
    if count == 1:
        source, destination = sources[0], destinations[0]
        if source < 0 or destination < 0:
            raise _negative(pool, source, destination)
        return source, destination, not one_tier or source != destination
    if not count:
        return -1, -1, True
    read, written = _ascending(sources), _ascending(destinations)
    if read[0] < 0 or written[0] < 0:
        raise _negative(pool, read[0], written[0])
    # Of many there are but the ends, which are never as many.
    plain = len(set(written)) == count and (not one_tier or set(read).isdisjoint(written))
    return read[-1], written[-1], plain


def _ascending(slots: array[int]) -> list[int]:
    """The slots; of many, the lowest and the highest."""
    if len(slots) > FEW:
        numbers = slot_numbers(slots)
        return [int(numbers.min()), int(numbers.max())]
    few = slots.tolist()
    few.sort()
    return few


def _negative(pool: str, *lowest: int) -> UsageError:
    slot = next(slot for slot in lowest if slot < 0)
    return UsageError(f"pool {pool!r}: slot {slot} is negative")
