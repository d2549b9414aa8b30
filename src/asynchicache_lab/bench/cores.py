"""Assign a bench's threads to cores, and limit torch's threads."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch

from asynchicache.streams.base import Device, Stream
from asynchicache.streams.drivers import DriverStep, ThreadDriver


class OwnCores(ThreadDriver):
    """Pins the threads of some streams to a core each, as copies and compute on a GPU do not share one.

    Without pinning, the system sometimes places two threads that wake each other on one core, where they wait
    for each other.
    """

    def __init__(self, cores: Mapping[str, int]) -> None:
        """`cores`: core by stream name; threads of other streams are not pinned."""
        super().__init__()
        self._cores = cores

    def lane(self, name: str) -> Callable[[DriverStep], None]:
        submit = super().lane(name)
        if name in self._cores:
            submit(partial(os.sched_setaffinity, 0, {self._cores[name]}))
        return submit


def two_cores(first: Sequence[str], second: Sequence[str]) -> dict[str, int]:
    """Assign one core to the streams `first` and another to `second`; nothing if there is only one core."""
    cores = sorted(os.sched_getaffinity(0))
    return dict.fromkeys(first, cores[0]) | dict.fromkeys(second, cores[1]) if len(cores) > 1 else {}


@contextmanager
def on_core(core: int | None) -> Iterator[None]:
    """Pin this thread, and threads it starts meanwhile, to one core; do nothing if `core` is None.

    Without pinning, the system can queue a thread behind the copying thread that woke it, for milliseconds,
    while the other core is idle.
    """
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, before if core is None else {core})
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)


def single_threaded(device: Device, name: str) -> Stream:
    """Return a stream whose work uses one CPU thread.

    OpenMP keeps its thread count per calling thread. A new thread, such as an emulated stream's, starts with
    all cores even under `one_torch_thread`, and a matrix product there would use the copies' cores.
    """
    stream = device.stream(name)
    stream.launch(partial(torch.set_num_threads, 1))
    return stream


@contextmanager
def one_torch_thread() -> Iterator[None]:
    """Limit torch operations called from this thread to one thread each; see `single_threaded`.

    Small operations gain little from more threads, and threads that synchronise at every operation make times
    meaningless on a busy machine.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)
