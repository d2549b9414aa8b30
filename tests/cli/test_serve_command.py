"""`asynchicache serve` as its users run it: a process, its first line, its signals, and what it refuses."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import sys
from pathlib import Path

import pytest
from openai import OpenAI

from asynchicache.backends.file.verify import verify_store
from asynchicache.cli.main import main
from asynchicache.cli.serve import ServeOptions
from engines import Server, executable
from integrations.serve.checkpoints import save_checkpoint


def server(*arguments: str | Path) -> Server:
    command = [executable("asynchicache"), "serve", "--port", "0", "--threads", "1"]
    return Server([*command, *arguments], ready="listening on http")


def client(one: Server) -> OpenAI:
    found = re.search(r"listening on (\S+)", one.output)
    assert found, one.output
    return OpenAI(base_url=f"{found[1]}/v1", api_key="none", max_retries=0)


@pytest.mark.soak  # a process takes seconds to begin; docs/examples/serve_client.py is another
def test_a_checkpoint_is_served_until_sigterm(tmp_path: Path) -> None:
    folder, result = save_checkpoint(tmp_path / "qwen-of-sorts"), tmp_path / "served.json"
    sizes = json.dumps({"device_slots": {"kv": 64, "mamba": 16}, "host_slots": {"kv": 64, "mamba": 16}})
    pages = tmp_path / "pages"
    with server("--model", folder, "--config", sizes, "--storage-path", pages, "--json", result) as one:
        with client(one) as openai:
            answer = openai.chat.completions.create(
                model="qwen-of-sorts",
                messages=[{"role": "user", "content": "what is kept " * 9}],
                max_tokens=4,
                temperature=0,
            )
        os.kill(one.pid, signal.SIGTERM)
        assert one.wait() == 0, one.output
    assert answer.usage is not None
    written = json.loads(result.read_text())
    assert written["answered"] == 1
    assert written["completion_tokens"] == answer.usage.completion_tokens
    assert verify_store(pages).pages > 0  # what was computed went to storage before it ended


def refused(*arguments: str | Path, capsys: pytest.CaptureFixture[str]) -> str:
    """The one line that is said to arguments that cannot be meant."""
    with pytest.raises(SystemExit) as caught:
        main(["serve", *map(str, arguments)])
    assert caught.value.code == 2
    (line,) = capsys.readouterr().err.splitlines()
    return line


def test_a_port_in_use_names_the_way_out(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        words = refused("--port", str(taken.getsockname()[1]), capsys=capsys)
    assert "is in use" in words
    assert "--port 0" in words


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--model", "no/such/model"], "config.json"),
        (["--port", "70000"], "0 to 65535"),
        (["--host", "256.1.1.1"], "cannot be bound"),
        (["--config", "{"], "no JSON object"),
        (["--config", '{"salt": "\udcff"}'], "no JSON object"),  # a byte of a shell that is no UTF-8
        (["--config", '{"host_ration": 3}'], "host_ration"),
        (["--config", "no.toml"], "no.toml"),
        (["--storage", "nonesuch", "--port", "0"], "nonesuch"),
        (["--storage-option", "a=b"], "--storage"),
        (["--storage", "file", "--storage-path", "x"], "say one of them"),
        (["--storage", "memory,file", "--storage-option", "path=x"], "say whose"),
        (["--max-running", "0"], "--max-running"),
        (["--max-context", "100000", "--port", "0"], "--max-context"),
        (["--chat-template", "a.jinja"], "--chat-template"),
        (["--role", "prefill"], "by storage, which is 'none'"),
        (["--role", "decode", "--storage-path", "x"], "'file'"),
        (
            ["--role", "decode", "--storage", "memory,file", "--storage-option", "file.path=x"],
            "'memory+file'",
        ),
    ],
)
def test_what_cannot_be_served_is_refused(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert words in refused(*arguments, capsys=capsys)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--storage-option", "password=s3cret"],
        ["--config", '{"storage_options": {"password": "s3cret"}'],
        ["--config", '{"storage": "redis", "storage_options": {"url": "redis://:s3cret@a/b"}}'],
    ],
)
def test_a_password_is_not_in_what_is_refused(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    assert "s3cret" not in refused("--port", "0", *arguments, capsys=capsys)


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--port", "99999"], "0 to 65535"),
        (["--storage", "nonesuch"], "nonesuch"),
        (["--storage", "redis", "--storage-option", "url=redis://cache/a"], "url='redis://cache/a'"),
        (["--storage", "redis", "--storage-option", "urk=redis://cache"], "'urk'"),
        (["--storage", "object", "--storage-option", "url=s4://bucket"], "url='s4://bucket'"),
        (["--storage", "memory,file", "--storage-option", "file.path="], "path"),
        (["--storage", "memory,file"], "option path is missing"),
        (["--config", '{"storage": "memory", "storage_options": [{}, {}]}'], "storage_options"),
    ],
)
def test_flags_are_refused_before_the_model_and_its_packages_are_loaded(
    arguments: list[str], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)
    monkeypatch.setitem(sys.modules, "asynchicache.integrations.serve.server", None)
    assert words in refused(*arguments, capsys=capsys)


@pytest.mark.parametrize("missing", ["uvicorn", "starlette", "transformers", "prometheus_client"])
def test_a_missing_package_is_named(
    missing: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in [name for name in sys.modules if name.startswith("asynchicache.integrations.serve")]:
        monkeypatch.delitem(sys.modules, name)
    for name in [missing, *(name for name in sys.modules if name.split(".")[0] == missing)]:
        monkeypatch.setitem(sys.modules, name, None)
    words = refused("--host", "256.1.1.1", capsys=capsys)  # which would be refused next
    assert missing in words
    assert "pip install 'asynchicache[serve]'" in words


def test_flags_come_before_the_environment_and_that_before_a_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "cache.json"
    file.write_text('{"host_ratio": 3, "eviction": "fifo", "salt": "file"}')
    monkeypatch.setenv("ASYNCHICACHE_EVICTION", "lru")
    options = ServeOptions(config=str(file), storage="memory", storage_option=("capacity_bytes=4096",))
    config = options.cache_config({"weight_version": "v", "salt": "default", "io_threads": 3})
    assert (config.host_ratio, config.eviction, config.salt, config.io_threads) == (3, "lru", "file", 3)
    assert (config.storage, config.storage_options) == ("memory", {"capacity_bytes": 4096})
    options = ServeOptions(
        storage="memory,file", storage_option=("file.path=x", "memory.capacity_bytes=4096")
    )
    config = options.cache_config({"weight_version": "v"})
    assert config.storage_name == "memory+file"
    assert config.storage_options == [{"capacity_bytes": 4096}, {"path": "x"}]
