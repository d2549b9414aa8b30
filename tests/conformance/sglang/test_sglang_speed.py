"""Pages from host memory to storage and back, through SGLang's controller: our backend beside its own.

It prints what it measured and asserts nothing of it: only that every byte came back. The file backend
of SGLang leaves its pages in the kernel's cache; ours has them on the disk before it says so.
"""

from __future__ import annotations

import statistics
import time
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

import pytest
import sglang_trees
import torch
from sglang_trees import Tree, stand_in_for_kernels

PAGE_SIZE, PAGES, ROUNDS, BATCH = 64, 128, 5, 128
SHAPE = {"HEADS": 4, "WIDTH": 128, "LAYERS": 8}  # a page of 1 MiB


class Round(NamedTuple):
    """Of one backend: MB/s and CPU seconds."""

    put: float
    get: float
    put_cpu: float
    get_cpu: float


def measure(tree: Tree, turn: int) -> Round:
    """Write pages that nobody has seen, forget them in memory, and read them, in SGLang's batches."""
    controller = tree.cache.cache_controller
    pool = controller.storage_host_pool
    content = pool.kv_buffer.view(torch.int16)[:, :PAGES]
    random = torch.Generator().manual_seed(turn)
    content.copy_(torch.randint(-9999, 9999, content.shape, generator=random, dtype=torch.int16))
    wanted = content.clone()
    keys = [f"{turn:08x}{page:056x}" for page in range(PAGES)]
    indices = torch.arange(PAGES * PAGE_SIZE)
    batches = [slice(first, first + BATCH) for first in range(0, PAGES, BATCH)]
    tokens = [slice(batch.start * PAGE_SIZE, batch.stop * PAGE_SIZE) for batch in batches]

    clocks = [(time.perf_counter(), time.process_time())]
    for batch, part in zip(batches, tokens, strict=True):
        assert controller.page_set_func(keys[batch], indices[part]) is not False
    clocks.append((time.perf_counter(), time.process_time()))
    content.zero_()
    request = SimpleNamespace(request_id="measured", is_terminated=lambda: False)
    clocks.append((time.perf_counter(), time.process_time()))
    for batch, part in zip(batches, tokens, strict=True):
        assert controller.page_get_func(request, keys[batch], indices[part]) == len(keys[batch])
    clocks.append((time.perf_counter(), time.process_time()))

    assert torch.equal(content, wanted)
    (a, a_cpu), (b, b_cpu), (c, c_cpu), (d, d_cpu) = clocks
    megabytes = wanted.nbytes / 1e6
    return Round(megabytes / (b - a), megabytes / (d - c), b_cpu - a_cpu, d_cpu - c_cpu)


def line(name: str, rounds: list[Round]) -> str:
    put, get, put_cpu, get_cpu = (statistics.median(column) for column in zip(*rounds, strict=True))
    ways = (("put", put, put_cpu), ("get", get, get_cpu))
    cells = (f"{way} {rate:6.0f} MB/s ({cpu:.2f} s of CPU)" for way, rate, cpu in ways)
    return f"{name:28}" + "   ".join(cells)


@pytest.mark.timeout(600)
def test_pages_to_storage_and_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    stand_in_for_kernels()
    torch.set_num_threads(
        1
    )  # its threads wait by spinning, which on a busy machine costs SGLang's backend most
    for name, value in SHAPE.items():
        monkeypatch.setattr(sglang_trees, name, value)
    ours = {
        "backend_name": "asynchicache",
        "module_path": "asynchicache.integrations.sglang.storage",
        "class_name": "AsynchicacheStorage",
        "interface_v1": 1,
        "weight_version": "1",
        "storage": "file",
        "storage_options": {"path": str(tmp_path / "ours")},
    }
    size = {"page_size": PAGE_SIZE, "tokens": 16 * PAGE_SIZE, "host_ratio": (PAGES + 2) / 16}
    trees = {
        "asynchicache, file": Tree("full", "python", ours, **size),
        "SGLang, file": Tree(
            "full", "python", {"file_storage_path": str(tmp_path / "theirs")}, storage="file", **size
        ),
    }
    rounds: dict[str, list[Round]] = {name: [] for name in trees}
    for turn in range(ROUNDS):
        for name, tree in trees.items():
            rounds[name].append(measure(tree, turn))
            assert tree.storage.clear() is not False
    for tree in trees.values():
        tree.close()

    mine, theirs = rounds.values()
    ratios = {
        way: statistics.median(getattr(a, way) / getattr(b, way) for a, b in zip(mine, theirs, strict=True))
        for way in ("put", "get")
    }
    with capsys.disabled():
        print(f"\n{PAGES} pages of 1 MiB, medians of {ROUNDS} interleaved rounds")
        print(*(line(name, each) for name, each in rounds.items()), sep="\n")
        print(f"{'ratio':28}put {ratios['put']:6.1f} times{'':18}get {ratios['get']:6.1f} times")
