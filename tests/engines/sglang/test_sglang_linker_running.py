"""Our host tier and storage below SGLang's tree, without HiCache, in whole servers."""

from __future__ import annotations

from pathlib import Path

import pytest
from sglang_checks import HYBRID, MODELS, ROUNDS, Start, Uncached, crowd_out, damage, of_turn, reachable
from sglang_conversations import Conversations, cached, compare
from sglang_servers import linker

BOTH_RANKS = {"SGLANG_CPU_OMP_THREADS_BIND": "0|1"}


@pytest.mark.parametrize("model", MODELS)
def test_conversations_go_on_after_a_kill(
    model: str, start: Start, uncached: Uncached, tmp_path: Path
) -> None:
    """Requests wait for what storage has of them, though the server is idle."""
    talk, middle = Conversations(), ROUNDS // 2
    with start(model, linker(tmp_path)) as server:
        talk.run(server, range(middle))
        server.kill()
    with start(model, linker(tmp_path)) as server:
        talk.run(server, range(middle, ROUNDS))

    difference = compare(uncached(model), talk.turns)
    assert (difference.turns, difference.different) == (ROUNDS * talk.clients, [])
    for turn in range(ROUNDS):
        assert cached(of_turn(talk.turns, turn)) == reachable(talk, turn)


def test_no_request_fails_by_damaged_pages(start: Start, uncached: Uncached, tmp_path: Path) -> None:
    """Nothing is promised that was not read and verified; a load cannot fail."""
    talk = Conversations(clients=6, at_once=6)
    with start(HYBRID, linker(tmp_path)) as server:
        talk.run(server, range(4))
    assert damage(tmp_path)
    with start(HYBRID, linker(tmp_path)) as server:
        after = talk.run(server, range(4, 6))

    assert compare(uncached(HYBRID), talk.turns).different == []
    assert cached(of_turn(after, 4)) == 0
    assert cached(of_turn(after, 5)) == reachable(talk, 5)


def test_a_rank_whose_pages_are_damaged_holds_all_ranks_back(
    start: Start, uncached: Uncached, tmp_path: Path
) -> None:
    talk = Conversations(clients=6, at_once=6)
    two = [*linker(tmp_path), "--tp=2"]
    with start(HYBRID, two, **BOTH_RANKS) as server:
        talk.run(server, range(3))
    assert damage(tmp_path, "rank-dp0-tp1-*/**/*.pages")
    with start(HYBRID, two, **BOTH_RANKS) as server:
        hurt = talk.run(server, [3])
        healed = talk.run(server, [4, 5])

    assert compare(uncached(HYBRID), talk.turns).different == []
    assert cached(hurt) == 0
    assert cached(healed) == reachable(talk, 4) + reachable(talk, 5)


def test_host_memory_has_what_the_device_evicted(start: Start, tmp_path: Path) -> None:
    prompt = list(range(3, 400))
    with start(HYBRID, linker(tmp_path)) as server:
        answer = server.ask(prompt)
        crowd_out(server)
        found = server.ask(prompt)
        assert (found.cached, found.tokens) == (384, answer.tokens)
        crowd_out(server)
        assert server.ask(prompt, cache_salt="another tenant").cached == 0
