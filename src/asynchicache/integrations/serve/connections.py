"""Cancel the work of a request when its client disconnects."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from starlette.types import Receive


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
