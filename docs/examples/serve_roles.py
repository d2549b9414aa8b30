"""Prompts are computed by one server and answered by another one, behind a proxy that asks both."""

import asyncio
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import httpx
import uvicorn
from openai import AsyncOpenAI
from starlette.applications import Starlette
from starlette.background import BackgroundTask
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

COMMAND = [str(Path(sys.executable).parent / "asynchicache"), "serve", "--port", "0", "--threads", "1"]
PREFILL_SECONDS = 60.0
TIMEOUT = httpx.Timeout(10, read=None)  # a decoder may have a queue; a client that leaves ends the wait


class Proxy:
    """Asks the prefill first, and with what it has said the decoder, which answers the client."""

    def __init__(self, prefill: str, decode: str) -> None:
        self.prefill, self.decode = prefill, decode
        self.http = httpx.AsyncClient(timeout=TIMEOUT, trust_env=False)

    def app(self) -> Starlette:
        paths = ("/v1/completions", "/v1/chat/completions")
        return Starlette(routes=[Route(path, self.answer, methods=["POST"]) for path in paths])

    async def answer(self, request: Request) -> Response:
        path, body = request.url.path, await request.json()
        body["kv_transfer_params"] = await self.computed(path, body)
        try:
            asked = self.http.build_request("POST", self.decode + path, json=body)
            answer = await self.http.send(asked, stream=True)
        except httpx.TransportError as error:  # nothing was answered yet, so the client may ask again
            return JSONResponse({"error": {"message": f"no decoder: {error!r}"}}, 503, {"retry-after": "1"})
        ended, kind = BackgroundTask(answer.aclose), answer.headers["content-type"]
        return StreamingResponse(answer.aiter_bytes(), answer.status_code, media_type=kind, background=ended)

    async def computed(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """What storage has of the prompt; nothing if the prefill died or is late: the decoder computes it."""
        try:
            answer = await self.http.post(self.prefill + path, json=body, timeout=PREFILL_SECONDS)
            answer.raise_for_status()
        except httpx.HTTPError:
            return {"durable": 0}
        print("prefill:", told(answer.json()))
        return dict(answer.json()["kv_transfer_params"])


def told(answer: dict[str, Any]) -> str:
    usage, durable = answer["usage"], answer["kv_transfer_params"]["durable"]
    cached = usage["prompt_tokens_details"]["cached_tokens"]
    return f"{cached} of {usage['prompt_tokens']} tokens were cached, storage has {durable}"


@contextmanager
def server(role: str, folder: str) -> Iterator[str]:
    """A server with the tiny model; yields its address, and ends with SIGTERM."""
    command = [*COMMAND, "--role", role, "--storage", "object", "--storage-option", f"url=file://{folder}"]
    with subprocess.Popen([*command, "--no-access-log"], stdout=subprocess.PIPE, text=True) as process:  # noqa: S603
        assert process.stdout is not None
        yield process.stdout.readline().removeprefix("listening on ").strip()
        process.terminate()
        process.communicate()


async def talk(address: str) -> None:
    client = AsyncOpenAI(base_url=f"{address}/v1", api_key="none")
    messages: list[Any] = [{"role": "system", "content": "You are a small model with random weights. " * 4}]
    for question in ("What did I ask?", "And before that?"):
        messages.append({"role": "user", "content": question})
        answer = await client.chat.completions.create(
            model="tiny", messages=messages, max_completion_tokens=32, temperature=0
        )
        print("decode:", told(answer.to_dict()))
        messages.append({"role": "assistant", "content": answer.choices[0].message.content})
    await client.close()


async def main(prefill: str, decode: str) -> None:
    proxy = Proxy(prefill, decode)
    front = uvicorn.Server(uvicorn.Config(proxy.app(), port=0, log_level="warning"))
    with front.config.bind_socket() as listener:
        serving = asyncio.create_task(front.serve([listener]))
        await talk("http://{}:{}".format(*listener.getsockname()))
        front.should_exit = True
        await serving
    await proxy.http.aclose()


if __name__ == "__main__":
    with TemporaryDirectory() as pages, server("prefill", pages) as first, server("decode", pages) as second:
        asyncio.run(main(first, second))
