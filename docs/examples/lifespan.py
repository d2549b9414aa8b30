"""A model behind Starlette, or FastAPI: opened once in the lifespan, served to any number of requests."""

import asyncio
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import TypedDict

import httpx
import uvicorn
from starlette.applications import Starlette  # FastAPI takes the same lifespan=...
from starlette.requests import Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route

from asynchicache import BusyError, CacheConfig, PrefixCachedModel
from asynchicache.integrations.transformers.demo_model import build_demo_model


class State(TypedDict):
    served: PrefixCachedModel


@asynccontextmanager
async def lifespan(app: Starlette) -> AsyncIterator[State]:
    model, _ = build_demo_model()
    async with PrefixCachedModel.open(
        model, page_size=32, config=CacheConfig(device_bytes=64 << 20)
    ) as served:
        yield {"served": served}  # request.state.served


async def complete(request: Request) -> Response:
    """A handler that is cancelled, because its client left, ends its generation."""
    prompt = await request.json()
    try:
        answer = request.state.served.generate(prompt, max_new_tokens=8)
    except BusyError as error:  # back-pressure
        return JSONResponse({"error": str(error)}, 429, {"retry-after": "1"})
    async with answer:
        tokens = [token async for token in answer]
    return JSONResponse({"tokens": tokens, "cached": answer.cached_tokens})


app = Starlette(routes=[Route("/", complete, methods=["POST"])], lifespan=lifespan)


async def main() -> None:
    listener = socket.create_server(("127.0.0.1", 0))
    server = uvicorn.Server(uvicorn.Config(app, log_level="warning"))
    serving = asyncio.create_task(server.serve(sockets=[listener]))
    while not server.started:  # noqa: ASYNC110  uvicorn has no event for it
        await asyncio.sleep(0.01)
    address = f"http://127.0.0.1:{listener.getsockname()[1]}"
    async with httpx.AsyncClient(base_url=address, timeout=60, trust_env=False) as client:
        prompt = list(range(100))
        for _ in range(2):
            answer = (await client.post("/", json=prompt)).json()
            print(f"{answer['cached']} of {len(prompt)} prompt tokens from the cache")
            prompt += [*answer["tokens"], 5]
    server.should_exit = True
    await serving


asyncio.run(main())  # or uvloop.run(main())
