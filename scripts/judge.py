"""What `make judge` runs: other people's caches and ours, through the same cases, on a CPU.

The engines are those of `make engines-e2e`, installed once below `.engines`.
"""
# ruff: noqa: S603, T201  # it runs our own commands, and prints for people

from __future__ import annotations

import argparse
import hashlib
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib.metadata import version
from pathlib import Path
from tempfile import TemporaryDirectory

import engines_e2e

from asynchicache_lab.judge.caches import CACHES, Cache
from asynchicache_lab.judge.cases import CASES, Case
from asynchicache_lab.judge.servers import Forks, JudgedServerError, Place
from asynchicache_lab.judge.trial import CacheTrial
from asynchicache_lab.judge.verdicts import RED, References, Verdict, as_json, judge, show
from conformance import pip, python_of, ready

LMCACHE = engines_e2e.ROOT / "scripts" / "judge-lmcache.txt"
FOLDER = engines_e2e.ROOT / ".engines" / "judge"
MODELS = {"serve": ("llama", "qwen3_5_alternating"), "sglang": ("llama", "qwen3_5_alternating")}
MODELS["vllm"] = ("qwen3", "qwen3_5")
"""Of each engine, without states and with states; others are not answered on its CPU path."""

_MAKE = """
import sys
from pathlib import Path
from models import checkpoint, train_adapter
folder, plain, hybrid = Path(sys.argv[1]), *sys.argv[2:]
for name in (plain, plain + "_retrained", hybrid):
    checkpoint(folder, name)
for seed in (1, 2):
    train_adapter(folder / f"judged_adapter{seed}", folder / plain, seed)
"""


def lmcache(folder: Path) -> Path:
    """LMCache and what it imports beside vLLM, in a folder; pip must not add builds for CUDA."""
    target, stamp = folder / "lmcache", folder / "lmcache" / ".installed"
    wanted = hashlib.sha256(LMCACHE.read_bytes()).hexdigest()
    if not ready(stamp, wanted):
        arguments = ("--no-deps", "--upgrade", "--target", str(target), "--requirement", str(LMCACHE))
        pip(folder, "install", *arguments)
        stamp.write_text(wanted)
    return target


def place(engine: str, folder: Path) -> Place:
    """Make an engine's environment and models, once."""
    whole = next((each for each in engines_e2e.ENGINES if each.name == engine), None)
    if whole:
        (folder / engine).mkdir(parents=True, exist_ok=True)
        engines_e2e.make_environment(folder / engine, whole)
        python, variables = python_of(folder / engine), engines_e2e.environment(folder / engine, whole)
        variables |= {
            "VLLM_ENABLE_V1_MULTIPROCESSING": "1",
            "VLLM_SERVER_DEV_MODE": "1",  # the verbs of an operator
            "LMCACHE_TRACK_USAGE": "false",
        }
    else:
        python, whole = Path(sys.executable), engines_e2e.ENGINES[0]
        variables = engines_e2e.environment(folder / engine, whole)
    if engine == "vllm":
        variables["PYTHONPATH"] += os.pathsep + str(lmcache(folder / engine))
    models, (plain, hybrid) = folder / engine / "models", MODELS[engine]
    names = {"a": plain, "b": f"{plain}_retrained", "hybrid": hybrid}
    found = {name: models / file for name, file in names.items()}
    found |= {f"adapter{seed}": models / f"judged_adapter{seed}" for seed in (1, 2)}
    if not all(path.exists() for path in found.values()):
        models.mkdir(parents=True, exist_ok=True)
        command = [python, "-c", _MAKE, models, plain, hybrid]
        subprocess.run(command, env=variables, cwd=models, check=True)
    known = version("asynchicache") if engine == "serve" else whole.version
    return Place(python, variables, known, found)


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    caches, cases = [cache.name for cache in CACHES], [case.name for case in CASES]
    parser = argparse.ArgumentParser(description="Judge caches by what clients see.")
    parser.add_argument(
        "caches", nargs="*", metavar="CACHE", help=f"some of {caches}; all of them by default"
    )
    parser.add_argument("--case", action="append", metavar="CASE", help=f"one of {cases}; may be given again")
    parser.add_argument("--engines", type=Path, default=engines_e2e.FOLDER, help="where the engines are")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where stores and logs go")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the verdicts there too")
    options = parser.parse_args(arguments)
    for given, known in ((options.caches, caches), (options.case or [], cases)):
        if unknown := set(given) - set(known):
            parser.error(f"no {sorted(unknown)}; there are {known}")
    return options


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Returns:
        1 if a cache of ours is red, or does not start; 0 if not, whatever was seen of others.
    """
    options = parse(arguments)
    cases = [case for case in CASES if case.name in (options.case or [case.name])]
    chosen = [cache for cache in CACHES if cache.name in (options.caches or [cache.name])]
    verdicts: list[Verdict] = []
    versions: dict[str, str] = {}
    for cache in chosen:
        started = time.monotonic()
        try:
            versions[cache.name], found = _judge(cache, cases, options)
            verdicts += found
        except JudgedServerError as error:
            print(f"{cache.name} was not judged: it {error}; try it alone: make judge ARGS={cache.name}")
            verdicts += [Verdict(cache.name, case.name, "FAILED", f"{error}") for case in cases[:1]]
            versions.setdefault(cache.name, "")
        print(f"{cache.name}: {time.monotonic() - started:.0f} s", flush=True)
        if options.json:
            options.json.write_text(as_json(verdicts))
    print(show(verdicts, versions, 'make judge ARGS="{cache} --case {case}"'))
    ours = {cache.name for cache in chosen if cache.ours}
    return int(any(verdict.word in RED for verdict in verdicts if verdict.cache in ours))


def _judge(cache: Cache, cases: Sequence[Case], options: argparse.Namespace) -> tuple[str, list[Verdict]]:
    found = place(cache.engine.name, options.engines.resolve())
    folder = options.folder.resolve() / cache.name
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    with TemporaryDirectory(prefix="judge") as door:
        forks = Forks(cache.engine, found, Path(door))
        try:
            trial = CacheTrial(cache, found, forks, folder)
            references = References(
                cache, found, forks, folder.parent / f"{cache.engine.name}-references.json"
            )
            return found.version, judge(trial, cases, references, _said(cache))
        finally:
            forks.close()


def _said(cache: Cache) -> Callable[[str], None]:
    started = time.monotonic()
    return lambda life: print(
        f"{time.monotonic() - started:5.0f} s  {cache.name}: {life}", file=sys.stderr, flush=True
    )


if __name__ == "__main__":
    sys.exit(main())
