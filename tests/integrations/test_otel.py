"""Spans of a real cache, as an exporter sees them; and that without a tracer nothing is there to pay for."""

from __future__ import annotations

import asyncio
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from opentelemetry.sdk.trace import ReadableSpan, TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import StatusCode

import asynchicache
from asynchicache import HybridCache, Tier
from asynchicache.backends.memory import MemoryBackend, MemoryStore
from asynchicache.integrations.otel import instrument
from asynchicache.testing.devices import break_device
from asynchicache.testing.seeded import SeededWorld, run_seeded
from cache import paged_engine
from cache.engine import SPEC, Engine, config

PROMPT = range(100, 121)
TRACE, PARENT = "4bf92f3577b34da6a3ce929d0e0e4736", "00f067aa0ba902b7"
TRACEPARENT = f"00-{TRACE}-{PARENT}-01"


class Spans:
    """What was exported since it was asked last."""

    def __init__(self) -> None:
        self._exporter = InMemorySpanExporter()
        self.provider = TracerProvider()
        self.provider.add_span_processor(SimpleSpanProcessor(self._exporter))

    def take(self) -> dict[str, list[ReadableSpan]]:
        found: dict[str, list[ReadableSpan]] = {}
        for span in self._exporter.get_finished_spans():
            found.setdefault(span.name.removeprefix("asynchicache."), []).append(span)
        self._exporter.clear()
        return found


@pytest.fixture
def spans() -> Iterator[Spans]:
    found = Spans()
    yield found
    found.provider.shutdown()


def attributes(span: ReadableSpan) -> dict[str, object]:
    return {name.removeprefix("asynchicache."): value for name, value in (span.attributes or {}).items()}


async def serve(cache: HybridCache, tokens: range, traceparent: str | None = None) -> None:
    engine = Engine(cache)
    async with cache.request(tokens, traceparent=traceparent) as request:
        await request.prefetch()
        await request.load()
        engine.check(request)
        await engine.compute(request, len(tokens) // 4 * 4)
    await cache.drain()


@pytest.mark.asyncio
async def test_a_request_is_a_tree_beneath_its_traceparent(spans: Spans):
    store = MemoryStore()
    async with HybridCache.open(SPEC, config(), storage=MemoryBackend(store)) as cache:
        instrument(cache, spans.provider)
        await serve(cache, PROMPT, TRACEPARENT)
        first = spans.take()
        assert set(first) == {"lookup", "prefetch", "load", "checkpoint", "fork", "backup", "store"}
        await cache.flush()
        spans.take()
        await serve(cache, PROMPT, TRACEPARENT)
        second = spans.take()

    for name in ("lookup", "prefetch", "load", "checkpoint"):
        (span,) = first[name]
        assert span.context is not None
        assert span.parent is not None
        assert f"{span.context.trace_id:032x}" == TRACE
        assert f"{span.parent.span_id:016x}" == PARENT
    (looked,), (prefetched,), (loaded,) = second["lookup"], second["prefetch"], second["load"]
    assert attributes(looked) == {"prompt_tokens": 21, "hit_tokens": 0, "reason": "cold"}
    assert attributes(prefetched) == {"hit_tokens": 20, "reason": "none", "tier": "storage"}
    assert attributes(loaded) == {"hit_tokens": 20, "tier": "storage", "slots.kv": 5, "slots.mamba": 1}
    (stored,) = first["store"]
    assert attributes(stored)["stored"] is True
    assert attributes(stored)["slots.kv"] == 5
    assert attributes(first["checkpoint"][0])["tokens"] == 20


@pytest.mark.asyncio
async def test_requests_of_an_engines_pages_are_traced_too(spans: Spans):
    memory = paged_engine.paged()
    async with HybridCache.open(SPEC, paged_engine.config(), engine=memory.memory) as cache:
        instrument(cache, spans.provider)
        engine = paged_engine.PagedEngine(cache, memory)
        await engine.serve(PROMPT)
        assert spans.take().keys() == {"lookup", "prefetch", "load", "checkpoint", "backup"}
        await engine.serve(PROMPT)
        again = spans.take()
    assert [attributes(span)["tokens"] for span in again["checkpoint"]] == [20, 21]
    (loaded,) = again["load"]
    assert attributes(loaded) == {"hit_tokens": 20, "tier": "host", "slots.kv": 5, "slots.mamba": 1}


@pytest.mark.asyncio
async def test_a_load_ends_when_its_bytes_have_landed(spans: Spans):
    async with HybridCache.open(SPEC, config(device_slots={"kv": 8, "mamba": 4})) as cache:
        await serve(cache, PROMPT)
        await serve(cache, range(500, 529))  # makes the first prompt leave the device
        instrument(cache, spans.provider)
        async with cache.request(PROMPT) as request:
            ticket = request.load()
            assert "load" not in spans.take()
            await ticket
            await cache.drain()
            assert request.hit.by_tier == {Tier.HOST: 20}
        (loaded,) = spans.take()["load"]
        assert attributes(loaded)["slots.kv"] == 5


@pytest.mark.asyncio
@pytest.mark.parametrize("traceparent", [None, "garbage", "00-0-0-00", f"00-{TRACE}-{'0' * 16}-01"])
async def test_without_a_parent_of_its_own_it_is_beneath_the_current_span(
    spans: Spans, traceparent: str | None
):
    async with HybridCache.open(SPEC, config()) as cache:
        instrument(cache, spans.provider)
        with spans.provider.get_tracer("engine").start_as_current_span("generate") as outer:
            await serve(cache, PROMPT, traceparent)
        (span,) = spans.take()["lookup"]
        assert span.parent is not None
        assert span.parent.span_id == outer.get_span_context().span_id


@pytest.mark.asyncio
async def test_evictions_are_beneath_the_request_that_needs_the_room(spans: Spans):
    async with HybridCache.open(SPEC, config(device_slots={"kv": 8, "mamba": 4})) as cache:
        instrument(cache, spans.provider)
        await serve(cache, PROMPT)
        spans.take()
        await serve(cache, range(500, 521), TRACEPARENT)
        evicted = spans.take()["evict"]
        assert evicted
        for span in evicted:
            assert span.context is not None
            assert f"{span.context.trace_id:032x}" == TRACE
        assert attributes(evicted[0]) == {
            "pool": "kv",
            "tier": "device",
            "wanted": 2,
            "freed": 5,  # a node that a state stands on goes as a whole
            "demoted": 5,
            "lost": 0,
        }


def test_what_fails_says_why(spans: Spans):
    async def main(world: SeededWorld) -> None:  # on threads, the copy may end before the device fails
        device = world.device()
        options = config(device_slots={"kv": 12, "mamba": 4})
        async with HybridCache.open(SPEC, options, port=world.port, device=device) as cache:
            instrument(cache, spans.provider)
            engine = Engine(cache)
            for start in (0, 100, 200):
                await engine.serve(range(start, start + 21))
                await cache.drain()
            spans.take()
            async with cache.request(range(21)) as request:
                loading = request.load()
                break_device(device)
                await asyncio.gather(loading, return_exceptions=True)
            await cache.drain()

    run_seeded(3, main)  # of the seeds in which the device fails before the copy is through
    failed = [
        span
        for found in spans.take().values()
        for span in found
        if span.status.status_code is StatusCode.ERROR
    ]
    assert failed
    assert all(span.events[0].name == "exception" for span in failed)


@pytest.mark.asyncio
async def test_tracing_begins_and_ends_when_told(spans: Spans):
    async with HybridCache.open(SPEC, config()) as cache:
        assert cache.request(PROMPT).spans is None
        instrument(cache, spans.provider)
        assert cache.request(PROMPT).spans is not None
        cache.trace(None)
        await serve(cache, PROMPT, TRACEPARENT)
        assert spans.take() == {}


@pytest.mark.asyncio
async def test_without_a_tracer_not_one_call_is_made_for_it():
    """All that is left is the comparison of an attribute with None."""
    called: set[str] = set()

    def note(frame: object, event: str, _: object) -> None:
        if event == "call":
            called.add(frame.f_code.co_filename)  # type: ignore[attr-defined]

    async with HybridCache.open(SPEC, config(device_slots={"kv": 8, "mamba": 4})) as cache:
        before = sys.getprofile()
        sys.setprofile(note)
        try:
            for start in (0, 100, 0):
                await serve(cache, range(start, start + 21), TRACEPARENT)
        finally:
            sys.setprofile(before)
    assert any(name.endswith("planner/inventory.py") for name in called)
    tracing = ("/asynchicache/integrations/otel.py", "/asynchicache/tracing.py")
    assert not [name for name in called if "opentelemetry" in name or name.endswith(tracing)]


@pytest.mark.parametrize("package", ["opentelemetry", "prometheus_client", "zmq"])
def test_what_operators_read_is_imported_by_integrations_only(package: str):
    """So a cache without them needs none of these packages, and loads none."""
    root = Path(asynchicache.__path__[0])
    users = {
        path.relative_to(root).parts[0]
        for path in root.rglob("*.py")
        if re.search(rf"^\s*(import|from) {package}\b", path.read_text("utf-8"), re.MULTILINE)
    }
    assert users == {"integrations"}
