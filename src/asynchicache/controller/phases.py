"""Phases of a request, for tracers: a verb runs within one if its request has spans."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from functools import wraps
from inspect import iscoroutinefunction
from typing import Any, Protocol, TypeVar

from asynchicache.tracing import Tracer


class RequestSpans(Protocol):
    """The spans of one request."""

    def phase(self, name: str, request: Any, length: object) -> AbstractContextManager[object]:
        """Put what the body begins under the request's parent span, and under one of its own.

        Args:
            name: of that; empty: it has none.
            request: the `BaseRequest` whose verb runs.
            length: what `checkpoint` was given.
        """
        ...


class RequestTracer(Tracer, Protocol):
    """A tracer that has spans for requests, too."""

    def request(self, traceparent: str | None) -> RequestSpans:
        """The spans of a new request; `traceparent`: the W3C header of their parent."""
        ...


Verb = TypeVar("Verb", bound=Callable[..., object])


def phase(name: str = "") -> Callable[[Verb], Verb]:
    """Run a verb within a phase of its request, if that has spans."""

    def decorate(verb: Any) -> Any:
        def within(request: Any, given: Sequence[object], named: Mapping[str, object]) -> Any:
            return request.spans.phase(name, request, given[0] if given else named.get("length"))

        @wraps(verb)
        def called(self: Any, *given: object, **named: object) -> object:
            if self.spans is None:
                return verb(self, *given, **named)
            with within(self, given, named):
                return verb(self, *given, **named)

        @wraps(verb)
        async def awaited(self: Any, *given: object, **named: object) -> object:
            if self.spans is None:
                return await verb(self, *given, **named)
            with within(self, given, named):
                return await verb(self, *given, **named)

        return awaited if iscoroutinefunction(verb) else called

    return decorate
