"""`asynchicache chaos`: its keys, its exit codes, and scripts that replay what it found."""

import json
from pathlib import Path

import pytest

from asynchicache.cli.main import main
from asynchicache.pools.allocator import SlotAllocator
from asynchicache_lab.chaos.faults import KINDS
from asynchicache_lab.chaos.workload import draw_script


@pytest.fixture
def leaking(monkeypatch: pytest.MonkeyPatch) -> None:
    """Slots that are never given back."""
    monkeypatch.setattr(SlotAllocator, "release", lambda *_: None)


def test_a_search_writes_its_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code = main(["chaos", "--seeds", "2", "--jobs", "1", "--found", str(tmp_path / "found"), "--json", "-"])

    result = json.loads(capsys.readouterr().out)
    assert code == 0
    assert (result["seeds"], result["violations"]) == (2, [])
    assert result["operations"] == sum(result["operations_by_name"].values()) > 100
    assert list(result["faults"]) == list(KINDS)
    assert not (tmp_path / "found").exists()


def test_a_violation_is_cut_down_and_replayed(
    leaking: None, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = tmp_path / "found"
    assert main(["chaos", "--seed", "3", "--found", str(found), "--json", "-"]) == 1
    violation = json.loads(capsys.readouterr().out)["violations"][0]

    assert violation["seed"] == 3
    assert any("leak" in words for words in violation["violations"])
    kind = violation["violations"][0].partition(":")[0]
    script = Path(violation["script"])
    assert script == found / "3.json"
    assert len(script.read_text()) < len(draw_script(3).text()) / 4
    assert main(["chaos", "--script", str(script)]) == 1
    assert kind in capsys.readouterr().out


def test_a_script_that_holds_exits_0(tmp_path: Path) -> None:
    script = tmp_path / "script.json"
    script.write_text(draw_script(1).text())

    assert main(["chaos", "--script", str(script)]) == 0


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--seeds", "0"], "--seeds 0: must be a whole number above 0"),
        (["--script", "nowhere.json"], "'nowhere.json' cannot be read: No such file"),
    ],
)
def test_bad_arguments_are_named(flags: list[str], words: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        main(["chaos", *flags])

    assert stop.value.code == 2
    assert words in capsys.readouterr().err
