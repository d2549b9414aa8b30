"""What storage can do to our tier under vLLM's own manager: misses, and nothing worse."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from rig import CHUNK_BYTES, KEYS, Open, content, key

from storage.redis_servers import RedisServer


def test_a_damaged_chunk_is_a_miss_and_the_others_arrive(open_rig: Open, tmp_path: Path) -> None:
    first = open_rig()
    first.store_and_evict(KEYS)
    first.shutdown()
    damage(tmp_path / "pages", content(KEYS[2]).tobytes())

    rig = open_rig(events=True, tier={"enable_kv_events": True})

    assert rig.fetch(KEYS) == ["HIT", "HIT", "MISS", "HIT", "HIT", "HIT"]
    lost = [event for event in rig.manager.take_events() if event.removed and not event.metadata_only]
    assert [event.keys for event in lost] == [[KEYS[2]]]
    assert rig.fetch(KEYS[2:3]) == ["MISS"]  # it is not found, and read, again and again


def damage(folder: Path, page: bytes) -> None:
    """Change one byte of a stored page, wherever it lies."""
    for path in folder.rglob("*"):
        if path.is_file() and (at := path.read_bytes().find(page)) >= 0:
            with path.open("r+b") as file:
                file.seek(at + 100)
                file.write(bytes([page[100] ^ 0xFF]))
            return
    raise AssertionError("the page is nowhere")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[RedisServer]:
    with RedisServer(tmp_path) as running:
        yield running


def over_redis(server: RedisServer, **limits: float) -> dict[str, Any]:
    patience = {"deadline": 1.0, "failures": 2, "cooldown": 60.0, "closing": 1.0, **limits}
    return {"storage": "redis", "storage_options": {"url": server.url}, "storage_limits": patience}


def test_a_server_that_dies_costs_misses_and_nothing_else(open_rig: Open, server: RedisServer) -> None:
    rig = open_rig(over_redis(server))
    rig.store_and_evict(KEYS[:3])
    assert rig.fetch(KEYS[:1]) == ["HIT"]
    rig.evict_all()
    context = rig.request()
    rig.ask(KEYS[:3], context)
    rig.settle()
    assert rig.ask(KEYS[:3], context) == ["HIT_PENDING"] * 3

    server.kill()  # between the lookup and the read

    assert rig.ask_to_the_end(KEYS[:3], context) == ["MISS"] * 3
    rig.compute(KEYS[:3], context)  # and the write
    rig.finish(context)
    rig.settle()
    rig.settle()
    assert not rig.manager.has_pending_work()
    assert rig.ask(KEYS[:3], rig.request()) == ["HIT"] * 3  # the primary tier has them
    rig.shutdown()
    assert rig.memory_is_unmapped()


@pytest.mark.parametrize("when", ["lookup", "read", "write"])
def test_a_server_that_hangs_costs_its_deadline_and_nothing_else(
    open_rig: Open, server: RedisServer, when: str
) -> None:
    rig = open_rig(over_redis(server))
    rig.store_and_evict(KEYS[:3])
    context = rig.request()
    if when == "read":
        rig.ask(KEYS[:3], context)
        rig.settle()
        assert rig.ask(KEYS[:3], context) == ["HIT_PENDING"] * 3

    server.pause()
    if when == "write":
        rig.compute([key("new")], context)
    else:
        assert rig.ask_to_the_end(KEYS[:3], context) == ["MISS"] * 3

    rig.settle()
    rig.finish(context)
    rig.shutdown()  # it ends, although calls of the server do not


def test_a_hung_server_cannot_take_all_staging_for_good(open_rig: Open, server: RedisServer) -> None:
    """Six chunks through two staging slots, and both are lent to calls that never end."""
    rig = open_rig({**over_redis(server, failures=100), "staging_bytes": 2 * CHUNK_BYTES})
    rig.store_and_evict(KEYS)
    context = rig.request()
    rig.ask(KEYS, context)
    rig.settle()
    assert rig.ask(KEYS, context) == ["HIT_PENDING"] * len(KEYS)

    server.pause()

    assert rig.ask_to_the_end(KEYS, context) == ["MISS"] * len(KEYS)
    rig.finish(context)


def test_shutting_down_with_work_in_flight_loses_nothing_but_that_work(open_rig: Open) -> None:
    rig = open_rig(chunks=8)
    rig.store_and_evict(KEYS[:3])
    context = rig.request()
    rig.ask(KEYS[:3], context)
    rig.settle()
    assert rig.ask(KEYS[:3], context) == ["HIT_PENDING"] * 3
    rig.compute(KEYS[3:], context)
    rig.end_step()  # reads and writes are under way

    rig.shutdown()

    assert rig.memory_is_unmapped()
    assert open_rig().fetch(KEYS[:3]) == ["HIT"] * 3


def test_a_reset_waits_for_what_is_in_flight(open_rig: Open) -> None:
    rig = open_rig()
    context = rig.compute(KEYS)

    rig.manager.reset_cache()
    rig.manager.on_reset_flushed()
    rig.finish(context)

    assert not rig.manager.has_pending_work()
    assert rig.fetch(KEYS) == ["HIT"] * len(KEYS)
