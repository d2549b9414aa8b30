"""Memory limits read from fake mounts, and slabs."""

from __future__ import annotations

import weakref
from pathlib import Path

import pytest
import torch

from asynchicache.errors import CapacityError, ClosedError, ConfigError, DeviceError
from asynchicache.pools.memory import (
    REGISTRATION_BYTES,
    GroupMemory,
    HostRegistration,
    MemoryBudget,
    PinningWarning,
    Slab,
    allocate_slab,
    memory_budget,
    memory_groups,
    parse_limit,
    parse_statistic,
    registration_chunks,
    tightest,
)

MEMINFO = "MemTotal:       1000 kB\nMemFree:         100 kB\nMemAvailable:    800 kB\n"


def _mount(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def test_budget_without_groups_is_what_the_machine_has(tmp_path: Path) -> None:
    root = _mount(tmp_path, {"proc/meminfo": MEMINFO, "proc/self/cgroup": "0::/\n"})

    assert memory_budget(root) == MemoryBudget(None, 0, 800 * 1024)


def test_budget_under_version_2_counts_no_droppable_file_cache(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/kubepods/pod1"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/kubepods/pod1\n",
        f"{group}/memory.max": "500000\n",
        f"{group}/memory.current": "300000\n",
        f"{group}/memory.stat": "anon 200000\ninactive_file 100000\n",
    }

    assert memory_budget(_mount(tmp_path, files)) == MemoryBudget(500_000, 200_000, 300_000)


def test_budget_goes_by_the_tightest_ancestor(tmp_path: Path) -> None:
    mount = "sys/fs/cgroup"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/a/b\n",
        f"{mount}/a/b/memory.max": "max\n",
        f"{mount}/a/b/memory.current": "5\n",
        f"{mount}/a/memory.max": "70000\n",
        f"{mount}/a/memory.current": "60000\n",
    }

    assert memory_budget(_mount(tmp_path, files)) == MemoryBudget(70_000, 60_000, 10_000)


def test_budget_under_version_1_in_a_container_that_sees_only_its_root(tmp_path: Path) -> None:
    mount = "sys/fs/cgroup/memory"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "9:name=systemd:/x\n4:memory:/docker/abc\n0::/\n",
        f"{mount}/memory.limit_in_bytes": "400000\n",
        f"{mount}/memory.usage_in_bytes": "150000\n",
        f"{mount}/memory.stat": "inactive_file 1\ntotal_inactive_file 50000\n",
    }

    assert memory_budget(_mount(tmp_path, files)) == MemoryBudget(400_000, 100_000, 300_000)


def test_budget_of_this_machine_is_positive() -> None:
    assert memory_budget().available > 0


def test_budget_is_bounded_by_the_machine_and_never_negative() -> None:
    assert tightest(100, [GroupMemory(1000, 10)]).available == 100
    assert tightest(100, [GroupMemory(1000, 1200)]).available == 0


def test_groups_name_their_ancestors_and_skip_other_controllers() -> None:
    text = "3:cpu,memory:/a/b\n2:cpu:/c\n0::/../outside\n"

    assert memory_groups(text) == [(1, "/a/b"), (1, "/a"), (1, "/"), (2, "/")]


def test_limits_and_statistics_are_parsed() -> None:
    assert parse_limit("max\n") is None
    assert parse_limit("9223372036854771712\n") is None
    assert parse_limit("4096\n") == 4096
    assert parse_statistic(MEMINFO, "MemFree") == 100 * 1024
    assert parse_statistic("anon 7\n", "anon") == 7
    assert parse_statistic("anon 7\n", "file") == 0


def test_slab_is_aligned_zero_and_shared_by_its_views() -> None:
    slab = allocate_slab(3 * 4096, pin=False)

    assert slab.tensor.data_ptr() % 4096 == 0
    assert not slab.tensor.any()
    slab.memory[5] = 7
    assert slab.tensor[5] == 7
    assert not slab.memory.readonly
    slab.close()


def test_views_outlive_a_closed_slab() -> None:
    slab = allocate_slab(4096, pin=False)
    mapping = weakref.ref(slab.memory.obj)
    view = slab.tensor[:16]

    slab.close()
    slab.close()
    view.fill_(3)

    assert mapping() is not None
    with pytest.raises(ClosedError):
        _ = slab.memory
    with pytest.raises(ClosedError):
        _ = slab.tensor
    del view
    assert mapping() is None


def test_slabs_that_cannot_be_are_refused() -> None:
    with pytest.raises(ConfigError, match="slab of 0 bytes"):
        allocate_slab(0, pin=False)
    with pytest.raises(CapacityError, match="no room"):
        allocate_slab(1 << 60, pin=False)


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_cuda_nothing_is_pinned_and_nobody_is_warned() -> None:
    slab = allocate_slab(4096, pin=True)

    assert not slab.pinned
    slab.close()


class _Runtime:
    """A CUDA runtime that refuses the chunk number `refuse`."""

    def __init__(self, refuse: int | None = None) -> None:
        self.pinned: list[int] = []
        self._refuse = refuse

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> int:  # noqa: N802
        if len(self.pinned) == self._refuse:
            return 2
        self.pinned.append(pointer)
        return 0

    def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
        self.pinned.remove(pointer)
        return 0


def test_registration_goes_by_chunks_of_whole_units() -> None:
    assert list(registration_chunks(10, 3, most=7)) == [(0, 6), (6, 4)]
    assert list(registration_chunks(10, 8, most=7)) == [(0, 8), (8, 2)]
    assert [size for _, size in registration_chunks(REGISTRATION_BYTES + 1, 4096)] == [REGISTRATION_BYTES, 1]


def test_registration_is_undone_when_a_chunk_is_refused() -> None:
    runtime = _Runtime(refuse=1)

    with pytest.raises(DeviceError, match="error 2"):
        HostRegistration(runtime, 4096, 2 * REGISTRATION_BYTES, 4096)

    assert not runtime.pinned


def test_slab_is_unpinned_when_it_is_closed() -> None:
    runtime, slab = _Runtime(), Slab(4096)

    slab.pin(runtime, 4096)
    assert slab.pinned
    assert runtime.pinned == [slab.tensor.data_ptr()]
    slab.close()

    assert not runtime.pinned


def test_slab_that_cannot_be_pinned_warns_and_serves() -> None:
    slab = Slab(4096)

    with pytest.warns(PinningWarning, match="error 2"):
        slab.pin(_Runtime(refuse=0), 4096)

    assert not slab.pinned
    slab.memory[0] = 1
    slab.close()
