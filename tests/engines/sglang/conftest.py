"""SGLang is imported once for all tests, and what a model answers without a cache is asked once."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from pathlib import Path

import pytest

FOLDER = "ASYNCHICACHE_ENGINE_FOLDER"

if FOLDER not in os.environ:
    raise pytest.UsageError("these tests need a whole engine: make engines-e2e ARGS='sglang'")

from models import checkpoint  # noqa: E402 - of packages that only this environment has
from sglang_checks import ROUNDS  # noqa: E402
from sglang_conversations import Conversations, Turn  # noqa: E402
from sglang_servers import STATES, Server  # noqa: E402

from asynchicache_lab.judge.servers import Forks, Place, SGLang  # noqa: E402

WITH_STATES = ("qwen3_5_alternating", "qwen3_next_alternating")

Start = Callable[..., Server]


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--measure",
        nargs="?",
        const="",
        metavar="ROWS",
        help="measure hit rates, of rows with this in their name",
    )
    parser.addoption("--record", action="store_true", help="write the calls of servers to tests/data/calls")


@pytest.fixture(scope="session")
def forks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Forks]:
    here = Place(Path(sys.executable), os.environ, "", {})
    server = Forks(SGLang(), here, tmp_path_factory.mktemp("forks"))
    yield server
    server.close()


@pytest.fixture(scope="session")
def start(forks: Forks, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Start a server: `start(model, arguments, **variables)`, to be used in a `with` block."""
    models = Path(os.environ[FOLDER]) / "models"
    models.mkdir(exist_ok=True)
    logs, numbers, started = tmp_path_factory.mktemp("logs"), count(), []

    def run(
        model: str, arguments: Sequence[str] = (), *, device_tokens: int = 2048, **variables: str
    ) -> Server:
        given = [f"--max-total-tokens={device_tokens}", "--max-running-requests=4"]
        given += STATES if model.startswith(WITH_STATES) else ()
        log = logs / f"{next(numbers)}-{model}.log"
        server = Server(forks, checkpoint(models, model), [*given, *arguments], log, variables)
        started.append(server)
        return server

    yield run
    for server in started:
        server.kill()


@pytest.fixture(scope="session")
def uncached(start: Start) -> Callable[[str], list[Turn]]:
    """Return what a model answers in `ROUNDS` turns without a cache."""
    known: dict[str, list[Turn]] = {}

    def ask(model: str) -> list[Turn]:
        if model not in known:
            with start(model, ["--disable-radix-cache"]) as server:
                known[model] = Conversations().run(server, range(ROUNDS))
        return known[model]

    return ask
