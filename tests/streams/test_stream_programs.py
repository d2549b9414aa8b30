"""Random programs over many streams: fenced, they equal the serial order; unfenced, they do not."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
import torch

from asynchicache.streams.base import Device
from asynchicache.streams.drivers import SeededDriver
from asynchicache.streams.emulated import EmulatedDevice

SEEDS = range(300)
STREAMS, BUFFERS, STEPS = 3, 5, 24


@dataclass(frozen=True)
class Step:
    """`buffers[target] = buffers[source] * 31 + addend`, on one of the streams."""

    stream: int
    source: int
    target: int
    addend: int

    def run(self, buffers: list[torch.Tensor]) -> None:
        buffers[self.target].copy_(buffers[self.source]).mul_(31).add_(self.addend)


def random_program(seed: int) -> list[Step]:
    rng = random.Random(seed)
    return [
        Step(rng.randrange(STREAMS), rng.randrange(BUFFERS), rng.randrange(BUFFERS), addend)
        for addend in range(STEPS)
    ]


def hazards(program: list[Step], index: int) -> Iterator[tuple[str, int]]:
    """The earlier steps that step `index` must not overtake, and why: read after write, write after
    write, write after read.
    """
    step = program[index]
    for earlier in range(index):
        before = program[earlier]
        if before.target == step.source:
            yield "raw", earlier
        if before.target == step.target:
            yield "waw", earlier
        if before.source == step.target:
            yield "war", earlier


def enqueue(
    device: Device, program: list[Step], buffers: list[torch.Tensor], *, without: str | None = None
) -> list:
    """Enqueue the program with all its fences, or all but those of one kind; returns the streams."""
    streams = [device.stream(f"s{i}") for i in range(STREAMS)]
    done = [device.event() for _ in program]
    for i, step in enumerate(program):
        for kind, earlier in hazards(program, i):
            if kind != without:
                streams[step.stream].wait_event(done[earlier])
        streams[step.stream].launch(lambda step=step: step.run(buffers))
        streams[step.stream].record(done[i])
    return streams


def fresh_buffers(device: str = "cpu") -> list[torch.Tensor]:
    # Filled on the host: a fill on the GPU's default stream would race with the program's streams.
    return [torch.full((4,), i + 1, dtype=torch.int64).to(device) for i in range(BUFFERS)]


def serial(program: list[Step]) -> list[list[int]]:
    buffers = fresh_buffers()
    for step in program:
        step.run(buffers)
    return values(buffers)


def values(buffers: list[torch.Tensor]) -> list[list[int]]:
    return [buffer.tolist() for buffer in buffers]


async def seeded_run_differs(seed: int, without: str | None) -> bool:
    """Whether the program of `seed`, run with durations of `seed`, ends unlike the serial order."""
    loop = asyncio.get_running_loop()
    device = EmulatedDevice(SeededDriver(loop, random.Random(seed), mean_seconds=1e-4))
    program, buffers = random_program(seed), fresh_buffers()
    for stream in enqueue(device, program, buffers, without=without):
        told = loop.create_future()
        device.notify(stream, told.set_result)
        assert await told is None
    return values(buffers) != serial(program)


@pytest.mark.asyncio
async def test_fenced_programs_equal_the_serial_order() -> None:
    differ = await asyncio.gather(*(seeded_run_differs(seed, None) for seed in SEEDS))
    assert [seed for seed in SEEDS if differ[seed]] == []


@pytest.mark.asyncio
@pytest.mark.parametrize("kind", ["raw", "waw", "war"])
async def test_without_one_kind_of_fence_some_programs_differ(kind: str) -> None:
    differ = await asyncio.gather(*(seeded_run_differs(seed, kind) for seed in SEEDS))
    assert any(differ)


@pytest.mark.asyncio
async def test_fenced_programs_equal_the_serial_order_on_every_driver(rig) -> None:
    for seed in range(25):
        program, buffers = random_program(seed), fresh_buffers(rig.device.name)
        streams = enqueue(rig.device, program, buffers)
        assert await rig.finished(*streams) == [None] * STREAMS
        assert values(buffers) == serial(program), f"seed {seed}"
