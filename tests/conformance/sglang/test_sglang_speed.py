"""Pages from host memory to storage and back, inside SGLang: our backend beside its own.

It prints what it measured and asserts nothing of it: only that every byte came back, and that cold reads
were of files that the kernel had forgotten. A storage tier is there for what no memory holds any more;
reads of what was written a moment before, which SGLang's backend has from the kernel, stand beside them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import sglang_trees
import torch
from page_cache import forget, resident_bytes
from sglang_trees import Tree, equal, stand_in_for_kernels

TOTAL, PAGE_SIZE, BATCH, ROUNDS = 128 << 20, 64, 128, 5
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


class Bench(NamedTuple):
    """One of SGLang's caches, whose host memory has room for all pages, and where its storage keeps them."""

    tree: Tree
    folder: Path
    pages: int

    @property
    def tokens(self) -> int:
        return self.pages * PAGE_SIZE

    def timed(self, work: Callable[[], object]) -> Pass:
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
        return Pass(TOTAL / 1e6 / wall, cpu)

    def end(self) -> None:
        """Nothing is left, for the next round."""
        self.tree.forget_memory()
        assert self.tree.storage.clear() is not False


def requests(bench: Bench, turn: int) -> Round:
    """The whole path: a prefix is stored as its tree does it, and prefetched for a request that wants it."""
    tree = bench.tree
    tokens = list(range(turn << 20, (turn << 20) + bench.tokens))
    computed = tree.compute(tokens, seed=turn)
    tree.settle(lambda: not tree.cache.ongoing_write_through)  # in host memory
    put = bench.timed(lambda: tree.settle(lambda: not tree.cache.ongoing_backup))

    def read(name: str) -> Pass:
        tree.forget_memory()
        took = bench.timed(lambda: tree.prefetch(tokens, f"{name} {turn}"))
        assert tree.load(tokens) == len(tokens)
        assert equal(tree.bytes_of(tokens), computed)
        return took

    warm = read("warm")
    assert forget(bench.folder) == 0
    return Round(put, warm, read("cold"))


def calls(bench: Bench, turn: int) -> Round:
    """The calls of SGLang's controller alone, a batch of pages each."""
    controller = bench.tree.cache.cache_controller
    content = controller.storage_host_pool.kv_buffer.view(torch.int16)[:, : bench.pages]
    random = torch.Generator().manual_seed(turn)
    wanted = torch.randint(-9999, 9999, content.shape, generator=random, dtype=torch.int16)
    content.copy_(wanted)
    keys = [f"{turn:08x}{page:056x}" for page in range(bench.pages)]
    request = SimpleNamespace(request_id="measured", is_terminated=lambda: False)

    def write() -> None:
        for batch, indices in batches(keys):
            assert controller.page_set_func(batch, indices) is not False

    def fetch() -> None:
        for batch, indices in batches(keys):
            assert controller.page_get_func(request, batch, indices) == len(batch)

    def read() -> Pass:
        content.zero_()
        took = bench.timed(fetch)
        assert torch.equal(content, wanted)
        return took

    put, warm = bench.timed(write), read()
    assert forget(bench.folder) == 0
    return Round(put, warm, read())


def batches(keys: list[str]) -> Iterator[tuple[list[str], torch.Tensor]]:
    """Keys, and where their tokens are in host memory."""
    for first in range(0, len(keys), BATCH):
        batch = keys[first : first + BATCH]
        yield batch, torch.arange(first * PAGE_SIZE, (first + len(batch)) * PAGE_SIZE)


@contextmanager
def benches(path: Path, pages: int) -> Iterator[dict[str, Bench]]:
    """Both backends, each with a cache of its own."""
    ours, theirs = path / "ours", path / "theirs"
    options = {
        "backend_name": "asynchicache",
        "module_path": "asynchicache.integrations.sglang.storage",
        "class_name": "AsynchicacheStorage",
        "interface_v1": 1,
        "weight_version": "1",
        "storage": "file",
        "storage_options": {"path": str(ours)},
    }
    size = {"page_size": PAGE_SIZE, "tokens": pages * PAGE_SIZE, "host_ratio": (pages + 2) / pages}
    own = {"file_storage_path": str(theirs)}
    with (
        sglang_trees.tree("full", "python", options, **size) as first,
        sglang_trees.tree("full", "python", own, storage="file", **size) as second,
    ):
        yield {"asynchicache": Bench(first, ours, pages), "SGLang": Bench(second, theirs, pages)}


def table(rounds: dict[str, list[Round]]) -> Iterator[str]:
    """Medians, and how many times as fast: of rounds that were played one after the other."""
    for name, mine in rounds.items():
        cells = [
            f"{way} {statistics.median(one.speed for one in column):5.0f} MB/s "
            f"{statistics.median(one.cpu for one in column):.3f} s of CPU"
            for way, column in zip(Round._fields, zip(*mine, strict=True), strict=True)
        ]
        yield f"    {name:14}" + "   ".join(cells)
    cells = []
    for way in Round._fields:
        pairs = zip(*([getattr(one, way).speed for one in each] for each in rounds.values()), strict=True)
        ratios = sorted(ours / theirs for ours, theirs in pairs)
        median = statistics.median(ratios)
        cells.append(f"{way} {median:.1f} times ({ratios[0]:.1f} to {ratios[-1]:.1f})".ljust(30))
    yield f"    {'':14}" + "   ".join(cells)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("layers", [2, 8, 32], ids=["256KiB", "1MiB", "4MiB"])
def test_pages_to_storage_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], layers: int
) -> None:
    stand_in_for_kernels()
    # Torch's threads wait by spinning, which on a busy machine costs SGLang's backend most.
    torch.set_num_threads(1)
    for name, value in {"HEADS": HEADS, "WIDTH": WIDTH, "LAYERS": layers}.items():
        monkeypatch.setattr(sglang_trees, name, value)
    page_bytes = 2 * layers * HEADS * WIDTH * PAGE_SIZE * torch.bfloat16.itemsize
    ways = {"the whole path": requests, "its calls alone": calls}
    played: dict[str, dict[str, list[Round]]] = {way: {} for way in ways}
    with benches(tmp_path, TOTAL // page_bytes) as made:
        for turn in range(ROUNDS):
            for way, play in ways.items():
                for name, bench in made.items():
                    played[way].setdefault(name, []).append(play(bench, turn))
                    bench.end()
    with capsys.disabled():
        print(f"\n{TOTAL // page_bytes} pages of {page_bytes >> 10} KiB, {ROUNDS} interleaved rounds")
        for way, rounds in played.items():
            print(f"  {way}", *table(rounds), sep="\n")


def test_cold_means_that_the_kernel_has_forgotten(tmp_path: Path) -> None:
    (tmp_path / "page").write_bytes(bytes(100_000))

    assert resident_bytes(tmp_path / "page") == 102_400
    assert forget(tmp_path) == resident_bytes(tmp_path / "page") == 0
