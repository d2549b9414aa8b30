"""The one thread that may touch a model and its memory; the event loop stays free."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Self, TypeVar

import torch

T = TypeVar("T")


class ModelThread:
    """Runs calls one after another, in the order in which they were given: whoever has many waits
    between them for the calls of others."""

    def __init__(self, device: torch.device) -> None:
        """`device`: of the model. The thread computes with as many torch threads as its maker."""
        self._device = device
        self._executor = ThreadPoolExecutor(
            1, "model", initializer=partial(torch.set_num_threads, torch.get_num_threads())
        )

    async def run(self, call: Callable[[], T]) -> T:
        """What `call` returns, when the device has done what it enqueued.

        If the waiter is cancelled, a call that has not begun is dropped. One that has is waited for: it
        may be writing to pages that the waiter is going to give back.
        """
        job = self._executor.submit(self._finish, call)
        done = asyncio.wrap_future(job)
        try:
            return await asyncio.shield(done)
        except asyncio.CancelledError:
            if not job.cancel():
                await _ended(done)
            raise

    def _finish(self, call: Callable[[], T]) -> T:
        result = call()
        if self._device.type == "cuda":
            torch.cuda.current_stream(self._device).synchronize()
        return result

    def close(self) -> None:
        """Wait for the call that runs; drop the others."""
        self._executor.shutdown(cancel_futures=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


async def _ended(done: asyncio.Future[T]) -> None:
    """Until it has a result, however often the waiter is cancelled."""
    while not done.done():
        try:
            await asyncio.wait([done])
        except asyncio.CancelledError:
            continue  # the first one is raised in the end
    if not done.cancelled():
        done.exception()  # seen: nobody is left to be told
