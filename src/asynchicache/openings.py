"""What `open` returns: something that is opened by `async with`, or by `await` and closed by `aclose`."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable, Coroutine, Generator
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any, Generic, Protocol, TypeVar

from asynchicache.errors import UsageError


class AsyncClosable(Protocol):
    """Something with an idempotent `aclose`."""

    async def aclose(self) -> None: ...


T = TypeVar("T", bound=AsyncClosable)
Opened = TypeVar("Opened")


class Opening(Generic[T]):
    """Opens a `T` when it is entered or awaited, once; one that is never used warns.

        async with HybridCache.open(spec) as cache:  # closes it at the end
            ...
        cache = await HybridCache.open(spec)  # who awaits it closes it
        await cache.aclose()

    Args:
        name: the call that makes it, for messages.
        made_at: the place of the call, see `caller`.
    """

    def __init__(self, name: str, begin: Callable[[], Coroutine[Any, Any, T]], made_at: str) -> None:
        self._name = name
        self._made_at = made_at
        self._begin: Callable[[], Coroutine[Any, Any, T]] | None = begin
        self._opened: T | None = None

    def _started(self) -> Coroutine[Any, Any, T]:
        begin, self._begin = self._begin, None
        if begin is None:
            raise UsageError(f"{self._name} opens once; call it again for another")
        return begin()

    def __await__(self) -> Generator[Any, None, T]:
        return self._started().__await__()

    async def __aenter__(self) -> T:
        self._opened = await self._started()
        return self._opened

    async def __aexit__(self, *error: object) -> None:
        if self._opened is not None:
            await self._opened.aclose()

    if not TYPE_CHECKING:  # a type checker knows that there is nothing else

        def __enter__(self) -> None:
            raise UsageError(self._advice())

        def __exit__(self, *error: object) -> None:
            pass

        def __getattr__(self, name: str) -> object:
            raise AttributeError(f"no {name!r} here: {self._advice()}")

    def _advice(self) -> str:
        name = self._name
        return (
            f"{name} is not open yet; use `async with {name} as it`, or `it = await {name}` and `it.aclose()`"
        )

    def __del__(self) -> None:
        if self.__dict__.get("_begin") is not None:
            warnings.warn(f"{self._made_at}: {self._advice()}", RuntimeWarning, stacklevel=2)

    def __repr__(self) -> str:
        return f"<{self._name}, {'used' if self._begin is None else 'not open yet'}>"


class Blocking(Generic[Opened]):
    """What `with` opens, in programs without an event loop; `async with` is told so."""

    def __init__(self, name: str, inner: AbstractContextManager[Opened]) -> None:
        """`name`: the call that makes it, for messages."""
        self._name = name
        self._inner = inner

    def __enter__(self) -> Opened:
        return self._inner.__enter__()

    def __exit__(self, *error: Any) -> bool | None:
        return self._inner.__exit__(*error)

    if not TYPE_CHECKING:

        async def __aenter__(self) -> None:
            raise UsageError(f"{self._name} blocks; use `with`, or PrefixCachedModel.open on an event loop")

        async def __aexit__(self, *error: object) -> None:
            pass


def caller(depth: int = 2) -> str:
    """The place of a call as `file:line`.

    Args:
        depth: frames above this function; 2 is the caller of the function that asks.
    """
    frame = sys._getframe(depth)  # noqa: SLF001  inspect.stack() would read the source of every frame
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"
