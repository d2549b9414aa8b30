"""A large load is enqueued as its groups land: what an engine copies for itself does not wait behind it all.

Layers 0 to 4 are a group each, and two groups may be ahead.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import pytest
import torch

from asynchicache.errors import TransferError
from asynchicache.transfer.copies import PageCopier
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.transfer.record import LayerStatus
from turns import turns

pytestmark = pytest.mark.asyncio

Build = Callable[..., CacheOperation]
ALL = {"kv": ([0, 1], [4, 5]), "dsa": ([0, 1], [4, 5]), "mamba": ([0], [2])}
PENDING, SUBMITTED = LayerStatus.PENDING, LayerStatus.SUBMITTED


async def test_two_groups_are_ahead_and_others_work_goes_between(
    open_rig, operation: Build, carry_out
) -> None:
    load, fork = operation(Direction.LOAD, **ALL), operation(Direction.FORK, mamba=([3], [4]))
    async with open_rig("stepped", ahead_bytes=1) as rig:
        expected = rig.contents()
        carry_out(expected, load)
        carry_out(expected, fork)
        ticket = rig.transfers.submit(load, done=rig.done)
        await ticket.submitted(1)
        forked = rig.transfers.submit(fork, done=rig.done)
        await turns(5)  # it has gone to the submit thread, which waits for the first group
        rig.device.step()

        await forked
        await ticket.submitted(2)

        assert [ticket.status(layer) for layer in (1, 2, 3, 4)] == [SUBMITTED, SUBMITTED, PENDING, PENDING]
        rig.device.step()
        await ticket.submitted(3)
        assert ticket.status(4) is PENDING
        rig.device.step(3)
        await ticket
        found = rig.contents()

    assert rig.outcomes == [None, None]
    assert all(torch.equal(found[key], expected[key]) for key in expected)


@pytest.mark.parametrize(("ahead", "layer"), [(1 << 20, 4), (1, None)])
async def test_a_load_that_fits_or_is_waited_for_is_enqueued_at_once(
    open_rig, operation: Build, ahead: int, layer: int | None
) -> None:
    async with open_rig("stepped", ahead_bytes=ahead) as rig:
        ticket = rig.transfers.submit(operation(Direction.LOAD, **ALL), done=rig.done)

        await ticket.submitted(layer)

        assert [ticket.status(layer) for layer in range(5)] == [SUBMITTED] * 5


async def test_whoever_waits_for_every_layer_to_be_enqueued_is_not_held_up(
    open_rig, operation: Build
) -> None:
    """As for a captured graph, which waits for all layers by itself."""
    async with open_rig("stepped", ahead_bytes=1) as rig:
        ticket = rig.transfers.submit(operation(Direction.LOAD, **ALL), done=rig.done)
        await ticket.submitted(1)
        everything = asyncio.create_task(ticket.submitted())
        await turns(5)
        rig.device.step()

        await everything

        assert [ticket.status(layer) for layer in (1, 2, 3, 4)] == [SUBMITTED] * 4


@pytest.mark.parametrize(
    ("direction", "slots"),
    [
        (Direction.BACKUP, {"kv": ([4], [9])}),  # of what is loaded
        (Direction.LOAD, {"kv": ([7], [8])}),  # on the same stream
    ],
)
async def test_what_must_come_behind_a_load_has_the_rest_of_it_enqueued(
    open_rig, operation: Build, carry_out, direction: Direction, slots: dict[str, tuple[list[int], list[int]]]
) -> None:
    load, later = operation(Direction.LOAD, **ALL), operation(direction, **slots)
    async with open_rig("stepped", ahead_bytes=1) as rig:
        expected = rig.contents()
        carry_out(expected, load)
        carry_out(expected, later)
        first = rig.transfers.submit(load, done=rig.done)
        await first.submitted(1)
        second = rig.transfers.submit(later, done=rig.done)
        await turns(5)
        rig.device.step()

        await second.submitted(0)

        assert [first.status(layer) for layer in (1, 2, 3, 4)] == [SUBMITTED] * 4
        rig.device.step(100)
        await second
        await first
        found = rig.contents()

    assert all(torch.equal(found[key], expected[key]) for key in expected)


async def test_a_load_that_fails_while_it_is_held_back_ends_behind_what_was_enqueued(
    open_rig, operation: Build, monkeypatch: pytest.MonkeyPatch
) -> None:
    enqueue = PageCopier.enqueue

    def break_at_three(copier: PageCopier, stream: object, copies: object, layers: range) -> None:
        if 3 in layers:
            raise ZeroDivisionError("a bug in the copies")
        enqueue(copier, stream, copies, layers)

    monkeypatch.setattr(PageCopier, "enqueue", break_at_three)
    async with open_rig("stepped", ahead_bytes=1) as rig:
        ticket = rig.transfers.submit(operation(Direction.LOAD, **ALL), done=rig.done)
        await ticket.submitted(1)
        rig.device.step(2)
        with pytest.raises(TransferError, match="was not submitted"):
            await ticket.submitted(3)
        assert rig.outcomes == []  # the third group may still be written to
        rig.device.step(100)
        with pytest.raises(TransferError, match="a bug in the copies"):
            await ticket
        monkeypatch.undo()

        await rig.transfers.submit(operation(Direction.FORK, mamba=([3], [4])), done=rig.done)

    assert [type(outcome).__name__ for outcome in rig.outcomes] == ["CopyEndedError", "NoneType"]
