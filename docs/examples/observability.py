"""What operators see of a cache: its metrics, and the spans of a request beneath that of its sender."""

import asyncio

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest
from toy import SPEC, Toy

from asynchicache import CacheConfig, HybridCache
from asynchicache.integrations.otel import instrument
from asynchicache.integrations.prometheus import CacheCollector


async def trace(cache: HybridCache) -> None:
    exporter = InMemorySpanExporter()  # an application has an OTLP exporter here
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    instrument(cache, provider)
    headers = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
    async with cache.request(range(22), traceparent=headers.get("traceparent")) as request:
        await request.load()
    cache.trace(None)
    for span in sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0):
        if span.context is not None and span.attributes is not None:
            hit = span.attributes.get("asynchicache.hit_tokens", "")
            print(f"{span.context.trace_id:032x} {span.name} {hit}".rstrip())


async def main() -> None:
    options = CacheConfig(device_slots={"kv": 12, "mamba": 4})
    async with HybridCache.open(SPEC, options) as cache:
        registry = CollectorRegistry()
        registry.register(CacheCollector(cache, labels={"engine": "a"}))
        toy = Toy(cache)
        for start in (100, 0, 0):
            await toy.serve(range(start, start + 22))
        for line in generate_latest(registry).decode().splitlines():
            if line.startswith("asynchicache_hit_tokens_total"):
                print(line)
        await trace(cache)


asyncio.run(main())
