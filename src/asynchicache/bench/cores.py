"""Which cores the threads of a bench run on, and how many of them torch takes."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from asynchicache.streams.base import Device, Stream
from asynchicache.streams.drivers import Run, ThreadDriver


class OwnCores(ThreadDriver):
    """Threads of some streams stay on a core each, as a GPU's copies and its compute do not share one.

    Left to the system, two that wake each other land on one core now and then, and wait for each other there.
    """

    def __init__(self, cores: Mapping[str, int]) -> None:
        """`cores`: by the name of a stream; the others go where the system lets them."""
        super().__init__()
        self._cores = cores

    def lane(self, name: str) -> Callable[[Run], None]:
        submit = super().lane(name)
        if name in self._cores:
            submit(partial(os.sched_setaffinity, 0, {self._cores[name]}))
        return submit


def two_cores(first: Sequence[str], second: Sequence[str]) -> dict[str, int]:
    """A core for some streams and another one for others; none where this process has only one."""
    cores = sorted(os.sched_getaffinity(0))
    return dict.fromkeys(first, cores[0]) | dict.fromkeys(second, cores[1]) if len(cores) > 1 else {}


@contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Keep this thread, and those that it starts meanwhile, on one core; where they like if it is None.

    Left to the system, whom a copying thread wakes is put behind it on its core, for milliseconds, while
    the other core has nothing to do.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before if core is None else {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def single_threaded(device: Device, name: str) -> Stream:
    """A stream whose work uses one thread of the CPU.

    OpenMP counts threads for each thread that asks. A new one, such as an emulated stream's, starts with all
    cores, whatever `one_torch_thread` says elsewhere, and a matrix product would take those of the copies.
    """
    stream = device.stream(name)
    stream.launch(partial(torch.set_num_threads, 1))
    return stream


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Let torch's operations use one thread each, those of this thread; see `single_threaded`.

    What is small gains little from more, and threads that wait for each other at every operation make times
    that say nothing on a machine with other work.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
