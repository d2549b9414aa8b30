"""`bench host`: it counts what a load asks of the driver, and leaves torch as it was."""

from __future__ import annotations

import json
from ctypes import ArgumentError

import pytest
import torch

from asynchicache import cuda_driver
from asynchicache.cli.main import main
from asynchicache.errors import ConfigError
from asynchicache_lab.bench.counting_driver import counted_cuda
from asynchicache_lab.bench.host import CASES, FIRST_PAGES, LAYERS
from asynchicache_lab.bench.options import HostOptions


def test_each_case_is_counted_and_measured(capsys: pytest.CaptureFixture[str]) -> None:
    before = torch.cuda.is_available, cuda_driver.load_libraries

    assert main(["bench", "host", "--rounds", "1", "--json", "-"]) == 0

    found = json.loads(capsys.readouterr().out)
    assert [(row["case"], row["pages"]) for row in found["rows"]] == [
        (case.name, case.pages) for case in CASES
    ]
    few, many, hybrid = found["rows"]
    for row in found["rows"]:
        assert 0 < row["cpu_us"]
        assert 0 < row["wall_us"]
        assert 0 < row["busy_us"]
        assert 2 <= row["driver_calls"] <= 2 + 4 / LAYERS, "a launch and an event; once a question"
    assert few["gil_releases"] == 0
    assert many["gil_releases"] == hybrid["gil_releases"] == 1, "more than 64 runs a layer"
    assert set(found["first_launch_us"]) == {str(pages) for pages in FIRST_PAGES}
    assert found["first_launch_ratio"] > 0
    assert (torch.cuda.is_available, cuda_driver.load_libraries) == before


def test_calls_convert_their_arguments_as_the_drivers_do() -> None:
    with counted_cuda() as calls:
        driver = cuda_driver.CudaDriver.load(0)
        driver.record(driver.make_event(), driver.make_stream(urgent=True))
        with pytest.raises(ArgumentError, match="argument 1"):
            driver.record(1.5, 1)  # type: ignore[arg-type]

    assert calls.names["cuEventRecord"] == 1
    assert calls.released == 0


def test_options_are_checked() -> None:
    with pytest.raises(ConfigError, match="--rounds 0"):
        HostOptions(rounds=0)
