"""A command imports what it needs and nothing else, and Ctrl-C ends it quietly at any moment."""

from __future__ import annotations

import json
import os
import resource
import signal
import subprocess
import sys
import time
import typing
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

import asynchicache
from asynchicache.cli.commands import Command, find_commands
from asynchicache.options import CommandOptions
from asynchicache_lab.cli.benches import Bench
from soaking import first

COMMANDS = find_commands()
HEAVY = {"numpy", "torch", "transformers"}
TRACE = Path(__file__).parents[1] / "data" / "traces" / "claude_code_weka_16_sessions.jsonl.gz"

LIST_IMPORTS = """
import json, sys
from asynchicache.cli.main import main
found = []
for words in json.loads(sys.argv[2]):
    try:
        code = main(words)
    except SystemExit as stopped:
        code = stopped.code
    found.append([code, sorted(set(json.loads(sys.argv[1])) & set(sys.modules))])
print(json.dumps(found), file=sys.stderr)
"""


def started(*commands: Sequence[str]) -> list[tuple[int, list[str]]]:
    """The exit codes of commands, one after another in a fresh process, and the heavy modules that were
    imported by then."""
    command = [sys.executable, "-c", LIST_IMPORTS, json.dumps(sorted(HEAVY)), json.dumps(commands)]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    return [(code, modules) for code, modules in json.loads(run.stderr.splitlines()[-1])]


CODES = {
    ("--version",): 0,
    ("--help",): 0,
    ("bench", "--help"): 0,
    ("fly",): 2,
    ("verify",): 2,
    ("verify", "nowhere"): 1,
    ("clear", "nowhere", "--everything"): 1,
    **{(*command.path, "--help"): 0 for command in COMMANDS},
    **{(*command.path, "--seed", "x"): 2 for command in COMMANDS},
}


def test_commands_import_what_they_need() -> None:
    found = dict(zip(CODES, started(*CODES), strict=True))

    assert found == {words: (code, []) for words, code in CODES.items()}


@pytest.mark.parametrize(
    ("words", "code"),
    [
        (["replay", "nowhere"], 2),
        (["replay", str(TRACE), "--pools", "kv,mamba,swa,dsa", "--capacity-share", "0.5"], 0),
    ],
    ids=["no trace", "a trace"],
)
def test_a_replay_needs_arrays_and_no_more(words: list[str], code: int) -> None:
    assert started(words) == [(code, ["numpy"])]


def test_a_store_is_verified_and_cleared_without_arrays(tmp_path: Path) -> None:
    pool = tmp_path / "store"
    pool.mkdir()

    found = started(["verify", str(pool)], ["clear", str(pool), "--everything"])
    assert [modules for _, modules in found] == [[], []]


def test_the_package_alone_imports_nothing() -> None:
    code = "import sys, asynchicache; print(sorted(name for name in sys.modules if 'asynchicache.' in name))"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert run.stdout.strip() == "[]"


def test_public_names_are_listed_before_they_are_used() -> None:
    assert set(asynchicache.__all__) <= set(dir(asynchicache))
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = asynchicache.nothing


WITHOUT_TRANSFORMERS = """
import sys
sys.modules["transformers"] = None
from asynchicache import *
import asynchicache
print(HybridCache.__name__)
try:
    from asynchicache import prefix_cached
except ImportError as error:
    print(error)
"""


def test_a_star_import_needs_no_extra_and_a_missing_one_is_named() -> None:
    run = subprocess.run(
        [sys.executable, "-c", WITHOUT_TRANSFORMERS], capture_output=True, text=True, check=True
    )

    needs = "prefix_cached needs transformers: pip install 'asynchicache[transformers]'"
    assert run.stdout.splitlines() == ["HybridCache", needs]


def test_names_that_need_transformers_are_listed_where_it_is() -> None:
    assert {"PrefixCachedModel", "prefix_cached"} <= set(dir(asynchicache))
    assert asynchicache.prefix_cached.__module__ == "asynchicache.integrations.transformers.generate"


def test_a_start_takes_a_fifth_of_a_second_of_processor_time() -> None:
    """The best of a few, doubled: other processes slow this one down."""
    times = []
    for _ in range(3):
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        started(["--version"])
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        times.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)

    assert min(times) < 0.4


@pytest.mark.parametrize("command", COMMANDS, ids=lambda command: " ".join(command.path))
def test_a_command_runs_with_its_own_options(command: Command) -> None:
    start = command.load()
    start = start.work if isinstance(start, Bench) else start
    types = vars(sys.modules[start.__module__])
    options = typing.get_type_hints(start, types | _names_under_type_checking(start.__module__))["options"]

    assert options is command.options
    assert issubclass(command.options, CommandOptions)


def _names_under_type_checking(module: str) -> dict[str, object]:
    from asynchicache.replay.options import ReplayOptions
    from asynchicache_lab.bench import options as flags
    from asynchicache_lab.bench.ranks.options import RanksOptions
    from asynchicache_lab.bench.serve.options import HandoverOptions, ServeBenchOptions
    from asynchicache_lab.bench.soak.options import SoakOptions
    from asynchicache_lab.bench.storage.options import StorageBenchOptions

    kinds = (HandoverOptions, RanksOptions, ReplayOptions, ServeBenchOptions, SoakOptions)
    kinds += (StorageBenchOptions,)
    return {"flags": flags} | {
        kind.__name__: kind for kind in kinds if module.endswith(("benches", "replay"))
    }


# Ctrl-C


BEGIN = """
import sys
from asynchicache.cli.interrupts import quit_on_interrupt
from asynchicache.cli.main import main
quit_on_interrupt()
print(flush=True)
sys.exit(main())
"""
INTERRUPTED = [
    pytest.param(["replay", str(TRACE), "--pools", "kv,mamba"], id="replay"),
    pytest.param(["bench", "multiturn", "--num-rounds", "1000"], id="asyncio"),
    pytest.param(["bench", "stall", "--pages", "4000"], id="threads"),
    pytest.param(["chaos", "--seeds", "1000", "--jobs", "2", "--found", "found"], id="processes"),
]


@pytest.mark.parametrize("arguments", INTERRUPTED)
@pytest.mark.parametrize("seconds", first(3, [0.0, 0.15, 1.0, 0.05, 0.4, 2.5]))
def test_an_interrupt_is_quiet_at_any_moment(arguments: list[str], seconds: float, tmp_path: Path) -> None:
    """From the first line of the command line on: until then Python itself starts."""
    process = subprocess.Popen(
        [sys.executable, "-c", BEGIN, *arguments],
        cwd=tmp_path,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
        preexec_fn=partial(signal.signal, signal.SIGINT, signal.SIG_DFL),  # jobs in the background ignore it
    )
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        time.sleep(seconds)
        os.killpg(process.pid, signal.SIGINT)  # a terminal signals the children too
        _, err = process.communicate(timeout=60)

    assert "Traceback" not in err
    assert "Error" not in err
    # Python gives SIGINT back to the system while it shuts down; a shell calls death by SIGINT 130 as well.
    assert process.returncode in (130, 0, -signal.SIGINT), err
