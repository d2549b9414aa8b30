"""A server in this process, on a free port, and clients of it."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import httpx
from openai import AsyncOpenAI
from transformers import DynamicCache

from asynchicache.cli.options import ServeOptions
from asynchicache.cli.serve import settings_of
from asynchicache.config import CacheConfig
from asynchicache.integrations.serve.api import Api, RequestCounts
from asynchicache.integrations.serve.loading import LoadedModel
from asynchicache.integrations.serve.server import ApiServer, address, bind, serve
from asynchicache.integrations.transformers.forward import prefill

PAGE = 16
SMALL = CacheConfig(
    device_slots={"kv": 256, "mamba": 64}, host_slots={"kv": 256, "mamba": 64}, weight_version="test"
)


@dataclass(frozen=True)
class Running:
    """A server that answers.

    Attributes:
        server: what listens.
        url: where it listens.
        openai: the real client; it does not try again.
        http: a plain one.
        task: ends with the server, and has its counts.
    """

    server: ApiServer
    url: str
    openai: AsyncOpenAI
    http: httpx.AsyncClient
    task: asyncio.Task[RequestCounts]

    @property
    def api(self) -> Api:
        return self.server.api

    async def idle(self) -> None:
        """Until nothing is answered and nothing is generated any more, and all is well then."""
        await self.api.idle()
        await self.api.model.drain()
        assert (self.api.model.running, self.api.model.waiting) == (0, 0)
        assert self.api.model.cache.verify() == []


@asynccontextmanager
async def running(loaded: LoadedModel, **settings: Any) -> AsyncIterator[Running]:
    """A server until the block ends, or it is stopped."""
    cache = settings.pop("cache", SMALL)
    chosen = replace(settings_of(ServeOptions(page_size=PAGE), cache), **settings)
    ready: asyncio.Future[ApiServer] = asyncio.get_running_loop().create_future()
    with bind("127.0.0.1", 0) as listener:
        url = address(listener)
        task = asyncio.create_task(serve(loaded, chosen, listener, ready.set_result))
        await asyncio.wait((task, ready), return_when=asyncio.FIRST_COMPLETED)
        if task.done():
            task.result()
        async with (
            AsyncOpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client,
            httpx.AsyncClient(base_url=url, timeout=60, trust_env=False) as http,
        ):
            try:
                yield Running(ready.result(), url, client, http, task)
            finally:
                if not task.done():
                    ready.result().stop()
                await task


def body(**fields: Any) -> dict[str, Any]:
    """A short completion to ask for."""
    return {"prompt": "hello " * 20, "max_tokens": 4, "temperature": 0, **fields}


async def until(condition: Callable[[], object]) -> None:
    """Other tasks go on until it holds."""
    while not condition():  # noqa: ASYNC110 - it is another task's doing
        await asyncio.sleep(0)


@contextmanager
def before_each_forward(loaded: LoadedModel, action: Callable[..., None]) -> Iterator[None]:
    """The action runs first, in the model's thread."""
    hook = loaded.model.register_forward_pre_hook(action)
    try:
        yield
    finally:
        hook.remove()


@contextmanager
def held(loaded: LoadedModel) -> Iterator[None]:
    """The model's next forward ends with the block."""
    let_go = threading.Event()

    def wait(*_: object) -> None:
        let_go.wait()

    try:
        with before_each_forward(loaded, wait):
            yield
    finally:
        let_go.set()


def uncached(loaded: LoadedModel, prompt: Sequence[int], count: int) -> list[int]:
    """What the model alone says next, greedily."""
    tokens = list(prompt)
    memory = DynamicCache(config=loaded.model.config)
    for _ in range(count):
        logits = prefill(loaded.model, memory, tokens, memory.get_seq_length(), len(tokens))
        tokens.append(int(logits.argmax()))
    return tokens[len(prompt) :]


def as_text(loaded: LoadedModel, tokens: Sequence[int]) -> str:
    """Tokens as an answer shows them."""
    detokenizer = loaded.tokenizer.detokenizer([])
    return "".join(map(detokenizer.push, tokens)) + detokenizer.finish()
