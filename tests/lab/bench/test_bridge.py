"""`bench bridge`: it measures what it says, with the bytes of real copies behind it."""

from __future__ import annotations

import asyncio
import json

import pytest

from asynchicache.cli.main import main
from asynchicache.errors import ConfigError
from asynchicache.transfer.local import LocalTransfers
from asynchicache_lab.bench.bridge import BridgeOptions, run_bridge


def test_one_wake_tells_of_64_completions() -> None:
    report = asyncio.run(run_bridge(BridgeOptions(rounds=9, pages=2)))

    assert report.wakes_per_64 == 1
    assert 0 < report.wake_us < report.resume_us
    assert min(report.build_us, report.submit_us, report.submit_wall_us) > 0


def test_each_round_submits_64_operations_of_one_tick(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[LocalTransfers] = []
    aclose = LocalTransfers.aclose

    async def watched(transfers: LocalTransfers, deadline_seconds: float) -> int:
        opened.append(transfers)
        return await aclose(transfers, deadline_seconds)

    monkeypatch.setattr(LocalTransfers, "aclose", watched)
    asyncio.run(run_bridge(BridgeOptions(rounds=3, pages=1)))

    statistics = opened[0].statistics()
    assert (statistics.operations, statistics.launches) == (3 * 64, 3)


def test_the_command_prints_its_figures(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "bridge", "--rounds", "3", "--json", "-"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert {"submit_us", "wake_us", "resume_us", "wakes_per_64"} <= found.keys()


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="--rounds 0"):
        BridgeOptions(rounds=0)
