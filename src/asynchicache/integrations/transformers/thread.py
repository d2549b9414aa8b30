"""The thread that runs a model and accesses its memory, so that the event loop is never blocked."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import Self, TypeVar

import torch

T = TypeVar("T")


class ModelThread:
    """Runs calls one at a time, in order of submission.

    Long work should be split into several calls, so that calls of other requests run in between.
    """

    def __init__(self, device: torch.device) -> None:
        """`device`: the model's device. The thread takes over the caller's number of torch threads."""
        self._device = device
        self._executor = ThreadPoolExecutor(
            1, "model", initializer=partial(torch.set_num_threads, torch.get_num_threads())
        )

    async def run(self, call: Callable[[], T], *, always: bool = False) -> T:
        """Run `call` and return its result when the device has finished what it enqueued.

        If the waiter is cancelled, a call that has not started is dropped, unless it must run `always`. One
        that has started is awaited first, because it may write to pages that the waiter is about to free.
        """
        job = self._executor.submit(self._finish, call)
        done = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if always or not job.cancel():
                await _ended(done)
            raise

    def submit(self, call: Callable[[], T]) -> asyncio.Future[T]:
        """Run `call` when its turn comes; the future is done when the device has finished it."""
        return asyncio.wrap_future(self._executor.submit(self._finish, call))

    def start(self, call: Callable[[], object]) -> None:
        """Run `call` when its turn comes, and wait for nothing. Dropped once the thread is closed."""
        with suppress(RuntimeError):
            self._executor.submit(call)

    def _finish(self, call: Callable[[], T]) -> T:
        result = call()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return result

    def close(self, *, wait: bool = True) -> None:
        """Drop calls that have not begun, and `wait` for the running one. Idempotent."""
        self._executor.shutdown(wait=wait, cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


async def _ended(done: asyncio.Future[T]) -> None:
    """Wait for the result, even if the waiter is cancelled repeatedly."""
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            continue  # the caller raises the first one
    if not done.cancelled():
        done.exception()  # mark it as retrieved: the waiter is cancelled
