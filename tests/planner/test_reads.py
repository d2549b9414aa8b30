"""What the planner reads from storage: how far, and what is kept meanwhile."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest

from asynchicache.planner.fetch import Query
from asynchicache.tree.node import FULL_DEVICE, FULL_HOST
from asynchicache.types import MissReason, Outcome, WritePolicy
from controller.simulation import Simulation

PROMPT = list(range(1, 18))
PAGES = 8
"""Whole pages of the prompt before its last token."""


@pytest.fixture
def simulations() -> Iterator[list[Simulation]]:
    found: list[Simulation] = []
    yield found
    for sim in found:
        for sequence in list(sim.live):
            sim.close(sequence)
        sim.settle()
        sim.verify()


def served(sim: Simulation, length: int) -> None:
    """Serve the beginning of the prompt, and let everything end."""
    sequence = sim.open(PROMPT[:length])
    sim.load(sequence)
    assert sim.compute(sequence, length)
    sim.close(sequence)
    sim.settle()


def asked(sim: Simulation) -> Query:
    query = sim.planner.reader.ask(sim.open(PROMPT).tokens, b"")
    assert query is not None
    return query


def test_a_read_is_as_long_as_the_host_has_room_for(simulations: list[Simulation]) -> None:
    sim = Simulation(random.Random(0), states=False, slots={"kv": (64, 5)})
    simulations.append(sim)
    served(sim, 4)
    query = asked(sim)
    choice = sim.planner.reader.choose(query, {0: b"\1" * PAGES})
    sim.start(choice.backups)

    assert choice.read is not None
    assert choice.read.target == 5  # two pages are there, and stay
    sim.planner.reader.deliver(choice.read, {0: [Outcome.MISS] * len(choice.read.slots[0])})
    sim.planner.reader.finish(choice.read)


@pytest.mark.parametrize("policy", list(WritePolicy))
def test_pages_on_the_device_stay_while_storage_is_asked(
    simulations: list[Simulation], policy: WritePolicy
) -> None:
    sim = Simulation(random.Random(0), states=False, slots={"kv": (64, 64)}, policy=policy)
    simulations.append(sim)
    served(sim, 4)
    query = asked(sim)
    sim.settle()
    books = sim.planner.books
    held = books.free[FULL_DEVICE].held
    books.evict(FULL_DEVICE, 64, dirty=True)
    books.evict(FULL_HOST, 64, dirty=True)

    assert books.free[FULL_DEVICE].held == held
    assert books.free[FULL_HOST].held == 0, "what is on the device needs no copy on the host to be kept"
    sim.planner.reader.drop(query)


def test_a_state_that_storage_was_not_asked_for_is_not_there(simulations: list[Simulation]) -> None:
    sim = Simulation(random.Random(0), slots={"kv": (64, 64), "mamba": (4, 0)})
    simulations.append(sim)
    query = asked(sim)

    choice = sim.planner.reader.choose(query, {0: b"\1" * PAGES})

    assert (choice.read, choice.reason, choice.backups) == (None, MissReason.STATE, [])
    sim.planner.reader.drop(query)
