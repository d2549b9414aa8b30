"""The steps of each part, the most telling first: the time for a part may be up before the last."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from itertools import chain

from asynchicache_lab.gpu.goals import POOLS
from asynchicache_lab.gpu.steps import Step

SUITES: Mapping[str, tuple[str, str]] = {
    "streams": ("tests/streams", ""),
    "pinned memory": ("tests/pools", ""),
    "kernels": ("tests/kernels", ""),
    "plain copies": ("tests/transfer", "plain"),
    "batched copies": ("tests/transfer", "batch"),
    "copies by kernel": ("tests/transfer", "kernel"),
    "transfers": ("tests/transfer", "not plain and not batch and not kernel"),
    "whole cache": ("tests/cache/test_front_door_on_a_gpu.py", ""),
}
"""By what they are for, packages whose tests of a GPU are run, and which of those (pytest's `-k`)."""

_DRY_SUITES = {"kernels": ("tests/kernels/test_select.py", "")}
_SYSTEM = ("nvidia-smi", "nvidia-smi -q", "nvidia-smi topo -m", "lscpu", "free -m")
_LENGTHS = "2048,8192,32768"

OVERLAPS = {"overlap": (16, 64), "overlap, 8 MiB a layer": (48, 8), "overlap, 2 MiB a layer": (48, 2)}
"""By name, layers and MiB of each; the smaller they are, the more the host's time counts."""


def module(name: str, *words: object) -> list[str]:
    """The command that runs a module of this package."""
    return [sys.executable, "-m", f"asynchicache_lab.gpu.{name}", *map(str, words)]


def look(*, dry: bool) -> Iterator[Step]:
    """Beside the first step what is more of a machine, for the log: any of it may be missing."""
    yield Step("machine", module("machine"), 120, "rows")  # reads torch from a cold disk
    if not dry:
        yield Step(
            "system", ["sh", "-c", f"{'; '.join(_SYSTEM)}; cat /sys/kernel/mm/transparent_hugepage/*"], 60
        )


def one(*, dry: bool) -> Iterator[Step]:
    """Does it work, and what can the bus and the driver do?"""
    yield Step("doctor", module("machine", "doctor"), wants="rows")
    seconds, flags = (5, ["--dry"]) if dry else (170, [])
    yield Step("probe", module("probe", "--seconds", seconds, *flags), 200, "rows")
    for name, (path, which) in (_DRY_SUITES if dry else SUITES).items():
        yield suite(name, path, which, marks="not gpu and not soak" if dry else "gpu")


def two(*, dry: bool) -> Iterator[Step]:
    """How fast is it, and where does the host's time go? Latency apart from bandwidth."""
    device = "cpu" if dry else "cuda:0"
    yield Step("host", module("host_time", "--device", device, "--seconds", 1 if dry else 90), 120, "rows")
    few = {"device": device, "rounds": 1} if dry else {"device": device}
    for name, (layers, mib) in ({"overlap": (4, 1)} if dry else OVERLAPS).items():
        yield bench(name, "overlap", {**few, "layers": layers, "layer_mib": mib})
    for pool in ("swa",) if dry else POOLS:
        yield bench(f"transfer, {pool}", "transfer", {**few, "row_mib": 1 if dry else 256, "pool": pool})
    if dry:
        return
    more = {"device": device, "rounds": 5, "pool": "mha"}
    yield bench("transfer, 1 GiB", "transfer", {**more, "row_mib": 1024})
    for path in ("batch", "kernel"):  # also what was not chosen
        yield bench(f"transfer by {path}", "transfer", {**more, "row_mib": 256, "path": path})


def three(*, dry: bool) -> Iterator[Step]:
    """Do real models and the server gain by it, from every tier, and after they died?"""
    flags = ["--device", "cpu", "--small", "--lengths", "128"] if dry else ["--lengths", _LENGTHS]
    yield Step("models", module("models", *flags), 340, "rows")
    yield Step("serve", module("serving", *flags), 225, "rows")


PARTS = {"one": one, "two": two, "three": three}


def steps(part: str, *, dry: bool) -> Iterator[Step]:
    """All steps of a part, after a look at the machine."""
    return chain(look(dry=dry), PARTS[part](dry=dry))


def suite(name: str, path: str, which: str, *, marks: str) -> Step:
    """The tests of one package that are marked so; some must run, and none may fail."""
    words = [sys.executable, "-m", "pytest", "-v", "-m", marks, "-k", which, "-p", "no:cacheprovider"]
    return Step(f"tests: {name}", [*words, "--durations=5", path], wants="tests")


def bench(name: str, of: str, options: Mapping[str, object]) -> Step:
    """One bench, whose bytes must be right."""
    return Step(name, module("bench", of, json.dumps(options)), wants="rows")
