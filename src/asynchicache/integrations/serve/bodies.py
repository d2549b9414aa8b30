"""Request bodies: a memory limit on all bodies together, and a deadline for receiving each."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from starlette.requests import ClientDisconnect, Request

from asynchicache.integrations.serve.problems import CLIENT_LEFT, ApiError, overloaded

_SLOW_SECONDS = 2.0  # a body that takes longer may be dropped to make room for others
_FIRST_SECONDS = 10.0
_LAST_SECONDS = 60.0
_RETRY_SECONDS = 1


class BodyRoom:
    """Memory for the bodies of all requests that are being read or answered.

    Each connection has a guaranteed share; the rest is a common part. When the common part is full, the body
    that has been arriving for longest is dropped if it is slow; otherwise the request that needs memory is
    refused. Slow senders therefore cannot keep others out, regardless of their number.

    Attributes:
        share: guaranteed bytes of each connection.
        held: bytes in use.
    """

    def __init__(self, most: int, *, largest: int, connections: int) -> None:
        """
        Args:
            most: most bytes of all bodies together.
            largest: most bytes of one body; the common part has room for it.
            connections: most connections.
        """
        self.share = min(most // 2, most - largest) // max(1, connections)
        self.held = 0
        self._most = most
        self._common = most - self.share * connections
        self._borrowed = 0
        # Incomplete bodies of more than a share, with the time when each exceeded it; oldest first.
        self._coming: dict[BodyMemory, float] = {}

    @contextmanager
    def memory(self) -> Iterator[BodyMemory]:
        """Return the memory of one request; released on exit."""
        memory = BodyMemory(self)
        try:
            yield memory
        finally:
            self.release(memory)

    def take(self, memory: BodyMemory, nbytes: int) -> None:
        """Reserve memory for more of a body.

        Raises:
            ApiError: no memory is free.
        """
        needed = max(0, memory.nbytes + nbytes - self.share) - memory.borrowed
        if needed:
            self._make_room(memory, needed)
            self._coming.setdefault(memory, _now())
        memory.nbytes += nbytes
        memory.borrowed += needed
        self.held += nbytes
        self._borrowed += needed

    def complete(self, memory: BodyMemory) -> None:
        """Mark a body as complete or failed: it keeps its memory and cannot be dropped any more."""
        self._coming.pop(memory, None)

    def release(self, memory: BodyMemory) -> None:
        """Release a request's memory. Idempotent."""
        self.complete(memory)
        self.held -= memory.nbytes
        self._borrowed -= memory.borrowed
        memory.nbytes = memory.borrowed = 0

    def _make_room(self, memory: BodyMemory, nbytes: int) -> None:
        while self._borrowed + nbytes > self._common:
            slowest = next(iter(self._coming), memory)
            if slowest is memory or _now() - self._coming[slowest] < _SLOW_SECONDS:
                raise overloaded(
                    f"requests that are read and answered now have {self.held:,} bytes, and may have "
                    f"{self._most:,}: try again later",
                    _RETRY_SECONDS,
                )
            self.release(slowest)
            slowest.dismiss()


class BodyMemory:
    """The memory of one request in a `BodyRoom`.

    Attributes:
        nbytes: bytes reserved.
        borrowed: bytes of `nbytes` from the common part.
        dismissed: whether the body was dropped to make room for others.
        on_dismiss: called when the body is dropped.
    """

    __slots__ = ("_room", "borrowed", "dismissed", "nbytes", "on_dismiss")

    def __init__(self, room: BodyRoom) -> None:
        self.nbytes = 0
        self.borrowed = 0
        self.dismissed = False
        self.on_dismiss: Callable[[], None] = lambda: None
        self._room = room

    def take(self, nbytes: int) -> None:
        """Reserve more bytes.

        Raises:
            ApiError: no memory is free, or the body was dropped.
        """
        if self.dismissed:
            raise _too_slow()
        self._room.take(self, nbytes)

    def complete(self) -> None:
        """Mark the body as complete: it cannot be dropped any more."""
        self._room.complete(self)

    def dismiss(self) -> None:
        self.dismissed = True
        self.on_dismiss()


async def read_body(request: Request, most: int, memory: BodyMemory) -> bytes:
    """Read the JSON body of a request.

    Args:
        request: a request whose body was not read yet.
        most: most bytes of the body.

    Raises:
        ApiError: the content type is not JSON, the body is longer than `most` bytes or misses its deadline,
            no memory is free, or the client left.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        raise ApiError(f"content-type {kind!r}: send application/json", status=415)
    announced = request.headers.get("content-length", "")
    if announced.isdecimal() and int(announced) > most:
        raise _too_large(most)
    body = bytearray()
    try:
        await _read(request, body, most, memory)
    except TimeoutError:
        if memory.dismissed:
            raise _too_slow() from None
        raise ApiError(
            f"the body did not come within {seconds_for(len(body), most):.0f} s", status=408
        ) from None
    except ClientDisconnect:
        raise ApiError("the client left before its body had come", status=CLIENT_LEFT) from None
    finally:
        memory.complete()
    return bytes(body)


async def _read(request: Request, body: bytearray, most: int, memory: BodyMemory) -> None:
    started = _now()
    async with asyncio.timeout_at(started + seconds_for(0, most)) as limit:

        def give_up() -> None:
            if not limit.expired():
                limit.reschedule(started)

        memory.on_dismiss = give_up
        async for part in request.stream():
            if len(body) + len(part) > most:
                raise _too_large(most)
            memory.take(len(part))
            body += part
            limit.reschedule(started + seconds_for(len(body), most))


def seconds_for(nbytes: int, most: int) -> float:
    """Return the deadline of a body, in seconds from its start, after `nbytes` of `most` have arrived."""
    return _FIRST_SECONDS + (_LAST_SECONDS - _FIRST_SECONDS) * nbytes / most


def _too_large(most: int) -> ApiError:
    return ApiError(
        f"the body is larger than {most:,} bytes: send a shorter prompt, or raise --max-body-mib",
        status=413,
        code="request_too_large",
    )


def _too_slow() -> ApiError:
    return ApiError(
        f"the body had not come after {_SLOW_SECONDS:g} s, and others needed its room: try again later",
        status=408,
    )


def _now() -> float:
    return asyncio.get_running_loop().time()
