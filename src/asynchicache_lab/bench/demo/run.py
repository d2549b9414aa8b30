"""The demo: serve the same conversations in four modes with a real hybrid model, and compare."""

from __future__ import annotations

import random
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from itertools import chain
from pathlib import Path
from typing import Protocol

from asynchicache.cache import HybridCache
from asynchicache.integrations.transformers.demo_model import build_demo_model
from asynchicache.integrations.transformers.thread import ModelThread
from asynchicache.specs import ModelSpec
from asynchicache_lab.bench.cores import one_torch_thread
from asynchicache_lab.bench.demo.crowd import Crowd
from asynchicache_lab.bench.demo.modes import MODES, Mode
from asynchicache_lab.bench.demo.options import PAGE_SIZE, DemoOptions, ceiling, round_ceilings
from asynchicache_lab.bench.demo.prompts import conversations
from asynchicache_lab.bench.demo.report import write_report
from asynchicache_lab.bench.demo.results import DemoResult, ModeResult, Sample, ServedPrompt
from asynchicache_lab.bench.demo.serving import OwnedModel, ServingEngine

PlayedRounds = list[list[ServedPrompt]]
"""What became of every request, by round and client."""


class Watcher(Protocol):
    """Receives the demo's progress."""

    def round_served(self, mode: str, served: Sequence[ServedPrompt]) -> None:
        """One more round of a mode has finished."""
        ...

    def crowd_seen(self, sample: Sample) -> None:
        """An interval of the second act has ended."""
        ...


async def run_demo(options: DemoOptions, watcher: Watcher) -> DemoResult:
    """Play all modes, compare them, and write the report.

    Raises:
        CacheError: a cache cannot be opened.
        OSError: the report cannot be written.
    """
    started = time.perf_counter()
    Path(options.report).parent.mkdir(parents=True, exist_ok=True)  # fail early, not after a minute
    model, config = build_demo_model(options.seed)
    with one_torch_thread(), ModelThread(model.device) as thread:
        owned = OwnedModel(model, config, thread)
        stage = Stage(options, owned, watcher)
        await stage.warm_up()
        played = {mode.name: await stage.play(mode) for mode in MODES}
        crowd = None
        if options.num_visitors:
            crowd = await Crowd(model, options, watcher.crowd_seen).play()
    result = DemoResult(
        model=_describe_model(owned),
        workload=_describe_workload(options),
        ceiling=ceiling(options),
        modes={name: _judge(rounds, played["uncached"]) for name, rounds in played.items()},
        crowd=crowd,
        report=options.report,
        seconds=time.perf_counter() - started,
    )
    write_report(result, round_ceilings(options), {mode.name: mode.blurb for mode in MODES})
    return result


class Stage:
    """One model, and the conversations that every mode plays with it."""

    def __init__(self, options: DemoOptions, owned: OwnedModel, watcher: Watcher) -> None:
        self._options = options
        self._owned = owned
        self._watcher = watcher
        self._spec = ModelSpec.from_config(owned.config, page_size=PAGE_SIZE)
        self._pieces = conversations(options.num_clients, options.num_rounds, options.request_length)

    async def warm_up(self) -> None:
        """Warm up: trigger all loading and autotuning, so that no mode's times include it."""
        engine = ServingEngine(self._owned, None)
        await engine.serve([self._pieces[0][0]] * self._options.num_clients, 2)
        await engine.serve([list(chain.from_iterable(self._pieces[0]))], 2)

    async def play(self, mode: Mode) -> PlayedRounds:
        """Play all rounds of a mode, with storage in a temporary folder."""
        rounds = range(self._options.num_rounds)
        histories: list[list[int]] = [[] for _ in range(self._options.num_clients)]
        played: PlayedRounds = []
        with tempfile.TemporaryDirectory(prefix="asynchicache-demo-") as folder:
            for span in [[number] for number in rounds] if mode.reopens else [list(rounds)]:
                async with self._open(mode, Path(folder)) as (engine, cache):
                    for number in span:
                        played.append(await self._play_round(engine, number, histories))
                        self._watcher.round_served(mode.name, played[-1])
                        if cache is not None:
                            await cache.drain()  # the pause in which users would read and type
        return played

    @asynccontextmanager
    async def _open(
        self, mode: Mode, folder: Path
    ) -> AsyncIterator[tuple[ServingEngine, HybridCache | None]]:
        if mode.config is None:
            yield ServingEngine(self._owned, None), None
            return
        async with HybridCache.open(self._spec, mode.config(self._options, folder)) as cache:
            yield ServingEngine(self._owned, cache), cache

    async def _play_round(
        self, engine: ServingEngine, number: int, histories: list[list[int]]
    ) -> list[ServedPrompt]:
        """Play one turn of every client, in a random order that differs by round but not by mode."""
        clients = list(range(len(histories)))
        random.Random(self._options.seed * 1000 + number).shuffle(clients)
        for client in clients:
            histories[client] += self._pieces[client][number]
        prompts = [histories[client] for client in clients]
        served = await engine.serve(prompts, self._options.output_length)
        by_client = dict(zip(clients, served, strict=True))
        for client, one in by_client.items():
            histories[client] += one.tokens
        return [by_client[client] for client in range(len(histories))]


def _judge(rounds: PlayedRounds, reference: PlayedRounds) -> ModeResult:
    equal = all(
        one.tokens == right.tokens
        for served, expected in zip(rounds, reference, strict=True)
        for one, right in zip(served, expected, strict=True)
    )
    return ModeResult.of(rounds, tokens_equal=equal)


def _describe_model(owned: OwnedModel) -> str:
    weights = sum(parameter.numel() for parameter in owned.model.parameters())
    dtype = str(owned.model.dtype).removeprefix("torch.")
    return f"{owned.config.model_type}, {weights / 1e6:.1f} million random weights, {dtype}, on one core"


def _describe_workload(options: DemoOptions) -> str:
    return (
        f"{options.num_clients} clients, {options.num_rounds} rounds, {options.request_length} tokens in and "
        f"{options.output_length} out a round, pages of {PAGE_SIZE} tokens"
    )
