"""An HTTP connection may go away at any time, and work for it ends then."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine

from starlette.types import Receive


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
