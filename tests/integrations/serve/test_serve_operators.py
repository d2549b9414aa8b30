"""Operators tell a running server what to do; others cannot, and are told how."""

from __future__ import annotations

import asyncio
import logging
import shutil
from pathlib import Path
from typing import Any

import httpx
import msgspec
import pytest

from asynchicache.cli.options import ServeOptions
from asynchicache.cli.serve import settings_of
from asynchicache.errors import ConfigError
from engines import free_port
from integrations.serve.checkpoints import tiny_loaded
from integrations.serve.serving import PAGE, SMALL, Running, body, running

LOADED = tiny_loaded()
TOKEN = "a token of an operator"
BEARER = {"authorization": f"Bearer {TOKEN}"}
PROMPT = "An operator may do what a client may not. " * 2
VERBS = ("attach_storage", "detach_storage", "clear_storage", "flush_cache", "sync", "update_weights")

pytestmark = pytest.mark.asyncio


async def told(server: Running, verb: str, order: dict[str, Any] | None = None) -> httpx.Response:
    return await server.http.post(f"/{verb}", json=order, headers=BEARER)


async def done(server: Running, verb: str, order: dict[str, Any] | None = None) -> dict[str, Any]:
    answer = await told(server, verb, order)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def refused(server: Running, verb: str, order: dict[str, Any] | None, status: int, words: str) -> None:
    answer = await told(server, verb, order)
    assert (answer.status_code, words in answer.json()["error"]["message"]) == (status, True), answer.text


async def cached(server: Running) -> int:
    answer = await server.http.post("/v1/completions", json=body(prompt=PROMPT))
    return int(answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"])


async def test_without_a_token_there_is_nothing_and_it_is_said_how_to_turn_it_on() -> None:
    async with running(LOADED) as server:
        for verb in VERBS:
            await refused(server, verb, None, 404, "--admin-token, or ASYNCHICACHE_ADMIN_TOKEN")


async def test_only_who_has_the_token_is_obeyed() -> None:
    async with running(LOADED, admin_token=TOKEN) as server:
        await cached(server)
        for given in ("", "Bearer", f"Token {TOKEN}", "Basic ???"):
            answer = await server.http.post("/flush_cache", headers={"authorization": given})
            assert (answer.status_code, answer.headers["www-authenticate"]) == (401, "Bearer")
        for given in (f"Bearer {TOKEN}!", "Bearer \u00e9".encode(), "Basic eDp5"):
            answer = await server.http.post("/flush_cache", headers={"authorization": given})
            assert answer.status_code == 403
        assert await cached(server) > 0
        # A client that can send nothing of ours takes the password from its ~/.netrc.
        assert (await server.http.post("/flush_cache", auth=("x", TOKEN))).status_code == 200
        assert await cached(server) == 0


async def test_storage_comes_and_goes_while_the_server_runs(tmp_path: Path) -> None:
    order = {"storage": "file", "storage_options": {"path": str(tmp_path / "pages")}}
    async with running(LOADED, admin_token=TOKEN) as server:
        await refused(server, "sync", None, 503, "there is none")
        await refused(server, "attach_storage", {}, 409, "no storage is configured")
        await refused(server, "attach_storage", {"storage": "nfs"}, 409, "'nfs'")
        await refused(server, "attach_storage", {"storge": "file"}, 400, "storge")
        assert await done(server, "attach_storage", order) == {"storage": "file"}
        await refused(server, "attach_storage", order, 409, "has storage already")
        assert (await server.http.get("/health")).json()["storage"] == "ok"

        await cached(server)
        assert await done(server, "sync") == {"written": True}
        assert await done(server, "flush_cache") == {"flushed": True}
        assert await cached(server) == len(PROMPT) // PAGE * PAGE, "storage has all"
        assert (await done(server, "clear_storage"))["pages"] > 0
        await done(server, "flush_cache")
        assert await cached(server) == 0

        assert await done(server, "detach_storage") == {"detached": True, "attempts_ended": False}
        assert await done(server, "detach_storage") == {"detached": False, "attempts_ended": False}
        assert (await server.http.get("/health")).json()["storage"] == "none"
        assert "\nasynchicache_serve_storage_open " not in (await server.http.get("/metrics")).text
        await refused(server, "clear_storage", None, 409, "no storage is attached")


async def test_storage_that_is_tried_again_can_be_given_up_or_be_attached_at_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    blocked = tmp_path / ("pages" * 9)
    blocked.write_text("in the way")
    cache = msgspec.structs.replace(SMALL, storage="file", storage_options={"path": str(blocked)})
    async with running(LOADED, cache=cache, admin_token=TOKEN, attach_seconds=3600.0) as server:
        await refused(server, "attach_storage", {}, 503, "pages")
        (line,) = [record.getMessage() for record in caplog.records if record.name.endswith("serve.access")]
        assert blocked.name in line, "an operator's own words are not hidden"
        assert (await server.http.get("/health")).json()["storage"] == "unavailable"
        blocked.unlink()
        assert await done(server, "attach_storage", {}) == {"storage": "file"}
        assert (await server.http.get("/health")).json()["storage"] == "ok"
        assert await done(server, "detach_storage") == {"detached": True, "attempts_ended": False}
        shutil.rmtree(blocked)
        blocked.write_text("in the way again")
    async with running(LOADED, cache=cache, admin_token=TOKEN, attach_seconds=3600.0) as server:
        assert await done(server, "detach_storage") == {"detached": False, "attempts_ended": True}
        assert await done(server, "detach_storage") == {"detached": False, "attempts_ended": False}
        assert (await server.http.get("/health")).json()["storage"] == "none"


async def test_other_weights_have_a_name() -> None:
    async with running(LOADED, admin_token=TOKEN) as server:
        assert await cached(server) == 0
        for version, hits in (("2", False), ("2", True), ("3", False)):
            order = {"weight_version": version}
            assert await done(server, "update_weights", order) == order
            assert (await cached(server) > 0) == hits, "the same name changes nothing"
        for wrong in ({}, {"weight_version": ""}, {"weight_version": 3}, {"weight_version": "4", "more": 1}):
            await refused(server, "update_weights", wrong, 400, "")
        assert server.api.model.cache.config.weight_version == "3"


@pytest.mark.parametrize("chosen", ["as configured", "by an operator"])
async def test_storage_that_is_down_when_the_weights_change_is_tried_again(
    tmp_path: Path, chosen: str, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "pages"
    ours = {"storage": "file", "storage_options": {"path": str(folder)}}
    other = {"storage": "file", "storage_options": {"path": str(tmp_path / "others")}}
    cache = msgspec.structs.replace(SMALL, **(ours if chosen == "as configured" else other))
    async with running(LOADED, cache=cache, admin_token=TOKEN, attach_seconds=0.02) as server:
        if chosen == "by an operator":
            await done(server, "detach_storage")
            await done(server, "attach_storage", ours)
        for version in ("2", "3"):  # each is told of
            caplog.clear()
            block(folder)
            await changed_in_vain(server, version)
            assert caplog.text.count("nothing is kept there for now; trying every 0.02 s") == 1
            folder.unlink()
            while (await health(server)) != "ok":  # noqa: ASYNC110
                await asyncio.sleep(0)
            assert "storage file is open now" in caplog.text
            await cached(server)
            assert await done(server, "sync") == {"written": True}
            assert any(folder.iterdir()), "the storage that was attached last, with its options"

        block(folder)
        await changed_in_vain(server, "4")
        assert await done(server, "detach_storage") == {"detached": False, "attempts_ended": True}
        assert await health(server) == "none"
        assert await done(server, "update_weights", {"weight_version": "5"}) == {"weight_version": "5"}
        assert await done(server, "detach_storage") == {"detached": False, "attempts_ended": False}


def block(folder: Path) -> None:
    """Put a file where the store is."""
    shutil.rmtree(folder)
    folder.write_text("in the way")


async def changed_in_vain(server: Running, version: str) -> None:
    await refused(server, "update_weights", {"weight_version": version}, 503, "pages")
    assert await health(server) == "unavailable"
    assert server.api.model.cache.config.weight_version == version


async def health(server: Running) -> str:
    return str((await server.http.get("/health")).json()["storage"])


async def test_redis_that_nobody_serves_is_tried_again_after_the_weights_changed(
    caplog: pytest.LogCaptureFixture,
) -> None:
    port = free_port()
    stage = {"backend": "redis", "name": "far", "options": {"url": f"redis://127.0.0.1:{port}"}}
    async with running(LOADED, admin_token=TOKEN, attach_seconds=3600.0) as server:
        await done(server, "attach_storage", {"storage": ["memory", stage]})
        await server.api.model.cache.detach_storage("memory")
        await refused(server, "update_weights", {"weight_version": "2"}, 503, str(port))
        assert "storage memory+far cannot be opened" in caplog.text
        assert await done(server, "detach_storage") == {"detached": False, "attempts_ended": True}


async def test_a_token_is_long_and_may_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ConfigError, match="16 or more"):
        settings_of(ServeOptions(admin_token="short"), SMALL)
    monkeypatch.setenv("ASYNCHICACHE_ADMIN_TOKEN", TOKEN)
    assert settings_of(ServeOptions(), SMALL).admin_token == TOKEN
    assert settings_of(ServeOptions(admin_token="b" * 16), SMALL).admin_token == "b" * 16
