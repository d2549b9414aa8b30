"""A server tells routers what it has, and puts what its cache does beneath the client's span."""

from __future__ import annotations

from array import array
from pathlib import Path

import pytest
from opentelemetry import trace
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from asynchicache.errors import ConfigError
from asynchicache.hashing import page_digests
from asynchicache.integrations.kv_events.encoding import int64_hash
from asynchicache.integrations.kv_events.index import BlockIndex
from asynchicache.integrations.kv_events.subscriber import KvEventSubscriber
from integrations.serve.checkpoints import tiny_loaded
from integrations.serve.serving import PAGE, running

TRACE = 0x4BF92F3577B34DA6A3CE929D0E0E4736
PARENT = f"00-{TRACE:032x}-00f067aa0ba902b7-01"
TEXT = "a prompt of more than one page, " * 3
PROMPT = {"prompt": TEXT, "max_tokens": 2}
LOADED = tiny_loaded()

pytestmark = pytest.mark.asyncio


async def test_a_router_learns_the_pages_of_a_request(tmp_path: Path):
    replay = f"ipc://{tmp_path}/replay"
    events = f'{{"endpoint": "ipc://{tmp_path}/events", "replay_endpoint": "{replay}"}}'
    async with running(LOADED, kv_events=events) as server:
        answer = await server.http.post("/v1/completions", json=PROMPT)
        assert answer.status_code == 200
        await server.idle()
        index = BlockIndex()
        async with KvEventSubscriber.open(f"ipc://{tmp_path}/events", replay_endpoint=replay) as router:
            for update in router.take():
                index.apply(update.batch.events)
    tokens = array("q", LOADED.tokenizer.encode(TEXT))
    blocks = [int64_hash(digest) for digest in page_digests(tokens, PAGE)]
    assert index.reach(blocks) == len(blocks) > 3


async def test_spans_are_beneath_the_clients(monkeypatch: pytest.MonkeyPatch):
    exporter, provider = InMemorySpanExporter(), TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    monkeypatch.setattr(trace, "get_tracer_provider", lambda: provider)
    async with running(LOADED, trace=True) as server:
        await server.http.post("/v1/completions", json=PROMPT, headers={"traceparent": PARENT})
        await server.idle()
    lookups = [span for span in exporter.get_finished_spans() if span.name == "asynchicache.lookup"]
    assert lookups
    assert {span.context.trace_id for span in lookups} == {TRACE}


@pytest.mark.parametrize(
    ("events", "words"),
    [("{", "does not fit"), ('{"endpoint": "nowhere"}', "nowhere"), ('{"topics": ""}', "topics")],
)
async def test_events_that_cannot_be_published_keep_the_server_from_starting(events: str, words: str):
    with pytest.raises(ConfigError, match=words):
        async with running(LOADED, kv_events=events):
            pass
