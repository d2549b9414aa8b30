"""Random programs over many streams: their fences suffice, and there is none that they could do without.

Virtual time decides how the streams interleave. Every step reads what it overwrites, so that any two steps
in the wrong order leave other values behind.
"""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass

import pytest
import torch

from asynchicache.streams.base import Device, Stream
from asynchicache.testing.seeded import SeededWorld, run_seeded
from streams.conftest import notify

PROGRAMS = 1_000
STREAMS, BUFFERS, STEPS = 3, 5, 16
ATTEMPTS = 10_000

Fence = tuple[int, int]
"""The second step, on another stream, comes after the first."""


@dataclass(frozen=True)
class Step:
    """`buffers[target] = buffers[target] * 31 + buffers[source] * 17 + addend`, on one of the streams."""

    stream: int
    source: int
    target: int
    addend: int

    def run(self, buffers: torch.Tensor | list[int]) -> None:
        value = buffers[self.target] * 31 + buffers[self.source] * 17 + self.addend
        buffers[self.target] = value % 1_000_003

    def conflicts(self, later: Step) -> bool:
        """Whether `later` reads what this writes, or writes what this touches."""
        return self.target in (later.source, later.target) or self.source == later.target


def random_program(seed: int) -> list[Step]:
    rng = random.Random(seed)
    return [
        Step(rng.randrange(STREAMS), rng.randrange(BUFFERS), rng.randrange(BUFFERS), addend)
        for addend in range(STEPS)
    ]


def hazards(program: list[Step]) -> set[Fence]:
    """All pairs of steps that have an order; those of one stream have it for free."""
    return {
        (first, second)
        for second, step in enumerate(program)
        for first in range(second)
        if program[first].stream != step.stream and program[first].conflicts(step)
    }


def necessary(program: list[Step], fences: set[Fence]) -> set[Fence]:
    """Those of `fences` that do not follow from the others and from the order within each stream."""
    return {fence for fence in fences if not ordered(program, fences - {fence}, *fence)}


def ordered(program: list[Step], fences: set[Fence], first: int, second: int) -> bool:
    """Whether `second` comes after `first` anyway."""
    behind = {first}
    for step in range(first + 1, second + 1):
        same_stream = any(program[one].stream == program[step].stream for one in behind)
        if same_stream or any((one, step) in fences for one in behind):
            behind.add(step)
    return second in behind


def enqueue(
    device: Device, program: list[Step], fences: Iterable[Fence], buffers: torch.Tensor | list[int]
) -> list[Stream]:
    streams = [device.stream(f"s{i}") for i in range(STREAMS)]
    done = [device.event() for _ in program]
    for i, step in enumerate(program):
        for first, second in sorted(fences):
            if second == i:
                streams[step.stream].wait_event(done[first])
        streams[step.stream].launch(lambda step=step: step.run(buffers))
        streams[step.stream].record(done[i])
    return streams


def serial(program: list[Step]) -> list[int]:
    buffers = list(range(1, BUFFERS + 1))
    for step in program:
        step.run(buffers)
    return buffers


def differs(program: list[Step], fences: set[Fence], seed: int) -> bool:
    """Whether the program, with durations of `seed`, ends unlike the serial order."""
    buffers = list(range(1, BUFFERS + 1))

    async def main(world: SeededWorld) -> None:
        device = world.device()
        for stream in enqueue(device, program, fences, buffers):
            told = world.loop.create_future()
            notify(device, stream, told.set_result)
            assert await told is None

    run_seeded(seed, main)
    return buffers != serial(program)


def test_fenced_programs_equal_the_serial_order() -> None:
    """With no more fences than are necessary, each in an interleaving of its own."""
    programs = [random_program(seed) for seed in range(PROGRAMS)]
    fences = [necessary(program, hazards(program)) for program in programs]

    assert sum(map(len, fences)) > 5 * PROGRAMS
    assert [i for i in range(PROGRAMS) if differs(programs[i], fences[i], seed=i)] == []


def unnoticed(program: list[Step]) -> list[Fence]:
    """The fences that can be taken away without any seed noticing."""
    fences = necessary(program, hazards(program))
    return [
        fence
        for fence in fences
        if not any(differs(program, fences - {fence}, seed) for seed in range(ATTEMPTS))
    ]


def test_without_any_one_fence_some_interleaving_differs() -> None:
    assert [seed for seed in range(PROGRAMS // 10) if unnoticed(random_program(seed))] == []


@pytest.mark.soak
def test_without_any_one_fence_of_all_programs_some_interleaving_differs() -> None:
    assert [seed for seed in range(PROGRAMS) if unnoticed(random_program(seed))] == []


@pytest.mark.asyncio
async def test_fenced_programs_equal_the_serial_order_on_every_driver(rig) -> None:
    for seed in range(25):
        program = random_program(seed)
        # Filled on the host: a fill on the GPU's default stream would race with the program's streams.
        buffers = torch.arange(1, BUFFERS + 1).to(rig.device.name)
        streams = enqueue(rig.device, program, hazards(program), buffers)
        assert await rig.finished(*streams) == [None] * STREAMS
        assert buffers.tolist() == serial(program), f"seed {seed}"
