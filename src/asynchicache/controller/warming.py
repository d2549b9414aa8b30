"""Warming: prefixes are read from storage to free host memory before the first request."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable
from contextlib import suppress
from typing import NamedTuple

from asynchicache.controller.cache_parts import CacheParts
from asynchicache.controller.request import BaseRequest
from asynchicache.errors import ConfigError


class Warmed(NamedTuple):
    """How far warming has come.

    Attributes:
        prefixes: that were looked at.
        tokens: of them that memory can restore now.
        bytes: of host memory that they took, at most.
        left: prefixes that were not read, because the host or `nbytes` had no room for them.
        in_time: whether all of them were looked at.
    """

    prefixes: int = 0
    tokens: int = 0
    bytes: int = 0
    left: int = 0
    in_time: bool = False


async def warm(
    parts: CacheParts,
    requests: Iterable[BaseRequest],
    seconds: float,
    nbytes: int | None,
    progress: Callable[[Warmed], object] | None,
) -> Warmed:
    """Carry out `HybridCache.warm` for some requests, made but not entered."""
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not seconds >= 0:
        raise ConfigError(f"warm(seconds={seconds!r}): 0 or more")
    if nbytes is not None and (isinstance(nbytes, bool) or not isinstance(nbytes, int) or nbytes < 0):
        raise ConfigError(f"warm(nbytes={nbytes!r}): a whole number, 0 or more")
    done = Warmed()
    with suppress(TimeoutError):
        async with asyncio.timeout(seconds):
            for request in requests:
                left = None if nbytes is None else nbytes - done.bytes
                tokens, read = await _read(parts, request, left)
                done = Warmed(
                    done.prefixes + 1,
                    done.tokens + tokens,
                    done.bytes + (read or 0),
                    done.left + (read is None),
                )
                if progress is not None:
                    progress(done)
            done = done._replace(in_time=True)
    return done


async def _read(parts: CacheParts, request: BaseRequest, left: int | None) -> tuple[int, int | None]:
    """Read one prefix into host slots that are free: tokens that memory restores then, and the bytes of the
    slots, at most; None if there is no room."""
    request.record_of = request  # a trace has only what clients asked for
    async with request:
        state = request.inspect()
        assert state is not None, "it was entered"
        most = parts.planner.prefetches.bytes_that_fit(state.tokens, state.seed)
        if most is None or (left is not None and most > left):
            await asyncio.sleep(0)
            return request.hit.tokens, None
        before = request.hit.tokens
        await request.prefetch()
        if parts.prefetcher.waits_for_nobody:
            await parts.executor.settled()
            request.rematch()
        tokens = request.hit.tokens
        return tokens, most if tokens > before else 0
