"""What `doctor` says of this machine, and of machines that lack something."""

from __future__ import annotations

import errno
import os
import re
import shutil
from importlib.metadata import EntryPoint, version
from itertools import product
from pathlib import Path

import pytest
import torch
from rich.console import Console

from asynchicache.cli import doctor
from asynchicache.cli.main import main
from asynchicache.cli.options import DoctorOptions
from asynchicache.config import BACKEND_GROUP
from storage.redis_servers import RedisServer, redis_at

NAMES = [
    "torch",
    "triton",
    "device",
    "pinning",
    "copy paths",
    "O_DIRECT",
    "disk space",
    "memory limits",
    "engines",
    "ranks",
]


def engine(name: str, value: str) -> EntryPoint:
    return EntryPoint(name, value, BACKEND_GROUP)


def machine(root: Path, available_kb: int, limit: str) -> Path:
    """A made-up `proc` and `sys`, with one control group that uses 1 MiB."""
    files = {
        "proc/meminfo": f"MemAvailable: {available_kb} kB\n",
        "proc/self/cgroup": "0::/\n",
        "sys/fs/cgroup/memory.max": f"{limit}\n",
        "sys/fs/cgroup/memory.current": f"{1 << 20}\n",
    }
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_everything_is_looked_at_and_shown(tmp_path: Path) -> None:
    checks = doctor.checks(tmp_path)
    console = Console(width=200)

    with console.capture() as capture:
        console.print(doctor.present(checks))

    assert [check.name for check in checks] == NAMES
    assert all(check.name in capture.get() and check.detail for check in checks)
    assert list(tmp_path.iterdir()) == []


def test_a_machine_without_a_gpu_is_in_order() -> None:
    if torch.cuda.is_available():
        pytest.skip("this machine has a GPU")

    assert doctor.check_device().ok
    assert doctor.check_pinning() == ("pinning", True, "not needed without a CUDA device")


def test_a_folder_that_is_not_there_has_no_o_direct(tmp_path: Path) -> None:
    check = doctor.check_o_direct(tmp_path / "absent")

    assert not check.ok
    assert "No such file" in check.detail


def test_direct_io_is_tried_in_the_folder(tmp_path: Path) -> None:
    try:
        os.close(os.open(tmp_path / "probe", os.O_CREAT | os.O_RDWR | os.O_DIRECT))
    except OSError:
        supported = False
    else:
        supported = True

    assert doctor.check_o_direct(tmp_path).ok == supported


def test_a_full_disk_is_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert doctor.check_disk_space(tmp_path).ok == (shutil.disk_usage(tmp_path).free >= doctor.LEAST_DISK)
    assert not doctor.check_disk_space(tmp_path / "absent").ok
    with monkeypatch.context() as little:
        little.setattr(doctor, "LEAST_DISK", 1 << 60)
        check = doctor.check_disk_space(tmp_path)
        assert (check.ok, "GiB free" in check.detail) == (False, True)

    def refuse(descriptor: int, offset: int, length: int) -> None:
        raise OSError(errno.EDQUOT, "Disk quota exceeded")

    monkeypatch.setattr(os, "posix_fallocate", refuse)
    assert doctor.check_disk_space(tmp_path) == (
        "disk space",
        False,
        f"{tmp_path}: Disk quota exceeded",
    )
    assert list(tmp_path.iterdir()) == []


def test_a_report_is_markdown_with_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "--report"]) == 0
    out = capsys.readouterr().out

    assert re.search(r"^- Python 3\.\d+\.\d+\S*, Linux .*CPUs$", out, re.MULTILINE)
    assert f"- torch {version('torch')}" in out
    rows = out.partition("|---|---|---|\n")[2].strip().splitlines()
    assert rows[0].startswith("| torch | yes | ")
    assert [row for row in rows if not re.fullmatch(r"\| .* \| (yes|\*\*no\*\*) \| .* \|", row)] == []


def test_words_in_brackets_are_shown_as_they_are() -> None:
    console = Console(width=80)

    with console.capture() as capture:
        console.print(doctor.present([doctor.Check("device", False, "[Errno 5] broken")]))

    assert "[Errno 5] broken" in capture.get()


@pytest.mark.parametrize(
    ("available_kb", "limit", "ok", "detail"),
    [
        (8 << 20, "max", True, "8.0 GiB available, no control group limits it"),
        (8 << 20, str(1 << 29), False, "0.5 GiB available, limit 0.5 GiB"),
        (1 << 19, "max", False, "0.5 GiB available, no control group limits it"),
    ],
)
def test_memory_is_what_machine_and_control_groups_leave(
    tmp_path: Path, available_kb: int, limit: str, ok: bool, detail: str
) -> None:
    assert doctor.check_memory_limits(machine(tmp_path, available_kb, limit)) == (
        "memory limits",
        ok,
        detail,
    )


def test_ranks_need_a_socket(tmp_path: Path) -> None:
    check = doctor.check_ranks(tmp_path)
    assert (check.name, check.ok) == ("ranks", True)
    assert "every rank needs asynchicache " in check.detail
    deep = tmp_path / ("x" * 100)  # longer than the address of a Unix socket
    deep.mkdir()
    assert not doctor.check_ranks(deep).ok


def test_an_engine_without_its_client_is_named_and_excused() -> None:
    entries = [engine("memory", "json:dumps"), engine("file", "json:loads"), engine("far", "absent_client:f")]

    check = doctor.check_engines(entries)

    assert check == ("engines", True, "file, memory, far (unusable: No module named 'absent_client')")


def test_an_engine_whose_package_is_broken_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "broken_package.py").write_text("raise KeyError('endpoint')")
    monkeypatch.syspath_prepend(tmp_path)
    entries = [engine(name, "json:dumps") for name in ("memory", "file")]

    check = doctor.check_engines([*entries, engine("far", "broken_package:open_backend")])

    assert "far (unusable: 'endpoint')" in check.detail


def test_an_engine_that_would_fail_when_it_is_opened_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(doctor.CLIENTS, "object", "absent_client")
    entries = [engine(name, "json:dumps") for name in ("memory", "file", "object")]

    check = doctor.check_engines(entries)

    assert check.detail == "file, memory, object (unusable: No module named 'absent_client')"


@pytest.mark.parametrize("value", ["absent_client:f", "json:absent"])
def test_an_engine_of_ours_must_work(value: str) -> None:
    check = doctor.check_engines([engine("memory", "json:dumps"), engine("file", value)])

    assert not check.ok
    assert "file (unusable:" in check.detail


def test_engines_that_are_not_registered_are_named() -> None:
    check = doctor.check_engines([])

    assert not check.ok
    assert "memory (not registered; is the package installed?)" in check.detail


@pytest.mark.engine("redis")
@pytest.mark.parametrize(
    ("settings", "ok", "words"),
    [
        ({"maxmemory": "0"}, False, "has no maxmemory"),
        ({"maxmemory": "64mb", "maxmemory-policy": "noeviction"}, False, "no more is stored"),
        ({"maxmemory": "64mb", "maxmemory-policy": "allkeys-random"}, False, "evicts at random"),
        ({"maxmemory": "64mb", "maxmemory-policy": "allkeys-lru"}, True, "nothing is wrong"),
    ],
)
def test_a_redis_that_loses_pages_is_named(
    tmp_path: Path, settings: dict[str, str], ok: bool, words: str
) -> None:
    with RedisServer(tmp_path) as server, redis_at(server) as client:
        for name, value in settings.items():
            client.config_set(name, value)
        check = doctor.check_store(DoctorOptions(store=server.url))
    assert (check.ok, words in check.detail) == (ok, True)


@pytest.mark.engine("redis")
@pytest.mark.parametrize("right", ["", "+info"])
def test_a_redis_that_does_not_tell_its_policy_is_named(tmp_path: Path, right: str) -> None:
    # The rights that docs/howto/redis.md says are enough.
    rights = ["~asynchicache:*", "+get", "+set", "+exists", "+unlink", "+touch", "+scan", *right.split()]
    settings = ["--maxmemory", "64mb", "--maxmemory-policy", "allkeys-lru"]
    with RedisServer(tmp_path, *settings, "--user", "cache", "on", ">secret", *rights) as server:
        store = f"redis://cache:secret@127.0.0.1:{server.port}"
        check = doctor.check_store(DoctorOptions(store=store))
    words = "nothing is wrong" if right else "answers no INFO to user 'cache'"
    assert (check.ok, words in check.detail) == (bool(right), True), check.detail


@pytest.mark.engine("redis")
def test_a_password_in_the_url_is_in_no_output(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(doctor, "checks", list)
    users = ["--requirepass", "s3cret", "--user", "bob", "on", ">s3cret", "~*", "+@all"]
    with RedisServer(tmp_path, *users) as server:
        places = [f"127.0.0.1:{server.port}", "127.0.0.1:1"]
        for login, place in product((":s3cret", "bob:s3cret", ":s3cret-wrong"), places):
            for output in (["--report"], ["--json", "-"], ["--json", str(tmp_path / "found")]):
                assert main(["doctor", "--store", f"redis://{login}@{place}", *output]) == 0
            said = "".join(capsys.readouterr()) + (tmp_path / "found").read_text()
            assert "s3cret" not in said
            assert f"redis://***@{place}" in said
            right = place == places[0] and "wrong" not in login
            assert ("has no maxmemory" in said) == right, said


def test_a_folder_may_have_an_at_sign(tmp_path: Path) -> None:
    folder = tmp_path / "bob@home"
    assert str(folder) in doctor.check_store(DoctorOptions(store=str(folder))).detail


def test_a_store_that_cannot_be_used_is_no_crash(tmp_path: Path) -> None:
    assert doctor.check_store(DoctorOptions(store="redis://127.0.0.1:1")).ok is False
    (tmp_path / "letter").write_text("dear store")
    assert doctor.check_store(DoctorOptions(store=str(tmp_path))).ok is False
