"""The demo in a small size: a real model, equal tokens, nothing lost, and a report that stands alone."""

import asyncio
import json
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from fractions import Fraction
from pathlib import Path

import pytest
from transformers import PreTrainedConfig, PreTrainedModel

from asynchicache.cache import HybridCache
from asynchicache.cli.main import main
from asynchicache.config import CacheConfig
from asynchicache.errors import ConfigError
from asynchicache.integrations.transformers import bridge
from asynchicache.integrations.transformers.demo_model import build_demo_model
from asynchicache.integrations.transformers.thread import ModelThread
from asynchicache.specs import ModelSpec
from asynchicache.types import Tier
from asynchicache_lab.bench.demo import modes, serving
from asynchicache_lab.bench.demo.options import DemoOptions, ceiling, round_ceilings
from asynchicache_lab.bench.demo.prompts import conversations
from asynchicache_lab.bench.demo.report import render
from asynchicache_lab.bench.demo.results import CrowdResult, DemoResult, ModeResult, Sample, ServedPrompt
from asynchicache_lab.bench.demo.run import PlayedRounds, Stage, run_demo
from integrations.zoo import tiny_config, tiny_model

NAMES = ["uncached", "no_offload", "hybrid", "restart"]
SIZE = {"num_clients": 3, "num_rounds": 3, "num_visitors": 0}


class Silent:
    def round_served(self, mode: str, served: Sequence[ServedPrompt]) -> None:
        pass

    def crowd_seen(self, sample: Sample) -> None:
        pass


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where one small demo, run through the command line, left its JSON and its report."""
    folder = tmp_path_factory.mktemp("demo")
    report = folder / "made" / "on the way" / "index.html"
    flags = ["--num-clients", "3", "--num-rounds", "3", "--num-visitors", "8", "--report", str(report)]
    assert main(["demo", *flags, "--json", str(folder / "result.json")]) == 0
    return folder


@pytest.fixture(scope="module")
def result(folder: Path) -> dict[str, dict[str, dict[str, object]]]:
    loaded: dict[str, dict[str, dict[str, object]]] = json.loads((folder / "result.json").read_text())
    return loaded


def test_the_result_has_its_keys(result: dict[str, dict[str, dict[str, object]]]) -> None:
    assert result.keys() >= {"model", "modes", "report"}
    assert list(result["modes"]) == NAMES
    for mode in result["modes"].values():
        assert mode.keys() >= {"hit_rate", "rounds", "ttft_ms", "tokens_by_tier", "tokens_equal"}
        assert mode["ttft_ms"].keys() == {"p50", "p90"}  # type: ignore[attr-defined]
        assert mode["tokens_by_tier"].keys() == {"device", "host", "storage"}  # type: ignore[attr-defined]
        assert len(mode["rounds"]) == 3  # type: ignore[arg-type]
        assert all(r.keys() == {"hit_rate", "ttft_ms"} for r in mode["rounds"])  # type: ignore[attr-defined]


def test_every_mode_generates_the_same_and_nothing_is_lost(
    result: dict[str, dict[str, dict[str, object]]],
) -> None:
    best = float(ceiling(DemoOptions(**SIZE)))

    assert all(mode["tokens_equal"] for mode in result["modes"].values())
    assert result["modes"]["uncached"]["hit_rate"] == 0
    assert result["modes"]["hybrid"]["hit_rate"] == pytest.approx(best)
    assert result["modes"]["restart"]["hit_rate"] == pytest.approx(best)
    assert result["modes"]["no_offload"]["hit_rate"] < best  # type: ignore[operator]


def test_after_a_restart_everything_comes_from_storage(
    result: dict[str, dict[str, dict[str, object]]],
) -> None:
    options = DemoOptions(**SIZE)
    kept = 3 * sum(options.kept(round_) for round_ in range(3))

    assert result["modes"]["restart"]["tokens_by_tier"] == {"device": 0, "host": 0, "storage": kept}


def test_the_report_stands_alone(folder: Path) -> None:
    page = (folder / "made" / "on the way" / "index.html").read_text()

    assert page.count("<svg") == 4
    assert all(name in page for name in NAMES)
    assert not re.search(r"<script|<link|<img|@import|src=|url\((?!#)", page)


# What the demo promises, and that it would notice.


def test_ceiling_of_the_full_size() -> None:
    options = DemoOptions()

    assert ceiling(options) == Fraction(
        sum(64 * r - 8 for r in range(1, 12)), sum(64 * r + 32 for r in range(12))
    )
    assert round_ceilings(options)[:2] == [0, 56 / 96]


def mode_result(*, hit_rate: float = 0.9, equal: bool = True) -> ModeResult:
    served = ServedPrompt(100, int(100 * hit_rate), {Tier.HOST: int(100 * hit_rate)}, 20.0, [1, 2])
    return ModeResult.of([[served], [served]], tokens_equal=equal)


def demo_result(**changes: ModeResult) -> DemoResult:
    found = {name: mode_result() for name in NAMES} | changes
    return DemoResult("a <model>", "some work", Fraction(9, 10), found, None, "index.html", 1.0)


def test_many_at_once_get_their_answers_whatever_happens(folder: Path) -> None:
    crowd = json.loads((folder / "result.json").read_text())["crowd"]

    assert (crowd["clients"], crowd["answers"], crowd["hung_up"]) == (8, 22, 2)
    happened = [moment["what"] for moment in crowd["moments"]]
    assert happened == ["8 clients", "storage fails", "storage is back", "restart"]
    assert max(sample["running"] for sample in crowd["samples"]) > 1
    assert crowd["warm_hit_rate"] > 0.5
    assert crowd["longest_gap_ms"] > 0


def test_what_went_wrong_in_the_crowd_is_a_violation() -> None:
    crowd = CrowdResult(8, problems=["a client got CapacityError()"])

    assert replace(demo_result(), crowd=crowd).violations == ["a client got CapacityError()"]


def test_a_demo_without_violations_says_so() -> None:
    assert demo_result().violations == []


@pytest.mark.parametrize("name", NAMES)
def test_other_tokens_are_a_violation_in_every_mode(name: str) -> None:
    assert any(name in violation for violation in demo_result(**{name: mode_result(equal=False)}).violations)


@pytest.mark.parametrize(("name", "matters"), [("hybrid", True), ("restart", True), ("no_offload", False)])
def test_a_hit_rate_below_the_ceiling_is_a_violation_where_nothing_may_be_lost(
    name: str, matters: bool
) -> None:
    assert bool(demo_result(**{name: mode_result(hit_rate=0.8)}).violations) is matters


def test_no_mode_has_storage_that_can_never_be_used(tmp_path: Path) -> None:
    configs = [mode.config(DemoOptions(), tmp_path) for mode in modes.MODES if mode.config is not None]
    assert all(all(one.host_slots.values()) == (one.storage is not None) for one in configs)


def test_the_report_escapes_what_it_is_given_and_names_violations() -> None:
    blurbs = dict.fromkeys(NAMES, "tells < much")
    page = render(demo_result(hybrid=mode_result(equal=False)), [0.9, 0.9], blurbs)

    assert "a &lt;model&gt;" in page
    assert "tells &lt; much" in page
    assert "hybrid: other tokens than uncached" in page


def test_quantiles_and_means_of_a_mode() -> None:
    rounds = [
        [ServedPrompt(10, 0, {}, float(ms), []) for ms in (1, 2, 3, 4)],
        [ServedPrompt(10, 5, {Tier.DEVICE: 5}, 6.0, [])],
    ]
    found = ModeResult.of(rounds, tokens_equal=True)

    assert (found.ttft_p50, found.ttft_p90) == (3.0, 6.0)
    assert [round_.ttft_ms for round_ in found.rounds] == [2.5, 6.0]
    assert found.tokens_by_tier == {"device": 5, "host": 0, "storage": 0}


def test_conversations_are_real_text_and_differ() -> None:
    pieces = conversations(10, 12, 32)
    starts = {tuple(rounds[0]) for rounds in pieces}

    assert len(starts) == 10
    assert all(len(piece) == 32 for rounds in pieces for piece in rounds)
    assert bytes(pieces[0][0] + pieces[0][1]).decode().isprintable()


@contextmanager
def owned(model: PreTrainedModel, config: PreTrainedConfig) -> Iterator[serving.OwnedModel]:
    with ModelThread(model.device) as thread:
        yield serving.OwnedModel(model, config, thread)


@pytest.fixture(scope="module")
def stage_and_reference() -> Iterator[tuple[Stage, PlayedRounds]]:
    """A stage with two clients, and what they are answered without a cache."""
    options = DemoOptions(num_clients=2, num_rounds=3)
    with owned(*build_demo_model(0)) as model:
        stage = Stage(options, model, Silent())
        reference = asyncio.run(stage.play(modes.MODES[0]))
        yield stage, reference


def tokens(rounds: PlayedRounds) -> list[list[Sequence[int]]]:
    return [[one.tokens for one in served] for served in rounds]


def test_a_state_that_is_not_what_was_computed_is_seen_in_the_tokens(
    stage_and_reference: tuple[Stage, PlayedRounds], monkeypatch: pytest.MonkeyPatch
) -> None:
    stage, reference = stage_and_reference
    hybrid = next(mode for mode in modes.MODES if mode.name == "hybrid")
    assert tokens(asyncio.run(stage.play(hybrid))) == tokens(reference)

    monkeypatch.setattr(bridge, "write_states", lambda *args, **kwargs: None)
    assert tokens(asyncio.run(stage.play(hybrid))) != tokens(reference)


@pytest.mark.asyncio
async def test_prompts_that_are_no_whole_pages_and_a_cache_without_room_for_states() -> None:
    """Whatever the lengths, and even if nothing can be kept, the answers are those of the model."""
    prompt = list(b"a prompt of 29 byte tokens...")
    with owned(*build_demo_model(0)) as model:
        spec = ModelSpec.from_config(model.config, page_size=8)
        expected = await serving.ServingEngine(model, None).serve([prompt], 12)
        for slots, hits in (({"kv": 64, "mamba": 4}, 24), ({"kv": 8, "mamba": 1}, 0)):
            config = CacheConfig(device_slots=slots, host_ratio=1)
            async with HybridCache.open(spec, config) as cache:
                engine = serving.ServingEngine(model, cache)
                first = await engine.serve([prompt], 12)
                again = await engine.serve([prompt], 12)
                await cache.drain()
                assert cache.verify() == []
            assert first[0].tokens == again[0].tokens == expected[0].tokens
            assert again[0].hit_tokens == hits


@pytest.mark.asyncio
@pytest.mark.parametrize("name", ["gemma3", "lfm3", "deepseek_v32"])
async def test_models_with_windows_and_index_keys_are_served_alike(name: str) -> None:
    prompts = [[7 * n % 250 for n in range(start, start + 53)] for start in (3, 100)]
    with owned(tiny_model(name), tiny_config(name)) as model:
        spec = ModelSpec.from_config(model.config, page_size=8)
        config = CacheConfig(device_slots={pool.name: 40 for pool in spec.owners})
        async with HybridCache.open(spec, config) as cache:
            for hits in (0, 72):  # the second turn resumes behind what the first one generated
                uncached = await serving.ServingEngine(model, None).serve(prompts, 20)
                served = await serving.ServingEngine(model, cache).serve(prompts, 20)
                assert [one.tokens for one in served] == [one.tokens for one in uncached]
                assert [one.hit_tokens for one in served] == [hits, hits]
                prompts = [[*p, *one.tokens, 5] for p, one in zip(prompts, served, strict=True)]
            await cache.drain()
            assert cache.verify() == []


@pytest.mark.asyncio
async def test_a_report_that_cannot_be_written_is_refused_before_the_work(tmp_path: Path) -> None:
    for bad in (tmp_path, f"{tmp_path}/new/", ""):
        with pytest.raises(ConfigError, match="must be a file, such as"):
            DemoOptions(report=str(bad))
    report = str(tmp_path / "taken" / "index.html")
    options = DemoOptions(report=report)
    (tmp_path / "taken").write_text("a file")  # after the flags were read
    with pytest.raises(ConfigError, match="is not a folder"):
        DemoOptions(report=report)

    class Unserved(Silent):
        def round_served(self, mode: str, served: Sequence[ServedPrompt]) -> None:
            raise AssertionError("begun")

    with pytest.raises(FileExistsError):
        await run_demo(options, Unserved())
