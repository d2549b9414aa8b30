"""The routes, as a Starlette application."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, NamedTuple

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from asynchicache.errors import CacheError
from asynchicache.integrations.serve.access import DETAIL, AccessLog
from asynchicache.integrations.serve.api import Api, unknown_model
from asynchicache.integrations.serve.bodies import BodyRoom, read_body
from asynchicache.integrations.serve.connections import ToldOfTheEnd, while_connected
from asynchicache.integrations.serve.messages import (
    ChatRequest,
    CompletionRequest,
    GenerationRequest,
    decode_request,
)
from asynchicache.integrations.serve.metrics import CONTENT_TYPE, Metrics
from asynchicache.integrations.serve.operators import OperatorEndpoints
from asynchicache.integrations.serve.picture import PAGE, picture
from asynchicache.integrations.serve.problems import ApiError, broken, crowded, refusal
from asynchicache.integrations.serve.protocol import CROWDED
from asynchicache.integrations.serve.replies import ChatReply, CompletionReply, Reply
from asynchicache.storage.statistics import PoolStatistics

_POLICY = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'; connect-src 'self'"


def build_app(
    api: Api,
    *,
    admin_token: str = "",
    max_body_bytes: int,
    max_bodies_bytes: int,
    max_connections: int = 4096,
    ignore_unknown: bool = False,
) -> Starlette:
    """Build the application; its `state.bodies` is the `BodyRoom`.

    Args:
        api: answers requests; the caller closes it.
        admin_token: what operators send; empty turns their endpoints off.
        max_body_bytes: most bytes of one body; longer bodies are refused.
        max_bodies_bytes: most bytes of all bodies that are being read or answered.
        max_connections: most connections; each has a guaranteed share of `max_bodies_bytes`.
        ignore_unknown: leave out unknown fields of requests instead of refusing them.
    """
    endpoints = InfoEndpoints(api)
    room = BodyRoom(max_bodies_bytes, largest=max_body_bytes, connections=max_connections)
    bodies = Bodies(max_body_bytes, room, ignore_unknown)
    completions = GenerationEndpoint(api, CompletionRequest, CompletionReply, bodies)
    chat = GenerationEndpoint(api, ChatRequest, ChatReply, bodies)
    app = Starlette(
        routes=[
            Route("/v1/completions", completions, methods=["POST"]),
            Route("/v1/chat/completions", chat, methods=["POST"]),
            *OperatorEndpoints(api, admin_token, room).routes(),
            Route("/v1/models", endpoints.models),
            Route("/v1/models/{name:path}", endpoints.model),
            Route("/health", endpoints.health),
            Route("/metrics", endpoints.metrics),
            Route("/stats", endpoints.stats),
            Route("/dashboard", endpoints.dashboard),
        ],
        exception_handlers={
            CacheError: endpoints.refused,
            HTTPException: endpoints.no_route,
            Exception: endpoints.failed,
        },
        middleware=[Middleware(AccessLog), Middleware(ToldOfTheEnd)],
    )
    app.state.bodies = room
    return app


class Bodies(NamedTuple):
    """Limits on one body (`most`, in bytes) and on all bodies (`room`); what becomes of unknown fields."""

    most: int
    room: BodyRoom
    ignore_unknown: bool = False


class GenerationEndpoint:
    """An ASGI application that answers one kind of request while its client is connected."""

    def __init__(
        self, api: Api, kind: type[GenerationRequest], reply_type: type[Reply], bodies: Bodies
    ) -> None:
        self._api = api
        self._kind = kind
        self._reply_type = reply_type
        self._bodies = bodies

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        arrived = Request(scope, receive)
        if CROWDED in scope.get("state", {}):
            raise crowded(scope["state"][CROWDED])
        parent = arrived.headers.get("traceparent")
        with self._bodies.room.memory() as memory:
            body = await read_body(arrived, self._bodies.most, memory)
            request = decode_request(
                body, self._kind, context=self._api.served.context, ignore_unknown=self._bodies.ignore_unknown
            )
            await while_connected(receive, self._answer(request, scope, send, parent))

    async def _answer(
        self, request: GenerationRequest, scope: Scope, send: Send, traceparent: str | None
    ) -> None:
        answered = await self._api.answer(request, self._reply_type, send, traceparent=traceparent)
        scope[DETAIL] = str(answered)


def _breakers(pools: Mapping[str, PoolStatistics]) -> dict[str, str]:
    return {pool: one.breaker.value for pool, one in pools.items()}


class InfoEndpoints:
    """The endpoints for models, health and metrics, and the responses to errors."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._started = int(time.time())
        self._metrics = Metrics(api)

    async def models(self, request: Request) -> Response:
        return JSONResponse({"object": "list", "data": [self._card()]})

    async def model(self, request: Request) -> Response:
        name = request.path_params["name"]
        if not self._api.served.is_called(name):
            raise unknown_model(name, self._api.served.name)
        return JSONResponse(self._card())

    async def health(self, request: Request) -> Response:
        """Answer 200 while requests are accepted. Without storage they are, with fewer hits."""
        api = self._api
        statistics = api.model.cache.statistics()
        body = {
            "status": "stopping" if api.stopping else "ok",
            "model": api.served.name,
            "role": api.served.role,
            "running": api.model.running,
            "waiting": api.model.waiting,
            "storage": api.storage_state(),
            "storage_breakers": _breakers(statistics.storage),
            "storage_stages": {stage: _breakers(pools) for stage, pools in statistics.stages.items()},
        }
        return JSONResponse(body, 503 if api.stopping else 200)

    async def metrics(self, request: Request) -> Response:
        return Response(self._metrics.text(), headers={"content-type": CONTENT_TYPE})

    async def stats(self, request: Request) -> Response:
        """Answer with what `asynchicache top` and the dashboard show."""
        return JSONResponse(picture(self._api, time.time() - self._started))

    async def dashboard(self, request: Request) -> Response:
        # The page loads nothing from elsewhere, and runs no other script than its own.
        return Response(
            PAGE.read_bytes(), media_type="text/html", headers={"content-security-policy": _POLICY}
        )

    async def refused(self, request: Request, error: Exception) -> Response:
        return self._refuse(request, refusal(error))

    async def no_route(self, request: Request, error: Exception) -> Response:
        status = error.status_code if isinstance(error, HTTPException) else 404
        place = f"{request.method} {request.url.path}"
        allowed = (getattr(error, "headers", None) or {}).get("Allow")
        rule = f"send {min(allowed.split(', '))}" if allowed else "no such path"  # the line names it already
        return self._refuse(request, ApiError(f"{place}: {rule}", status=status, rule=rule))

    def _refuse(self, request: Request, answer: ApiError) -> Response:
        self._api.counts.refuse(answer)
        request.scope[DETAIL] = answer.logged
        return answer.response()

    async def failed(self, request: Request, error: Exception) -> Response:
        """Respond with status 500; Starlette raises the error again, and uvicorn logs it."""
        answer = broken()
        self._api.counts.refuse(answer)
        return answer.response()

    def _card(self) -> dict[str, Any]:
        return {
            "id": self._api.served.name,
            "object": "model",
            "created": self._started,
            "owned_by": "asynchicache",
            "root": str(self._api.served.folder or self._api.served.name),
            "max_model_len": self._api.served.context,
        }
