"""OpenTelemetry spans of a cache's operations, as children of the request's span.

    instrument(cache)
    async with cache.request(tokens, traceparent=headers.get("traceparent")) as request: ...

Without `instrument`, this module is never imported, and a cache only compares an attribute with None.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from asynchicache.cache import EngineCache, HybridCache
from asynchicache.controller.request import BaseRequest
from asynchicache.types import Hit

PREFIX = "asynchicache."
"""Prefix of the names of spans and attributes."""

_propagator = TraceContextTextMapPropagator()


def instrument(cache: HybridCache | EngineCache, provider: TracerProvider | None = None) -> None:
    """Start tracing a cache; `cache.trace(None)` stops it.

    Args:
        provider: creates the spans. Default: the application's global provider.
    """
    cache.trace(CacheTracer(cache.spec.page_size, trace.get_tracer("asynchicache", tracer_provider=provider)))


class CacheTracer:
    """Starts the spans of one cache; see `docs/howto/observability.md` for their attributes."""

    def __init__(self, page_size: int, tracer: trace.Tracer) -> None:
        self._page_size = page_size
        self._tracer = tracer

    def request(self, traceparent: str | None) -> CacheRequestSpans:
        """Return the spans of a request, children of `traceparent`.

        They are children of the current span if `traceparent` is None or malformed.
        """
        current = context_api.get_current()
        carrier = {} if traceparent is None else {"traceparent": traceparent}
        return CacheRequestSpans(self, _propagator.extract(carrier, context=current))

    @contextmanager
    def span(self, name: str, **attributes: str | int) -> Iterator[trace.Span]:
        """Open a span as the current one; an exception is recorded and propagates."""
        with self._tracer.start_as_current_span(PREFIX + name, attributes=_named(attributes)) as span:
            yield span

    def copying(self, kind: str, slots: Mapping[str, int], hit_pages: int, tier: str) -> OpenSpan:
        attributes: dict[str, str | int] = {f"slots.{pool}": count for pool, count in slots.items()}
        if tier:
            attributes |= {"hit_tokens": hit_pages * self._page_size, "tier": tier}
        return self._begin(kind, attributes)

    def storing(self, slots: Mapping[str, int]) -> OpenSpan:
        return self._begin("store", {f"slots.{pool}": count for pool, count in slots.items()})

    def evicting(self, pool: str, tier: str, slots: int) -> OpenSpan:
        return self._begin("evict", {"pool": pool, "tier": tier, "wanted": slots})

    def _begin(self, name: str, attributes: Mapping[str, str | int]) -> OpenSpan:
        return OpenSpan(self._tracer.start_span(PREFIX + name, attributes=_named(attributes)))


class OpenSpan:
    """A span that is ended explicitly, with `finish`."""

    __slots__ = ("_span",)

    def __init__(self, span: trace.Span) -> None:
        self._span = span

    def finish(self, error: BaseException | None = None, **attributes: str | int) -> None:
        self._span.set_attributes(_named(attributes))
        if error is not None:
            self._span.record_exception(error)
            self._span.set_status(Status(StatusCode.ERROR, str(error)))
        self._span.end()


class CacheRequestSpans:
    """Spans for the phases of one request; its copies and evictions are children of its parent span."""

    def __init__(self, tracer: CacheTracer, parent: Context) -> None:
        self._tracer = tracer
        self._parent = parent

    @contextmanager
    def phase(self, name: str, request: BaseRequest, length: object) -> Iterator[None]:
        token = context_api.attach(self._parent)
        try:
            if name:
                with self._tracer.span(name, **_given(name, request, length)) as span:
                    yield
                    if name != "checkpoint":
                        span.set_attributes(_hit(request.hit))
            else:  # a copy has its own span, which ends when the copy completes
                yield
        finally:
            context_api.detach(token)


def _given(name: str, request: BaseRequest, length: object) -> dict[str, str | int]:
    if name == "lookup":
        return {"prompt_tokens": request.prompt_tokens}
    return {"tokens": length} if isinstance(length, int) else {}


def _hit(hit: Hit) -> dict[str, str | int]:
    tier = max(hit.by_tier, default=None)
    found: dict[str, str | int] = {"hit_tokens": hit.tokens, "reason": hit.reason.value}
    if tier is not None:
        found["tier"] = tier.name.lower()
    if hit.held_back_by:
        found["held_back_by"] = hit.held_back_by
    return _named(found)


def _named(attributes: Mapping[str, str | int]) -> dict[str, str | int]:
    return {PREFIX + name: value for name, value in attributes.items()}
