"""What an operator may tell a running server to do, with a token."""

from __future__ import annotations

from base64 import b64decode
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from hmac import compare_digest
from typing import Any, TypeAlias

import msgspec
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from asynchicache.errors import StorageError, UsageError
from asynchicache.integrations.serve.access import DETAIL
from asynchicache.integrations.serve.api import Api
from asynchicache.integrations.serve.bodies import BodyRoom, read_body
from asynchicache.integrations.serve.messages import AttachRequest, WeightsRequest, decode_order
from asynchicache.integrations.serve.problems import ApiError

Told: TypeAlias = dict[str, Any]
_MOST_BYTES = 1 << 20


class OperatorEndpoints:
    """The endpoints of operators, named like the methods of the cache.

    Args:
        token: what operators send, as a bearer token or as a password; empty: all is refused.
        room: of bodies.
    """

    def __init__(self, api: Api, token: str, room: BodyRoom) -> None:
        self._api = api
        self._token = token
        self._room = room

    def routes(self) -> list[Route]:
        verbs: Mapping[str, Callable[[Request], Awaitable[Told]]] = {
            "attach_storage": self._attach,
            "detach_storage": self._detach,
            "clear_storage": self._clear,
            "flush_cache": self._flush,
            "sync": self._sync,
            "update_weights": self._update_weights,
        }
        return [Route(f"/{name}", partial(self._run, verb), methods=["POST"]) for name, verb in verbs.items()]

    async def _run(self, verb: Callable[[Request], Awaitable[Told]], request: Request) -> Response:
        self._check(request)
        try:
            told = await verb(request)
        except UsageError as error:
            if isinstance(error, ApiError):
                raise
            raise ApiError(str(error), status=409, rule=str(error)) from error
        except StorageError as error:
            raise ApiError(str(error), status=503, code="storage_unavailable", rule=str(error)) from error
        request.scope[DETAIL] = msgspec.json.encode(told).decode()
        return JSONResponse(told)

    def _check(self, request: Request) -> None:
        if not self._token:
            raise ApiError(
                f"{request.method} {request.url.path} is for operators, and off: start the server with "
                "--admin-token, or ASYNCHICACHE_ADMIN_TOKEN",
                status=404,
                rule="off: see --admin-token",
            )
        given = _token_of(request.headers.get("authorization", ""))
        if not given:
            raise ApiError("send the header authorization: Bearer, and the admin token", status=401)
        if not compare_digest(given, self._token.encode()):
            raise ApiError("this is not the admin token of this server", status=403)

    async def _attach(self, request: Request) -> Told:
        order = await self._order(request, AttachRequest)
        return {"storage": await self._api.storage.attach(order.storage, order.storage_options)}

    async def _detach(self, request: Request) -> Told:
        detached, ended = await self._api.storage.detach()
        return {"detached": detached, "attempts_ended": ended}

    async def _clear(self, request: Request) -> Told:
        if not self._api.model.cache.statistics().storage:
            raise ApiError("no storage is attached: nothing to clear", status=409)
        return {"pages": await self._api.model.cache.clear_storage()}

    async def _flush(self, request: Request) -> Told:
        await self._api.model.cache.flush()
        return {"flushed": True}

    async def _sync(self, request: Request) -> Told:
        if not await self._api.model.cache.sync():
            raise ApiError(
                "not everything was written: storage is full, refused or failed, or there is none: see "
                "asynchicache_shed_slots_total in /metrics for which, and the log for why",
                status=503,
                code="storage_unavailable",
            )
        return {"written": True}

    async def _update_weights(self, request: Request) -> Told:
        version = (await self._order(request, WeightsRequest)).weight_version
        try:
            await self._api.model.update_weights(version)
        except StorageError as error:
            self._api.storage.lost(error)
            raise
        return {"weight_version": version}

    async def _order(self, request: Request, kind: type[Any]) -> Any:
        with self._room.memory() as memory:
            return decode_order(await read_body(request, _MOST_BYTES, memory), kind)


def _token_of(header: str) -> bytes:
    """The token of an `Authorization` header; of a user and a password, the password."""
    scheme, _, value = header.partition(" ")
    if scheme.lower() == "bearer":
        return value.strip().encode()
    if scheme.lower() != "basic":
        return b""
    try:
        return b64decode(value, validate=True).partition(b":")[2]
    except ValueError:
        return b""
