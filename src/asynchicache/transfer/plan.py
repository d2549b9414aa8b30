"""What is to be copied, and the merging of many such wishes into few copies. Integers only.

Operations of one direction merge into a plan: slots become runs that are contiguous on both sides,
layers become groups that are worth a launch, and each operation keeps a view on the last group that
holds bytes of its own. After `HiCacheController.merge_ops` of SGLang, with runs in place of page
lists, and with overlapping or dependent copies refused, because a batch has no order within.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import force_setattr

from asynchicache.errors import InternalError, UsageError
from asynchicache.specs import PoolSpec
from asynchicache.types import PoolTransfer, Tier

Slots: TypeAlias = npt.NDArray[np.int64]

FEW = 64
"""Up to so many slots Python's own loops are quicker than numpy, which takes microseconds to begin."""


Columns: TypeAlias = dict[str, tuple[Slots, Slots]]
"""By pool, (sources, destinations) of all that is to be moved."""


class Direction(Enum):
    """From which tier to which."""

    LOAD = "load"  # host to device
    BACKUP = "backup"  # device to host
    FORK = "fork"  # device to device: a state that one request goes on from and another keeps

    @property
    def source(self) -> Tier:
        return Tier.HOST if self is Direction.LOAD else Tier.DEVICE

    @property
    def destination(self) -> Tier:
        return Tier.HOST if self is Direction.BACKUP else Tier.DEVICE


_LOAD, _BACKUP, _FORK = Direction
# To look a member up takes an enum longer than a function takes to be called.

Reach: TypeAlias = tuple[str, int, int]
"""(pool, highest slot on the device, highest slot on the host) of one transfer; -1 if it touches none."""


class CacheOperation(msgspec.Struct, frozen=True):
    """What one request wants moved.

    Attributes:
        direction: from which tier to which.
        transfers: by pool, slots to slots; a pool may come more than once.
        reach: of each transfer, so that whoever knows the pools checks it in no time; none if there is
            nothing to move. Not to be given: it is worked out.
    """

    # A struct: to set the fields of a frozen dataclass takes longer than to check a few slots.
    direction: Direction
    transfers: tuple[PoolTransfer, ...]
    reach: tuple[Reach, ...] = ()

    def __post_init__(self) -> None:
        """
        Raises:
            UsageError: no direction, lists of unequal length, a slot that is no integer or negative, a
                destination twice, or a slot forked and written at once.
        """
        direction = self.direction
        if not isinstance(direction, Direction):
            raise UsageError(f"{direction!r} must be a Direction")
        transfers, reaches, moves, plain = [], [], False, set()
        for transfer in self.transfers:
            pool, sources, destinations = copy = copied(transfer)
            source, destination, independent = looked_at(pool, sources, destinations, direction is _FORK)
            transfers.append(tuple.__new__(PoolTransfer, copy))  # its own way is twice as long
            reaches.append(_reach(direction, pool, source, destination))
            moves = moves or destination >= 0
            if independent:
                plain.add(pool)
        force_setattr(self, "transfers", tuple(transfers))
        force_setattr(self, "reach", tuple(reaches) if moves else ())
        if len(plain) < len(transfers):
            for pool, (read, written) in self.columns().items():
                _check_independent(direction, pool, read, np.sort(written))

    @property
    def empty(self) -> bool:
        """There is nothing to move."""
        return not self.reach

    def columns(self) -> Columns:
        """Slots by pool of all its transfers; pools with nothing to move left out."""
        return columns_of([self])


class PoolExtent(NamedTuple):
    """What a plan has to know of one pool.

    Attributes:
        spec: the pool.
        page_size: tokens of a slot.
        device_slots: slots on the device.
        host_slots: slots in host memory.
    """

    spec: PoolSpec
    page_size: int
    device_slots: int
    host_slots: int

    def capacity(self, tier: Tier) -> int:
        return self.device_slots if tier is Tier.DEVICE else self.host_slots


class TensorPart(NamedTuple):
    """Layers `start` to `stop - 1` of one tensor, local numbers (indices into its `layers`)."""

    pool: str
    tensor: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True)
class LayerGroup:
    """Layers that are copied together and become visible together.

    Attributes:
        start: the first layer of the model in it.
        stop: one behind the last.
        parts: what of which tensors it copies, in every run of their pool.
    """

    start: int
    stop: int
    parts: tuple[TensorPart, ...]


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """What operations of one direction come to when they are carried out as one.

    Attributes:
        direction: theirs.
        runs: by pool, int64 `[runs, 3]` of (first source slot, first destination slot, slots), the
            same for all tensors and layers.
        groups: in the order they are to be copied; together they hold every layer of the model.
        last_groups: by operation, the index of the last group that holds bytes of it.
        nbytes: bytes to be moved.
    """

    direction: Direction
    runs: Mapping[str, Slots]
    groups: tuple[LayerGroup, ...]
    last_groups: tuple[int, ...]
    nbytes: int

    def group_of(self, layer: int) -> int:
        """The index of the group that holds layer `layer` of the model."""
        return bisect_left(self.groups, layer + 1, key=lambda group: group.stop)


def merge(
    operations: Sequence[CacheOperation],
    pools: Mapping[str, PoolExtent],
    layers: int,
    group_bytes: int | None,
) -> TransferPlan:
    """One plan for all of `operations`.

    Args:
        operations: of one direction, one at least, not all of them empty.
        pools: by name.
        layers: layers of the model, those without a cache included.
        group_bytes: what makes a group of layers worth a launch; the first group closes at the first
            layer with bytes all the same, so that a forward can start on it. None: one group.

    Raises:
        UsageError: an unknown pool, a slot that is not there, two operations that write one slot, or
            one that reads what another writes.
        InternalError: no operations, or several directions.
    """
    direction = _common_direction(operations)
    columns = columns_of(operations)
    for pool, (sources, destinations) in columns.items():
        check_slots(pool, direction.source, sources, pools)
        check_slots(pool, direction.destination, destinations, pools)
    pages = {pool: len(sources) for pool, (sources, _) in columns.items()}
    sizes = _layer_bytes(pages, pools, layers)
    groups = tuple(
        LayerGroup(start, stop, tuple(_parts(pages, pools, start, stop)))
        for start, stop in pairwise(_group_bounds(sizes, group_bytes))
    )
    return TransferPlan(
        direction=direction,
        runs={pool: _runs(direction, pool, *slots) for pool, slots in columns.items()},
        groups=groups,
        last_groups=_last_groups(operations, groups),
        nbytes=sum(sizes),
    )


def check_slots(pool: str, tier: Tier, slots: Slots | Sequence[int], pools: Mapping[str, PoolExtent]) -> None:
    """
    Raises:
        UsageError: `pool` is not in `pools`, or one of `slots` is outside of it.
    """
    extent = pools.get(pool)
    if extent is None:
        raise UsageError(f"pool {pool!r} is none of {sorted(pools)}")
    numbers, capacity = slot_numbers(slots), extent.capacity(tier)
    wrong = numbers[(numbers < 0) | (numbers >= capacity)]
    if len(wrong):
        raise UsageError(f"pool {pool!r} has no {tier.name.lower()} slot {wrong[0]}; it has {capacity}")


# Slots.


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


def _reach(direction: Direction, pool: str, source: int, destination: int) -> Reach:
    """`source` and `destination` are the highest slots."""
    if direction is _LOAD:
        return pool, destination, source
    if direction is _BACKUP:
        return pool, source, destination
    return pool, max(source, destination), -1


def columns_of(operations: Sequence[CacheOperation]) -> Columns:
    """Slots by pool of all their transfers; pools with nothing to move left out."""
    by_pool: dict[str, list[PoolTransfer]] = {}
    for operation in operations:
        for transfer in operation.transfers:
            if transfer.sources:
                by_pool.setdefault(transfer.pool, []).append(transfer)
    return {
        pool: (
            np.concatenate([slot_numbers(transfer.sources) for transfer in transfers]),
            np.concatenate([slot_numbers(transfer.destinations) for transfer in transfers]),
        )
        for pool, transfers in by_pool.items()
    }


def _check_independent(direction: Direction, pool: str, sources: Slots, destinations: Slots) -> None:
    """`destinations` must be sorted."""
    twice = destinations[1:][destinations[1:] == destinations[:-1]]
    if len(twice):
        raise UsageError(f"pool {pool!r}: destination slot {twice[0]} is written twice")
    if direction.source is direction.destination:
        both = np.intersect1d(sources, destinations)
        if len(both):
            raise UsageError(f"pool {pool!r}: slot {both[0]} is read and written by copies without an order")


def _common_direction(operations: Sequence[CacheOperation]) -> Direction:
    directions = {operation.direction for operation in operations}
    if len(directions) != 1:
        names = sorted(direction.value for direction in directions)
        raise InternalError(f"operations to merge must be of one direction, not of {names}")
    return directions.pop()


def _runs(direction: Direction, pool: str, sources: Slots, destinations: Slots) -> Slots:
    """Slots in runs that are contiguous on both sides, ascending by destination; `[runs, 3]`."""
    if len(sources) <= FEW and direction is not Direction.FORK:
        return _few_runs(direction, pool, sources, destinations)
    order = np.argsort(destinations)
    sources, destinations = sources[order], destinations[order]
    _check_independent(direction, pool, sources, destinations)
    breaks = np.flatnonzero((np.diff(destinations) != 1) | (np.diff(sources) != 1)) + 1
    starts = np.concatenate([[0], breaks])
    counts = np.diff(starts, append=len(sources))
    return np.stack([sources[starts], destinations[starts], counts], axis=1)


def _few_runs(direction: Direction, pool: str, sources: Slots, destinations: Slots) -> Slots:
    runs: list[list[int]] = []
    source_end = destination_end = -1
    for destination, source in sorted(zip(destinations.tolist(), sources.tolist(), strict=True)):
        if destination < destination_end:
            _check_independent(direction, pool, sources, np.sort(destinations))
        if (source, destination) == (source_end, destination_end):
            runs[-1][2] += 1
        else:
            runs.append([source, destination, 1])
        source_end, destination_end = source + 1, destination + 1
    return np.array(runs, np.int64)


# Layers.


def _layer_bytes(pages: Mapping[str, int], pools: Mapping[str, PoolExtent], layers: int) -> list[int]:
    sizes = [0] * layers
    for pool, count in pages.items():
        extent = pools[pool]
        for tensor in extent.spec.tensors:
            item = extent.spec.item_bytes(tensor, extent.page_size)
            for layer in tensor.layers:
                sizes[layer] += item * count
    return sizes


def _group_bounds(sizes: Sequence[int], group_bytes: int | None) -> list[int]:
    """The first layer of each group, and `len(sizes)` at the end. Layers without bytes close no group."""
    bounds, held, moved = [0], 0, 0
    total = sum(sizes)
    for layer, size in enumerate(sizes):
        held += size
        moved += size
        first = len(bounds) == 1
        worth = group_bytes is not None and held >= (1 if first else max(1, group_bytes))
        # What follows the last bytes belongs to their group: a group of nothing is not worth an event.
        if worth and moved < total:
            bounds.append(layer + 1)
            held = 0
    return [*bounds, len(sizes)]


def _parts(
    pages: Mapping[str, int], pools: Mapping[str, PoolExtent], start: int, stop: int
) -> Iterator[TensorPart]:
    for pool in pages:
        for tensor in pools[pool].spec.tensors:
            first, last = bisect_left(tensor.layers, start), bisect_left(tensor.layers, stop)
            if first < last:
                yield TensorPart(pool, tensor.name, first, last)


def _last_groups(operations: Sequence[CacheOperation], groups: Sequence[LayerGroup]) -> tuple[int, ...]:
    """By operation, the last group that holds bytes of it; -1 if none does."""
    last = {part.pool: index for index, group in enumerate(groups) for part in group.parts}
    return tuple(
        max((last[transfer.pool] for transfer in operation.transfers if transfer.sources), default=-1)
        for operation in operations
    )
