"""The soak: it runs for real, it sees what it is to see, and its verdicts follow from its samples."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import pytest

from asynchicache.bench.soak import run
from asynchicache.bench.soak.options import LOOPS, STORES, SoakOptions
from asynchicache.bench.soak.samples import Sample, hit_drift, hit_rates, memory_level
from asynchicache.bench.soak.traffic import Engine, Talks
from asynchicache.bench.soak.watchdog import LoopWatchdog
from asynchicache.bench.synthetic import ByteOracle
from asynchicache.cli.main import main
from asynchicache.controller.planner import Planner
from asynchicache.controller.tasks import OwnedTasks
from asynchicache.errors import ConfigError
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
    release = Planner.release

    def keep_one(planner: Planner, sequence) -> None:
        sequence.duplicates = []
        release(planner, sequence)

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
@pytest.mark.parametrize("loop", LOOPS)
@pytest.mark.parametrize("storage", STORES)
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


def samples(*, rss: list[int], prompts: int = 100, hits: list[int] | None = None) -> list[Sample]:
    """One every quarter of a minute; `hits` of each quarter's `prompts` tokens."""
    hits = hits or [50] * len(rss)
    return [Sample(15.0 * n, size, 1, 1, 1, n, n * prompts, sum(hits[:n])) for n, size in enumerate(rss)]


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


def test_conversations_grow_and_are_replaced() -> None:
    talks = Talks(random.Random(0), 1)
    lengths = []
    for _ in range(40):
        talk = talks.take()
        lengths.append(len(talk.tokens))
        talks.give_back(talk)

    assert lengths[0] < 200
    assert max(lengths) < 30 * 16 + 40
    assert sorted(lengths) != lengths, "a new one began"
