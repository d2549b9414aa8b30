"""Our storage behind HiCache in whole SGLang servers: tokens as without a cache, whatever happens to it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from sglang_checks import HYBRID, MODELS, ROUNDS, Start, Uncached, damage, of_turn, reachable
from sglang_conversations import Conversations, cached, compare
from sglang_servers import HICACHE, Server, storage, storage_options, wait_for

HOST_RATIO = "--hicache-ratio=4"
"""Half of the host pool takes what four requests fetch at the same time."""

BOTH_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


def written(server: Server, tokens: int) -> None:
    """Wait until so many tokens were given to storage."""
    wait_for(lambda: server.metric("hicache_backup_tokens_total", pool="kv") >= tokens)


@pytest.mark.parametrize("model", MODELS)
def test_conversations_go_on_after_a_kill(
    model: str, start: Start, uncached: Uncached, tmp_path: Path
) -> None:
    """Every process dies in the middle, and memory with it; the next server finds all that was computed."""
    talk, middle = Conversations(), ROUNDS // 2
    with start(model, [*storage(tmp_path), HOST_RATIO]) as server:
        talk.run(server, range(middle))
        written(server, reachable(talk, middle) - talk.clients)
        server.kill()
    with start(model, [*storage(tmp_path), HOST_RATIO]) as server:
        after = talk.run(server, range(middle, ROUNDS))

    difference = compare(uncached(model), talk.turns)
    first = of_turn(after, middle)
    assert (difference.turns, difference.different) == (ROUNDS * talk.clients, [])
    assert cached(first, "storage") == cached(first) == reachable(talk, middle)
    assert cached(after) >= 0.9 * sum(reachable(talk, turn) for turn in range(middle, ROUNDS))


def test_damaged_pages_are_computed_and_stored_again(
    start: Start, uncached: Uncached, tmp_path: Path
) -> None:
    talk = Conversations(clients=4)
    with start(HYBRID, [*storage(tmp_path), HOST_RATIO]) as server:
        talk.run(server, range(4))
        written(server, reachable(talk, 4))
    assert damage(tmp_path)
    with start(HYBRID, [*storage(tmp_path), HOST_RATIO]) as server:
        after = talk.run(server, range(4, 6))

    assert compare(uncached(HYBRID), talk.turns).different == []
    assert cached(of_turn(after, 4)) == 0
    assert cached(of_turn(after, 5)) == reachable(talk, 5)


def test_a_rank_whose_pages_are_damaged_holds_all_ranks_back(
    start: Start, uncached: Uncached, tmp_path: Path
) -> None:
    """Both agree on what both have, though one of them has more."""
    talk = Conversations(clients=4)
    with start(HYBRID, [*storage(tmp_path), HOST_RATIO, "--tp=2"], **BOTH_RANKS) as server:
        talk.run(server, range(3))
        written(server, reachable(talk, 3))
    assert damage(tmp_path, "rank-dp0-tp1-*/**/*.pages")
    with start(HYBRID, [*storage(tmp_path), HOST_RATIO, "--tp=2"], **BOTH_RANKS) as server:
        hurt = talk.run(server, range(3, 4))
        healed = talk.run(server, range(4, 6))

    assert compare(uncached(HYBRID), talk.turns).different == []
    assert cached(hurt) == 0
    assert cached(healed) == reachable(talk, 4) + reachable(talk, 5)


def test_a_store_whose_files_were_removed_is_begun_afresh(start: Start, tmp_path: Path) -> None:
    """As a cleaner of temporary files leaves it: our folders are there, and nothing in them."""
    talk = Conversations(clients=2)
    with start("llama", [*storage(tmp_path), HOST_RATIO]) as server:
        talk.run(server, range(2))
        for file in tmp_path.rglob("*"):
            if file.is_file():
                file.unlink()
        assert cached(talk.run(server, range(2, 3))) == reachable(talk, 2)
    with start("llama", [*storage(tmp_path), HOST_RATIO]) as server:
        again = talk.run(server, range(3, 5))

    assert cached(of_turn(again, 3)) == 0
    assert cached(of_turn(again, 4)) == reachable(talk, 4)


def test_storage_is_attached_to_a_running_server_and_taken_away(start: Start, tmp_path: Path) -> None:
    path, prompt = "/hicache/storage-backend", list(range(3, 400))
    attach = {
        "hicache_storage_backend": "dynamic",
        "hicache_storage_prefetch_policy": "wait_complete",
        "hicache_write_policy": "write_through",
        "hicache_storage_backend_extra_config_json": json.dumps(storage_options(tmp_path)),
    }
    wrong = attach | {
        "hicache_storage_backend_extra_config_json": json.dumps(storage_options(tmp_path, spare=1))
    }
    with start(HYBRID, HICACHE, device_tokens=4096) as server:
        status, text = server.call("PUT", path, wrong)
        assert status == 400
        assert "spare" in text
        assert server.call("PUT", path, attach)[0] == 200
        answer = server.ask(prompt)
        written(server, 384)
        server.flush()
        assert server.ask(prompt).places["storage"] == 384
        server.flush()
        assert server.ask(prompt, cache_salt="another tenant").cached == 0
        assert server.call("DELETE", path)[0] == 200
        server.flush()
        assert server.ask(prompt).cached == 0
        assert server.call("PUT", path, attach)[0] == 200
        server.flush()
        found = server.ask(prompt)
        assert (found.cached, found.tokens) == (384, answer.tokens)
        assert server.call("POST", f"{path}/clear")[0] == 200
        server.flush()
        assert server.ask(prompt).cached == 0
