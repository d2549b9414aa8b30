"""What commands of the laboratory show to people can be read in 80 columns."""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from rich.console import RenderableType

from asynchicache.cli.commands import Command, find_commands
from asynchicache.cli.output import Output
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
from cli.readable import assert_readable

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
    ("chaos",): {"seeds": 1, "jobs": 1},
}
"""By command, options of a run that takes no time."""


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


def demonstrated() -> RenderableType:
    tiers = {"device": 112_345, "host": 112_345, "storage": 112_345}
    mode = ModeResult(0.8976, [RoundResult(1.0, 12345.6)] * 12, 1234.5, 1234.5, tiers, tokens_equal=False)
    modes = dict.fromkeys(("uncached", "no_offload", "hybrid", "restart"), mode)
    words = "10 clients, 12 rounds, 32 tokens in and 32 out a round, pages of 8 tokens"
    return demo.present(DemoResult("qwen3_5_text", words, Fraction(9, 10), modes, None, "index.html", 1.0))


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


@pytest.mark.parametrize("view", [transfer, overlap, demonstrated, bench_served, soaked])
def test_what_is_long_is_readable(view: Callable[[], RenderableType]) -> None:
    assert_readable(view())
