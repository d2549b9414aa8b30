"""Storage that is there, that is not there yet, and that goes away: answers are the same."""

from __future__ import annotations

import asyncio
import errno
import os
import shutil
from pathlib import Path
from typing import Any

import msgspec
import pytest

from asynchicache.cache import HybridCache
from asynchicache.config import CacheConfig
from asynchicache.errors import ConfigError
from asynchicache.integrations.serve.description import describe
from asynchicache.integrations.serve.loading import LoadedModel, load_checkpoint
from asynchicache.integrations.serve.tokenizers import Conversation
from asynchicache.integrations.transformers.asking import spec_from_model
from engines import Server, executable, free_port
from integrations.serve.checkpoints import save_checkpoint, tiny_loaded
from integrations.serve.serving import PAGE, SMALL, Running, as_text, running, uncached

LOADED = tiny_loaded()
PROMPT = "What was computed once is not computed again, wherever it was kept. "


def stored_in(name: str, **options: object) -> CacheConfig:
    return msgspec.structs.replace(SMALL, storage=name, storage_options=options)


async def answered(server: Running, prompt: str, loaded: LoadedModel = LOADED) -> int:
    """The model's own answer; tokens of the prompt that came from the cache."""
    answer = await server.openai.completions.create(
        model=loaded.name, prompt=prompt, max_tokens=4, temperature=0
    )
    tokens = uncached(loaded, loaded.tokenizer.encode(prompt), 4)
    assert answer.choices[0].text == as_text(loaded, tokens)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens_details is not None
    return answer.usage.prompt_tokens_details.cached_tokens or 0


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["qwen3", "gemma3", "qwen3_5"])
async def test_a_restart_loses_no_page(tmp_path: Path, name: str) -> None:
    """Prompts that end just before the end of a page, and just behind it, hit what they did before."""
    loaded = tiny_loaded(name)
    pools = [pool.name for pool in spec_from_model(loaded.model).owners]
    slots = dict.fromkeys(pools, 256)
    cache = msgspec.structs.replace(
        stored_in("file", path=str(tmp_path)), device_slots=slots, host_slots=slots
    )
    prompts = [(f"{end} " + PROMPT * 3)[: 8 * PAGE + end] for end in (-1, 1, 3)]
    hits = []
    for _ in range(2):
        async with running(loaded, cache=cache) as server:
            cold = [await answered(server, prompt, loaded) for prompt in prompts]
            hits.append([await answered(server, prompt, loaded) for prompt in prompts])
            health = (await server.http.get("/health")).json()
            assert health["storage"] == "ok"
            assert health["storage_breakers"] == dict.fromkeys(pools, "closed")
    assert hits[0] == [7 * PAGE, 8 * PAGE, 8 * PAGE]
    assert cold == hits[1] == hits[0]


@pytest.mark.asyncio
async def test_storage_that_cannot_be_opened_is_tried_again_and_told_of_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tried, attach = list[object](), HybridCache.attach_storage

    async def attach_storage(cache: HybridCache, *options: Any) -> None:
        tried.append(options)
        await attach(cache, *options)

    monkeypatch.setattr(HybridCache, "attach_storage", attach_storage)
    blocked = tmp_path / "pages"
    blocked.write_text("in the way")
    async with running(LOADED, cache=stored_in("file", path=str(blocked)), attach_seconds=0.02) as server:
        await answered(server, PROMPT)
        assert (await server.http.get("/health")).json()["storage"] == "unavailable"
        assert "\nasynchicache_serve_storage_open 0.0\n" in (await server.http.get("/metrics")).text
        assert "storage: file, unavailable" in "\n".join(describe(server.api))
        while len(tried) < 3:  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert caplog.text.count("cannot be opened") == 1
        blocked.unlink()
        while (await server.http.get("/health")).json()["storage"] != "ok":  # noqa: ASYNC110
            await asyncio.sleep(0)
        assert "storage: file, open" in list(describe(server.api))
        assert "\nasynchicache_serve_storage_open 1.0\n" in (await server.http.get("/metrics")).text
        await answered(server, "now it is there: " + PROMPT)
        await server.api.model.drain()
        assert server.api.model.cache.statistics().storage["kv"].put.pages > 0


@pytest.mark.asyncio
async def test_health_says_that_a_store_is_full_and_which_stage_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    async with running(LOADED, cache=stored_in("file", path=str(tmp_path / "one"))) as server:
        await answered(server, PROMPT)
        await server.api.model.drain()
        health = (await server.http.get("/health")).json()
        assert (health["storage"], health["storage_stages"]) == ("full", {})
        assert "storage: file, open, and its medium is full" in list(describe(server.api))

    (tmp_path / "blocked").write_text("in the way")
    stages = ["memory", {"backend": "file", "options": {"path": str(tmp_path / "blocked")}}]
    cache = msgspec.structs.replace(stored_in("memory"), storage=stages)
    async with running(LOADED, cache=cache) as server:
        health = (await server.http.get("/health")).json()
        assert health["storage"] == "ok"
        breakers = {stage: {*pools.values()} for stage, pools in health["storage_stages"].items()}
        assert breakers == {"memory": {"closed"}, "file": {"open"}}


@pytest.mark.asyncio
async def test_a_folder_that_is_gone_costs_hits_only(tmp_path: Path) -> None:
    folder = tmp_path / "pages"
    async with running(LOADED, cache=stored_in("file", path=str(folder))) as server:
        await answered(server, PROMPT)
        await server.api.model.drain()
        await server.api.model.cache.flush()
        shutil.rmtree(folder)
        for number in range(4):
            await answered(server, f"{number} " + PROMPT)
        await answered(server, PROMPT)
        await server.idle()
        assert server.api.counts.refused == {}


@pytest.mark.engine("redis")
@pytest.mark.asyncio
async def test_redis_may_be_killed_and_come_back() -> None:
    port = free_port()
    command = [executable("redis-server"), "--port", str(port), "--save", "", "--bind", "127.0.0.1"]
    with Server(command, ready="Ready to accept", port=port) as redis:
        config = stored_in("redis", url=f"redis://127.0.0.1:{port}", namespace="test")
        async with running(LOADED, cache=config) as server:
            await answered(server, PROMPT)
            await server.api.model.drain()
            redis.kill()
            for number in range(3):
                await answered(server, f"{number} " + PROMPT)
            redis.start()
            await answered(server, "back " + PROMPT)
            await server.idle()
            assert server.api.counts.refused == {}


@pytest.mark.asyncio
async def test_a_saved_checkpoint_answers_as_its_model(tmp_path: Path) -> None:
    folder = save_checkpoint(tmp_path / "model")
    loaded = load_checkpoint(folder)
    messages = [{"role": "user", "content": PROMPT}]
    prompt = loaded.tokenizer.encode_chat(Conversation(messages))
    async with running(loaded) as server:
        answer = await server.openai.chat.completions.create(
            model="model", messages=messages, max_tokens=8, temperature=0, extra_body={"ignore_eos": True}
        )
    assert answer.choices[0].message.content == as_text(loaded, uncached(loaded, prompt, 8))


@pytest.mark.asyncio
async def test_a_server_that_warms_is_ready_with_the_prompts_on_the_host(tmp_path: Path) -> None:
    cache = stored_in("file", path=str(tmp_path / "pages"))
    async with running(LOADED, cache=cache) as server:
        await answered(server, PROMPT)
    file = tmp_path / "prompts.jsonl"
    chat = {"messages": [{"role": "user", "content": "who asked this before?"}], "model": "any"}
    file.write_bytes(b"\n".join(map(msgspec.json.encode, [{"prompt": PROMPT, "max_tokens": 4}, chat])))
    async with running(LOADED, cache=cache, warm=str(file)) as server:
        warmed, tokens = server.api.model.cache, LOADED.tokenizer.encode(PROMPT)
        async with warmed.request(tokens) as request:
            assert request.hit.tokens == (len(tokens) - 1) // PAGE * PAGE
        assert await answered(server, PROMPT) == (len(tokens) - 1) // PAGE * PAGE
    for text, wrong in ((b"{}", r"line 1: .*prompt"), (b"no JSON", "line 1"), (None, "cannot be read")):
        file.write_bytes(text) if text is not None else file.unlink()
        with pytest.raises(ConfigError, match=wrong):
            async with running(LOADED, cache=cache, warm=str(file)):
                pass
