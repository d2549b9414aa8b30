"""The command line's contract: keys, exit codes, and nothing but JSON on standard output for `-`."""

import json
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from asynchicache.cli import commands
from asynchicache.cli.main import main
from asynchicache.cli.output import CommandResult
from asynchicache.cli.parser import build_parser
from asynchicache.options import flags_of

SMALL = {
    "multiturn": [
        "--num-clients",
        "2",
        "--num-rounds",
        "3",
        "--request-length",
        "128",
        "--output-length",
        "128",
    ],
    "shared-prefix": [
        "--gsp-num-groups",
        "2",
        "--gsp-prompts-per-group",
        "3",
        "--gsp-system-prompt-len",
        "128",
    ],
    "tree": ["--scenario", "tiny"],
}
KEYS = {
    "multiturn": {"hit_rate", "rounds", "tokens_by_tier", "turns_s", "verified_pages"},
    "shared-prefix": {"hit_rate", "rounds", "tokens_by_tier", "ideal_hit_rate"},
    "tree": {"sets"},
}


@pytest.mark.parametrize("bench", SMALL)
def test_a_bench_writes_its_keys(bench: str, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["bench", bench, *SMALL[bench], "--seed", "3", "--json", "-"])

    result = json.loads(capsys.readouterr().out)  # nothing else is there
    assert code == 0
    assert result.keys() >= KEYS[bench]


@pytest.mark.parametrize("bench", ["multiturn", "shared-prefix"])
def test_hits_are_told_by_round_and_tier(bench: str, capsys: pytest.CaptureFixture[str]) -> None:
    main(["bench", bench, *SMALL[bench], "--json", "-"])

    result = json.loads(capsys.readouterr().out)
    assert result["tokens_by_tier"].keys() == {"device", "host", "storage"}
    assert len(result["rounds"]) == 3
    assert all(0 <= round_["hit_rate"] <= 1 for round_ in result["rounds"])


def test_a_file_gets_the_json_and_people_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "result.json"
    code = main(["bench", "multiturn", *SMALL["multiturn"], "--json", str(file)])

    captured = capsys.readouterr()
    assert code == 0
    assert json.loads(file.read_text())["hit_rate"] > 0
    assert "hit rate" in captured.out
    assert "{" not in captured.out


TRACE = Path(__file__).parents[1] / "data" / "traces" / "claude_code_weka_16_sessions.jsonl.gz"


def test_replay_writes_its_keys_and_shows_a_table(capsys: pytest.CaptureFixture[str]) -> None:
    flags = ["--pools", "kv,mamba", "--capacity-share", "0.5", "--host-share", "0.5", "--policy", "lru"]
    code = main(["replay", str(TRACE), *flags, "--checkpoint", "prompt", "--seed", "1", "--json", "-"])

    captured = capsys.readouterr()
    result = json.loads(captured.out)
    assert code == 0
    keys = {"hit_rate", "request_hit_rate", "tokens_by_tier", "evicted_pages", "states_kept"}
    assert result.keys() >= keys
    assert result["tokens_by_tier"].keys() == {"device", "host", "storage"}
    assert result["prompt_tokens"] == 41_267_049
    assert "not_kept" in captured.err


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ([], "the following arguments are required: TRACE"),
        (["nowhere.jsonl.gz"], "cannot be read"),
        ([__file__], "line 1"),
        ([str(TRACE), "--capacity-share", "0"], "must be above 0"),
        ([str(TRACE), "--pools", "kv,cache"], "pools 'kv,cache'"),
        ([str(TRACE), "--policy", "best"], "eviction policy 'best' is none of"),
        ([str(TRACE), "--checkpoint", "100"], "must be a multiple of the page size, 64"),
    ],
)
def test_replay_refuses_what_it_cannot_mean(
    arguments: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as stopped:
        main(["replay", *arguments])

    assert stopped.value.code == 2
    assert words in capsys.readouterr().err


def test_doctor_lists_its_checks(capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["doctor", "--json", "-"])

    result = json.loads(capsys.readouterr().out)
    assert code == 0
    assert all(check.keys() == {"name", "ok", "detail"} for check in result["checks"])


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        ([], "COMMAND"),
        (["bench"], "BENCH"),
        (["fly"], "fly"),
        (["bench", "multiturn", "--num-clients", "many"], "many"),
        (["bench", "multiturn", "--num-clients", "0"], "--num-clients"),
        (["bench", "multiturn", "--checkpoint-interval", "100"], "--checkpoint-interval"),
        (["bench", "multiturn", "--host-ratio", "nan"], "--host-ratio"),
        (["bench", "tree", "--scenario", "moon"], "moon"),
        (["bench", "tree", "--page-size", "0"], "0"),
        (["bench", "multiturn", "--json", "no/such/folder/file.json"], "no/such/folder"),
        (["demo", "--num-rounds", "-1"], "--num-rounds"),
    ],
)
def test_bad_arguments_exit_with_2_and_are_named(
    arguments: list[str], named: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["demo", "--report", "file/report.html"], "--report: file is not a folder"),
        (["chaos", "--found", "file"], "--found: file is not a folder"),
        (["soak", "--folder", "nowhere"], "--folder: nowhere is not a folder"),
        (["bench", "storage", "--folder", "file"], "--folder: file is not a folder"),
        (["serve", "--threads", "100000"], "--threads 100000: must be 1024 at most"),
        (["bench", "tree", "--window", "0"], "--window 0"),
    ],
)
def test_what_could_only_fail_later_is_refused_at_once(
    arguments: list[str],
    named: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("file").touch()
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 2
    assert named in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [["--help"], ["bench", "--help"], ["demo", "--help"], ["--version"]])
def test_help_and_version_exit_with_0(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)

    assert caught.value.code == 0
    assert capsys.readouterr().out


def test_help_shows_every_default(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    for command in commands.find_commands():
        with pytest.raises(SystemExit):
            main([*command.path, "--help"])
        shown = capsys.readouterr().out
        assert "(default: )" not in shown
        for setting in flags_of(command.options):
            default = setting.default
            if isinstance(default, bool):
                assert f"{setting.help} (default: {'yes' if default else 'no'})" in shown
            elif isinstance(default, int | float):
                assert f"{setting.help} (default: {default})" in shown


def test_every_command_takes_json_and_seed() -> None:
    parser = build_parser(commands.find_commands())
    for command in commands.find_commands():
        words = ["word" for setting in flags_of(command.options) if setting.positional]
        values = parser.parse_args([*command.path, *words, "--json", "-", "--seed", "7"])
        assert (values.json, values.seed) == ("-", 7)


@pytest.mark.parametrize(("ok", "code"), [(True, 0), (False, 1)])
def test_a_violation_exits_with_1(
    ok: bool, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    outcome = CommandResult({"answer": 42}, "a table", ok)
    monkeypatch.setattr("asynchicache.cli.doctor.run", lambda options, output: outcome)

    assert main(["doctor", "--json", "-"]) == code
    assert json.loads(capsys.readouterr().out) == {"answer": 42}


def test_what_cannot_be_done_exits_with_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    target = tmp_path / "gone" / "result.json"
    target.parent.mkdir()
    outcome = CommandResult({}, "a table")

    def remove_folder(options: object, output: object) -> CommandResult:
        target.parent.rmdir()
        return outcome

    monkeypatch.setattr("asynchicache.cli.doctor.run", remove_folder)

    assert main(["doctor", "--json", str(target)]) == 1
    assert "result.json" in capsys.readouterr().err


def test_an_interrupt_is_quiet() -> None:
    """A real process and a real signal, as from a person, while the turns run."""
    arguments = ["-m", "asynchicache", "bench", "multiturn", "--num-rounds", "1000", "--json", "-"]
    with subprocess.Popen(
        [sys.executable, *arguments, "--request-length", "16", "--output-length", "16", "--page-size", "16",
         "--checkpoint-interval", "16"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
        env=os.environ | {"FORCE_COLOR": "1"},
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # jobs in the background ignore it
    ) as process:  # fmt: skip
        assert process.stderr is not None
        seen = ""
        while "/10000" not in seen:
            seen += process.stderr.read(1) or pytest.fail(f"it ended by itself: {seen}")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)

    assert process.returncode == 130
    assert out == ""
    assert "Traceback" not in seen + err
