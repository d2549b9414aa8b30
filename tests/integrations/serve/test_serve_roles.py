"""Prefill and decode by two server processes over a Redis, behind the proxy of the documentation."""

from __future__ import annotations

import asyncio
import importlib
import json
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest
import pytest_asyncio

from integrations.serve.checkpoints import tiny_loaded
from integrations.serve.serving import SMALL, as_text, body, running
from integrations.serve.serving import uncached as greedy
from integrations.served import uncached
from integrations.zoo import PAGE, random_tokens
from ranks.launch import Follower, launch
from soaking import first
from storage.redis_servers import RedisServer

FOLDER = Path(__file__).parent
EXAMPLES = FOLDER.parents[2] / "docs" / "examples"
MODELS = ("qwen3_5", "deepseek_v4")
ROLES = ("prefill", "decode")
NEW = 6

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.engine("redis")]


class RoleProcess:
    """A server of one role, which may be killed and started again."""

    def __init__(self, role: str, name: str, url: str) -> None:
        self.words = (str(FOLDER / "role_process.py"), role, name, url)
        self.process: Follower | None = None
        self.url = ""

    async def start(self) -> None:
        self.process = await launch(*self.words, piped=True)
        self.url = await self._line()

    async def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            await self.process.wait()

    async def say(self, word: str) -> Any:
        assert self.process is not None
        assert self.process.stdin is not None
        self.process.stdin.write(word.encode() + b"\n")
        return await self._line()

    async def _line(self) -> Any:
        assert self.process is not None
        assert self.process.stdout is not None
        return json.loads(await self.process.stdout.readline())


class Pair:
    """Both servers, and the proxy before them."""

    def __init__(self, name: str, url: str, proxy: Any) -> None:
        self.name = name
        self.prefill, self.decode = (RoleProcess(role, name, url) for role in ROLES)
        self._proxy = proxy
        self._http = httpx.AsyncClient(
            transport=httpx.ASGITransport(proxy.app()), base_url="http://proxy", timeout=120
        )

    async def start(self, *which: RoleProcess) -> None:
        await asyncio.gather(*(one.start() for one in which))
        self._proxy.prefill, self._proxy.decode = self.prefill.url, self.decode.url

    async def aclose(self) -> None:
        await self._http.aclose()
        await self._proxy.http.aclose()
        await self.prefill.kill()
        await self.decode.kill()

    async def ask(self, prompt: Sequence[int], **fields: Any) -> dict[str, Any]:
        body = {"prompt": list(prompt), "max_tokens": NEW, "temperature": 1, "seed": 11, **fields}
        answer = await self._http.post("/v1/completions", json=body)
        return dict(answer.raise_for_status().json())

    def check(self, prompt: Sequence[int], answer: dict[str, Any]) -> list[int]:
        """What the model alone says, which the answer must be."""
        tokens = uncached(self.name, prompt, NEW)
        assert answer["choices"][0]["text"] == as_text(tiny_loaded(self.name), tokens)
        return tokens


@pytest_asyncio.fixture(loop_scope="module", scope="module", params=MODELS)
async def opened(
    tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> AsyncIterator[Pair]:
    """Both run until the end of the tests of one model, and hold nothing then."""
    with pytest.MonkeyPatch.context() as patch, RedisServer(tmp_path_factory.mktemp("redis")) as redis:
        patch.syspath_prepend(str(EXAMPLES))
        pair = Pair(request.param, redis.url, importlib.import_module("serve_roles").Proxy("", ""))
        try:
            await pair.start(pair.prefill, pair.decode)
            yield pair
            for one in (pair.prefill, pair.decode):
                assert (await one.say("check"))["wrong"] == []
        finally:
            await pair.aclose()


def cached(answer: dict[str, Any]) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


def whole(tokens: int) -> int:
    return tokens // PAGE * PAGE


async def test_twenty_conversations_at_once(opened: Pair) -> None:
    """The decoder computes the end of each prompt, and the prefill what was not answered before."""
    talks = [random_tokens(3 * PAGE + number, seed=number) for number in range(20)]
    before = [0] * len(talks)
    for _ in range(2):
        had = (await opened.prefill.say("check"))["cached_tokens"]
        answers = await asyncio.gather(*map(opened.ask, talks))
        assert (await opened.prefill.say("check"))["cached_tokens"] - had == sum(before)
        for number, (talk, answer) in enumerate(zip(talks, answers, strict=True)):
            assert cached(answer) == whole(len(talk) - 1)
            talk += opened.check(talk, answer)
            before[number] = whole(len(talk) - 1)
            assert answer["kv_transfer_params"]["durable"] == before[number]
            talk += random_tokens(PAGE, seed=100 + number)


@pytest.mark.parametrize("instants", first(1, [1, 50]))
@pytest.mark.parametrize("side", ROLES)
async def test_either_side_may_die_at_any_instant(opened: Pair, side: str, instants: int) -> None:
    """The decoder computes what is lost with a prefill; who asked a decoder that died asks the next one."""
    victim: RoleProcess = getattr(opened, side)
    loops = harmed = 0
    for number in range(instants + 1):
        prompt = random_tokens(5 * PAGE + number % PAGE, seed=1000 * instants + number)
        start = (await victim.say("check"))["loops"]
        if number:
            await victim.say(f"die {loops * (2 * number - 1) // (2 * instants)}")
        try:
            answer = await opened.ask(prompt)
        except httpx.HTTPError:
            assert side == "decode"
            answer = {}
        harmed += not answer or cached(answer) < whole(len(prompt) - 1)
        if not number:
            assert not harmed
            loops = (await victim.say("check"))["loops"] - start
        else:
            await victim.kill()
            await opened.start(victim)
        answer = answer or await opened.ask(prompt)
        opened.check(prompt, answer)
    assert harmed or instants == 1  # that one may come when all is said


LOADED = tiny_loaded()
PROMPT = random_tokens(4 * PAGE, seed=5)  # ends with a page: a decoder has to compute the last token again


def shared(redis: RedisServer) -> Any:
    return msgspec.structs.replace(SMALL, storage="redis", storage_options={"url": redis.url})


async def test_a_prefill_computes_prompts_and_says_what_storage_has(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hello " * 20}], "top_logprobs": 2, "logprobs": True}
    with RedisServer(tmp_path) as redis:
        async with running(LOADED, cache=shared(redis), role="prefill") as server:

            async def ask(path: str, **fields: Any) -> int:
                answer = (await server.http.post(path, json=fields)).raise_for_status().json()
                assert answer["usage"]["completion_tokens"] == 0
                assert len(answer["choices"]) == 1
                durable = answer["kv_transfer_params"]["durable"]
                assert durable in (0, whole(answer["usage"]["prompt_tokens"]))
                return int(durable)

            assert (await server.http.get("/health")).json()["role"] == "prefill"
            assert await ask(
                "/v1/completions", **body(prompt=PROMPT, stream=True, n=3, echo=True, logprobs=2)
            )
            assert await ask("/v1/chat/completions", **chat, stream=True, n=2)
            assert not await ask("/v1/completions", **body(prompt="once", cache_hint={"transient": True}))
            redis.kill()
            assert not await ask("/v1/completions", **body(prompt="nobody keeps this " * 9))
            await server.idle()


async def test_a_decoder_waits_for_what_it_is_told_or_the_whole_prompt(tmp_path: Path) -> None:
    """Of a prompt that a prefill could not store, it is told so, and does not wait."""
    with RedisServer(tmp_path) as redis:
        cache = shared(redis)
        async with (
            running(LOADED, cache=cache, role="prefill") as computing,
            running(LOADED, cache=cache, role="decode", wait_seconds=1e6) as answering,
        ):

            async def ask(durable: int | None, prompt: Sequence[int] = PROMPT) -> tuple[int, str]:
                told = {} if durable is None else {"kv_transfer_params": {"durable": durable, "engine": "x"}}
                answer = (
                    await answering.http.post("/v1/completions", json=body(prompt=prompt) | told)
                ).json()
                return cached(answer), answer["choices"][0]["text"]

            for told, prompt in ((None, PROMPT), (2 * PAGE, PROMPT[1:]), (1000, PROMPT[2:])):
                waiting = asyncio.create_task(ask(told, prompt))
                await computing.http.post("/v1/completions", json=body(prompt=prompt))
                hit, text = await waiting
                assert hit == whole(len(prompt) - 1)
                assert text == as_text(LOADED, greedy(LOADED, prompt, 4))
            assert (await ask(0, PROMPT[3:]))[0] == 0
            refused = await answering.http.post(
                "/v1/completions", json=body(kv_transfer_params={"durable": -1})
            )
            assert refused.status_code == 400
            await answering.idle()
            await computing.idle()
