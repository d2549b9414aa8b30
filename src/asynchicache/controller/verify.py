"""Checks that work in flight (copies, storage writes, tasks) agrees with the state. A report in words."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from asynchicache.planner.inventory import SlotInventory
from asynchicache.planner.planner import Planner
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.tree.node import LOADING, SAVING, Node, place_of
from asynchicache.types import Tier


@dataclass(frozen=True, slots=True)
class InFlightWork:
    """The work in flight of a controller.

    Attributes:
        copies: between device and host, and on the device.
        calls: tasks that read from storage or write to it.
        left: tasks that still run in a closed cache.
        active: the work in flight that the executor counts, and that waiters wait for.
    """

    copies: Collection[CacheOperation]
    calls: Collection[asyncio.Task[None]]
    left: Collection[asyncio.Task[None]]
    active: int


def problems(planner: Planner, in_flight: InFlightWork, *, idle: bool) -> list[str]:
    """Describe every broken invariant; empty if there are none. Linear in the slots.

    Args:
        idle: the cache is not in use, so list everything held, in flight or lost too.
    """
    inventory = planner.inventory
    found = inventory.verify()
    found += _copies(inventory, in_flight.copies)
    found += _writes(planner.backups.writes_in_flight())
    found += _counts(inventory, in_flight)
    found += [f"task {task.get_name()} is left behind" for task in in_flight.left]
    return found + list(_leftovers(inventory, in_flight)) if idle else found


def _copies(inventory: SlotInventory, copies: Iterable[CacheOperation]) -> Iterator[str]:
    """Copies that use a free slot, or write a slot that another copy writes.

    Copies within the device may write the same slot of a request twice: they run one after another.
    """
    numbers = {
        pool: component_id
        for component_id in range(len(inventory.names))
        for pool in inventory.sharing(component_id)
    }
    written: set[tuple[str, Tier, int]] = set()
    for operation in copies:
        way = operation.direction
        for pool, sources, destinations in operation.transfers:
            for tier, slots in ((way.source, sources), (way.destination, destinations)):
                if inventory.host_only and tier is Tier.DEVICE:
                    continue  # the engine's own pages
                free = inventory.free[place_of(numbers[pool], tier)]
                for slot in filter(free.is_free, slots):
                    yield f"{free.name}: slot {slot} is free, and a {way.value} uses it"
            if way is Direction.FORK:
                continue
            for slot in destinations:
                if (pool, way.destination, slot) in written:
                    yield f"{pool} {way.destination.name.lower()} slots: two copies write slot {slot}"
                written.add((pool, way.destination, slot))


def _writes(writing: Iterable[tuple[Node, int]]) -> Iterator[str]:
    """Storage writes of nodes and components whose bytes are not on the host yet."""
    for node, component_id in writing:
        if node.residency[place_of(component_id, Tier.HOST)] in (LOADING, SAVING):
            yield f"{node!r}: component {component_id} goes to storage before it is on the host"


def _counts(inventory: SlotInventory, in_flight: InFlightWork) -> Iterator[str]:
    """More work in flight than is counted: waiters would return too early."""
    copies, calls = len(inventory.tier_copies), sum(not task.done() for task in in_flight.calls)
    if in_flight.active < copies + calls:
        yield f"{copies} copies and {calls} storage calls are in flight, {in_flight.active} are counted"


def _leftovers(inventory: SlotInventory, in_flight: InFlightWork) -> Iterator[str]:
    """Requests, work, locks and quarantined slots that an idle cache should not have."""
    for request in inventory.requests:
        status = "closed, and its slots are still in use" if request.closed else "open"
        made = f", made at {request.made_at}" if request.made_at else ""
        yield f"a request of {len(request.tokens)} tokens is {status}: pages {request.own_pages()}{made}"
    ended = sum(task.done() for task in in_flight.calls)  # whose callbacks run in this turn of the loop
    active, calls = in_flight.active - ended, len(in_flight.calls) - ended
    if active or inventory.tier_copies or inventory.locked or calls:
        yield (
            f"{len(inventory.tier_copies)} copies and {calls} storage calls are in flight, "
            f"{len(inventory.locked)} paths are kept for some, {active} are counted"
        )
    for free in inventory.free:
        if free.quarantined:
            yield f"{free.name}: {free.quarantined} are in quarantine"
