"""`/stats`, the dashboard and `asynchicache top` show what a server knows, and no prompt."""

from __future__ import annotations

import asyncio
import io
import json
import re
import shutil
from collections.abc import AsyncIterator
from typing import Any

import pytest
import pytest_asyncio
from rich.console import Console

from asynchicache import CacheConfig
from asynchicache.cli.top import look, present
from asynchicache.errors import ConfigError
from asynchicache.integrations.serve.description import describe
from integrations.serve.checkpoints import tiny_loaded
from integrations.serve.serving import Running, body, running

HOST_BYTES = 6 << 20
SECRET = "the combination of the safe is 4711, and nobody else must know it. "
BROWSER = shutil.which("chromium") or shutil.which("google-chrome")

pytestmark = pytest.mark.asyncio(loop_scope="module")


@pytest_asyncio.fixture(loop_scope="module", scope="module")
async def server() -> AsyncIterator[Running]:
    config = CacheConfig(device_slots={"kv": 256, "mamba": 64}, host_bytes=HOST_BYTES, weight_version="test")
    async with running(tiny_loaded(), cache=config) as one:
        for tail in ("Who? " * 9, "Where? " * 9, "Who? " * 9):
            answer = await one.http.post("/v1/completions", json=body(prompt=SECRET + tail, max_tokens=2))
            assert answer.status_code == 200
        await one.idle()
        yield one


async def stats(server: Running) -> dict[str, Any]:
    answer = await server.http.get("/stats")
    assert answer.status_code == 200
    found: dict[str, Any] = answer.json()
    return found


async def test_the_numbers_are_those_of_the_cache(server: Running) -> None:
    seen, served = await stats(server), server.api.model.cache.statistics().served

    assert seen["requests"] == {"running": 0, "waiting": 0, "answered": 3, "cancelled": 0, "refused": 0}
    assert seen["tokens"]["cached"] == sum(seen["tokens"]["by_tier"].values()) > 0
    assert seen["tokens"]["prompt"] == served.prompt_tokens
    assert sum(seen["reasons"].values()) == 3
    assert seen["pools"]["kv"]["device"]["capacity"] == 256
    assert seen["pools"]["kv"]["device"]["held"] > 0
    assert seen["storage"] == {"name": "", "state": "none", "writing_bytes": 0, "pools": {}}
    assert seen["first_token_ms"]["p50"] > 0


async def test_memory_that_pools_share_counts_once(server: Running) -> None:
    seen, lines = await stats(server), list(describe(server.api))
    hosts, all_of_it = [tiers["host"] for tiers in seen["pools"].values()], seen["memory_bytes"]["host"]

    assert 0.9 * HOST_BYTES < all_of_it <= HOST_BYTES
    assert 0 < sum(host["bytes"] for host in hosts) <= all_of_it
    assert sum(host["most_bytes"] for host in hosts) > all_of_it > max(host["most_bytes"] for host in hosts)
    up_to = r"\), up to [\d,]+ on the host \(up to [\d.]+ [KM]iB\)$"
    assert [line for line in lines[1:3] if not re.search(up_to, line)] == []
    assert f"{all_of_it / 2**20:.4g} MiB on the host" in lines[3]
    metrics = (await server.http.get("/metrics")).text
    (told,) = re.findall(r'asynchicache_memory_bytes\{.*tier="host".*\} (\S+)', metrics)
    assert float(told) == all_of_it


async def test_shared_beginnings_are_a_tree(server: Running) -> None:
    prefixes = (await stats(server))["prefixes"]

    assert prefixes[0]["parent"] == -1
    assert prefixes[0]["continuations"] == len(prefixes) - 1 >= 2
    for one in prefixes[1:]:
        assert one["end"] == prefixes[one["parent"]]["end"] + one["tokens"]


async def test_no_prompt_is_shown(server: Running) -> None:
    for path in ("/stats", "/dashboard", "/metrics", "/health"):
        text = (await server.http.get(path)).text
        assert "4711" not in text
        assert str(list(SECRET.encode()))[1:40] not in text


async def test_the_page_loads_nothing_from_elsewhere(server: Running) -> None:
    answer = await server.http.get("/dashboard")

    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'none'" in answer.headers["content-security-policy"]
    assert "//" not in answer.text.replace("\n// ", "\n")


@pytest.mark.skipif(BROWSER is None, reason="no chromium here")
async def test_a_browser_shows_the_dashboard(server: Running) -> None:
    """A real one: the page's script runs, and the numbers of `/stats` are in what it makes of them."""
    assert BROWSER is not None
    command = ["--headless", "--no-sandbox", "--disable-gpu", "--timeout=20000", "--virtual-time-budget=3000"]
    browser = await asyncio.create_subprocess_exec(
        BROWSER,
        *command,
        "--dump-dom",
        f"{server.url}/dashboard",
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    text = (await browser.communicate())[0].decode()
    seen = await stats(server)

    assert "0 running, 0 waiting, 3 answered" in text
    assert f"{100 * seen['tokens']['cached'] / seen['tokens']['prompt']:.1f} %" in text
    assert all(one["digest"] in text for one in seen["prefixes"])
    assert "nothing was missed" in text


async def test_top_shows_the_same(server: Running) -> None:
    seen = await asyncio.to_thread(look, server.url)
    console = Console(width=100, record=True, file=io.StringIO())
    console.print(present(seen))
    text = console.export_text()

    assert "qwen3_5: 0 running, 0 waiting, 3 answered" in text
    assert f"of {seen['tokens']['prompt']:,} tokens" in text
    assert "storage: none" in text
    assert seen["prefixes"][0]["digest"] in text
    json.dumps(seen, allow_nan=False)


async def test_what_is_no_server_is_said(server: Running) -> None:
    for url in ("", "localhost:8000", "file:///etc/passwd"):
        with pytest.raises(ConfigError, match="must be an address such as"):
            look(url)
    with pytest.raises(OSError, match="does not answer"):
        await asyncio.to_thread(look, "http://127.0.0.1:9")
