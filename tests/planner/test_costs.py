"""Load or compute: decisions in virtual time, for models and stores as they are."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest

from asynchicache.errors import ConfigError
from asynchicache.planner.costs import DecayingFit, LoadCosts

GPU_FLOPS = 0.4 * 989e12


@dataclass(frozen=True)
class Machine:
    """A model on its GPUs: bytes of KV a token and of a state; seconds a token, and a token and context."""

    token_bytes: int
    state_bytes: int
    a_token: float
    a_pair: float

    def compute(self, tokens: int, context: int) -> float:
        return tokens * self.a_token + tokens * (context + tokens / 2) * self.a_pair


@dataclass
class Store:
    """A tier of storage: seconds a call, and bytes a second."""

    latency: float
    bandwidth: float

    def load(self, nbytes: float) -> float:
        return self.latency + nbytes / self.bandwidth


MACHINES = {
    "Llama-3.1-8B": Machine(131_072, 0, 2 * 8e9 / GPU_FLOPS, 4 * 32 * 32 * 128 / GPU_FLOPS),
    "Llama-3.3-70B": Machine(327_680, 0, 2 * 70e9 / GPU_FLOPS / 8, 4 * 80 * 64 * 128 / GPU_FLOPS / 8),
    "Qwen3-Next-80B-A3B": Machine(24_576, 77_856_768, 2 * 3e9 / GPU_FLOPS, 4 * 12 * 16 * 256 / GPU_FLOPS),
    "Nemotron-H-8B": Machine(16_384, 52_000_000, 2 * 8e9 / GPU_FLOPS, 4 * 4 * 32 * 128 / GPU_FLOPS),
}
STORES = {
    "host": Store(20e-6, 50e9),
    "nvme": Store(100e-6, 7e9),
    "disk": Store(200e-6, 2.5e9),
    "rdma": Store(30e-6, 20e9),
    "redis": Store(500e-6, 1e9),
}


class Run:
    """Decisions one after the other, each way's time known."""

    def __init__(self, machine: Machine, store: Store, seed: int = 0) -> None:
        self.machine, self.store, self.chance = machine, store, random.Random(seed)
        self.costs = LoadCosts()
        self.spent = self.always = self.never = 0.0

    def decide(self, count: int) -> list[bool]:
        """Prefixes from 256 to 64k tokens behind contexts as long; figures vary by 10 %."""
        loads = []
        for _ in range(count):
            tokens, context = (int(256 * 256 ** self.chance.random()) for _ in range(2))
            nbytes = tokens * self.machine.token_bytes + self.machine.state_bytes
            load = self.store.load(nbytes) * self.chance.uniform(0.9, 1.1)
            compute = self.machine.compute(tokens, context) * self.chance.uniform(0.9, 1.1)
            loads.append(self.costs.worth_loading(tokens, context, nbytes))
            if loads[-1]:
                self.costs.read(nbytes, 0, load)
            else:
                self.costs.computed(tokens, context, compute)
            more = self.chance.randrange(16, 2048)  # the rest of the prompt is always computed
            self.costs.computed(more, context, self.machine.compute(more, context))
            self.spent += load if loads[-1] else compute
            self.always += load
            self.never += compute
        return loads


@pytest.mark.parametrize("store", STORES)
@pytest.mark.parametrize("machine", MACHINES)
def test_at_most_a_twentieth_above_the_better_of_always_and_never(machine: str, store: str):
    run = Run(MACHINES[machine], STORES[store])
    run.decide(3000)
    assert run.spent <= 1.05 * min(run.always, run.never)


@pytest.mark.parametrize("machine", MACHINES)
def test_a_store_that_gets_ten_times_slower_is_noticed_within_200_decisions(machine: str):
    run = Run(MACHINES[machine], Store(100e-6, 20e9))
    run.decide(1000)
    run.store.bandwidth /= 10
    run.decide(200)
    run.spent = run.always = run.never = 0.0
    run.decide(1000)
    assert run.spent <= 1.05 * min(run.always, run.never)


def test_a_store_that_gets_fast_again_is_noticed_because_it_is_tried():
    run = Run(MACHINES["Llama-3.1-8B"], Store(200e-6, 1.5e9))
    run.decide(1000)
    run.store.bandwidth = 20e9
    run.decide(3000)
    assert sum(run.decide(200)) > 150


def test_a_busy_engine_loads_what_an_idle_one_computes():
    costs = LoadCosts()
    for _ in range(10):
        costs.computed(1000, 0, 0.04)
        costs.read(10**8, 0, 0.06)
    assert not costs.worth_loading(1000, 0, 10**8)
    assert costs.worth_loading(1000, 0, 10**8, busy=1.0)


def test_a_queue_of_reads_makes_computing_cheaper():
    costs = LoadCosts()
    for size in range(1, 11):
        costs.computed(1000 * size, 0, 0.04 * size)
        costs.read(10**7 * size, 0, 0.01 * size)
    assert costs.worth_loading(1000, 0, 10**7)
    costs.reading_bytes = 10**9
    assert not costs.worth_loading(1000, 0, 10**7)


def test_nothing_measured_means_a_floor():
    costs = LoadCosts(min_tokens=256)
    assert [costs.worth_loading(tokens, 0, 1) for tokens in (255, 256)] == [False, True]
    assert (costs.loads, costs.computes, costs.explored) == (1, 1, 0)


def test_costs_are_not_negative():
    fit = DecayingFit(0.9)
    fit.add(1.0, 100.0, 2.0)
    fit.add(1.0, 200.0, 1.0)
    assert fit.seconds(1.0, 1e6) >= 0
    assert DecayingFit(0.9).seconds(1.0, 5.0) == 0.0


@pytest.mark.parametrize("values", [(0, 0, 1.0), (1, -1, 1.0), (1, 0, 0.0), (1, 0, float("nan"))])
def test_measurements_that_cannot_be_are_refused(values: tuple[int, int, float]):
    with pytest.raises(ConfigError, match="1 token and some time at least"):
        LoadCosts().computed(*values)
