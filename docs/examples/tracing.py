"""Spans of one request, beneath the span of whoever sent it."""

import asyncio

from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from toy import SPEC, Toy

from asynchicache import CacheConfig, HybridCache
from asynchicache.integrations.otel import instrument


async def main() -> None:
    exporter = InMemorySpanExporter()  # an application has an OTLP exporter here
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    options = CacheConfig(device_slots={"kv": 16, "mamba": 4})
    async with HybridCache.open(SPEC, options) as cache:
        await Toy(cache).serve(range(22))
        instrument(cache, provider)
        headers = {"traceparent": "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"}
        async with cache.request(range(22), traceparent=headers.get("traceparent")) as request:
            await request.load()
        cache.trace(None)
    for span in sorted(exporter.get_finished_spans(), key=lambda span: span.start_time or 0):
        if span.context is not None and span.attributes is not None:
            hit = span.attributes.get("asynchicache.hit_tokens", "")
            print(f"{span.context.trace_id:032x} {span.name} {hit}".rstrip())


asyncio.run(main())
