"""A model behind LitServe: one cache in each worker process, opened on the worker's own event loop."""

import asyncio
import os
import signal
import socket
import subprocess
import sys

import httpx
import litserve as ls
from fastapi import HTTPException

from asynchicache import BusyError, CacheConfig, PrefixCachedModel
from asynchicache.integrations.transformers.demo_model import build_demo_model


class CachedApi(ls.LitAPI):
    """With `enable_async`, every request is a task of the worker's loop; they are batched in the model."""

    def setup(self, device: str) -> None:
        """Build the model. The worker's loop does not run yet, so the cache is opened later."""
        self.model, _ = build_demo_model()
        self.opening: asyncio.Task[PrefixCachedModel] | None = None

    async def open(self) -> PrefixCachedModel:
        config = CacheConfig(device_bytes="64MiB")
        return await PrefixCachedModel.open(self.model, page_size=32, config=config)

    async def decode_request(self, request: dict[str, list[int]]) -> list[int]:
        return request["prompt"]

    async def predict(self, prompt: list[int]) -> dict[str, object]:
        if self.opening is None:  # the first request opens, and those that come meanwhile wait for it
            self.opening = asyncio.create_task(self.open())
        served = await asyncio.shield(self.opening)
        try:
            answer = served.generate(prompt, max_new_tokens=8)
        except BusyError as error:  # back-pressure
            raise HTTPException(429, str(error)) from error
        async with answer:
            tokens = [token async for token in answer]
        return {"tokens": tokens, "cached": answer.cached_tokens}

    async def encode_response(self, output: dict[str, object]) -> dict[str, object]:
        return output


def serve(port: int) -> None:
    server = ls.LitServer(CachedApi(enable_async=True), accelerator="cpu", workers_per_device=1)
    server.run(host="127.0.0.1", port=port, generate_client_file=False, log_level="warning")


async def ask(port: int) -> None:
    """Two turns of one conversation, then four questions at once."""
    address = f"http://127.0.0.1:{port}"
    async with httpx.AsyncClient(base_url=address, timeout=300, trust_env=False) as client:
        async with asyncio.timeout(300):
            while not await is_up(client):  # noqa: ASYNC110  another process
                await asyncio.sleep(0.2)
        prompt = list(range(100))
        for _ in range(2):
            answer = (await client.post("/predict", json={"prompt": prompt})).json()
            print(f"{answer['cached']} of {len(prompt)} prompt tokens from the cache")
            prompt += [*answer["tokens"], 5]
        posts = (client.post("/predict", json={"prompt": [*prompt, number]}) for number in range(4))
        print([post.json()["cached"] for post in await asyncio.gather(*posts)])


async def is_up(client: httpx.AsyncClient) -> bool:
    try:
        return (await client.get("/health")).is_success
    except httpx.TransportError:
        return False


if __name__ == "__main__" and len(sys.argv) > 1:
    serve(int(sys.argv[1]))
elif __name__ == "__main__":
    with socket.create_server(("127.0.0.1", 0)) as listener:
        free = listener.getsockname()[1]
    command = [sys.executable, __file__, str(free)]
    with subprocess.Popen(command, start_new_session=True) as process:  # noqa: S603  this script
        try:
            asyncio.run(ask(free))
        finally:
            os.killpg(process.pid, signal.SIGTERM)
