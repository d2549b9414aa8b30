"""Memory limits read from fake mounts."""

from __future__ import annotations

from pathlib import Path

from asynchicache.pools.memory import (
    GroupMemory,
    ProcessMemory,
    memory_groups,
    parse_limit,
    parse_statistic,
    process_memory,
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

    assert process_memory(root) == ProcessMemory(None, 0, 800 * 1024)


def test_budget_under_version_2_counts_no_droppable_file_cache(tmp_path: Path) -> None:
    group = "sys/fs/cgroup/kubepods/pod1"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "0::/kubepods/pod1\n",
        f"{group}/memory.max": "500000\n",
        f"{group}/memory.current": "300000\n",
        f"{group}/memory.stat": "anon 200000\ninactive_file 100000\n",
    }

    assert process_memory(_mount(tmp_path, files)) == ProcessMemory(500_000, 200_000, 300_000)


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

    assert process_memory(_mount(tmp_path, files)) == ProcessMemory(70_000, 60_000, 10_000)


def test_budget_under_version_1_in_a_container_that_sees_only_its_root(tmp_path: Path) -> None:
    mount = "sys/fs/cgroup/memory"
    files = {
        "proc/meminfo": MEMINFO,
        "proc/self/cgroup": "9:name=systemd:/x\n4:memory:/docker/abc\n0::/\n",
        f"{mount}/memory.limit_in_bytes": "400000\n",
        f"{mount}/memory.usage_in_bytes": "150000\n",
        f"{mount}/memory.stat": "inactive_file 1\ntotal_inactive_file 50000\n",
    }

    assert process_memory(_mount(tmp_path, files)) == ProcessMemory(400_000, 100_000, 300_000)


def test_budget_of_this_machine_is_positive() -> None:
    assert process_memory().available > 0


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
