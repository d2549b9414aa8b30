"""Memory that this process may still use, by the machine and by its control groups."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import NamedTuple

_UNLIMITED = 1 << 60
"""cgroup v1 has no value for "no limit"; it shows the largest number of pages."""


class ProcessMemory(NamedTuple):
    """Memory that this process may use, in bytes.

    Attributes:
        limit: the tightest limit of its control groups, or None.
        used: memory counted against that limit, without droppable file cache.
        available: memory that may still be allocated, by the limits and by the machine's free memory.
    """

    limit: int | None
    used: int
    available: int


class GroupMemory(NamedTuple):
    """A control group with a limit: the limit and the memory used, in bytes."""

    limit: int
    used: int


class _Interface(NamedTuple):
    """Names of the memory files in one version of cgroups."""

    mount: str
    limit: str
    usage: str
    droppable: str


_INTERFACES = {
    1: _Interface("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _Interface("", "memory.max", "memory.current", "inactive_file"),
}


def process_memory(root: Path = Path("/")) -> ProcessMemory:
    """The memory that this process may use, by its cgroups (v1 and v2, with ancestors) and MemAvailable.

    Args:
        root: where `proc` and `sys` are mounted.
    """
    meminfo = _read(root / "proc/meminfo")
    groups = memory_groups(_read(root / "proc/self/cgroup") or "")
    found = [_group_memory(root / "sys/fs/cgroup", version, path) for version, path in groups]
    return tightest(_machine_memory(meminfo), [group for group in found if group is not None])


def tightest(available: int, groups: Iterable[GroupMemory]) -> ProcessMemory:
    """The budget under all of `groups`, on a machine with `available` bytes left."""
    group = min(groups, key=lambda group: group.limit - group.used, default=None)
    if group is None:
        return ProcessMemory(None, 0, available)
    return ProcessMemory(group.limit, group.used, max(0, min(available, group.limit - group.used)))


def memory_groups(text: str) -> list[tuple[int, str]]:
    """The control groups that may limit memory, as (cgroup version, path), from `/proc/self/cgroup`.

    Ancestors are included: each limits the groups below it. A path from outside a container may not be
    visible inside; the root, which is then the container's own group, always is.
    """
    groups = []
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        if not controllers or "memory" in controllers.split(","):
            parts = PurePosixPath("/" if ".." in path else path)
            version = 1 if controllers else 2
            groups += [(version, str(group)) for group in (parts, *parts.parents)]
    return groups


def parse_limit(text: str) -> int | None:
    """The bytes of a limit file, or None for no limit (`max`, or v1's largest number)."""
    word = text.strip()
    limit = _UNLIMITED if word == "max" else int(word)
    return None if limit >= _UNLIMITED else limit


def parse_statistic(text: str, name: str) -> int:
    """The number after `name` in `memory.stat` (`name 123`) or meminfo (`name: 123 kB`); else 0."""
    for line in text.splitlines():
        words = line.replace(":", " ").split()
        if words and words[0] == name:
            return int(words[1]) * (1024 if words[-1] == "kB" else 1)
    return 0


def _group_memory(mount: Path, version: int, group: str) -> GroupMemory | None:
    names = _INTERFACES[version]
    directory = mount / names.mount / group.lstrip("/")
    limit_text, usage_text = _read(directory / names.limit), _read(directory / names.usage)
    limit = parse_limit(limit_text) if limit_text else None
    if limit is None or usage_text is None:
        return None
    droppable = parse_statistic(_read(directory / "memory.stat") or "", names.droppable)
    return GroupMemory(limit, max(0, int(usage_text) - droppable))


def _machine_memory(meminfo: str | None) -> int:
    if meminfo is not None:
        return parse_statistic(meminfo, "MemAvailable")
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def _read(path: Path) -> str | None:
    try:
        return path.read_text()
    except OSError:
        return None
