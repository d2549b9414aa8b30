"""Whether what is under way agrees with the books: copies, writes to storage, tasks. A report in words."""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from asynchicache.planner.planner import Planner
from asynchicache.planner.state import Books
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.tree.node import LOADING, SAVING, Node, place
from asynchicache.types import Tier


@dataclass(frozen=True, slots=True)
class UnderWay:
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


def problems(planner: Planner, under_way: UnderWay, *, idle: bool) -> list[str]:
    """Every broken invariant, empty when all is well; linear in the slots.

    Args:
        planner: what was decided.
        under_way: what is being carried out.
        idle: nobody uses the cache; whatever is held, under way or lost is listed too.
    """
    books = planner.books
    found = books.verify()
    found += _copies(books, under_way.copies)
    found += _writes(planner.writer.under_way())
    found += _counts(books, under_way)
    found += [f"task {task.get_name()} is left behind" for task in under_way.left]
    return found + list(_leftovers(books, under_way)) if idle else found


def _copies(books: Books, copies: Iterable[CacheOperation]) -> Iterator[str]:
    """Copies that use slots that are nobody's, or write a slot that another one writes.

    Copies within the device may write a request's own slot again: they run one after the other.
    """
    numbers = {
        pool: component_id for component_id in range(len(books.names)) for pool in books.sharing(component_id)
    }
    written: set[tuple[str, Tier, int]] = set()
    for operation in copies:
        way = operation.direction
        for pool, sources, destinations in operation.transfers:
            for tier, slots in ((way.source, sources), (way.destination, destinations)):
                free = books.free[place(numbers[pool], tier)]
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
        if node.residency[place(component_id, Tier.HOST)] in (LOADING, SAVING):
            yield f"{node!r}: component {component_id} goes to storage before it is on the host"


def _counts(books: Books, under_way: UnderWay) -> Iterator[str]:
    """More under way than is counted: who waits for its end would not."""
    copies, calls = len(books.tier_copies), sum(not task.done() for task in under_way.calls)
    if under_way.active < copies + calls:
        yield f"{copies} copies and {calls} storage calls are under way, {under_way.active} are counted"


def _leftovers(books: Books, under_way: UnderWay) -> Iterator[str]:
    """What a cache that nobody uses should not have."""
    for sequence in books.sequences:
        state = "closed, and its slots are still in use" if sequence.closed else "open"
        yield f"a request of {len(sequence.tokens)} tokens is {state}: pages {sequence.own_pages()}"
    if under_way.active or books.tier_copies or books.pinned or under_way.calls:
        yield (
            f"{len(books.tier_copies)} copies and {len(under_way.calls)} storage calls are under way, "
            f"{len(books.pinned)} paths are kept for some, {under_way.active} are counted"
        )
    for free in books.free:
        if free.quarantined:
            yield f"{free.name}: {free.quarantined} are in quarantine"
