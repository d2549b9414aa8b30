"""`bench storage --engine mooncake`, beside Mooncake's own client, on a real cluster."""

from __future__ import annotations

import json

import pytest

from asynchicache.cli.main import main
from asynchicache_lab.bench.storage import run
from storage.mooncake_cluster import cluster, own_network

SMALL = ["--page-bytes", "8192", "--pages", "12", "--batch-bytes", "32768", "--depth", "2", "--rounds", "1"]


@pytest.mark.engine("mooncake")
def test_mooncake_is_measured_beside_its_own_client(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(run, "_EXISTS_KEYS", 1000)
    with own_network(), cluster() as made:
        given = [f"--option={name}={value}" for name, value in made.options().items()]
        code = main(["bench", "storage", "--engine", "mooncake", *given, *SMALL, "--json", "-"])

    result = json.loads(capsys.readouterr().out)
    assert (code, result["engine"], result["wrong_pages"]) == (0, "mooncake", 0)
    assert result["limit"]["title"] == "Mooncake's client, called directly"
    assert min(result["limit"]["put_mb_s"], result["limit"]["get_mb_s"], result["put_mb_s"]) > 0


@pytest.mark.parametrize(
    ("given", "rule"),
    [
        ([], "say which cluster"),
        (["--option", "master=a:1", "--option", "namespace=mine"], "has one of its own"),
    ],
)
def test_the_bench_says_what_it_needs(
    given: list[str], rule: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(["bench", "storage", "--engine", "mooncake", *SMALL, *given])

    assert caught.value.code == 2
    assert rule in capsys.readouterr().err
