"""What one HTTP connection brings, and that it may go away at any time."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Iterator
from contextlib import contextmanager

from starlette.requests import ClientDisconnect, Request
from starlette.types import Receive

from asynchicache.integrations.serve.problems import CLIENT_LEFT, ApiError, overloaded

_BODY_SECONDS = 60.0
_RETRY_SECONDS = 1


class BodyRoom:
    """Memory for the bodies of all requests that are being read or answered.

    Args:
        most: bytes.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._held = 0

    @contextmanager
    def share(self) -> Iterator[Callable[[int], None]]:
        """For one request: call it with the bytes that have come; they are given back in the end.

        Raises:
            ApiError: there is no room for more, from that call.
        """
        mine = 0

        def take(nbytes: int) -> None:
            nonlocal mine
            if self._held + nbytes > self._most:
                raise overloaded(
                    f"requests that are read and answered now have {self._held:,} bytes, and may have "
                    f"{self._most:,}: try again later",
                    _RETRY_SECONDS,
                )
            self._held += nbytes
            mine += nbytes

        try:
            yield take
        finally:
            self._held -= mine


async def read_body(request: Request, most: int, take: Callable[[int], None]) -> bytes:
    """The JSON body of a request.

    Args:
        request: whose body was not read.
        most: bytes that it may have.
        take: room for what comes, `BodyRoom.share`.

    Raises:
        ApiError: it is said to be something else, is longer than `most` bytes, does not come, or there is
            no room for it.
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
                take(len(part))
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
