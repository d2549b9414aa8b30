"""Whether what is under way agrees with the books: copies, writes to storage, tasks. A report in words."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from asynchicache.planner.planner import Planner
from asynchicache.planner.state import CacheState
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.tree.node import LOADING, SAVING, Node, place_of
from asynchicache.types import Tier


@dataclass(frozen=True, slots=True)
class InFlightWork:
    """What a controller has going.

    Attributes:
        copies: between device and host, and on the device.
        calls: tasks that read from storage or write to it.
        left: tasks that a closed cache has still.
        active: how many things the controller counts, whose end some wait for.
    """

    copies: Collection[CacheOperation]
    calls: Collection[asyncio.Task[None]]
    left: Collection[asyncio.Task[None]]
    active: int


def problems(planner: Planner, under_way: InFlightWork, *, idle: bool) -> list[str]:
    """Every broken invariant, empty when all is well; linear in the slots.

    Args:
        planner: what was decided.
        under_way: what is being carried out.
        idle: nobody uses the cache; whatever is held, under way or lost is listed too.
    """
    state = planner.state
    found = state.verify()
    found += _copies(state, under_way.copies)
    found += _writes(planner.backups.writes_in_flight())
    found += _counts(state, under_way)
    found += [f"task {task.get_name()} is left behind" for task in under_way.left]
    return found + list(_leftovers(state, under_way)) if idle else found


def _copies(state: CacheState, copies: Iterable[CacheOperation]) -> Iterator[str]:
    """Copies that use slots that are nobody's, or write a slot that another one writes.

    Copies within the device may write a request's own slot again: they run one after the other.
    """
    numbers = {
        pool: component_id for component_id in range(len(state.names)) for pool in state.sharing(component_id)
    }
    written: set[tuple[str, Tier, int]] = set()
    for operation in copies:
        way = operation.direction
        for pool, sources, destinations in operation.transfers:
            for tier, slots in ((way.source, sources), (way.destination, destinations)):
                free = state.free[place_of(numbers[pool], tier)]
                for slot in filter(free.is_free, slots):
                    yield f"{free.name}: slot {slot} is free, and a {way.value} uses it"
            if way is Direction.FORK:
                continue
            for slot in destinations:
                if (pool, way.destination, slot) in written:
                    yield f"{pool} {way.destination.name.lower()} slots: two copies write slot {slot}"
                written.add((pool, way.destination, slot))


def _writes(writing: Iterable[tuple[Node, int]]) -> Iterator[str]:
    """Nodes and components that are written to storage, and have no bytes yet."""
    for node, component_id in writing:
        if node.residency[place_of(component_id, Tier.HOST)] in (LOADING, SAVING):
            yield f"{node!r}: component {component_id} goes to storage before it is on the host"


def _counts(state: CacheState, under_way: InFlightWork) -> Iterator[str]:
    """More under way than is counted: who waits for its end would not."""
    copies, calls = len(state.tier_copies), sum(not task.done() for task in under_way.calls)
    if under_way.active < copies + calls:
        yield f"{copies} copies and {calls} storage calls are under way, {under_way.active} are counted"


def _leftovers(state: CacheState, under_way: InFlightWork) -> Iterator[str]:
    """What a cache that nobody uses should not have."""
    for sequence in state.sequences:
        status = "closed, and its slots are still in use" if sequence.closed else "open"
        yield f"a request of {len(sequence.tokens)} tokens is {status}: pages {sequence.own_pages()}"
    if under_way.active or state.tier_copies or state.pinned or under_way.calls:
        yield (
            f"{len(state.tier_copies)} copies and {len(under_way.calls)} storage calls are under way, "
            f"{len(state.pinned)} paths are kept for some, {under_way.active} are counted"
        )
    for free in state.free:
        if free.quarantined:
            yield f"{free.name}: {free.quarantined} are in quarantine"
