"""What judges a run of the search, fed by hand: each oracle complains where it should, and nowhere else."""

from __future__ import annotations

import asyncio
import random
from array import array
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from asynchicache.controller.prefetcher import Prefetcher
from asynchicache.hashing import ObjectKey
from asynchicache.planner.backup import BackupPlanner
from asynchicache.planner.inventory import SlotInventory
from asynchicache.planner.load import LoadPlanner
from asynchicache.planner.planner import Planner
from asynchicache.planner.prefetch import PrefetchPlanner
from asynchicache.planner.readings import ReadPlan
from asynchicache.planner.request_state import RequestState
from asynchicache.testing.seeded import SeededWorld, run_seeded
from asynchicache.tree.node import FULL_DEVICE, FULL_HOST, place_of
from asynchicache.types import (
    ALL_PAGES,
    MissReason,
    Outcome,
    PrefetchPolicy,
    Tier,
    WritePolicy,
    trailing_pages,
)
from asynchicache_lab.chaos.calls import Call
from asynchicache_lab.chaos.costs import CostOracle
from asynchicache_lab.chaos.identity import PageNames
from asynchicache_lab.chaos.ledger import Ledger
from asynchicache_lab.chaos.presence import (
    in_memory,
    is_held,
    longest,
    nothing,
    reclaimable,
    shared_pages,
    span,
)
from asynchicache_lab.chaos.promises import DurabilityOracle, DurablePrefix
from asynchicache_lab.chaos.recency import TOLD_SECONDS, RecencyOracle, StoredPath
from asynchicache_lab.chaos.run import run_script
from asynchicache_lab.chaos.script import (
    CacheSizes,
    ChaosClient,
    ClientTurn,
    Life,
    ModelShape,
    Pace,
    Script,
    ScriptEvent,
    Steady,
)
from asynchicache_lab.chaos.steady import BOUND_SECONDS, SteadyTraffic
from asynchicache_lab.chaos.store import ChaosStore
from asynchicache_lab.chaos.waste import MOST_FOR_NOBODY, WasteOracle
from controller.simulation import Simulation

A, B, C, D = (letter * 32 for letter in (b"a", b"b", b"c", b"d"))


def key(digest: bytes, pool: str = "kv") -> ObjectKey:
    return ObjectKey(b"f" * 32, digest, pool, "")


# Costs


class Costs:
    """A cost oracle, and the calls that it is told of."""

    def __init__(self) -> None:
        self.ledger = Ledger()
        self.calm = True
        self.wanted: set[bytes] = set()
        self.memory: set[bytes] = set()
        self.running: list[Call] = []
        self.time = 0.0
        self.oracle = CostOracle(
            ["kv", "mamba"],
            self.ledger,
            lambda: self.calm,
            lambda digest, moment: digest in self.wanted,
            lambda pool: self.memory,
        )

    def begin(self, verb: str, *digests: bytes, pool: str = "kv") -> Call:
        self.time += 1
        call = Call(verb, pool, digests, self.time)
        self.oracle.began(call, self.running)
        self.running.append(call)
        return call

    def end(self, call: Call, answer: Sequence[bool] | Sequence[Outcome] | None = None) -> None:
        self.time += 1
        self.running.remove(call)
        call.ended = self.time
        fine = {"exists": True, "get": Outcome.HIT, "put": Outcome.STORED}[call.verb]
        self.oracle.ended(call, answer or [fine] * len(call.digests))  # type: ignore[list-item]

    def call(self, verb: str, *digests: bytes, pool: str = "kv", answer: Any = None) -> None:
        self.end(self.begin(verb, *digests, pool=pool), answer)

    def said(self) -> list[str]:
        said, self.ledger.violations = self.ledger.violations, []
        return said


def test_a_page_is_not_read_twice_at_once() -> None:
    costs = Costs()
    first = costs.begin("get", A, B)
    costs.begin("get", C)
    costs.begin("get", B, pool="mamba")
    costs.begin("put", A)
    assert costs.said() == []
    costs.begin("get", B, D, A)
    assert costs.said() == ["read twice: pages, 2 of 'kv'"]
    costs.end(first)
    assert costs.ledger.costs["read"] == 2 + 1 + 1 + 3
    assert costs.ledger.costs["read_twice"] == 2


def test_what_was_read_may_be_read_again() -> None:
    costs = Costs()
    costs.call("get", A)
    costs.call("get", A)
    assert costs.said() == []


def test_what_was_in_memory_when_it_was_asked_for_is_not_read() -> None:
    costs = Costs()
    costs.memory = {A}
    costs.call("exists", A, B)
    costs.begin("get", A, B)
    assert costs.said() == ["read needlessly: pages, 1 of 'kv'"]
    assert costs.ledger.costs["read_in_vain"] == 1

    costs.memory = set()
    costs.call("exists", C)
    costs.memory = {C}  # somebody published it since
    costs.begin("get", C)
    assert costs.said() == []
    assert costs.ledger.costs["read_in_vain"] == 2


def test_a_page_that_left_memory_meanwhile_may_be_read() -> None:
    costs = Costs()
    costs.memory = {A}
    costs.call("exists", A)
    costs.oracle.lost(A, "kv")
    costs.begin("get", A)
    assert costs.said() == []


def test_a_page_is_written_once_unless_it_was_lost() -> None:
    costs = Costs()
    costs.call("put", A, B)
    costs.call("put", B, pool="mamba")
    assert costs.said() == []
    costs.call("put", B, C)
    assert costs.said() == ["written twice: pages, 1 of 'kv'"]
    for lose in (lambda: costs.oracle.lost(A, "kv"), costs.oracle.gap, costs.oracle.forget):
        lose()
        costs.call("put", A)
        assert costs.said() == []
    writing = costs.begin("put", C)
    costs.oracle.gap()
    costs.end(writing)
    costs.call("put", C)
    assert costs.said() == [], "it belongs to a path that was just found to have a gap"
    costs.call("put", D, answer=[Outcome.REJECTED])
    costs.call("put", D)
    assert costs.said() == [], "it was not written the first time"


def test_a_page_is_asked_for_once_at_a_time() -> None:
    costs = Costs()
    first = costs.begin("exists", A)
    costs.begin("exists", A, pool="mamba")
    costs.begin("exists", B)
    assert costs.said() == []
    costs.begin("exists", A)
    assert costs.said() == ["asked twice: pages, 1 of 'kv'"]
    costs.memory = {A}  # whether storage has it too is another question
    costs.begin("exists", A)
    assert costs.said() == []
    costs.end(first)


def test_a_page_is_asked_for_again_by_who_came_since() -> None:
    costs = Costs()
    costs.call("exists", A, answer=[False])
    costs.wanted = {A}
    costs.call("exists", A)
    assert costs.said() == []
    costs.wanted = set()
    costs.call("exists", A)
    assert costs.said() == ["asked twice: pages, 1 of 'kv'"]
    costs.oracle.lost(A, "kv")
    costs.call("exists", A)
    assert costs.said() == []


def test_where_storage_went_wrong_anything_may_be_repeated() -> None:
    costs = Costs()
    costs.calm = False
    for verb in ("get", "put", "exists"):
        costs.begin(verb, A)
        costs.call(verb, A)
        costs.call(verb, A)
    assert costs.said() == []
    assert not any(costs.ledger.costs[kind] for kind in ("read_twice", "written_twice", "asked_twice"))


def test_a_page_is_known_once_it_was_read_or_written() -> None:
    costs = Costs()
    costs.call("get", A, B, answer=[Outcome.HIT, Outcome.MISS])
    costs.call("put", C, D, answer=[Outcome.EXISTS, Outcome.FAILED])
    assert [costs.oracle.knows("kv", digest) for digest in (A, B, C, D)] == [True, False, True, False]
    assert not costs.oracle.knows("mamba", A)
    costs.oracle.lost(A, "kv")
    assert not costs.oracle.knows("kv", A)
    costs.memory = {B}
    costs.call("get", B)
    assert not costs.oracle.knows("kv", B), "what memory has computed is known to no storage"


# Waste


def test_a_read_begins_for_somebody() -> None:
    awaited = {A, B}
    ledger = Ledger()
    waste = WasteOracle(ledger, lambda digests: sum(digest in awaited for digest in digests), lambda: True)
    waste.began(Call("get", "kv", [A, B] * MOST_FOR_NOBODY, 0.0), ())
    waste.began(Call("exists", "kv", [C] * 2 * MOST_FOR_NOBODY, 0.0), ())
    waste.began(Call("get", "kv", [A, *[C] * MOST_FOR_NOBODY], 0.0), ())
    assert (ledger.violations, ledger.costs["read_for_nobody"]) == ([], MOST_FOR_NOBODY)
    for _ in range(2):
        waste.began(Call("get", "kv", [C, B], 0.0), ())
    assert ledger.violations == [f"read for nobody: more than {MOST_FOR_NOBODY} pages"]


# Names


def test_no_digest_and_no_key_stands_for_two_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    ledger, tokens = Ledger(), array("q", range(5))
    names = PageNames(2, ledger)
    turns = [
        ClientTurn(prompt=(1,), tenant=tenant, salt=salt) for tenant in (None, "a") for salt in (None, "a")
    ]
    assert len({name for turn in turns for name in names.of(tokens, turn)}) == 2 * len(turns)
    assert names.of(tokens[:2], turns[1]) == names.of(tokens, turns[1])[:1]
    for identity in ("old/", "new/"):
        names.stored(key(identity.encode().ljust(32)), identity)
    assert ledger.violations == []
    names.stored(key(b"old/".ljust(32)), "new/")
    assert ledger.violations == ["identity: one key of 'kv' for two pages"]
    monkeypatch.setattr("asynchicache_lab.chaos.identity.namespace_seed", lambda tenant, salt: b"")
    PageNames(2, ledger).of(tokens, turns[0])
    assert len(ledger.violations) == 1
    for turn in turns[:2]:
        names.of(array("q", range(9, 11)), turn)
    assert ledger.violations[1:] == ["identity: one digest for two pages"]


# Promises


def path(*digests: bytes, state: bool = False) -> StoredPath:
    ends = [key(digests[-1], "mamba")] if state else []
    return StoredPath(digests, [[key(digest)] for digest in digests], ends)


def promised(tokens: int = 1, identity: object = "weights") -> DurablePrefix:
    return DurablePrefix(identity, "alice", None, tuple(range(tokens)))


def stored(store: ChaosStore, *keys: ObjectKey) -> None:
    for one in keys:
        assert store.write(one, b"", bytes(100))


def test_what_is_durable_is_in_storage() -> None:
    store, ledger = ChaosStore(), Ledger()
    promises = DurabilityOracle(store, ledger)
    stored(store, key(A), key(B), key(B, "mamba"))

    promises.made(promised(), path(A, B, state=True), set())
    assert ledger.violations == []
    promises.made(promised(), path(A, B, C), set())
    assert ledger.violations == ["not durable: 1 of 3 pages are not in storage, of kv"]
    store.drop(key(B, "mamba"))
    promises.made(promised(), path(A, B, state=True), set())
    assert ledger.violations[1:] == ["not durable: 1 of 3 pages are not in storage, of mamba"]


def test_what_went_while_somebody_waited_was_promised_by_nobody() -> None:
    store, ledger = ChaosStore(), Ledger()
    promises = DurabilityOracle(store, ledger)
    stored(store, key(A), key(B))
    with promises.waiting() as gone:
        store.drop(key(B))
    store.drop(key(A))
    assert gone == {(B, "kv")}

    promises.made(promised(), path(B), gone)
    assert ledger.violations == []
    promises.made(promised(), path(A, B), gone)
    assert ledger.violations == ["not durable: 1 of 1 pages are not in storage, of kv"]


def test_the_newest_promises_are_what_the_next_cache_is_asked_to_keep() -> None:
    store = ChaosStore()
    promises = DurabilityOracle(store, Ledger())
    stored(store, key(A))
    for tokens in (1, 2, 3, 4, 2):
        promises.made(promised(tokens), path(A), set())
    promises.made(promised(9, "others"), path(A), set())
    promises.made(promised(5), StoredPath([], [], []), set())

    turns = promises.asked("weights", patient=True)
    assert [len(turn.prompt) - 1 for turn in turns] == [3, 4, 2]
    assert {(turn.tenant, turn.patience) for turn in turns} == {("alice", None)}
    assert promises.asked("nobody", patient=True) == []


@pytest.mark.parametrize(("patient", "least"), [(True, 1), (False, 0)])
def test_how_much_is_found_is_promised_to_who_waits_until_it_is_there(patient: bool, least: int) -> None:
    store = ChaosStore()
    promises = DurabilityOracle(store, Ledger(), loses_nothing=True)
    stored(store, key(A))
    promises.made(promised(1)._replace(least=1), path(A), set())

    assert [turn.least for turn in promises.asked("weights", patient=patient)] == [least]


# Recency


def judged(history: Callable[[ChaosStore, RecencyOracle], Any], capacity: int | None = 1000) -> list[str]:
    """What the oracle says of a store of ten pages that has gone through `history`."""
    ledger = Ledger()

    async def main(world: SeededWorld) -> None:
        store = ChaosStore(capacity)
        await history(store, RecencyOracle(store, ledger))

    run_seeded(0, main)
    return ledger.violations


def known(_: ObjectKey) -> bool:
    return True


OTHERS = [key(bytes([number]) * 32) for number in range(9)]


@pytest.mark.parametrize(("used_since", "wrong"), [(0, True), (6, True), (7, True), (8, False), (9, False)])
def test_a_page_that_fits_beside_all_that_was_used_since_stays(used_since: int, wrong: bool) -> None:
    """Nine of ten pages are put to use: the page itself, the one that comes, and what was used since."""

    async def history(store: ChaosStore, recency: RecencyOracle) -> None:
        stored(store, key(A))
        recency.restored(path(A), known)
        await asyncio.sleep(10 * TOLD_SECONDS)
        for other in OTHERS[:used_since]:
            recency.used(other, 100)
        recency.evicted(key(A), 100)

    words = f"forgotten: a page of 'kv' made room, though all that was used since, {100 * used_since} bytes"
    said = judged(history)
    assert [one.startswith(words) for one in said] == [True] * wrong


def test_a_page_that_a_full_store_evicts_is_judged() -> None:
    async def history(store: ChaosStore, recency: RecencyOracle) -> None:
        stored(store, key(A), *OTHERS)
        await asyncio.sleep(10 * TOLD_SECONDS)
        recency.restored(path(A), known)  # and the store is not told
        await asyncio.sleep(10 * TOLD_SECONDS)
        assert store.make_room(100)  # as an engine does before it writes

    assert len(judged(history)) == 1


def test_a_use_that_storage_could_not_know_of_counts_for_nothing() -> None:
    async def history(store: ChaosStore, recency: RecencyOracle) -> None:
        stored(store, key(A))
        await asyncio.sleep(10 * TOLD_SECONDS)
        for other in OTHERS:
            recency.used(other, 100)
        await asyncio.sleep(3 * TOLD_SECONDS)
        recency.restored(path(A), known)
        recency.evicted(key(A), 100)  # at once: nobody was told yet

    assert judged(history) == []


def test_the_end_of_a_path_may_stay_if_storage_knows_of_later_uses_of_it() -> None:
    """As when others continue at a page that has left memory, of which storage is asked just now."""

    async def history(store: ChaosStore, recency: RecencyOracle) -> None:
        stored(store, key(A), key(B))
        recency.restored(path(A), known)
        recency.asked(path(A, B).digests)
        await asyncio.sleep(10 * TOLD_SECONDS)
        for other in (key(B), *OTHERS[:7]):
            recency.used(other, 100)
        await asyncio.sleep(3 * TOLD_SECONDS)
        recency.restored(path(A), known)
        recency.evicted(key(A), 100)

    assert judged(history) == []


@pytest.mark.parametrize(
    ("knows", "restarted", "wrong"), [(True, False, True), (False, False, False), (True, True, True)]
)
def test_a_use_that_storage_was_told_of_counts(knows: bool, restarted: bool, wrong: bool) -> None:
    async def history(store: ChaosStore, recency: RecencyOracle) -> None:
        stored(store, key(A))
        await asyncio.sleep(10 * TOLD_SECONDS)
        for other in OTHERS:
            recency.used(other, 100)
        await asyncio.sleep(3 * TOLD_SECONDS)
        recency.restored(path(A), lambda _: knows)
        await asyncio.sleep(2 * TOLD_SECONDS)
        if restarted:
            recency.restarted()
        recency.evicted(key(A), 100)

    assert bool(judged(history)) == wrong


def test_what_a_cache_that_ended_had_not_told_yet_counts_for_nothing() -> None:
    async def history(store: ChaosStore, recency: RecencyOracle) -> None:
        stored(store, key(A))
        await asyncio.sleep(10 * TOLD_SECONDS)
        for other in OTHERS:
            recency.used(other, 100)
        await asyncio.sleep(3 * TOLD_SECONDS)
        recency.restored(path(A), known)
        await asyncio.sleep(0.5 * TOLD_SECONDS)
        recency.restarted()
        await asyncio.sleep(2 * TOLD_SECONDS)
        recency.evicted(key(A), 100)

    assert judged(history) == []


def test_pages_that_nothing_can_be_restored_from_may_go() -> None:
    async def history(store: ChaosStore, recency: RecencyOracle) -> None:
        stored(store, key(A), key(B), key(C), key(C, "mamba"))
        recency.restored(path(A, B, C, state=True), known)
        await asyncio.sleep(10 * TOLD_SECONDS)
        store.drop(key(B))
        recency.evicted(key(C), 100)
        recency.evicted(key(C, "mamba"), 100)

    assert judged(history) == []


def test_without_states_the_beginning_of_a_path_is_worth_something_by_itself() -> None:
    async def history(store: ChaosStore, recency: RecencyOracle) -> None:
        stored(store, key(A), key(B), key(C))
        recency.restored(path(A, B, C), known)
        await asyncio.sleep(10 * TOLD_SECONDS)
        store.drop(key(C))
        recency.evicted(key(B), 100)

    assert len(judged(history)) == 1


def test_a_path_loses_its_end_first() -> None:
    """All three were used at once, and only two fit beside what came since."""

    async def history(store: ChaosStore, recency: RecencyOracle, victim: ObjectKey) -> None:
        stored(store, key(A), key(B), key(C))
        recency.restored(path(A, B, C), known)
        await asyncio.sleep(10 * TOLD_SECONDS)
        for other in OTHERS[:6]:
            recency.used(other, 100)
        recency.evicted(victim, 100)

    async def beginning(store: ChaosStore, recency: RecencyOracle) -> None:
        await history(store, recency, key(A))

    async def end(store: ChaosStore, recency: RecencyOracle) -> None:
        await history(store, recency, key(C))

    assert len(judged(beginning)) == 1, "its end should have gone"
    assert judged(end) == []


def test_nothing_is_expected_of_what_nobody_used_or_of_a_store_without_a_bound() -> None:
    async def unused(store: ChaosStore, recency: RecencyOracle) -> None:
        stored(store, key(A))
        recency.evicted(key(A), 100)

    async def forgotten(store: ChaosStore, recency: RecencyOracle) -> None:
        stored(store, key(A))
        recency.restored(path(A), known)
        store.drop(key(A))
        recency.evicted(key(A), 100)

    async def used(store: ChaosStore, recency: RecencyOracle) -> None:
        stored(store, key(A))
        recency.restored(path(A), known)
        recency.evicted(key(A), 100)

    assert judged(unused) == judged(forgotten) == judged(used, capacity=None) == []


# Progress


class Busy:
    """An engine whose requests take a moment, and a cache whose calls take as long as they are told."""

    def __init__(self, seconds: float) -> None:
        self.said: list[str] = []
        self.served = 0
        self.seconds = seconds
        self.cache = SimpleNamespace(
            spec=SimpleNamespace(page_size=2), flush=self._wait, drain=self._wait,
            detach_storage=self._wait, attach_storage=lambda _: asyncio.sleep(0),
        )  # fmt: skip

    async def _wait(self) -> None:
        await asyncio.sleep(self.seconds)

    async def serve(self, turn: ClientTurn) -> None:
        self.served += 1
        await asyncio.sleep(0.003)

    def did(self, operation: str) -> None: ...

    def violated(self, words: str) -> None:
        self.said.append(words)


@pytest.mark.parametrize("call", ["flush", "drain", "detach"])
@pytest.mark.parametrize(("share", "wrong"), [(0.9, False), (1.1, True)])
def test_a_call_has_to_end_while_others_go_on(call: str, share: float, wrong: bool) -> None:
    engine: Any = Busy(share * BOUND_SECONDS)

    async def main(world: SeededWorld) -> None:
        steady = Steady(prompts=((1,), (2,)), pages=1, calls=(call,), large=3)
        backend: Any = None
        await SteadyTraffic(engine, steady, backend).run()

    run_seeded(0, main)
    words = f"wait: {call!r} did not end in {BOUND_SECONDS} s beside 2 clients that go on"
    assert engine.said == [words] * wrong
    assert engine.served > 100, "the clients went on meanwhile"


# Presence


@pytest.mark.parametrize(
    ("pages", "there", "found"),
    [
        (None, [b"\1\1\0\1"], 2),
        (None, [b"\1\1\1\1"], 4),
        (None, [b"\0\1"], 0),
        (1, [b"\1\1\1\1", b"\1\0\1\0"], 3),
        (2, [b"\1\1\1\1", b"\1\0\1\1"], 4),
        (2, [b"\1\1\1\1", b"\1\1\0\1"], 2),
        (2, [b"\1\1\0\1", b"\0\0\1\1"], 0),
        (3, [b"\1\1\1\1", b"\1\1\0\0"], 2),
    ],
)
def test_the_longest_prefix_needs_all_full_pages_and_its_end_of_others(
    pages: int | None, there: list[bytes], found: int
) -> None:
    coverages = [ALL_PAGES] + ([trailing_pages(pages)] if pages else [])
    assert longest(coverages, [bytearray(flags) for flags in there]) == found


HEAD = [1, 2, 3, 4]
LONG = [*HEAD, 5, 6, 7, 8]


def simulation(**slots: tuple[int, int]) -> Simulation:
    return Simulation(random.Random(0), states="mamba" in slots, slots=slots, policy=WritePolicy.WRITE_BACK)


def published(sim: Simulation, tokens: list[int]) -> Any:
    request = sim.open(tokens)
    sim.load(request)
    assert sim.compute(request, len(tokens))
    node = request.lease.node
    sim.close(request)
    return node


def test_what_is_in_memory_is_found_page_by_page() -> None:
    sim = simulation(kv=(64, 64), mamba=(8, 8))
    published(sim, HEAD)
    published(sim, LONG)
    tree = sim.planner.inventory.tree

    def seen(tokens: list[int], pages: int, seed: bytes = b"") -> list[bytes]:
        return [bytes(flags) for flags in in_memory(tree, array("q", tokens), seed, pages)]

    assert seen([*LONG, 9, 9], 5) == [b"\1\1\1\1\0", b"\0\1\0\1\0"]
    assert seen(LONG, 3) == [b"\1\1\1", b"\0\1\0"]
    assert seen([*HEAD, 5, 6, 9, 9], 4) == [b"\1\1\1\0", b"\0\1\0\0"]
    assert seen([1, 2, 9, 9], 2) == [b"\1\0", b"\0\0"]
    assert seen(LONG, 4, b"another") == [bytes(4)] * 2
    assert seen(LONG, 0) == [b"", b""]
    assert [bytes(flags) for flags in nothing(2, 3)] == [bytes(3)] * 2


def test_pages_that_are_shared_follow_one_another() -> None:
    sim = simulation(kv=(64, 64))
    node = published(sim, LONG)
    size = sim.planner.inventory.tree.page_bytes

    def shared(tokens: list[int], at: int = 0) -> int:
        return shared_pages(node, memoryview(array("q", tokens)).cast("B"), at, len(tokens) // 2, size)

    assert [shared(tokens) for tokens in (LONG, [*LONG, 9, 9], HEAD, [1, 2, 9, 9, 5, 6], [9, 9])] == [
        4,
        4,
        2,
        1,
        0,
    ]
    assert shared([0, 0, *LONG], at=1) == 4


def test_a_page_is_held_in_either_tier_and_on_its_way_up() -> None:
    sim = simulation(kv=(64, 64), mamba=(8, 8))
    node = published(sim, HEAD)
    tree, books = sim.planner.inventory.tree, sim.planner.inventory
    assert (span(tree, node, 0), span(tree, node, 1)) == ((0, 2), (1, 2))
    assert (is_held(node, 0), is_held(node, 1)) == (True, True)
    books.evict(place_of(1, Tier.DEVICE), 1, dirty=True)
    assert (is_held(node, 0), is_held(node, 1)) == (True, False)
    (copy,) = sim.planner.backups.backup(node)
    books.tree.lock_all([])
    sim.planner.copy_finished(copy, None)
    books.evict(FULL_DEVICE, 2, dirty=True)
    assert is_held(node, 0)
    request = sim.open(LONG)
    sim.load(request)
    sim.close(request)
    books.evict(FULL_DEVICE, 2, dirty=True)
    books.evict(FULL_HOST, 2, dirty=True)
    assert not is_held(node, 0)


def test_room_could_be_made_of_ends_of_paths_that_nobody_keeps() -> None:
    sim = simulation(kv=(64, 64), mamba=(8, 8))
    published(sim, HEAD)
    lower = published(sim, LONG)
    tree = sim.planner.inventory.tree
    device, states = FULL_DEVICE, place_of(1, Tier.DEVICE)
    assert (reclaimable(tree, device), reclaimable(tree, FULL_HOST), reclaimable(tree, states)) == (4, 0, 2)

    keeper = sim.open([*HEAD, 9])
    assert (reclaimable(tree, device), reclaimable(tree, states)) == (2, 1)
    longer = sim.open([*LONG, 9])
    assert (reclaimable(tree, device), reclaimable(tree, states)) == (0, 0)
    sim.close(longer)
    (copy,) = sim.planner.backups.backup(lower)
    assert reclaimable(tree, device) == 0, "they are being copied"
    sim.planner.copy_finished(copy, None)
    assert (reclaimable(tree, device), reclaimable(tree, FULL_HOST)) == (2, 4)
    sim.close(keeper)
    assert reclaimable(tree, device) == 4


# Hits: a cache that is right, and one that is wrong in one way


def script() -> Script:
    """Two prompts that begin alike, one after the other; then a restart and one of them again."""
    pace = (Pace(checkpoint=True),)
    first = ClientTurn(prompt=tuple(range(9)), patience=None, durable=True, paces=pace)
    second = ClientTurn(prompt=(*range(8), 50, 51, 52), patience=None, paces=pace)
    sizes = {"kv": CacheSizes(device=64, host=64)}
    lives = [
        Life(
            sizes=sizes,
            clients=(ChaosClient(turns=turns),),
            prefetch=PrefetchPolicy.WAIT_COMPLETE,
            patience=0.1,
        )
        for turns in ((first, second), (second,))
    ]
    return Script(seed=1, model=ModelShape(page_size=2, layers=2), lives=tuple(lives))


def found() -> list[str]:
    return run_script(script()).violations


def test_a_cache_that_gives_what_is_there_is_not_blamed() -> None:
    assert found() == []


def test_a_match_has_to_be_all_that_is_in_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    def shorter(self: Planner, tokens: array[int], seed: bytes) -> Any:
        return self.inventory.tree.match(tokens, seed, limit=min(1, len(tokens) // 2))

    monkeypatch.setattr(Planner, "_match", shorter)
    assert any(words.startswith("hit: 1 pages matched, and 4 of ") for words in found())


def test_what_storage_has_is_to_be_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        PrefetchPlanner, "choose", lambda *_, **__: ReadPlan(None, MissReason.COLD, [], 0, None, 0)
    )
    assert any(
        words.startswith("hit: 0 pages, reason cold, though memory and storage had 4 of ")
        for words in found()
    )


def test_what_matched_is_to_be_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    def cold(self: LoadPlanner, request: RequestState) -> Any:
        copies = self.load_nothing(request)
        request.cut(MissReason.COLD)
        return copies

    monkeypatch.setattr(LoadPlanner, "load", cold)
    assert any(
        words.startswith("hit: 0 of 8 tokens that matched, though there was room") for words in found()
    )


def test_a_script_says_what_a_request_must_find() -> None:
    def asked(least: int) -> list[str]:
        first, second = script().lives
        turn = msgspec.structs.replace(second.clients[0].turns[0], least=least)
        life = msgspec.structs.replace(second, clients=(ChaosClient(turns=(turn,)),))
        return run_script(msgspec.structs.replace(script(), lives=(first, life))).violations

    assert asked(5) == []
    assert asked(6) == ["least: 5 pages, reason none, though 6 of 5 must be there"]


@pytest.mark.parametrize(
    "reason", [MissReason.DEADLINE, MissReason.STATE, MissReason.HOST_CAPACITY, MissReason.STORAGE_FAILED]
)
def test_a_reason_has_to_be_true(reason: MissReason, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Planner, "reason", lambda *_: reason)
    assert any(words.startswith(f"reason: {reason.value}, with ") for words in found())


def test_room_that_could_be_made_is_not_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(SlotInventory, "_make_room", lambda self, at, count: at != FULL_HOST or not count)
    assert any(words.startswith("room: ") and words.endswith("are free or could be") for words in found())


def test_a_wait_is_no_longer_than_storage_takes(monkeypatch: pytest.MonkeyPatch) -> None:
    prefetch = Prefetcher.prefetch

    async def slow(self: Prefetcher, request: RequestState, *others: Any) -> None:
        await prefetch(self, request, *others)
        await asyncio.sleep(0.04)

    monkeypatch.setattr(Prefetcher, "prefetch", slow)
    assert any(words.startswith("wait: a request waited 0.04") for words in found())


@pytest.mark.parametrize("forgets", [True, False])
def test_what_is_marked_stored_is_in_storage(forgets: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not forgets:
        monkeypatch.setattr(BackupPlanner, "forget_stored", lambda self: None)
    first, *later = script().lives
    others = ChaosClient(
        turns=tuple(
            ClientTurn(prompt=tuple(range(begin, begin + 5)), patience=None, durable=True)
            for begin in range(100, 400, 10)
        )
    )
    clears = (ScriptEvent(wait=5e-3, what="clear"),)
    life = msgspec.structs.replace(first, clients=(*first.clients, others), events=clears)
    violations = run_script(msgspec.structs.replace(script(), lives=(life, *later))).violations
    wrong = [words for words in violations if words.endswith("of kv are marked stored, and are not")]
    assert bool(wrong) is not forgets
