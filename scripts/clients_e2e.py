"""What `make clients-e2e` runs: clients that others wrote, pinned and unchanged, and `asynchicache serve`.

openai, lm-eval and guidellm have an environment of their own below `.clients`, installed once from a pinned
list. The benchmarks of vLLM and SGLang run in the environments of `make engines-e2e`. Scripts that are in no
wheel come from the source archives of vLLM and LMCache.
"""
# ruff: noqa: S603, T201  # it runs our own commands, and prints for people

from __future__ import annotations

import argparse
import hashlib
import json
import os
import subprocess
import sys
import tarfile
import venv
from collections.abc import Sequence
from pathlib import Path

import engines_e2e

from conformance import pip, python_of, ready

ROOT = Path(__file__).parents[1]
SUITE = ROOT / "tests" / "clients"
FOLDER = ROOT / ".clients"
REQUIREMENTS = ROOT / "scripts" / "clients.txt"
FOR_BENCHMARKS = ROOT / "scripts" / "clients-benchmarks.txt"
FOR_JUDGE = ROOT / "scripts" / "judge-lmcache.txt"


def make_environment(folder: Path) -> None:
    """Install the clients' packages, once for each state of the lists; pip must add no builds for CUDA."""
    wanted = hashlib.sha256(REQUIREMENTS.read_bytes() + FOR_BENCHMARKS.read_bytes()).hexdigest()
    stamp = folder / "venv" / ".installed"
    if ready(stamp, wanted):
        return
    print(f"installing {REQUIREMENTS.name} into {folder / 'venv'}, 1.5 GB; this takes minutes", flush=True)
    venv.create(folder / "venv", with_pip=True, clear=True)
    pip(folder, "install", "--no-deps", "--requirement", str(REQUIREMENTS))
    more = ("--upgrade", "--target", str(folder / "benchmarks"), "--requirement", str(FOR_BENCHMARKS))
    pip(folder, "install", "--no-deps", *more)
    stamp.write_text(wanted)


def fetch_benchmark(folder: Path, requirement: str, script: str) -> str:
    """The path of a script with its neighbours, from the source archive of `requirement`, NAME==VERSION."""
    title = requirement.replace("==", "-")
    found = folder / title / script
    if not found.exists():
        command = ["-m", "unearth", "--no-binary", "--download", folder, requirement]
        subprocess.run([python_of(folder), *command], check=True, stdout=subprocess.DEVNULL)
        with tarfile.open(folder / f"{title}.tar.gz") as archive:
            part = f"/{Path(script).parent}/"
            archive.extractall(
                folder, [name for name in archive.getmembers() if part in name.name], filter="data"
            )
    return str(found)


def engine_of(name: str) -> engines_e2e.WholeEngine:
    return next(engine for engine in engines_e2e.ENGINES if engine.name == name)


def engine_client(folder: Path, name: str, more: Path) -> dict[str, object]:
    """How a benchmark of an engine is started: its interpreter, and the environment."""
    engine = engine_of(name)
    (folder / name).mkdir(parents=True, exist_ok=True)
    engines_e2e.make_environment(folder / name, engine)
    variables = engines_e2e.environment(folder / name, engine)
    return {
        "python": str(python_of(folder / name)),
        "environment": variables | {"PYTHONPATH": os.pathsep.join((variables["PYTHONPATH"], str(more)))},
    }


def main(arguments: Sequence[str] | None = None) -> int:
    """
    Returns:
        pytest's status. What pip lacks is an error of its own.
    """
    parser = argparse.ArgumentParser(description="Run other people's clients against asynchicache serve.")
    parser.add_argument("--folder", type=Path, default=FOLDER, help="where the clients' environment goes")
    parser.add_argument("--engines", type=Path, default=engines_e2e.FOLDER, help="where the engines' are")
    parser.add_argument("--install", action="store_true", help="make the environments, and run nothing")
    options, more = parser.parse_known_args(arguments)
    folder = options.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    make_environment(folder)
    vllm = f"vllm=={engine_of('vllm').version}"
    (lmcache,) = (line for line in FOR_JUDGE.read_text().splitlines() if line.startswith("lmcache=="))
    quiet = {"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    clients: dict[str, object] = {
        "packages": {"python": str(python_of(folder)), "environment": os.environ | quiet},
        "vllm": engine_client(options.engines.resolve(), "vllm", folder / "benchmarks"),
        "sglang": engine_client(options.engines.resolve(), "sglang", folder / "benchmarks"),
        "multi_turn": fetch_benchmark(folder, vllm, "benchmarks/multi_turn/benchmark_serving_multi_turn.py"),
        "multi_round_qa": fetch_benchmark(folder, lmcache, "benchmarks/multi_round_qa/multi-round-qa.py"),
    }
    if options.install:
        return 0
    (folder / "clients.json").write_text(json.dumps(clients))
    environment = os.environ | {
        "ASYNCHICACHE_CLIENTS": str(folder / "clients.json"),
        "PYTHONPATH": os.pathsep.join(map(str, (ROOT / "src", ROOT / "tests"))),
    }
    command = [sys.executable, "-m", "pytest", "-c", ROOT / "tests" / "engines" / "pytest.ini"]
    where = ["--rootdir", ROOT, "--confcutdir", SUITE, SUITE]
    return subprocess.run([*command, *where, *more], env=environment, cwd=ROOT, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
