"""Leaving a request, wherever that happens: no forward that still runs writes to a slot that is free."""

from __future__ import annotations

import asyncio
import importlib
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import pytest

from asynchicache import CacheConfig, HybridCache
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.transfer.graph_fences import GraphFences
from asynchicache.tree.node import FULL_DEVICE, place_of
from asynchicache.types import Tier
from cache.engine import SPEC, Engine, config

EXAMPLES = Path(__file__).parents[2] / "docs/examples"
SOURCE = (EXAMPLES / "stream_order.py").read_text().splitlines()
STATE_DEVICE = place_of(1, Tier.DEVICE)
OPTIONS = CacheConfig(device_slots={"kv": 16, "mamba": 4}, weight_version="test")


@pytest.fixture
def example(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The documented example, whose last line is left out: it runs itself."""
    monkeypatch.syspath_prepend(str(EXAMPLES))
    module = ModuleType("stream_order")
    module.toy = importlib.import_module("toy")
    exec(
        compile("\n".join(SOURCE).replace("\nasyncio.run(main())", ""), "stream_order.py", "exec"),
        module.__dict__,
    )
    yield module
    sys.modules.pop("toy", None)


def watched(toy: Any, cache: HybridCache, wrong: list[str]) -> Any:
    """A toy engine that looks, when a forward runs, whether what it writes is still its request's."""
    free = cache._parts.planner.inventory.free
    compute = toy.compute

    def look(tokens: Sequence[int], start: int, pages: Sequence[int], state: int) -> None:
        written = pages[start // 4 : (start + len(tokens) - 1) // 4 + 1]
        if any(free[FULL_DEVICE].is_free(page) for page in written) or free[STATE_DEVICE].is_free(state):
            wrong.append(f"a forward of {len(tokens)} tokens writes to slots that are free")
        compute(tokens, start, pages, state)

    toy.compute = look
    return toy


@contextmanager
def cancelled_at(line: int, name: str) -> Iterator[list[int]]:
    """Raise a cancellation where a function of that name is about to run its so many-th line; what comes out
    counts the lines."""
    lines = [0]

    def local(frame: FrameType, event: str, argument: object) -> Any:
        # Not where `async with` begins to leave: no cancellation comes there, and no `__aexit__` after one.
        if event == "line" and not SOURCE[frame.f_lineno - 1].lstrip().startswith("async with"):
            lines[0] += 1
            if lines[0] == line:
                raise asyncio.CancelledError
        return local

    def tracing(frame: FrameType, event: str, argument: object) -> Any:
        return local if frame.f_code.co_name == name and "stream_order" in frame.f_code.co_filename else None

    before = sys.gettrace()
    sys.settrace(tracing)
    try:
        yield lines
    finally:
        sys.settrace(before)


def interrupted(example: ModuleType, line: int) -> tuple[int, list[str]]:
    """Serve two prompts, the second one cut off at a line; how many lines there were, and what was wrong."""
    wrong: list[str] = []

    async def main(world: SeededWorld) -> int:
        device = world.device(mean_seconds=1e-3)  # forwards take longer than anything else
        async with world.open_cache(example.SPEC, OPTIONS, device=device) as cache:
            toy = watched(example.Toy(cache), cache, wrong)
            compute = device.stream("compute")
            await example.serve(toy, compute, list(range(22)))
            with cancelled_at(line, "serve") as lines:
                task = asyncio.ensure_future(example.serve(toy, compute, list(range(30))))
                await asyncio.wait([task])
            assert task.cancelled() or task.exception() is None
            if await example.serve(toy, compute, list(range(40, 62))) != sum(range(40, 62)):
                wrong.append("the next request's answer is wrong")
            await cache.drain()
            wrong.extend(cache.verify(idle=True))
            return lines[0]

    return run_seeded(line, main), wrong


def test_the_documented_example_may_be_cancelled_at_each_of_its_lines(example: ModuleType) -> None:
    lines, wrong = interrupted(example, 0)
    assert (lines > 20, wrong) == (True, [])
    found = {line: interrupted(example, line)[1] for line in range(1, lines + 1)}
    assert {line: words for line, words in found.items() if words} == {}


def test_without_the_stream_it_may_not(example: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test before this one can fail."""
    request = HybridCache.request
    monkeypatch.setattr(HybridCache, "request", lambda self, tokens, **options: request(self, tokens))
    monkeypatch.setattr("asynchicache.planner.request_state.RequestState.runs_on", lambda self, stream: None)
    lines, _ = interrupted(example, 0)
    assert any(interrupted(example, line)[1] for line in range(1, lines + 1))


Told = Callable[[HybridCache, Any, Any], object]


async def by_name(cache: HybridCache, request: Any, stream: Any) -> None:
    request.run_on(stream)
    await request.__aenter__()
    await request.load()


async def by_fence(cache: HybridCache, request: Any, stream: Any) -> None:
    await request.__aenter__()
    ticket = request.load()
    await ticket.submitted()
    ticket.fence(0).wait_on(stream)


async def by_host_fence(cache: HybridCache, request: Any, stream: Any) -> None:
    await request.__aenter__()
    ticket = request.load()
    await ticket
    ticket.host_fence(0).wait_on(stream)


async def by_graph(cache: HybridCache, request: Any, stream: Any) -> None:
    fences = GraphFences(cache.device, cache.spec.layers)
    with cache.device.capture(stream):
        for layer in range(cache.spec.layers):
            fences.wait_on(layer, stream)
    await request.__aenter__()
    ticket = request.load()
    await ticket.submitted()
    fences.arm(ticket)


async def by_advance(cache: HybridCache, request: Any, stream: Any) -> None:
    await request.__aenter__()
    await request.load()
    request.advance(0, after=stream)


async def by_checkpoint(cache: HybridCache, request: Any, stream: Any) -> None:
    await request.__aenter__()
    await request.load()
    await request.checkpoint(0, after=stream)


async def by_snapshot(cache: HybridCache, request: Any, stream: Any) -> None:
    await request.__aenter__()
    await request.load()
    request.extend(0)
    await request.snapshot(0, after=stream)


@pytest.mark.parametrize(
    "tell", [by_name, by_fence, by_host_fence, by_graph, by_advance, by_checkpoint, by_snapshot]
)
def test_every_stream_that_a_request_was_told_of_is_waited_for(tell: Told) -> None:
    async def main(world: SeededWorld) -> None:
        async with world.open_cache(SPEC, config(), storage=MemoryBackend(MemoryStore())) as cache:
            await Engine(cache).serve(list(range(20)))
            stream, other = cache.device.stream("compute"), cache.device.stream("another")
            request = cache.request([*range(20), 7])
            await tell(cache, request, stream)
            held: list[bool] = []
            free = cache._parts.planner.inventory.free[FULL_DEVICE]
            own = request.extend(8)["kv"]
            for one in (stream, other):
                one.launch(lambda: held.append(all(not free.is_free(slot) for slot in own)))
            await request.__aexit__(RuntimeError, RuntimeError(), None)
            await cache.drain()
            while len(held) < 2:  # noqa: ASYNC110  work of a stream has no event here
                await asyncio.sleep(1e-4)
            assert held[0]
            assert all(free.is_free(slot) for slot in own)
            assert cache.verify(idle=True) == []

    run_seeded(3, main)


def test_a_request_that_was_told_of_no_stream_gives_back_at_once() -> None:
    async def main(world: SeededWorld) -> None:
        async with world.open_cache(SPEC, config()) as cache:
            request = cache.request([1, 2, 3, 4, 5])
            await request.__aenter__()
            await request.load()
            own = request.extend(5)["kv"]
            request.close()
            free = cache._parts.planner.inventory.free[FULL_DEVICE]
            assert all(free.is_free(slot) for slot in own)

    run_seeded(0, main)
