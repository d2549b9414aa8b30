"""What commands show to people can be read in 80 columns: nothing is cut, and no number is broken."""

import re
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from io import StringIO
from pathlib import Path

import pytest
from rich.console import Console, RenderableType

from asynchicache.cli import serve
from asynchicache.cli.commands import Command, find_commands
from asynchicache.cli.main import main
from asynchicache.cli.output import Output
from asynchicache.integrations.serve.api import RequestCounts
from asynchicache.replay.report import ReplayReport
from asynchicache.types import Tier
from asynchicache_lab.bench.demo.results import DemoResult, ModeResult, RoundResult
from asynchicache_lab.bench.overlap import OverlapReport, OverlapRow
from asynchicache_lab.bench.serve.clients import ServeTurn
from asynchicache_lab.bench.serve.options import ServeBenchOptions
from asynchicache_lab.bench.serve.report import ServeReport
from asynchicache_lab.bench.soak.model import HitModel
from asynchicache_lab.bench.soak.report import SoakReport
from asynchicache_lab.bench.soak.samples import ProcessSample
from asynchicache_lab.bench.soak.traffic import Models, SoakCounters, soak_spec
from asynchicache_lab.bench.transfer import TransferReport, TransferRow
from asynchicache_lab.cli import demo

TRACE = Path(__file__).parents[1] / "data" / "traces" / "claude_code_weka_16_sessions.jsonl.gz"
RUN: dict[tuple[str, ...], dict[str, object]] = {
    ("bench", "multiturn"): {"num_clients": 2, "num_rounds": 2, "request_length": 128, "output_length": 128},
    ("bench", "shared-prefix"): {"gsp_num_groups": 2, "gsp_system_prompt_len": 128},
    ("bench", "tree"): {"scenario": "tiny"},
    ("bench", "bridge"): {"rounds": 1},
    ("bench", "stall"): {"page_bytes": 4096, "pages": 8},
    ("bench", "transfer"): {"row_mib": 1, "rounds": 1},
    ("bench", "overlap"): {"layers": 2, "layer_mib": 1, "rounds": 1},
    ("bench", "ranks"): {
        "simulated": True,
        "ranks": 2,
        "conversations": 2,
        "request_length": 128,
        "decode_steps": 1,
        "collectives": 2,
    },
    ("bench", "storage"): {"page_bytes": 4096, "pages": 8, "rounds": 1, "through_controller": True},
    ("replay",): {"trace": str(TRACE), "pools": "kv,mamba", "capacity_share": "0.3", "host_share": "0.5"},
    ("chaos",): {"seeds": 1, "jobs": 1},
    ("doctor",): {},
}
"""By command, options of a run that takes no time."""


def shown(view: RenderableType, width: int) -> list[str]:
    written = StringIO()
    Console(file=written, width=width).print(view)
    return written.getvalue().splitlines()


def letters(lines: list[str]) -> Counter[str]:
    """All but what tables are drawn with: a long path may be folded, but no letter of it is lost."""
    return Counter(re.sub(r"[\s\u2500-\u257f]", "", "".join(lines)))


def figures(lines: list[str]) -> Counter[str]:
    """Cells that begin with a digit, whole: a number and its unit."""
    cells = (cell.strip() for line in lines for cell in re.split("[│┃]|  +", line))
    return Counter(cell for cell in cells if re.match(r"\d[\d.,]*( [KM]?i?B| us| ms|%|$)", cell))


def assert_readable(view: RenderableType) -> None:
    narrow, wide = shown(view, 80), shown(view, 400)
    assert [line for line in narrow if "…" in line or len(line) > 80] == []
    assert letters(narrow) == letters(wide)
    assert not figures(wide) - figures(narrow)


@pytest.mark.parametrize(
    "command", [one for one in find_commands() if one.path in RUN], ids=lambda one: " ".join(one.path)
)
def test_a_run_is_readable(command: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert_readable(command.load()(command.options(**RUN[command.path]), Output(None)).view)


def transfer() -> RenderableType:
    """Both directions of one pool, each by a path of its own, as on a GPU."""
    load = TransferRow("load", "page_first_direct", "mamba", 255 << 10, 132, "kernel", 57.12, 63.2, 0.91)
    backup = replace(load, direction="backup", path="batch")
    longer = replace(load, page_bytes=4 << 20, run_bytes=100 << 10), replace(backup, page_bytes=4 << 20)
    return TransferReport("cuda:0", [load, backup, *longer], ok=True).present()


def overlap() -> RenderableType:
    return OverlapReport("cuda:0", [OverlapRow(*[12345.67] * 7)], 1.0, 1.0, ok=True).present()


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


def demonstrated() -> RenderableType:
    tiers = {"device": 112_345, "host": 112_345, "storage": 112_345}
    mode = ModeResult(0.8976, [RoundResult(1.0, 12345.6)] * 12, 1234.5, 1234.5, tiers, tokens_equal=False)
    modes = dict.fromkeys(("uncached", "no_offload", "hybrid", "restart"), mode)
    words = "10 clients, 12 rounds, 32 tokens in and 32 out a round, pages of 8 tokens"
    return demo.present(DemoResult("qwen3_5_text", words, Fraction(9, 10), modes, None, "index.html", 1.0))


def served() -> RenderableType:
    return serve._present(RequestCounts(10**6, 10**4, {429: 10**5, 503: 10**4}, 10**10, 10**10, 10**8))


def bench_served() -> RenderableType:
    options = ServeBenchOptions(num_clients=2, num_rounds=3)
    rounds = [[ServeTurn([1], 1000, 123456.0)] * 2 for _ in range(3)]
    memory = [100, 200, 200, 210, 205, 202]
    return ServeReport(options, rounds, rounds, rounds, rss_bytes=memory, errors=["client 1"]).present()


def soaked() -> RenderableType:
    tokens = Counter(dict.fromkeys(Tier, 10**10))
    model = HitModel(soak_spec(), [], [])
    model.hit_tokens = model.memory_tokens = 10**10
    played = SoakCounters(
        Models(model, model), 10**6, 10**4, 10**4, 10**11, tokens, checked=10**9, wrong=["slot 1 is wrong"]
    )
    return SoakReport(
        storage="redis",
        loop="uvloop",
        minutes=600.0,
        caches=9,
        happened={f"things of kind {kind}": 12_345 for kind in range(12)},
        served=played,
        samples=[ProcessSample(36000.0, 1 << 30, 10, 10, 10, 10**6, 10**11, 10**10, 10**10)],
        memory=None,
        hit_rates=[0.5],
        hit_drift=0.01,
        model_gap=0.01,
        unwritten={"shed": 12_345},
        stalls=[],
        starved=123,
        longest_stall_ms=12.0,
        violations=["one"],
    ).present()


@pytest.mark.parametrize("view", [transfer, overlap, replayed, demonstrated, served, bench_served, soaked])
def test_what_is_long_is_readable(view: Callable[[], RenderableType]) -> None:
    assert_readable(view())


def test_a_pipe_gets_the_tables_alone(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "multiturn", "--num-clients", "1", "--num-rounds", "1"]) == 0
    assert capsys.readouterr().out.lstrip(" ").startswith("multiturn")
