"""Pages from host memory to storage and back, inside SGLang: our backend beside its own.

It prints what it measured and asserts nothing of it: only that every byte came back, and that cold reads
were of files that the kernel had forgotten. A storage tier is there for what no memory holds any more;
reads of what was written a moment before, which SGLang's backend has from the kernel, stand beside them.
"""

from __future__ import annotations

import mmap
import os
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, contextmanager
from pathlib import Path
from typing import NamedTuple

import pytest
import sglang_trees
import torch
from page_cache import forget, resident_bytes
from sglang_trees import Tree, equal, stand_in_for_kernels

TOTAL, RUN, PAGE_SIZE, ROUNDS = 128 << 20, 4 << 20, 64, 5
HEADS, WIDTH = 4, 128


class Pass(NamedTuple):
    """One way, all pages: MB/s, and CPU seconds of the process."""

    speed: float
    cpu: float


class Round(NamedTuple):
    """Of one backend: written, read as it was just written, and read from files that nobody holds."""

    put: Pass
    warm: Pass
    cold: Pass

    def columns(self) -> dict[str, float]:
        """MB/s, also of the way to storage and back."""
        put, warm, cold = (one.speed for one in self)
        there_and_back = {
            f"there and back {way}": 1 / (1 / put + 1 / get) for way, get in (("warm", warm), ("cold", cold))
        }
        return {"put": put, "warm": warm, "cold": cold, **there_and_back}


class Bench(NamedTuple):
    """One of SGLang's caches, whose host memory has room for all pages, and where its storage keeps them."""

    tree: Tree
    folder: Path
    tokens: int

    def play(self, turn: int) -> Round:
        """A prefix is stored as its tree does it, and prefetched for requests that want it."""
        tree = self.tree
        tokens = list(range(turn << 20, (turn << 20) + self.tokens))
        computed = tree.compute(tokens, seed=turn)
        tree.settle(lambda: not tree.cache.ongoing_write_through)  # in host memory
        put = timed(lambda: tree.settle(lambda: not tree.cache.ongoing_backup))

        def read(name: str) -> Pass:
            tree.forget_memory()
            took = timed(lambda: tree.prefetch(tokens, f"{name} {turn}"))
            assert tree.load(tokens) == len(tokens)
            assert equal(tree.bytes_of(tokens), computed)
            return took

        warm = read("warm")
        assert forget(self.folder) == 0
        played = Round(put, warm, read("cold"))
        tree.forget_memory()
        assert tree.storage.clear() is not False
        return played


class Disk:
    """What the disk gives: plain calls with O_DIRECT on one file, as many at once as our backend has threads.

    Args:
        path: of the file, which is made.
    """

    def __init__(self, path: Path) -> None:
        self._file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_DIRECT, 0o600)
        os.posix_fallocate(self._file, 0, TOTAL)
        self._memory = memoryview(mmap.mmap(-1, TOTAL))

    def play(self, turn: int) -> Round:
        self._memory[:8] = turn.to_bytes(8, "little")
        put, get = timed(self._write), timed(lambda: self._each(os.preadv))
        return Round(put, get, get)

    def _write(self) -> None:
        self._each(os.pwritev)
        os.fdatasync(self._file)

    def _each(self, move: Callable[[int, list[memoryview], int], int]) -> None:
        starts = range(0, TOTAL, RUN)
        with ThreadPoolExecutor(8) as threads:
            moved = threads.map(lambda at: move(self._file, [self._memory[at : at + RUN]], at), starts)
            assert sum(moved) == TOTAL

    def close(self) -> None:
        os.close(self._file)


def timed(work: Callable[[], object]) -> Pass:
    wall, cpu = time.perf_counter(), time.process_time()
    work()
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    return Pass(TOTAL / 1e6 / wall, cpu)


@contextmanager
def benches(path: Path, pages: int) -> Iterator[dict[str, Bench | Disk]]:
    """Backends, each with a cache of its own; SGLang's is the second."""

    def ours(name: str, **options: object) -> dict[str, object]:
        return {
            "backend_name": "asynchicache",
            "module_path": "asynchicache.integrations.sglang.storage",
            "class_name": "AsynchicacheStorage",
            "interface_v1": 1,
            "weight_version": "1",
            "storage": "file",
            "storage_options": {"path": str(path / name), **options},
        }

    size = {"page_size": PAGE_SIZE, "tokens": pages * PAGE_SIZE, "host_ratio": (pages + 2) / pages}
    own = {"file_storage_path": str(path / "theirs")}
    with (
        sglang_trees.tree("full", "python", ours("ours"), **size) as first,
        sglang_trees.tree("full", "python", own, storage="file", **size) as second,
        sglang_trees.tree("full", "python", ours("cached", direct=False), **size) as third,
        closing(Disk(path / "raw")) as disk,
    ):
        tokens = pages * PAGE_SIZE
        yield {
            "asynchicache": Bench(first, path / "ours", tokens),
            "SGLang": Bench(second, path / "theirs", tokens),
            "direct=false": Bench(third, path / "cached", tokens),
            "the disk": disk,
        }


def table(rounds: dict[str, list[Round]]) -> Iterator[str]:
    """Medians, and how many times as fast as SGLang, in rounds that were played one after the other."""
    columns = {name: [one.columns() for one in each] for name, each in rounds.items()}
    for name, mine in columns.items():
        cells = [f"{way} {statistics.median(one[way] for one in mine):5.0f}" for way in mine[0]]
        cpu = [f"{statistics.median(one.cpu for one in way):.3f}" for way in zip(*rounds[name], strict=True)]
        yield f"  {name:14}{'   '.join(cells)}   CPU {' '.join(cpu)} s"
    for name in ("asynchicache", "direct=false"):
        cells = []
        for way in columns[name][0]:
            pairs = zip(columns[name], columns["SGLang"], strict=True)
            ratios = sorted(mine[way] / theirs[way] for mine, theirs in pairs)
            cells.append(f"{way} {statistics.median(ratios):.1f} ({ratios[0]:.1f} to {ratios[-1]:.1f})")
        yield f"  {name} / SGLang: {'   '.join(cells)}"


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layers", [8, 32], ids=["1MiB", "4MiB"])
def test_pages_to_storage_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], layers: int
) -> None:
    stand_in_for_kernels()
    # Torch's threads wait by spinning, which on a busy machine costs SGLang's backend most.
    torch.set_num_threads(1)
    for name, value in {"HEADS": HEADS, "WIDTH": WIDTH, "LAYERS": layers}.items():
        monkeypatch.setattr(sglang_trees, name, value)
    page_bytes = 2 * layers * HEADS * WIDTH * PAGE_SIZE * torch.bfloat16.itemsize
    with benches(tmp_path, TOTAL // page_bytes) as made:
        played = [{name: bench.play(turn) for name, bench in made.items()} for turn in range(ROUNDS)]
    with capsys.disabled():
        print(f"\n{TOTAL // page_bytes} pages of {page_bytes >> 20} MiB, {ROUNDS} interleaved rounds, MB/s")
        print(*table({name: [turn[name] for turn in played] for name in played[0]}), sep="\n")


def test_cold_means_that_the_kernel_has_forgotten(tmp_path: Path) -> None:
    (tmp_path / "page").write_bytes(bytes(100_000))

    assert resident_bytes(tmp_path / "page") == 102_400
    assert forget(tmp_path) == resident_bytes(tmp_path / "page") == 0
