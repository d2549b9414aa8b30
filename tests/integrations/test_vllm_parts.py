"""Parts of the tier for vLLM: what is known of chunks, what requests may ask, which vLLM is taken."""

from __future__ import annotations

import runpy
import sys
import tracemalloc
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

import forking
from asynchicache import CacheHint
from asynchicache.errors import ConfigError
from asynchicache.integrations.vllm import seam
from asynchicache.integrations.vllm.hints import RequestHints, read_hints
from asynchicache.integrations.vllm.options import for_replica
from asynchicache.integrations.vllm.tier import Lookups

A, B = b"a" * 36, b"b" * 36
HASH = "ab" * 32


def test_questions_of_one_step_go_out_together_and_once() -> None:
    lookups = Lookups()
    assert [lookups.ask(key, request) for key in (A, B) for request in ("one", "two")] == [None] * 4

    assert lookups.take_new() == [A, B]
    assert lookups.take_new() == []
    lookups.answer([A, B], [True, False])

    assert (lookups.ask(A, "one"), lookups.ask(B, "two")) == (True, False)


def test_an_answer_lives_as_long_as_someone_who_asked() -> None:
    lookups = Lookups()
    for request in ("one", "two"):
        lookups.ask(A, request)
    lookups.take_new()
    lookups.answer([A], [False])
    lookups.forget("one")
    assert lookups.ask(A, "two") is False

    lookups.forget("two")

    assert len(lookups) == 0
    assert lookups.ask(A, "three") is None  # it may have been stored meanwhile
    assert lookups.take_new() == [A]


def test_later_news_count_more_than_an_answer() -> None:
    lookups = Lookups()
    lookups.ask(A, "one")
    lookups.ask(B, "one")
    lookups.learn([A], present=True)  # it was stored while storage was being asked
    lookups.answer([A, B], [False, True])
    assert lookups.ask(A, "one") is True

    lookups.learn([B], present=False)  # it was there, and could not be read
    assert lookups.ask(B, "one") is False
    lookups.learn([b"c" * 36], present=True)  # nobody asks for it
    assert len(lookups) == 2


def test_a_question_whose_requests_have_ended_is_not_put() -> None:
    lookups = Lookups()
    lookups.ask(A, "one")
    lookups.forget("one")
    lookups.forget("unknown")

    assert lookups.take_new() == []


def test_a_replica_has_its_number_in_texts_of_the_storage_options() -> None:
    given = {"storage": "file", "storage_options": {"path": "/kv/{replica}/pages", "capacity_bytes": 5}}

    filled = for_replica(given, 3)

    assert filled["storage_options"] == {"path": "/kv/3/pages", "capacity_bytes": 5}
    assert given["storage_options"]["path"] == "/kv/{replica}/pages"
    assert for_replica({"storage_options": "nonsense"}, 3) == {"storage_options": "nonsense"}


def action(kind: object, payload: object = None) -> SimpleNamespace:
    return SimpleNamespace(action_type=kind, payload=payload)


def chunk(group: int) -> bytes:
    return bytes.fromhex(HASH) + group.to_bytes(4, "big")


@pytest.mark.parametrize(
    ("parameters", "actions", "expected"),
    [
        (None, (), RequestHints()),
        ({"kv_load_tiers": []}, (), RequestHints()),
        ({"asynchicache": {"no_store": True}}, (), RequestHints(no_store=True)),
        ({"asynchicache": {"no_load": True, "no_store": False}}, (), RequestHints(no_load=True)),
        ({"asynchicache": {"no_load": "yes", "ttl": 5}}, (), RequestHints(ignored=2)),
        (
            {"asynchicache": {"cache_hint": {"continues": True, "keep_seconds": 60}}},
            (),
            RequestHints(cache=CacheHint(continues=True, keep_seconds=60)),
        ),
        ({"asynchicache": {"cache_hint": {"over": 3}}}, (), RequestHints(ignored=1)),
        ({"asynchicache": {"cache_hint": {"keep_seconds": -1}}}, (), RequestHints(ignored=1)),
        ({"asynchicache": "no_store"}, (), RequestHints(ignored=1)),
        (
            {"asynchicache": {"prefetch": {"block_hashes": [HASH], "groups": [1]}}},
            (),
            RequestHints(prefetch=(chunk(1),)),
        ),
        ({"asynchicache": {"prefetch": {"block_hashes": "all"}}}, (), RequestHints(ignored=1)),
        (None, [action("no_store"), action("no_load")], RequestHints(no_store=True, no_load=True)),
        (
            None,
            [action("prefetch", {"block_hashes": [HASH, HASH]})],
            RequestHints(prefetch=(chunk(0), chunk(1))),
        ),
        (None, [action("prefetch", {"block_hashes": ["xyz"]})], RequestHints(ignored=1)),
        (None, [action("prefetch", {"block_hashes": [HASH], "groups": [7]})], RequestHints(ignored=1)),
        (None, [action("prefetch", {"block_hashes": [HASH], "groups": [[]]})], RequestHints(ignored=1)),
        (None, [action("prefetch", {"block_hashes": [HASH], "groups": [1.0]})], RequestHints(ignored=1)),
        (None, [action("prefetch"), action("pin", {}), action(None), object()], RequestHints(ignored=4)),
    ],
)
def test_hints_are_read_and_the_rest_is_counted(
    parameters: Any, actions: Any, expected: RequestHints
) -> None:
    envelope = SimpleNamespace(actions=actions) if actions else None

    assert read_hints(parameters, envelope, {0, 1}) == expected


def test_importing_the_tier_needs_no_vllm() -> None:
    code = (
        "import sys; import asynchicache.integrations.vllm.tier; "
        "sys.exit(any(name.partition('.')[0] == 'vllm' for name in sys.modules))"
    )

    assert forking.run(["-c", code]).returncode == 0


def test_another_vllm_is_refused_and_told_which_one_fits(monkeypatch: pytest.MonkeyPatch) -> None:
    old = ModuleType("vllm")
    old.__version__ = "0.20.0"  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "vllm", old)

    with pytest.raises(ConfigError, match=r"vLLM 0\.20\.0 lacks .* pip install 'vllm==0\.33"):
        runpy.run_path(str(Path(seam.__file__)))


def test_repeated_groups_of_a_hint_do_not_multiply_its_keys() -> None:
    payload = {"block_hashes": [HASH] * 1000, "groups": [0, 1] * 500}
    tracemalloc.start()
    try:
        hints = read_hints({"asynchicache": {"prefetch": payload}}, None, {0, 1})
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(hints.prefetch) == 2
    assert most < 2 << 20
