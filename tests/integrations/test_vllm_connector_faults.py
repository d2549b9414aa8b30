"""What goes wrong around the connector costs hits, and never a request, a hang or wrong bytes."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterable, Iterator
from hashlib import sha256
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asynchicache.integrations.vllm.connector_worker import StepOrders
from asynchicache.pools.shared import HostHandle
from asynchicache.transfer.remote import CopyOrder
from asynchicache.types import Direction, PoolTransfer, Tier
from integrations.vllm_player import Block, Player, options

SIZE = 32
GROUPS = [
    {"number": 0, "window": None, "states": False},
    {"number": 1, "window": 2, "states": False},
    {"number": 2, "window": 1, "states": True},
]
RECORD: dict[str, Any] = {
    "blocks": 64,
    "block_size": SIZE,
    "groups": GROUPS,
    "hashes": [sha256(bytes([number])).hexdigest() for number in range(12)],
}

Open = Callable[..., Player]


@pytest.fixture
def open_player(tmp_path: Path) -> Iterator[Open]:
    """Opens connectors over one folder."""
    opened: list[Player] = []

    def make(workers: int = 1, **changes: Any) -> Player:
        opened.append(Player(RECORD, workers, **(options(tmp_path) | changes)))
        return opened[-1]

    yield make
    for player in opened:
        player.close()


def described(name: str, blocks: int, *, computed: int = 0, extra: int = 1, **more: Any) -> dict[str, Any]:
    """A request for a prompt of whole blocks and some tokens."""
    tokens = blocks * SIZE + extra
    return {
        "id": name,
        "tokens": tokens,
        "prompt": tokens,
        "computed": computed,
        "hashes": list(range(blocks)),
        **more,
    }


def tables(blocks: int, first: int = 1) -> list[list[int]]:
    """Block tables of the three groups, which share nothing; a state has one block, at the end."""
    full = list(range(first, first + blocks))
    window = list(range(first + blocks, first + 2 * blocks))
    return [full, window, [0] * (blocks - 1) + [first + 2 * blocks]]


def look_up(player: Player, call: dict[str, Any]) -> int:
    player.play(call | {"call": "new_request"})
    request = player.request(call)
    while (found := player.scheduler.matched(request, 0)[0]) is None:
        assert player.scheduler._bridge.wait_finished(60)
    return found


def serve(
    player: Player, name: str, blocks: int = 4, first: int = 1, change: Callable[[], object] = lambda: None
) -> int:
    """Serve a prompt as vLLM does, with a change after its lookup; returns the tokens not computed."""
    call = described(name, blocks, tables=tables(blocks, first))
    hit = look_up(player, call)
    change()
    given = [[[number, False] for number in table] for table in call["tables"]]
    player.play(call | {"call": "allocated", "tables": given, "external": hit})
    offers = [[2, call["tables"][2][-1], blocks * SIZE]]
    rest = call | {"computed": hit, "scheduled": call["tokens"] - hit, "offers": offers}
    player.play({"call": "step", "requests": [rest]})
    player.play(call | {"call": "request_finished", "computed": call["tokens"]})
    return hit


def test_what_was_computed_is_found_in_host_memory_and_by_the_next_process(open_player: Open) -> None:
    first = open_player()
    assert [serve(first, "a"), serve(first, "b", first=20)] == [0, 4 * SIZE]
    first.close()
    assert serve(open_player(), "c") == 4 * SIZE


def test_copies_that_fail_are_misses_and_their_blocks_are_given_back(open_player: Open) -> None:
    player = open_player()
    player.failing = 0
    serve(player, "a")
    player.failing = None

    assert [serve(player, "b", first=20), serve(player, "c", first=40)] == [0, 4 * SIZE]
    assert player.scheduler.statistics.traffic.copies_failed > 0


def test_every_worker_gets_its_own_part_back(open_player: Open) -> None:
    first = open_player(2)
    assert [serve(first, "a"), serve(first, "b", first=20)] == [0, 4 * SIZE]
    first.close()
    assert serve(open_player(2), "c") == 4 * SIZE


@pytest.mark.parametrize("rank", [0, 1])
def test_what_one_worker_of_two_could_not_copy_is_a_miss(open_player: Open, rank: int) -> None:
    player = open_player(2)
    player.failing = rank
    serve(player, "a")
    player.failing = None

    assert [serve(player, "b", first=20), serve(player, "c", first=40)] == [0, 4 * SIZE]


def test_a_damaged_part_of_one_worker_is_a_miss_for_all(open_player: Open, tmp_path: Path) -> None:
    first = open_player(2)
    serve(first, "a")
    first.close()
    manifests = [json.loads(path.read_text()) for path in tmp_path.glob("*/pool.json")]
    assert sorted((one["pool"], one["shard"]) for one in manifests) == [
        (f"group{number}{'_tp1' * rank}", f"tp{rank}/2") for number in range(3) for rank in range(2)
    ]
    (damaged,) = (path.parent for path in tmp_path.glob("*/pool.json") if '"group0_tp1"' in path.read_text())
    overwrite(damaged.glob("*.pages"))

    assert serve(open_player(2), "b") == 0


def test_one_worker_finds_nothing_of_two(open_player: Open) -> None:
    first = open_player(2)
    serve(first, "a")
    first.close()
    assert serve(open_player(1), "b") == 0


def test_host_memory_that_cannot_be_mapped_fails_each_copy_by_itself(open_player: Open) -> None:
    """vLLM computes the request of a load that failed."""
    player = open_player()
    order = CopyOrder(7, Direction.LOAD, (PoolTransfer("group0", (0,), (1,)),))
    backup = CopyOrder(8, Direction.BACKUP, (PoolTransfer("group0", (1,), (0,)),))
    step = StepOrders(lost(player.scheduler._cache.host), [order, backup], loads={7: "a"})
    (worker,) = player.workers
    worker.start_loads(step)
    worker.start_backups(step)
    ended = worker.ended(idle=False)
    results = worker.results()

    assert ended.finished_recving == ended.failed_recving == {"a"}
    assert results is not None
    assert [result.id for result in results.results[0]] == [7, 8]
    assert all(result.error for result in results.results[0])


def lost(host: HostHandle) -> HostHandle:
    """Of an owner that has ended."""
    change = msgspec.structs.replace
    pools = {name: change(pool, slab=change(pool.slab, pid=2**22 - 3)) for name, pool in host.pools.items()}
    return change(host, pools=pools)


def test_a_load_that_cannot_be_ordered_is_computed(open_player: Open) -> None:
    player = open_player()
    serve(player, "a")
    call = described("b", 4, tables=tables(4, 20))
    hit = look_up(player, call)
    player.scheduler.allocated(player.request(call), [[Block(20)] * 4] * 3, hit)  # a block twice
    step = player.scheduler.step(idle_step())

    assert hit == 4 * SIZE
    assert step.failed == {"b"}
    assert player.scheduler.matched(player.request(call), 0) == (0, False)
    player.scheduler.request_finished(player.request(call), [[], [], []])


def idle_step() -> SimpleNamespace:
    return SimpleNamespace(
        kv_connector_block_state=None, num_scheduled_tokens={}, total_num_scheduled_tokens=0
    )


def test_a_storage_that_fails_every_read_is_a_miss(open_player: Open, tmp_path: Path) -> None:
    first = open_player()
    serve(first, "a")
    first.close()
    overwrite(tmp_path.glob("*/*.pages"))

    assert serve(open_player(), "b") == 0


def overwrite(segments: Iterable[Path]) -> None:
    """Damage all pages of a file store, whose entries stay whole."""
    for segment in segments:
        with segment.open("r+b") as file:
            file.seek(65536)
            file.write(b"\xff" * (segment.stat().st_size - 65536))


def test_aborts_at_every_point_leave_no_block_referenced(open_player: Open) -> None:
    player = open_player()
    serve(player, "a")
    aborted = {"call": "request_finished", "tables": [[], [], []]}
    for name in ("new", "looking", "found", "loading"):
        call = described(name, 4)
        player.play(call | {"call": "new_request"})
        if name != "new":
            player.scheduler.matched(player.request(call), 0)
        if name in ("found", "loading"):
            while player.scheduler.matched(player.request(call), 0)[0] is None:
                assert player.scheduler._bridge.wait_finished(60)
        if name == "loading":
            blocks = [[Block(number) for number in table] for table in tables(4, 20)]
            player.scheduler.allocated(player.request(call), blocks, 4 * SIZE)
        player.play(call | aborted)

    assert not player.scheduler._requests
    assert serve(player, "b", first=40) == 4 * SIZE


def test_a_request_chooses_to_load_and_to_keep_nothing(open_player: Open) -> None:
    player = open_player()
    for name, hint in (("a", "no_store"), ("b", "no_load")):
        call = described(name, 4, tables=tables(4))
        request = player.request(call)
        request.kv_transfer_params = {"asynchicache": {hint: True}}
        player.scheduler.new_request(request)
        if hint == "no_load":
            assert player.scheduler.matched(request, 0) == (0, False)
        else:
            step = call | {"scheduled": call["tokens"], "offers": []}
            player.play({"call": "step", "requests": [step]})
            player.play(call | {"call": "request_finished", "computed": call["tokens"]})

    assert serve(player, "c") == 0


@pytest.mark.parametrize("hints", [{"no_store": True}, {"cache_hint": {"transient": True}}])
def test_a_request_that_asks_for_it_leaves_nothing(open_player: Open, hints: dict[str, object]) -> None:
    player = open_player()
    player.parameters = {"asynchicache": hints}
    serve(player, "a")
    player.parameters = None

    assert [serve(player, "b", first=20), serve(player, "c", first=40)] == [0, 4 * SIZE]


def test_after_a_reset_nothing_of_before_is_found_in_any_process(open_player: Open) -> None:
    player = open_player()
    serve(player, "a")
    player.scheduler.forget()

    assert [serve(player, "b", first=20), serve(player, "c", first=40)] == [0, 4 * SIZE]
    player.close()
    assert serve(open_player(), "d") == 4 * SIZE  # a new process has the weights that it was started with


def test_what_a_request_computes_after_its_weights_changed_is_not_kept_as_before(open_player: Open) -> None:
    """It was looked up before, and runs on: what it computes is of the new weights, or of both."""
    player = open_player()
    serve(player, "a", change=lambda: player.scheduler._cache._weights.changed("2"))
    player.close()

    assert serve(open_player(), "b") == 0


@pytest.mark.parametrize("workers", [1, 2])
def test_blocks_that_were_unmapped_in_sleep_are_filled_after_it(open_player: Open, workers: int) -> None:
    player = open_player(workers)
    serve(player, "a")
    for worker in player.workers:
        worker.unregister()
        worker.unregister()  # vLLM may say so twice
    for memory in player.memories:
        for blocks in memory.values():
            blocks.zero_()
    for worker in player.workers:
        worker.restore()

    assert serve(player, "b", first=20) == 4 * SIZE


def test_a_step_does_not_wait_for_lookups_of_others(open_player: Open) -> None:
    player, held = open_player(), threading.Event()

    async def hold() -> None:
        held.wait()

    player.scheduler._bridge.submit(hold())
    call = described("a", 4)
    player.play(call | {"call": "new_request"})
    assert player.scheduler.matched(player.request(call), 0) == (None, False)
    player.scheduler.step(idle_step())
    waits = player.scheduler._taking
    held.set()

    assert waits is None
    player.play(call | {"call": "request_finished", "tables": [[], [], []]})


def test_hits_are_split_by_the_tier_they_came_from(open_player: Open) -> None:
    first = open_player()
    serve(first, "a")
    first.close()
    second = open_player()
    call = described("b", 4, tables=tables(4, 20))
    hit = look_up(second, call)
    given = [[[number, False] for number in table] for table in call["tables"]]
    second.play(call | {"call": "allocated", "tables": given, "external": hit})

    assert second.scheduler.tiers(second.request(call), hit) == {Tier.STORAGE: hit, Tier.HOST: 0}
    second.play(call | {"call": "request_finished", "computed": hit})


def test_a_prompt_that_ends_with_a_block_is_found_when_it_comes_again(open_player: Open) -> None:
    """It needs the window of one block before its end; states are where vLLM offers them."""
    player = open_player()
    call = described("a", 4, extra=0, tables=tables(4))
    look_up(player, call)
    step = call | {"scheduled": 4 * SIZE, "offers": [[2, call["tables"][2][-1], 3 * SIZE]]}
    player.play({"call": "step", "requests": [step]})
    player.play(call | {"call": "request_finished", "computed": call["tokens"]})

    assert look_up(player, described("b", 4, extra=0)) == 3 * SIZE


def test_a_closed_connector_answers_that_there_is_nothing(open_player: Open) -> None:
    player = open_player()
    serve(player, "a")
    player.scheduler.close()

    assert look_up(player, described("b", 4)) == 0
    player.scheduler.close()
