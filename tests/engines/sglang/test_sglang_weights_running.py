"""Weights that change in whole SGLang servers: right tokens, and nothing cached of the weights before."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from models import RETRAINED, checkpoint, train_adapter
from sglang_checks import HYBRID, Start
from sglang_servers import Server, linker, storage

PROMPT = [3 + 7 * place % 490 for place in range(700)]
HIT = 640  # the last page has the last token
MEMORY = {"storage": None, "storage_options": {}}
ADAPTERS: dict[str, Callable[[Path], list[str]]] = {
    "storage": storage,
    "linker": linker,
    "linker, no storage": lambda folder: linker(folder, **MEMORY),
}


@pytest.fixture(scope="module")
def retrained(start: Start) -> list[int]:
    """What the new weights say."""
    with start(HYBRID + RETRAINED, ["--disable-radix-cache"]) as server:
        return server.ask(PROMPT).tokens


def update(server: Server, **more: Any) -> None:
    path = checkpoint(Path(os.environ["ASYNCHICACHE_ENGINE_FOLDER"]) / "models", HYBRID + RETRAINED)
    status, text = server.call("POST", "/update_weights_from_disk", {"model_path": str(path), **more})
    assert status == 200, text


@pytest.mark.parametrize("named", [True, False])
@pytest.mark.parametrize("adapter", ADAPTERS)
def test_nothing_of_the_old_weights_is_found_after_an_update(
    adapter: str, named: bool, start: Start, retrained: list[int], tmp_path: Path
) -> None:
    version = {"weight_version": "2"} if named else {}
    with start(HYBRID, ADAPTERS[adapter](tmp_path)) as server:
        old = server.ask(PROMPT)
        assert old.tokens != retrained
        update(server, flush_cache=True, **version)
        updated = server.ask(PROMPT)
        server.flush()
        again = [server.ask(PROMPT) for _ in range(2)]
    assert (updated.cached, updated.tokens) == (0, retrained)
    assert [answer.tokens for answer in again] == [retrained] * 2
    assert again[1].cached == HIT
    assert again[0].cached == (0 if adapter == "linker, no storage" else HIT)


def test_a_flush_empties_a_linker_without_storage(start: Start, tmp_path: Path) -> None:
    with start(HYBRID, ADAPTERS["linker, no storage"](tmp_path)) as server:
        server.ask(PROMPT)
        server.flush()
        assert server.ask(PROMPT).cached == 0


@pytest.mark.parametrize("adapter", ["storage", "linker"])
def test_a_server_that_starts_with_the_new_weights_finds_what_the_updated_one_stored(
    adapter: str, start: Start, retrained: list[int], tmp_path: Path
) -> None:
    arguments = [*ADAPTERS[adapter](tmp_path), "--served-model-name=it"]
    with start(HYBRID, arguments) as server:
        server.ask(PROMPT)
        update(server, weight_version="2")
        server.ask(PROMPT)
    with start(HYBRID + RETRAINED, [*arguments, "--weight-version=2"]) as server:
        answers = [server.ask(PROMPT), server.ask([*PROMPT, 5])]
    assert [answer.cached for answer in answers] == [HIT, HIT]
    assert answers[0].tokens == retrained


@pytest.mark.parametrize("adapter", ["storage", "linker"])
def test_an_adapter_that_is_trained_again_into_its_folder_is_another_one(
    adapter: str, start: Start, tmp_path: Path
) -> None:
    """Its pages are found only with what it held when they were computed; those without it stay."""
    model = checkpoint(Path(os.environ["ASYNCHICACHE_ENGINE_FOLDER"]) / "models", "llama")
    folder = tmp_path / "sql"
    lora = [
        f"--lora-paths=sql={folder}",
        "--max-lora-rank=8",
        "--max-loras-per-batch=2",
        "--lora-backend=torch_native",
    ]
    expected, found = {}, []
    for seed in (1, 2):
        train_adapter(folder, model, seed)
        with start("llama", [*lora, "--disable-radix-cache"]) as server:
            expected[seed] = server.ask(PROMPT, lora_path="sql").tokens
            plain = server.ask(PROMPT).tokens
    assert len({tuple(tokens) for tokens in (plain, *expected.values())}) == 3
    for seed in (1, 2, 1):
        train_adapter(folder, model, seed)
        with start("llama", [*ADAPTERS[adapter](tmp_path / "store"), *lora]) as server:
            answers = [server.ask(PROMPT, lora_path="sql"), server.ask(PROMPT)]
        assert [answer.tokens for answer in answers] == [expected[seed], plain]
        found.append([answer.cached for answer in answers])
    assert found == [[0, 0], [0, HIT], [HIT, HIT]]
