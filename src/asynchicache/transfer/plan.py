"""Cache operations, and the plan that several of them merge into. Integers only.

Operations of one direction merge into a plan: slots become runs that are contiguous on both sides,
layers become groups that are worth a launch, and each operation knows the last group that holds bytes
of its own. After `HiCacheController.merge_ops` of SGLang, with runs in place of page lists. Overlapping
or dependent copies are refused, because the copies of a plan have no order among them.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from itertools import pairwise
from typing import NamedTuple, TypeAlias

import msgspec
import numpy as np
import numpy.typing as npt
from msgspec.structs import force_setattr

from asynchicache.errors import InternalError, UsageError
from asynchicache.specs import PoolSpec
from asynchicache.types import Direction as Direction
from asynchicache.types import PoolTransfer, Tier

Slots: TypeAlias = npt.NDArray[np.int64]

FEW_SLOTS = 64
"""Up to this many slots Python's loops are faster than numpy, whose calls take microseconds to begin."""


Columns: TypeAlias = dict[str, tuple[Slots, Slots]]
"""By pool, the slots of all its transfers: (sources, destinations)."""


_LOAD, _BACKUP, _FORK = Direction
# Module-level names, because looking up an enum's member takes longer than calling a function.

HighestSlots: TypeAlias = tuple[str, int, int]
"""(pool, highest device slot, highest host slot) of one transfer; -1 where it has none."""


class CacheOperation(msgspec.Struct, frozen=True):
    """Pages to move on behalf of one request.

    Attributes:
        direction: from which tier to which.
        transfers: by pool, source slots to destination slots; a pool may occur more than once.
        highest_slots: of each transfer, so that the slots can be checked against pool sizes quickly; empty if
            there is nothing to move. Computed; a given value is ignored.
    """

    # A struct, because setting the fields of a frozen dataclass takes longer than checking a few slots.
    direction: Direction
    transfers: tuple[PoolTransfer, ...]
    highest_slots: tuple[HighestSlots, ...] = ()

    def __post_init__(self) -> None:
        """
        Raises:
            UsageError: not a direction, lists of unequal length, a slot that is not an integer or negative, a
                destination that occurs twice, or a slot both forked and written.
        """
        direction = self.direction
        if not isinstance(direction, Direction):
            raise UsageError(f"{direction!r} must be a Direction")
        transfers, highest, moves, plain = [], [], False, set()
        for transfer in self.transfers:
            pool, sources, destinations = copy = copy_transfer(transfer)
            source, destination, independent = summarise(pool, sources, destinations, direction is _FORK)
            transfers.append(tuple.__new__(PoolTransfer, copy))  # its own constructor takes twice as long
            highest.append(_highest_slots(direction, pool, source, destination))
            moves = moves or destination >= 0
            if independent:
                plain.add(pool)
        force_setattr(self, "transfers", tuple(transfers))
        force_setattr(self, "highest_slots", tuple(highest) if moves else ())
        if len(plain) < len(transfers):
            for pool, (read, written) in self.columns().items():
                _check_independent(direction, pool, read, np.sort(written))

    @property
    def empty(self) -> bool:
        """Whether there is nothing to move."""
        return not self.highest_slots

    def columns(self) -> Columns:
        """Slots by pool of all its transfers, without pools that have nothing to move."""
        return columns_of([self])


@dataclass(frozen=True, eq=False)
class PoolShape:
    """Shape and size of one pool, as plans need it.

    Attributes:
        page_size: tokens of a slot.
    """

    spec: PoolSpec
    page_size: int
    device_slots: int
    host_slots: int

    @cached_property
    def layer_bytes(self) -> tuple[int, ...]:
        """Bytes of one page in each layer of the model up to the pool's last."""
        sizes = [0] * (1 + max(tensor.layers[-1] for tensor in self.spec.tensors))
        for tensor in self.spec.tensors:
            for layer in tensor.layers:
                sizes[layer] += self.spec.item_bytes(tensor, self.page_size)
        return tuple(sizes)

    def capacity(self, tier: Tier) -> int:
        return self.device_slots if tier is Tier.DEVICE else self.host_slots


class TensorPart(NamedTuple):
    """Layers `start` to `stop - 1` of one tensor, as indices into its `layers`."""

    tensor: str
    start: int
    stop: int


@dataclass(frozen=True, slots=True, eq=False)
class TransferPlan:
    """Operations of one direction, merged to be carried out together.

    Attributes:
        direction: theirs.
        columns: slots by pool, the same for all tensors and layers.
        groups: layers of the model that are copied together and become visible together, in order; together
            they hold every layer.
        last_groups: by operation, the index of the last group that holds bytes of it.
        nbytes: bytes to be moved.
    """

    direction: Direction
    columns: Columns
    groups: tuple[range, ...]
    last_groups: tuple[int, ...]
    nbytes: int

    def group_of(self, layer: int) -> int:
        """The index of the group that holds layer `layer` of the model."""
        return _group_of(self.groups, layer)


def merge(
    operations: Sequence[CacheOperation],
    pools: Mapping[str, PoolShape],
    layers: int,
    group_bytes: int | None,
) -> TransferPlan:
    """One plan for all of `operations`.

    Args:
        operations: of one direction, one at least, not all of them empty.
        pools: by name.
        layers: layers of the model, those without a cache included.
        group_bytes: bytes that make a group of layers worth a launch. The first group always closes at the
            first layer with bytes, so that a forward can start on it. None: one group.

    Raises:
        UsageError: an unknown pool, a slot outside its pool, two operations that write one slot, or
            one that reads what another writes.
        InternalError: no operations, or several directions.
    """
    direction = _common_direction(operations)
    columns = columns_of(operations)
    for pool, (sources, destinations) in columns.items():
        check_slots(pool, direction.source, sources, pools)
        check_slots(pool, direction.destination, destinations, pools)
        _check_independent(direction, pool, sources, np.sort(destinations))
    return plan_of(operations, columns, pools, layers, group_bytes)


def plan_of(
    operations: Sequence[CacheOperation],
    columns: Columns,
    pools: Mapping[str, PoolShape],
    layers: int,
    group_bytes: int | None,
) -> TransferPlan:
    """`merge` of operations that are known to be valid and independent; `columns` are theirs. Many pages take
    no longer than few."""
    pages = {pool: len(sources) for pool, (sources, _) in columns.items()}
    sizes = _layer_bytes(pages, pools, layers)
    groups = _groups(_group_bounds(sizes, group_bytes))
    last = {pool: _group_of(groups, len(pools[pool].layer_bytes) - 1) for pool in pages}
    return TransferPlan(
        operations[0].direction, columns, groups, _last_groups(operations, last), nbytes=sum(sizes)
    )


def check_slots(pool: str, tier: Tier, slots: Slots | Sequence[int], pools: Mapping[str, PoolShape]) -> None:
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
    """`slots` as an array, without a copy if they are an `array('q')`."""
    return np.asarray(slots, np.int64)


def slot_array(slots: Sequence[int]) -> array[int]:
    """A copy of `slots`.

    Raises:
        UsageError: they are not a run of 64-bit integers.
    """
    # Checked first, because most are lists and this is faster.
    if type(slots) is not list and isinstance(slots, _NO_RUNS):
        raise _no_run(slots)
    try:
        return array("q", slots)
    except (TypeError, ValueError, OverflowError) as error:
        raise UsageError(f"slots are not a run of 64-bit integers: {error}") from None


_NO_RUNS = bytes, bytearray, memoryview, set, frozenset


def _no_run(slots: object) -> UsageError:
    """`array` would read bytes as 64-bit numbers, and a set in an order that does not pair the two sides."""
    if isinstance(slots, (set, frozenset)):
        return UsageError(f"slots {slots!r} are not a run of 64-bit integers, but a set: it has no order")
    return UsageError("slots are not a run of 64-bit integers, but bytes: pass their numbers")


def copy_transfer(transfer: PoolTransfer) -> tuple[str, array[int], array[int]]:
    """
    Raises:
        UsageError: not a PoolTransfer, sides of unequal length, or a side that is not a run of 64-bit
        integers.
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


def summarise(
    pool: str, sources: array[int], destinations: array[int], one_tier: bool
) -> tuple[int, int, bool]:
    """The highest slot of each side (-1 of an empty one), and whether copies are known to be independent: no
    slot is written twice or, where both sides are of one tier, read and written. False if finding out takes
    more than a quick check.

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
    # Of many slots `_ascending` returns only two, so that the lengths differ and the answer is False.
    plain = len(set(written)) == count and (not one_tier or set(read).isdisjoint(written))
    return read[-1], written[-1], plain


def _ascending(slots: array[int]) -> list[int]:
    """All slots, or, of more than `FEW_SLOTS`, the lowest and the highest."""
    if len(slots) > FEW_SLOTS:
        numbers = slot_numbers(slots)
        return [int(numbers.min()), int(numbers.max())]
    few = slots.tolist()
    few.sort()
    return few


def _negative(pool: str, *lowest: int) -> UsageError:
    slot = next(slot for slot in lowest if slot < 0)
    return UsageError(f"pool {pool!r}: slot {slot} is negative")


def _highest_slots(direction: Direction, pool: str, source: int, destination: int) -> HighestSlots:
    """`source` and `destination` are the highest slots."""
    if direction is _LOAD:
        return pool, destination, source
    if direction is _BACKUP:
        return pool, source, destination
    return pool, max(source, destination), -1


def columns_of(operations: Sequence[CacheOperation]) -> Columns:
    """Slots by pool of all their transfers, without pools that have nothing to move."""
    by_pool: dict[str, list[PoolTransfer]] = {}
    for operation in operations:
        for transfer in operation.transfers:
            if transfer.sources:
                by_pool.setdefault(transfer.pool, []).append(transfer)
    return {
        pool: (
            _joined([slot_numbers(transfer.sources) for transfer in transfers]),
            _joined([slot_numbers(transfer.destinations) for transfer in transfers]),
        )
        for pool, transfers in by_pool.items()
    }


def _joined(columns: Sequence[Slots]) -> Slots:
    return columns[0] if len(columns) == 1 else np.concatenate(columns)


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


def runs_of(sources: Slots, destinations: Slots) -> Slots:
    """Slots in runs that are contiguous on both sides, ascending by destination: int64 `[runs, 3]` of (first
    source slot, first destination slot, slots)."""
    if len(sources) <= FEW_SLOTS:
        return _few_runs(sources, destinations)
    order = np.argsort(destinations)
    sources, destinations = sources[order], destinations[order]
    breaks = np.flatnonzero((np.diff(destinations) != 1) | (np.diff(sources) != 1)) + 1
    starts = np.concatenate([[0], breaks])
    counts = np.diff(starts, append=len(sources))
    return np.stack([sources[starts], destinations[starts], counts], axis=1)


def _few_runs(sources: Slots, destinations: Slots) -> Slots:
    runs: list[list[int]] = []
    source_end = destination_end = -1
    for destination, source in sorted(zip(destinations.tolist(), sources.tolist(), strict=True)):
        if (source, destination) == (source_end, destination_end):
            runs[-1][2] += 1
        else:
            runs.append([source, destination, 1])
        source_end, destination_end = source + 1, destination + 1
    return np.array(runs, np.int64)


# Layers.


def _layer_bytes(pages: Mapping[str, int], pools: Mapping[str, PoolShape], layers: int) -> list[int]:
    sizes = [0] * layers
    for pool, count in pages.items():
        for layer, nbytes in enumerate(pools[pool].layer_bytes):
            sizes[layer] += nbytes * count
    return sizes


def _group_bounds(sizes: Sequence[int], group_bytes: int | None) -> tuple[int, ...]:
    """The first layer of each group, and `len(sizes)` at the end. No group ends at a layer without bytes."""
    bounds, held, moved = [0], 0, 0
    total = sum(sizes)
    for layer, size in enumerate(sizes):
        held += size
        moved += size
        first = len(bounds) == 1
        worth = group_bytes is not None and held >= (1 if first else max(1, group_bytes))
        # Layers after the last bytes join the last group: a group without bytes is not worth an event.
        if worth and moved < total:
            bounds.append(layer + 1)
            held = 0
    return (*bounds, len(sizes))


@lru_cache(maxsize=256)
def _groups(bounds: tuple[int, ...]) -> tuple[range, ...]:
    return tuple(range(*pair) for pair in pairwise(bounds))


def tensor_parts(spec: PoolSpec, layers: range) -> Iterator[TensorPart]:
    """The tensors of a pool that have some of `layers` of the model."""
    for tensor in spec.tensors:
        first, last = bisect_left(tensor.layers, layers.start), bisect_left(tensor.layers, layers.stop)
        if first < last:
            yield TensorPart(tensor.name, first, last)


def _group_of(groups: Sequence[range], layer: int) -> int:
    return bisect_left(groups, layer + 1, key=lambda group: group.stop)


def _last_groups(operations: Sequence[CacheOperation], last: Mapping[str, int]) -> tuple[int, ...]:
    """By operation, the last group that holds bytes of it; -1 if none does. `last`: of each pool."""
    return tuple(
        max((last[transfer.pool] for transfer in operation.transfers if transfer.sources), default=-1)
        for operation in operations
    )
