"""What one HTTP connection brings, and that it may go away at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from asynchicache.integrations.serve.problems import CLIENT_LEFT, ApiError

_BODY_SECONDS = 60.0


async def read_body(request: Request, most: int) -> bytes:
    """The JSON body of a request.

    Raises:
        ApiError: it is said to be something else, is longer than `most` bytes, or does not come.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(f"content-type {kind!r}: send application/json", status=415)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > most:
        raise _too_large(most)
    body = bytearray()
    try:
        async with asyncio.timeout(_BODY_SECONDS):
            async for part in request.stream():
                body += part
                if len(body) > most:
                    raise _too_large(most)
    except TimeoutError:
        raise ApiError(f"the body did not come within {_BODY_SECONDS:g} s", status=408) from None
    except ClientDisconnect:
        raise ApiError("the client left before its body had come", status=CLIENT_LEFT) from None
    return bytes(body)


def _too_large(most: int) -> ApiError:
    return ApiError(
        f"the body is larger than {most:,} bytes: send a shorter prompt, or raise --max-body-mib",
        status=413,
        code="request_too_large",
    )


async def while_connected(receive: Receive, work: Coroutine[object, object, None]) -> None:
    """Do `work` as long as the client is there.

    A client that leaves cancels the work, wherever it is. So does cancelling this.

    Args:
        receive: of the ASGI connection, whose body was read.
        work: what is done; its errors are raised here.
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
