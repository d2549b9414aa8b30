"""A skipped engine is a failure where engines are required: see `tests/conftest.py`."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

import forking

CONFTEST = Path(__file__).parents[1] / "conftest.py"

SAMPLE = """
import pytest

@pytest.fixture
def server():
    pytest.skip("no server")

@pytest.mark.engine("redis")
def test_skips_in_a_fixture(server): ...

@pytest.mark.engine("redis")
def test_skips_in_its_body():
    pytest.skip("no client")

@pytest.mark.engine("redis")
@pytest.mark.xfail(reason="known")
def test_fails_as_expected():
    assert False

def test_of_no_engine_skips():
    pytest.skip("for another reason")
"""


@pytest.mark.parametrize(
    ("required", "summary"),
    [("0", "3 skipped, 1 xfailed"), ("1", "1 failed, 1 skipped, 1 xfailed, 1 error")],
)
def test_a_skipped_engine_fails_where_engines_are_required(
    tmp_path: Path, required: str, summary: str
) -> None:
    shutil.copy(CONFTEST, tmp_path)
    (tmp_path / "pytest.ini").write_text("[pytest]\nmarkers = engine(name): an engine\n")
    (tmp_path / "test_sample.py").write_text(SAMPLE)

    run = forking.run(
        ["-m", "pytest", "-q", "-p", "no:cacheprovider", tmp_path],
        env=os.environ | {"ASYNCHICACHE_REQUIRE_ENGINES": required},
    )

    assert summary in run.stdout
    assert ("redis is required here, but the test skipped: no server" in run.stdout) == (required == "1")
