"""The soak: it runs for real, it sees what it is to see, and its verdicts follow from its samples."""

from __future__ import annotations

import asyncio
import json
import random
from array import array
from pathlib import Path

import pytest

from asynchicache.cli.main import main
from asynchicache.controller.tasks import OwnedTasks
from asynchicache.errors import ConfigError
from asynchicache.planner.planner import Planner
from asynchicache.planner.request_state import RequestState
from asynchicache.testing.oracle import ByteOracle
from asynchicache_lab.bench.soak import report, run
from asynchicache_lab.bench.soak.model import HitModel, SharedBound
from asynchicache_lab.bench.soak.options import SoakOptions
from asynchicache_lab.bench.soak.samples import ProcessSample, hit_drift, hit_rates, memory_level, model_gap
from asynchicache_lab.bench.soak.stores import FileStore, RedisStore
from asynchicache_lab.bench.soak.traffic import ConversationPool, Engine, soak_spec
from asynchicache_lab.bench.soak.watchdog import LoopWatchdog
from engines import executable, module

SECONDS = 0.1
PATIENT = ["--stall-ms", "60000", "--clients", "4"]  # nothing here depends on how fast the machine is


def soak(tmp_path: Path, *arguments: str, seconds: float = SECONDS) -> tuple[int, dict[str, object]]:
    """The exit code and the result of a short soak."""
    result = tmp_path / "soak.json"
    flags = ["--minutes", str(seconds / 60), "--folder", str(tmp_path), "--json", str(result)]
    code = main(["soak", *flags, *PATIENT, *arguments])
    return code, json.loads(result.read_text())


def test_a_short_soak_serves_and_leaves_nothing(tmp_path: Path) -> None:
    code, result = soak(tmp_path, "--reopen-seconds", "0.7", "--fault-seconds", "0.2", seconds=1.5)

    assert (code, result["violations"]) == (0, [])
    assert result["turns"]
    assert result["checked"]
    assert result["caches"] > 1
    assert result["tasks"] == 1, "the one that runs the soak"
    assert result["rss_bytes"] is result["hit_drift"] is None, "too short to judge"
    assert [path.name for path in tmp_path.iterdir()] == ["soak.json"]


def test_wrong_bytes_end_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = ByteOracle.write
    monkeypatch.setattr(
        ByteOracle,
        "write",
        lambda self, pool, slots, digests: write(self, pool, slots, [b"\1" * 32] * len(slots)),
    )

    code, result = soak(tmp_path)

    assert code == 1
    assert result["wrong"]


def test_a_task_that_is_left_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def leave(self: OwnedTasks) -> None:
        return

    monkeypatch.setattr(OwnedTasks, "aclose", leave)

    code, result = soak(tmp_path)

    assert code == 1
    assert any("left behind: asynchicache-tasks" in words for words in result["violations"])


def test_a_slot_that_is_left_ends_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the pages that nobody published, so of the last one of nearly every request."""
    release = Planner.release

    def keep_one(planner: Planner, request: RequestState, error: BaseException | None = None) -> None:
        del request.pages[request.borrowed : request.borrowed + 1]
        release(planner, request, error)

    monkeypatch.setattr(Planner, "release", keep_one)
    monkeypatch.setattr(run, "HANG_SECONDS", 0.1)

    code, result = soak(tmp_path)

    assert code == 1
    assert any("leaked or stolen" in words for words in result["violations"])


def test_what_a_client_raises_is_raised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    async def fail(self: Engine, *_: object) -> None:
        raise ZeroDivisionError("made to fail")

    monkeypatch.setattr(Engine, "serve", fail)

    with pytest.raises(ZeroDivisionError):
        soak(tmp_path)


@pytest.mark.soak
@pytest.mark.engine("redis")
@pytest.mark.parametrize("loop", ["asyncio", "uvloop"])
@pytest.mark.parametrize("storage", ["file", "redis"])
def test_three_minutes_on_every_store_and_loop(tmp_path: Path, storage: str, loop: str) -> None:
    if storage == "redis":
        executable("redis-server")
    if loop == "uvloop":
        module("uvloop")

    code, result = soak(tmp_path, "--storage", storage, "--loop", loop, "--stall-ms", "500", seconds=180)

    assert (code, result["violations"]) == (0, [])
    assert result["rss_bytes"]["drift"] <= 0.05


@pytest.mark.parametrize("flag", [{"minutes": 0}, {"loop": "trio"}, {"storage": "tape"}, {"stall_ms": -1}])
def test_bad_flags_are_named(flag: dict[str, object]) -> None:
    name, value = next(iter(flag.items()))
    with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} {value}"):
        SoakOptions(**flag)


# The watchdog


@pytest.mark.asyncio
async def test_the_watchdog_names_what_blocks_the_loop() -> None:
    def block_on_purpose() -> None:
        assert watchdog.wait_until_seen(30)

    with LoopWatchdog(0.05) as watchdog:
        await asyncio.sleep(0)
        block_on_purpose()
        while not (watchdog.stalls or watchdog.starved):  # noqa: ASYNC110 - it tells nobody
            await asyncio.sleep(0)

    assert all("block_on_purpose" in stall.stack for stall in watchdog.stalls)
    assert watchdog.longest > 0 or watchdog.starved  # a machine with other things to do


@pytest.mark.asyncio
async def test_the_watchdog_does_not_mind_those_who_wait() -> None:
    with LoopWatchdog(60.0) as watchdog:
        await asyncio.sleep(0.1)

    assert not watchdog.stalls


# Verdicts


def samples(*, rss: list[int], prompts: int = 100, hits: list[int] | None = None) -> list[ProcessSample]:
    """One every quarter of a minute; `hits` of each quarter's `prompts` tokens, and 40 of the model's."""
    hits = hits or [50] * len(rss)
    return [
        ProcessSample(15.0 * n, size, 1, 1, 1, n, n * prompts, sum(hits[:n]), n * 40)
        for n, size in enumerate(rss)
    ]


def test_memory_is_judged_after_the_first_minute() -> None:
    assert memory_level(samples(rss=[1, 50, 90, 95, 100])) is None

    level = memory_level(samples(rss=[1, 50, 90, 95, 100, 103, 98, 101]))

    assert (level.level, level.lowest, level.highest, level.last) == (100, 98, 103, 101)
    assert level.drift == 0.03


def test_memory_that_shrinks_has_drifted_too() -> None:
    assert memory_level(samples(rss=[0, 0, 0, 0, 100, 80])).drift == 0.2


def test_hit_rates_are_those_of_whole_minutes() -> None:
    found = samples(rss=[1] * 13, hits=[0] * 4 + [60] * 4 + [80] * 5)

    assert hit_rates(found) == [0.0, 0.6, 0.8]
    assert hit_drift(hit_rates(found)) == pytest.approx(0.2)
    assert hit_drift([0.0, 0.6]) is None


def test_the_model_is_compared_after_the_first_minute() -> None:
    found = samples(rss=[1] * 9, hits=[0] * 4 + [42, 38, 43, 41, 0])

    assert model_gap(found) == pytest.approx(0.01)
    assert model_gap(found[:5]) is None
    assert model_gap(found[:4]) is None


@pytest.mark.parametrize("gap", [-0.02, 0.02])
def test_hits_unlike_the_models_end_it_where_nothing_goes_wrong(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, gap: float
) -> None:
    monkeypatch.setattr(report, "model_gap", lambda samples: gap)

    code, result = soak(tmp_path, "--fault-seconds", "0")

    assert code == 1
    assert f"the hit rate is {gap:+.2%} from the model's; 1% at most" in result["violations"]
    assert soak(tmp_path)[0] == 0, "with faults it is told, and not judged"


def test_without_faults_every_turn_is_in_storage_and_the_model_is_there(tmp_path: Path) -> None:
    code, result = soak(tmp_path, "--fault-seconds", "0", "--reopen-seconds", "0.7", seconds=1.5)

    assert (code, result["violations"]) == (0, [])
    skipped = result["unwritten"].get("states_skipped", 0)
    assert result["not_durable"] <= skipped, "only turns whose last state found no slot are not durable"
    assert set(result["happened"]) == {"close"}
    assert 0 < result["model_hit_rate"] < 1
    assert result["model_gap"] is None, "too short to judge"
    assert result["unwritten"].get("host_pressure", 0) == 0


# The model

PAGE = 16
_STORE = {"kv": 4, "dsa": 1, "mamba": 8, "swa": 2}
_PARTS = [
    [SharedBound(_STORE, 90)],
    [
        SharedBound({"kv": 1}, 12),
        SharedBound({"dsa": 1}, 11),
        SharedBound({"mamba": 1}, 4),
        SharedBound({"swa": 1}, 9),
    ],
]
_MEMORY = [SharedBound({"kv": 1, "dsa": 0}, 6), SharedBound({"mamba": 1}, 2), SharedBound({"swa": 1}, 5)]


class BruteForce:
    """The rules of the model taken literally: lists, and prefixes of tokens as names."""

    def __init__(self, memory: list[SharedBound], store: list[SharedBound]) -> None:
        self.tiers = [(memory, []), (store, [])]

    @staticmethod
    def needs(namespace: str, tokens: array[int], pages: int) -> list[tuple[str, str, tuple[int, ...]]]:
        found = []
        for number in range(pages, 0, -1):
            page = (namespace, tuple(tokens[: number * PAGE]))
            if number == pages:
                found.append(("mamba", *page))
            if number > pages - 2:
                found.append(("swa", *page))
            found += [("kv", *page), ("dsa", *page)]
        return found

    def request(self, namespace: str, tokens: array[int]) -> int:
        lengths = [
            pages
            for pages in range(1, (len(tokens) - 1) // PAGE + 1)
            if all(any(one in kept for _, kept in self.tiers) for one in self.needs(namespace, tokens, pages))
        ]
        pages = max(lengths, default=0)
        self.use(self.needs(namespace, tokens, pages))
        return pages * PAGE

    def publish(self, namespace: str, tokens: array[int], start: int, end: int, *, state: bool) -> None:
        pages = end // PAGE
        brought = [
            (pool, namespace, tuple(tokens[: number * PAGE]))
            for number in range(pages, start // PAGE, -1)
            for pool in ("swa", "kv", "dsa")
        ]
        needed = self.needs(namespace, tokens, pages)
        self.use(brought + [one for one in needed if state or one[0] != "mamba"])

    def use(self, things: list[tuple[str, str, tuple[int, ...]]]) -> None:
        for parts, kept in self.tiers:
            for one in things:
                if one in kept:
                    kept.remove(one)
                kept.append(one)
            for part in parts:
                while sum(part.costs.get(pool, 0) for pool, *_ in kept) > part.capacity:
                    oldest = next(one for one in kept if one[0] in part.costs)
                    full = oldest[0] in ("kv", "dsa")
                    kept[:] = [one for one in kept if one != oldest and not (full and one[1:] == oldest[1:])]


@pytest.mark.parametrize("parts", _PARTS)
@pytest.mark.parametrize("seed", range(20))
def test_the_model_hits_what_brute_force_does(seed: int, parts: list[SharedBound]) -> None:
    chance = random.Random(seed)
    model, brute = HitModel(soak_spec(), _MEMORY, parts), BruteForce(_MEMORY, parts)
    hits = 0
    for _ in range(150):
        whose, tokens = chance.choice("ab"), array("q", (chance.randrange(2) for _ in range(4)))
        tokens = array("q", (one for one in tokens for _ in range(PAGE)))[
            : chance.randrange(20, 4 * PAGE + 1)
        ]
        hit = model.request(whose, tokens)
        assert hit == brute.request(whose, tokens)
        hits += hit
        end = chance.randrange(hit, len(tokens) + 1)
        for each in (model, brute):
            each.publish(whose, tokens, hit, end, state=end % PAGE == 0 or seed % 2 == 0)
        if chance.random() < 0.03:
            model.forget_memory()
            brute.tiers[0][1].clear()
    assert hits == model.hit_tokens > 0


def model_of(**slots: int) -> HitModel:
    """A model whose store has so many slots, and whose memory has none to speak of."""
    parts = [SharedBound({pool: 1}, slots.get(pool, 100)) for pool in ("kv", "dsa", "mamba", "swa")]
    return HitModel(soak_spec(), [SharedBound(dict.fromkeys(_STORE, 1), 0)], parts)


def prompt(first: int, pages: int) -> array[int]:
    return array("q", [first] * (pages * PAGE + 1))


def test_a_path_loses_its_end_first_and_is_a_hit_where_a_state_is() -> None:
    model = model_of(kv=5)
    for end in (PAGE, 3 * PAGE):
        model.publish("a", prompt(1, 3), 0, end, state=True)
    model.publish("a", prompt(2, 3), 0, 3 * PAGE, state=True)  # takes the last page of the other

    assert model.request("a", prompt(1, 3)) == PAGE, "two pages are left, and a state after the first"
    assert model.request("b", prompt(1, 3)) == 0, "of somebody else"


def test_a_use_keeps_a_path() -> None:
    model = model_of(kv=4)
    for first in (1, 2):
        model.publish("a", prompt(first, 2), 0, 2 * PAGE, state=True)
    model.request("a", prompt(1, 2))
    model.publish("a", prompt(3, 2), 0, 2 * PAGE, state=True)

    assert [model.request("a", prompt(first, 2)) for first in (1, 2)] == [2 * PAGE, 0]


# Stores


@pytest.mark.asyncio
async def test_pools_have_equal_shares_of_a_folder(tmp_path: Path) -> None:
    bounds = await FileStore(tmp_path, random.Random(0), 32 << 20).bounds(soak_spec())

    assert [part.costs for part in bounds] == [{"kv": 4096}, {"dsa": 4096}, {"mamba": 8192}, {"swa": 4096}]
    assert len({part.capacity for part in bounds}) == 1
    assert 30 << 20 < sum(part.capacity for part in bounds) < 32 << 20


@pytest.mark.engine("redis")
@pytest.mark.asyncio
async def test_a_server_says_what_its_pages_take(tmp_path: Path) -> None:
    executable("redis-server")
    store = RedisStore(tmp_path, random.Random(0), 32 << 20)
    await store.start()
    try:
        (bound,) = await store.bounds(soak_spec())
    finally:
        await store.stop()

    frames = {"kv": 8192, "dsa": 4352, "mamba": 12288, "swa": 5120}
    assert all(size < bound.costs[pool] < 1.4 * size for pool, size in frames.items())
    assert 28 << 20 < bound.capacity < 32 << 20


def test_conversations_grow_and_are_replaced() -> None:
    conversations = ConversationPool(random.Random(0), 1)
    lengths = []
    for _ in range(40):
        conversation = conversations.take()
        lengths.append(len(conversation.tokens))
        conversations.give_back(conversation)

    assert max(lengths) < 30 * 16 + 40
    assert sorted(lengths) != lengths, "a new one began"


def test_conversations_are_of_all_ages_from_the_beginning() -> None:
    conversations = ConversationPool(random.Random(0), 100)

    lengths = sorted(len(conversations.take().tokens) for _ in range(100))

    assert lengths[10] < 220 < lengths[50] < 420 < lengths[90]
