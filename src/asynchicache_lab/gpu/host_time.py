"""Where the host's time for a load layer by layer goes: on the submit thread, alone and beside busy Python.

    python -m asynchicache_lab.gpu.host_time --device cuda:0 --seconds 90

Each case is a row: microseconds of the submit thread a layer, on the clock and of its processor; until the
first layer is enqueued, which is latency; and GB/s to the last byte. Then the functions that the time went
to, by a profiler that slows what it counts.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from cProfile import Profile
from itertools import product
from pstats import Stats
from statistics import median
from typing import Any, NamedTuple

from asynchicache.errors import CacheError
from asynchicache.specs import PoolSpec, TensorSpec
from asynchicache.transfer.paths import CopyPath
from asynchicache.transfer.plan import CacheOperation, Direction
from asynchicache.types import PoolTransfer
from asynchicache_lab.bench.copy_rig import CopyRig, open_rig
from asynchicache_lab.bench.submit_thread import SubmitPort, busy_python
from asynchicache_lab.gpu.rows import Deadline, tell

LAYER_BYTES = (2 << 20, 256 << 10, 8 << 20, 64 << 20)
PAGES = (32, 512)
ROUNDS, WARM = 12, 2
FUNCTIONS = 12


class TimedLoad(NamedTuple):
    """One load.

    Attributes:
        busy: whether a thread runs Python beside it.
        layer_bytes: bytes of each layer.
        pages: of each layer, in random order.
        path: how they are copied.
        layers: how many.
    """

    busy: bool
    layer_bytes: int
    pages: int
    path: CopyPath
    layers: int


def cases(device: str) -> Iterator[TimedLoad]:
    paths = list(CopyPath) if device == "cpu" else [CopyPath.BATCH, CopyPath.KERNEL]
    for busy, nbytes, path, pages in product((False, True), LAYER_BYTES, paths, PAGES):
        if nbytes // pages >= 4096 and (device != "cpu" or nbytes <= LAYER_BYTES[0]):
            yield TimedLoad(busy, nbytes, pages, path, 48 if nbytes < LAYER_BYTES[-1] else 16)


async def measure(case: TimedLoad, device: str, rounds: int) -> None:
    tensor = TensorSpec("pages", tuple(range(case.layers)), (case.layer_bytes // case.pages,), "uint8")
    port, pool = SubmitPort(), PoolSpec("kv", (tensor,))
    async with open_rig(pool, 1, case.pages, device=device, path=case.path, group_bytes=1, port=port) as rig:
        slots = list(range(case.pages))
        operation = CacheOperation(Direction.LOAD, (PoolTransfer("kv", slots, slots[1::2] + slots[::2]),))
        with busy_python() if case.busy else _nothing():
            for _ in range(WARM):
                await _load(rig, operation)
            port.spent.clear()
            firsts, wholes = zip(*[await _load(rig, operation) for _ in range(rounds)], strict=True)
        wall, cpu = (1e6 * median(one) / case.layers for one in zip(*port.spent, strict=True))
        port.profile = Profile()
        for _ in range(rounds):
            await _load(rig, operation)
    gb_s = case.layers * case.layer_bytes / median(wholes) / 1e9
    rates = {"submit_us_a_layer": wall, "submit_cpu_us_a_layer": cpu, "first_layer_us": 1e6 * median(firsts)}
    found = {name: round(value, 1) for name, value in rates.items()}
    parts = list(_functions(port.profile, rounds * case.layers))
    tell(**{**case._asdict(), "path": case.path.value}, **found, gb_s=round(gb_s, 2), functions=parts)


async def _load(rig: CopyRig, operation: CacheOperation) -> tuple[float, float]:
    """Seconds until the first layer is enqueued, and until the last byte is there."""
    started = time.perf_counter()
    ticket = rig.transfers.submit(operation, done=lambda error: None)
    await ticket.submitted(0)
    first = time.perf_counter() - started
    await ticket.submitted()  # else a large load is enqueued as it lands
    await ticket
    return first, time.perf_counter() - started


@contextmanager
def _nothing() -> Iterator[None]:
    yield


def _functions(profile: Profile, layers: int) -> Iterator[dict[str, Any]]:
    """The functions in which most time was spent, without those they called, by layer."""
    stats = Stats(profile).stats  # type: ignore[attr-defined]
    for (file, _, name), (_, calls, own, _, _) in sorted(stats.items(), key=lambda one: -one[1][2])[
        :FUNCTIONS
    ]:
        where = f"{file.rpartition('/')[2].removesuffix('.py')}.{name}"
        yield {"function": where, "calls": round(calls / layers, 2), "us": round(1e6 * own / layers, 2)}


async def run(device: str, seconds: float) -> int:
    end, failed = Deadline(seconds), 0
    for case in cases(device):
        if end.passed:
            break
        try:
            await measure(case, device, ROUNDS // 2 if case.busy else ROUNDS)
        except CacheError as error:
            failed += 1
            tell(**{**case._asdict(), "path": case.path.value}, failed=f"{type(error).__name__}: {error}")
    return failed


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cuda:0")
    parser.add_argument("--seconds", type=float, default=90)
    given = parser.parse_args()
    return asyncio.run(run(given.device, given.seconds))


if __name__ == "__main__":
    sys.exit(main())
