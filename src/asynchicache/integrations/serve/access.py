"""The access log: one line a request, with what it took."""

from __future__ import annotations

import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asynchicache.integrations.serve.problems import CLIENT_LEFT

DETAIL = "asynchicache.detail"
"""Key of a scope: what an endpoint adds to the line."""

_log = logging.getLogger(__name__)


class AccessLog:
    """ASGI middleware that logs each request at its end, at level INFO."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not _log.isEnabledFor(logging.INFO):
            await self._app(scope, receive, send)
            return
        began, status = time.monotonic(), 0

        async def watched(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except Exception:
            status = status or 500
            raise
        finally:  # without a status the client has left
            _write(scope, status or CLIENT_LEFT, time.monotonic() - began)


def _write(scope: Scope, status: int, seconds: float) -> None:
    client = scope.get("client") or ("-", 0)
    detail = f"; {scope[DETAIL]}" if DETAIL in scope else ""
    # The path as it came: %-escapes keep line breaks out of the log.
    path = scope.get("raw_path", b"").decode("latin-1")
    line = "%s:%s %s %s: %s in %.3f s%s"
    _log.info(line, client[0], client[1], scope["method"], path, status, seconds, detail)
