"""Limits on the number of connections, and on how long, and how framed, a request may be sent on one."""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from starlette.types import ASGIApp, Message, Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

CROWDED = "crowded"
"""Key of a request's state, set on connections over the limit; its value is the limit."""

_OWED_SECONDS = 10.0
_SPARE = 64
_MOST_HEAD_BYTES = 64 << 10


class OneFraming(h11.Connection):
    """HTTP/1.1 whose requests say in one way where they end.

    h11 believes Transfer-Encoding if there is a Content-Length too. A proxy in front that believes the other
    takes the rest of a body for the next request, perhaps that of another client (RFC 9112, section 6.1).
    """

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """
        Raises:
            h11.RemoteProtocolError: the request has both, or is of HTTP/1.0, which has no chunks.
        """
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            if b"transfer-encoding" in names and (b"content-length" in names or event.http_version != b"1.1"):
                raise h11.RemoteProtocolError("Transfer-Encoding with Content-Length, or with HTTP/1.0")
        return event


class Connection(H11Protocol):
    """A connection, subject to a limit on their number and to a deadline.

    uvicorn's `limit_concurrency` refuses requests of all connections while there is one too many, and keeps
    connections open that never send a request. Here `limit_concurrency` is the number of connections that
    are served. Up to `_SPARE` more are marked `CROWDED` and closed after their first response, so that
    clients get an error and health probes an answer. Connections beyond that are closed at once.

    A connection is closed if it takes too long to send the head of a request, or the rest of a body that was
    answered before it had arrived.

    Attributes:
        deadline: timer of the head or rest that is due; receiving a part of it does not restart the timer.
    """

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self.conn = OneFraming(h11.SERVER, _MOST_HEAD_BYTES)
        self._most = self.limit_concurrency or 0
        self.limit_concurrency = None
        self.deadline: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        excess = len(self.connections) - self._most
        if excess > _SPARE:
            transport.abort()
            return
        if excess > 0:
            self.app_state = {**self.app_state, CROWDED: self._most}
            self.app = _closing(self.app)
        self._set_deadline()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        answered = self.conn.our_state is h11.DONE and self.conn.their_state is h11.SEND_BODY
        if answered or self.conn.their_state is h11.IDLE:
            self._set_deadline()
        else:
            self._clear_deadline()

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        super().connection_lost(exc)

    def _set_deadline(self) -> None:
        """Start the deadline unless it runs: a slow trickle of bytes must not extend it."""
        if self.deadline is None and not self.transport.is_closing():
            self.deadline = self.loop.call_later(_OWED_SECONDS, self.transport.close)

    def _clear_deadline(self) -> None:
        if self.deadline is not None:
            self.deadline.cancel()
            self.deadline = None


def _closing(app: ASGIApp) -> ASGIApp:
    """Wrap an application: each response closes its connection."""

    async def call(scope: Scope, receive: Receive, send: Send) -> None:
        async def send_last(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message.get("headers", ()), (b"connection", b"close")]}
            await send(message)

        await app(scope, receive, send_last)

    return call
