"""The store over HTTP: each request is one call; a single separate thread runs them.

    GET  /v1/status                 what is held
    POST /v1/open                   a namespace's handle
    POST /v1/namespaces/HANDLE/VERB exists, locate, reserve, confirm, release, forget, delete, touch, clear

The service has no authentication: any client can drop every page. Bind it to loopback or a trusted network.
"""

from __future__ import annotations

import asyncio
import logging
import sqlite3
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from functools import partial
from typing import Any, NamedTuple

import msgspec
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from asynchicache.backends.hf3fs.metadata import messages as m
from asynchicache.backends.hf3fs.metadata.store import MetadataStore, UnknownNamespaceError
from asynchicache.errors import StorageFormatError, UsageError

MAX_BODY_BYTES = 8 << 20
"""Bytes of one request; more are refused."""

logger = logging.getLogger(__name__)


class Endpoint(NamedTuple):
    """One kind of call on a namespace: what it takes, and what answers it."""

    message: type[m.MetadataMessage]
    answer: Callable[[MetadataStore, int, Any], m.MetadataMessage]


def _exists(store: MetadataStore, namespace: int, ask: m.Ask) -> m.MetadataMessage:
    store.end_reads(ask.finished)
    return m.Present(store.exists(namespace, ask.keys))


def _locate(store: MetadataStore, namespace: int, ask: m.Ask) -> m.MetadataMessage:
    store.end_reads(ask.finished)
    return store.locate(namespace, ask.keys)


def _reserve(store: MetadataStore, namespace: int, ask: m.Reserve) -> m.MetadataMessage:
    store.end_reads(ask.finished)
    return store.reserve(namespace, ask.token, ask.keys)


def _confirm(store: MetadataStore, namespace: int, ask: m.Confirm) -> m.MetadataMessage:
    return m.Confirmed(store.confirm(namespace, ask.claims))


def _release(store: MetadataStore, namespace: int, ask: m.Release) -> m.MetadataMessage:
    return m.Counted(store.release(namespace, ask.places))


def _forget(store: MetadataStore, namespace: int, ask: m.Forget) -> m.MetadataMessage:
    return m.Dropped(store.forget(namespace, ask.claims))


def _delete(store: MetadataStore, namespace: int, ask: m.Ask) -> m.MetadataMessage:
    store.end_reads(ask.finished)
    return m.Dropped(store.delete(namespace, ask.keys))


def _touch(store: MetadataStore, namespace: int, ask: m.Ask) -> m.MetadataMessage:
    store.end_reads(ask.finished)
    return m.Counted(store.touch(namespace, ask.keys))


def _clear(store: MetadataStore, namespace: int, ask: m.Clear) -> m.MetadataMessage:
    return m.Counted(store.clear(namespace))


ENDPOINTS = {
    "exists": Endpoint(m.Ask, _exists),
    "locate": Endpoint(m.Ask, _locate),
    "reserve": Endpoint(m.Reserve, _reserve),
    "confirm": Endpoint(m.Confirm, _confirm),
    "release": Endpoint(m.Release, _release),
    "forget": Endpoint(m.Forget, _forget),
    "delete": Endpoint(m.Ask, _delete),
    "touch": Endpoint(m.Ask, _touch),
    "clear": Endpoint(m.Clear, _clear),
}

_STATUS_OF: dict[type[Exception], int] = {
    msgspec.MsgspecError: 400,
    UnicodeDecodeError: 400,
    UsageError: 400,
    UnknownNamespaceError: 404,
    StorageFormatError: 409,
    sqlite3.Error: 503,  # the transaction was rolled back; a full disk, say
}


class MetadataService:
    """The HTTP side of a store.

    Args:
        store: closed when the application ends.
    """

    def __init__(self, store: MetadataStore) -> None:
        self._store = store
        # One thread: the store takes one call at a time, and a commit waits for the disk.
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="metadata")

    def app(self) -> Starlette:
        """The ASGI application."""
        return Starlette(
            routes=[
                Route("/v1/status", self._status, methods=["GET"]),
                Route("/v1/open", self._open, methods=["POST"]),
                Route("/v1/namespaces/{handle}/{endpoint}", self._call, methods=["POST"]),
            ],
            exception_handlers={kind: partial(_refuse, code) for kind, code in _STATUS_OF.items()},
            lifespan=self._lifespan,
        )

    @asynccontextmanager
    async def _lifespan(self, app: Starlette) -> AsyncIterator[None]:
        yield
        await self._run(self._store.close)
        self._thread.shutdown()

    async def _status(self, request: Request) -> Response:
        return _reply(await self._run(self._store.status))

    async def _open(self, request: Request) -> Response:
        ask = msgspec.json.decode(await _body(request), type=m.Open)
        return _reply(await self._run(partial(self._store.open, ask.name, ask.slots, ask.frame_bytes)))

    async def _call(self, request: Request) -> Response:
        endpoint = ENDPOINTS.get(request.path_params["endpoint"])
        if endpoint is None:
            raise UsageError(
                f"no endpoint {request.path_params['endpoint']!r}; there are {sorted(ENDPOINTS)}"
            )
        ask = msgspec.json.decode(await _body(request), type=endpoint.message)
        return _reply(await self._run(partial(self._answer, endpoint, request.path_params["handle"], ask)))

    def _answer(self, endpoint: Endpoint, handle: str, ask: m.MetadataMessage) -> m.MetadataMessage:
        return endpoint.answer(self._store, self._store.number(handle), ask)

    async def _run(self, call: Callable[[], Any]) -> Any:
        return await asyncio.get_running_loop().run_in_executor(self._thread, call)


async def _body(request: Request) -> bytes:
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise UsageError(f"a request has at most {MAX_BODY_BYTES} bytes")
    return bytes(body)


def _reply(message: m.MetadataMessage, status: int = 200) -> Response:
    return Response(msgspec.json.encode(message), status, media_type="application/json")


async def _refuse(status: int, request: Request, error: Exception) -> Response:
    logger.log(logging.WARNING if status >= 500 else logging.INFO, "%s: %s", request.url.path, error)
    return _reply(m.Refusal(str(error)), status)
