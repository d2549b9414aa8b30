"""`bench multiturn` serves exactly what can be served, and sees wrong bytes."""

import asyncio
from fractions import Fraction
from typing import Any

import pytest

from asynchicache.errors import ConfigError
from asynchicache.planner.request_state import RequestState
from asynchicache.testing.oracle import ByteOracle
from asynchicache.tree import tails
from asynchicache.types import Tier
from asynchicache_lab.bench.multiturn import MultiturnOptions, ceiling, run_multiturn
from asynchicache_lab.bench.tally import HitReport
from asynchicache_lab.simulator import VirtualCache


def run(**flags: int | float | bool) -> HitReport:
    return asyncio.run(run_multiturn(MultiturnOptions(**flags), lambda done, turns: None))


def test_ten_clients_of_twelve_rounds_reach_the_ceiling() -> None:
    report = run(num_clients=10, num_rounds=12, checkpoint_interval=256, mamba_slots=6, host_ratio=2)

    assert report.ok
    assert Fraction(report.hit_rate).limit_denominator(10_000) == Fraction(517, 576)
    expected = [0, 0.583333, 0.75, 0.821429, 0.861111, 0.886364, 0.903846]
    assert report.round_rates[:7] == pytest.approx(expected, abs=1e-6)
    assert report.turns == 120
    assert report.verified_pages == 10 * sum(r * 32 - 4 + 1 for r in range(1, 12))
    assert sum(report.tokens_by_tier.values()) == 10 * sum(r * 2048 - 256 for r in range(1, 12))


def test_stamps_and_bytes_give_the_same_figures() -> None:
    sizes = {"num_clients": 5, "num_rounds": 5, "mamba_slots": 4, "host_ratio": 0.8}
    stamps, moved = run(**sizes), run(**sizes, move_bytes=True)

    assert moved.ok
    assert moved.round_rates == stamps.round_rates
    assert moved.tokens_by_tier == stamps.tokens_by_tier
    assert moved.verified_pages == stamps.verified_pages


def test_a_finer_grid_of_checkpoints_keeps_more() -> None:
    report = run(checkpoint_interval=64)

    assert report.ok
    assert report.hit_rate == pytest.approx(0.911892, abs=1e-6)


def test_ends_inside_a_page_lose_no_token() -> None:
    """With pages of 64: 0.9166, where whole pages reach 0.9119."""
    report = run(tails=True)

    assert report.ok
    assert report.hit_rate == report.limit.hit_rate == pytest.approx(0.916592, abs=1e-6)


def test_a_tail_with_a_token_too_many_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    find = tails.find

    def generous(*arguments: Any) -> tails.Tail | None:
        tail = find(*arguments)
        return tail and tail._replace(tokens=tail.tokens + 1)

    monkeypatch.setattr(tails, "find", generous)

    assert not run(tails=True, num_clients=2, num_rounds=3).ok


def test_tails_need_pages_that_can_be_divided() -> None:
    with pytest.raises(ConfigError, match="--tails"):
        run(tails=True, window=512)


def test_states_that_stay_on_the_device_are_lost_when_it_is_full() -> None:
    report = run(offload_mamba=False)

    assert report.ok
    assert report.hit_rate <= 0.5385


def test_states_that_all_fit_on_the_device_need_no_other_tier() -> None:
    report = run(num_clients=3, num_rounds=4, mamba_slots=40, offload_mamba=False)

    assert report.hit_rate == float(report.limit.hit_rate)
    assert report.tokens_by_tier["host"] == report.tokens_by_tier["storage"] == 0


@pytest.mark.parametrize(
    ("flags", "rate"),
    [
        ({}, Fraction(517, 576)),
        ({"checkpoint_interval": 64}, Fraction(2101, 2304)),
        ({"num_rounds": 1}, Fraction(0)),
        (
            {"output_length": 1, "request_length": 64, "num_rounds": 2, "checkpoint_interval": 64},
            Fraction(64, 193),
        ),
    ],
)
def test_ceiling(flags: dict[str, int], rate: Fraction) -> None:
    assert ceiling(MultiturnOptions(**flags)) == rate


def test_windows_of_all_conversations_are_enough() -> None:
    """The lengths of SGLang's sliding-window offload (sgl-project/sglang#23391), with fewer clients."""
    options = {"num_clients": 4, "num_rounds": 12, "request_length": 2048, "output_length": 1024}
    report = run(**options, page_size=64, window=128, host_ratio=2)

    assert report.ok
    assert report.hit_rate == pytest.approx(0.888795, abs=1e-6)
    assert report.tokens_by_tier == {"device": 4 * 202_048, "host": 0, "storage": 0}
    assert report.verified_pages == 4 * sum(r * 48 - 1 + 2 for r in range(1, 12))
    assert MultiturnOptions(**options, window=128).sizes.slots()["swa"] == ((4 + 3) * 3 + 1, 44)


def test_windows_of_real_bytes_give_the_same_figures() -> None:
    sizes = {"num_clients": 3, "num_rounds": 4, "request_length": 300, "output_length": 77, "page_size": 16}
    stamps, moved = (run(**sizes, window=40, move_bytes=real) for real in (False, True))

    assert stamps.ok
    assert moved.ok
    assert moved.round_rates == stamps.round_rates
    assert moved.tokens_by_tier == stamps.tokens_by_tier
    assert moved.verified_pages == stamps.verified_pages
    assert moved.hit_rate == pytest.approx(float(moved.limit.hit_rate))


def test_lengths_need_not_be_whole_pages() -> None:
    flags = {"num_clients": 3, "num_rounds": 5, "request_length": 100, "output_length": 77}
    report = run(**flags, page_size=16, checkpoint_interval=32)

    assert report.ok
    assert report.hit_rate == pytest.approx(float(report.limit.hit_rate))


def test_the_same_seed_gives_the_same_result() -> None:
    first, again = (run(num_clients=4, num_rounds=4, seed=5) for _ in range(2))

    assert (first.hit_rate, first.tokens_by_tier) == (again.hit_rate, again.tokens_by_tier)


def test_wrong_bytes_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    write = ByteOracle.write

    def spoil_states(self: ByteOracle, pool: str, slots: list[int], digests: list[bytes]) -> None:
        write(self, pool, slots, [bytes(32)] * len(slots) if pool == "mamba" else digests)

    monkeypatch.setattr(ByteOracle, "write", spoil_states)
    report = run(num_clients=2, num_rounds=3, move_bytes=True)

    assert report.wrong_pages == 4  # one state a turn, from the second round on
    assert not report.ok


def test_wrong_stamps_are_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    check = VirtualCache.check

    def spoil_states(self: VirtualCache, request: RequestState, stamps: list[bytes]) -> tuple[int, int]:
        for tier in (Tier.DEVICE, Tier.HOST):
            self.memory["mamba", tier][:] = [b"spoiled"] * len(self.memory["mamba", tier])
        return check(self, request, stamps)

    monkeypatch.setattr(VirtualCache, "check", spoil_states)
    report = run(num_clients=2, num_rounds=3, mamba_slots=40)

    assert report.wrong_pages == 4
    assert not report.ok


@pytest.mark.parametrize(("real", "pool"), [(False, "swa"), (True, "swa"), (True, "kv")])
def test_a_window_that_is_not_what_was_computed_is_seen(
    monkeypatch: pytest.MonkeyPatch, real: bool, pool: str
) -> None:
    if real:
        write = ByteOracle.write
        spoiled = [bytes(32)]

        def spoil(self: ByteOracle, name: str, slots: list[int], digests: list[bytes]) -> None:
            write(self, name, slots, spoiled * len(slots) if name == pool else digests)

        monkeypatch.setattr(ByteOracle, "write", spoil)
    else:
        monkeypatch.setattr(VirtualCache, "fill", lambda self, request, first, stamps: None)
    report = run(num_clients=2, num_rounds=3, window=128, move_bytes=real)

    assert report.wrong_pages > 0
    assert not report.ok


@pytest.mark.parametrize(
    "flags",
    [
        {"num_clients": 0},
        {"window": -1},
        {"mamba_slots": 2},
        {"checkpoint_interval": 65},
        {"host_ratio": float("nan")},
    ],
)
def test_values_outside_their_rule_are_refused(flags: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match="--" + next(iter(flags)).replace("_", "-")):
        MultiturnOptions(**flags)
