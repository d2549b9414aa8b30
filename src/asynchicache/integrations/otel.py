"""OpenTelemetry spans of a cache's operations, as children of the request's span.

    instrument(cache)
    async with cache.request(tokens, traceparent=headers.get("traceparent")) as request: ...

Without `instrument`, this module is never imported, and a cache only compares an attribute with None.
"""

from __future__ import annotations

from array import array
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from types import TracebackType
from typing import Any, Generic, Self, TypeVar

from opentelemetry import context as context_api
from opentelemetry import trace
from opentelemetry.context import Context
from opentelemetry.trace import Status, StatusCode, TracerProvider
from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

from asynchicache.cache import EngineCache, HybridCache
from asynchicache.controller.cache_parts import CacheParts
from asynchicache.controller.request import BaseRequest, EngineRequest, Hit, Request
from asynchicache.planner.engine_pages import NamedPages
from asynchicache.streams.base import Stream
from asynchicache.transfer.ticket import Ticket

PREFIX = "asynchicache."
"""Prefix of the names of spans and attributes."""

_propagator = TraceContextTextMapPropagator()

TracedKind = TypeVar("TracedKind", bound=BaseRequest)


def instrument(cache: HybridCache | EngineCache, provider: TracerProvider | None = None) -> None:
    """Start tracing a cache; `cache.trace(None)` stops it.

    Args:
        cache: the cache.
        provider: creates the spans. Default: the application's global provider.
    """
    tracer, size = trace.get_tracer("asynchicache", tracer_provider=provider), cache.spec.page_size
    if isinstance(cache, EngineCache):
        cache.trace(CacheTracer(TracedEngineRequest, size, tracer))
    else:
        cache.trace(CacheTracer(TracedRequest, size, tracer))


class CacheTracer(Generic[TracedKind]):
    """Starts the spans of one cache; see `docs/howto/observability.md` for their attributes."""

    def __init__(self, kind: Callable[..., TracedKind], page_size: int, tracer: trace.Tracer) -> None:
        """`kind`: of the cache's requests."""
        self._kind = kind
        self._page_size = page_size
        self._tracer = tracer

    def request(
        self,
        parts: CacheParts,
        tokens: array[int],
        seed: bytes,
        traceparent: str | None,
        prompt: int | None = None,
    ) -> TracedKind:
        """Return a request whose spans are children of `traceparent`.

        They are children of the current span if `traceparent` is None or malformed.
        """
        current = context_api.get_current()
        carrier = {} if traceparent is None else {"traceparent": traceparent}
        parent = _propagator.extract(carrier, context=current)
        return self._kind(parts, tokens, seed, self, parent, prompt)

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


class _TracedPhases(BaseRequest):
    """What traced requests of both kinds have spans for."""

    def __init__(
        self,
        parts: CacheParts,
        tokens: array[int],
        seed: bytes,
        tracer: CacheTracer[Any],
        parent: Context,
        prompt: int | None = None,
    ) -> None:
        super().__init__(parts, tokens, seed, prompt)
        self._tracer = tracer
        self._parent = parent

    async def __aenter__(self) -> Self:
        with self._beneath_parent(), self._tracer.span("lookup", prompt_tokens=self.prompt_tokens) as span:
            await super().__aenter__()
            span.set_attributes(_hit(self.hit))
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        with self._beneath_parent():
            await super().__aexit__(kind, error, traceback)

    async def prefetch(self) -> Hit:
        with self._beneath_parent(), self._tracer.span("prefetch") as span:
            hit = await super().prefetch()
            span.set_attributes(_hit(hit))
        return hit

    @contextmanager
    def _beneath_parent(self) -> Iterator[None]:
        token = context_api.attach(self._parent)
        try:
            yield
        finally:
            context_api.detach(token)


class TracedRequest(_TracedPhases, Request):
    """A request with spans for its phases; its copies and evictions are children of its parent span."""

    def load(self, *, counted: bool = True) -> Ticket:
        with self._beneath_parent():  # the copy has its own span, which ends when the copy completes
            return super().load(counted=counted)

    def extend(self, tokens: int) -> dict[str, list[int]]:
        with self._beneath_parent():
            return super().extend(tokens)

    async def reserve(self, tokens: int) -> dict[str, list[int]]:
        with self._beneath_parent():
            return await super().reserve(tokens)

    def snapshot(self, length: int, *, after: Stream | None = None) -> Ticket:
        with self._beneath_parent():
            return super().snapshot(length, after=after)

    def checkpoint(self, length: int, *, after: Stream | None = None, final: bool = False) -> Ticket:
        with self._beneath_parent(), self._tracer.span("checkpoint", tokens=length):
            return super().checkpoint(length, after=after, final=final)


class TracedEngineRequest(_TracedPhases, EngineRequest):
    """The same for pages of an engine."""

    def load(self, *, into: NamedPages, after: Stream | None = None, counted: bool = True) -> Ticket:
        with self._beneath_parent():
            return super().load(into=into, after=after, counted=counted)

    def checkpoint(
        self, length: int, *, pages: NamedPages, after: Stream | None = None, final: bool = False
    ) -> Ticket:
        with self._beneath_parent(), self._tracer.span("checkpoint", tokens=length):
            return super().checkpoint(length, pages=pages, after=after, final=final)


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
