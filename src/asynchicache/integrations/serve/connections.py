"""Cancel the work of a request when its client disconnects, and tell the client if the server cancels it."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from starlette.types import ASGIApp, Message, Receive, Scope, Send

from asynchicache.integrations.serve.access import DETAIL
from asynchicache.integrations.serve.problems import stopping
from asynchicache.integrations.serve.replies import server_sent


class ToldOfTheEnd:
    """ASGI middleware that answers cancelled requests. The server cancels those that do not drain in time.

    The answer is status 503, or in a stream the event of an error.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        begun, kind, more = False, b"", True

        async def watched(message: Message) -> None:
            nonlocal begun, kind, more
            if message["type"] == "http.response.start":
                begun, kind = True, dict(message.get("headers", ())).get(b"content-type", b"")
            else:
                more = message.get("more_body", False)
            await send(message)

        try:
            await self._app(scope, receive, watched)
        except asyncio.CancelledError:
            if not more:  # it was answered
                return
            problem = stopping()
            scope[DETAIL] = problem.logged
            if not begun:
                await problem.response()(scope, receive, send)
            elif kind.startswith(b"text/event-stream"):
                await send({"type": "http.response.body", "body": server_sent(problem.body())})


async def while_connected(receive: Receive, work: Coroutine[object, object, None]) -> None:
    """Run `work` while the client is connected.

    A disconnect cancels the work, and so does cancelling this call.

    Args:
        receive: the ASGI `receive` of a request whose body was read.
        work: the coroutine to run; its errors are raised here.
    """
    task = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait((task, leaving), return_when=asyncio.FIRST_COMPLETED)
    finally:
        leaving.cancel()
        task.cancel()
        await asyncio.wait((task, leaving))
    if not task.cancelled():
        task.result()


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
