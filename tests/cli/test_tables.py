"""What commands show to people can be read in 80 columns: nothing is cut, and no number is broken."""

from collections.abc import Callable
from pathlib import Path

import pytest
from rich.console import RenderableType

from asynchicache.cli import serve
from asynchicache.cli.commands import Command, find_commands
from asynchicache.cli.main import main
from asynchicache.cli.output import Output
from asynchicache.integrations.serve.api import RequestCounts
from asynchicache.replay.report import ReplayReport
from cli.readable import assert_readable

TRACE = Path(__file__).parents[1] / "data" / "traces" / "claude_code_weka_16_sessions.jsonl.gz"
RUN: dict[tuple[str, ...], dict[str, object]] = {
    ("replay",): {"trace": str(TRACE), "pools": "kv,mamba", "capacity_share": "0.3", "host_share": "0.5"},
    ("doctor",): {},
}
"""By command, options of a run that takes no time."""


@pytest.mark.parametrize(
    "command", [one for one in find_commands() if one.path in RUN], ids=lambda one: " ".join(one.path)
)
def test_a_run_is_readable(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_readable(command.load()(command.options(**RUN[command.path]), Output(None)).view)


def replayed() -> RenderableType:
    """2.7 billion tokens in pages of one: the widest numbers there are."""
    tiers, many = ("device", "host", "storage"), 42_345_678
    report = ReplayReport(
        title="trace",
        requests=23_608,
        prompt_tokens=2_712_345_678,
        trace_seconds=3600.0,
        hit_rate=0.5,
        request_hit_rate=0.5,
        ceiling=0.6,
        tokens_by_tier=dict.fromkeys(tiers, many),
        hit_rate_by_tier=dict.fromkeys(tiers, 0.5),
        working_set={"mamba": many},
        slots={"mamba": dict.fromkeys(tiers, many)},
        evicted_pages=many,
        evicted={"mamba": dict.fromkeys(tiers, many)},
        states_kept=many,
        block_size=512,
        longest_prompt=many,
        tokens_per_end=many,
        misses={"mamba": {"device_capacity": many}},
        reasons={},
        problems=[],
        skipped=10**9,
        seconds=1.0,
    )
    return report.present()


def served() -> RenderableType:
    return serve._present(RequestCounts(10**6, 10**4, {429: 10**5, 503: 10**4}, 10**10, 10**10, 10**8))


@pytest.mark.parametrize("view", [replayed, served])
def test_what_is_long_is_readable(view: Callable[[], RenderableType]) -> None:
    assert_readable(view())


def test_a_pipe_gets_the_tables_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "multiturn", "--num-clients", "1", "--num-rounds", "1"]) == 0
    assert capsys.readouterr().out.lstrip(" ").startswith("multiturn")
