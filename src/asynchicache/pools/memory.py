"""Host memory: how much this process may still use, and page-aligned slabs that a GPU can copy from."""

from __future__ import annotations

import mmap
import os
import warnings
from collections.abc import Iterable, Iterator
from contextlib import suppress
from pathlib import Path, PurePosixPath
from typing import NamedTuple, Protocol, SupportsInt

import torch

from asynchicache.errors import CapacityError, ClosedError, ConfigError, DeviceError
from asynchicache.layouts import ALIGNMENT

REGISTRATION_BYTES = 64 << 30
"""Most bytes pinned by one call: one call for hundreds of GiB holds the driver's lock for minutes,
and fails outright above 512 GiB (https://github.com/vllm-project/vllm/pull/51080)."""

_UNLIMITED = 1 << 60
"""cgroup v1 has no word for "no limit"; it shows the largest number of pages."""
_PORTABLE = 1  # cudaHostRegisterPortable: pinned for every CUDA context of the process


class PinningWarning(RuntimeWarning):
    """Warned when host memory could not be pinned: copies work, but are slow and do not overlap."""


# How much memory there is.


class MemoryBudget(NamedTuple):
    """What this process may use, in bytes.

    Attributes:
        limit: the tightest limit of its control groups, or None.
        used: what counts against that limit already, without file cache that can be dropped.
        available: what may still be taken: by the limits, and by what the machine has left.
    """

    limit: int | None
    used: int
    available: int


class GroupMemory(NamedTuple):
    """One control group that has a limit: the limit, and what is used of it, in bytes."""

    limit: int
    used: int


class _Interface(NamedTuple):
    """How one version of cgroups names its memory files."""

    mount: str
    limit: str
    usage: str
    droppable: str


_INTERFACES = {
    1: _Interface("memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    2: _Interface("", "memory.max", "memory.current", "inactive_file"),
}


def memory_budget(root: Path = Path("/")) -> MemoryBudget:
    """What this process may use, by its cgroups (v1 and v2, ancestors too) and by MemAvailable.

    Args:
        root: where `proc` and `sys` are mounted.
    """
    meminfo = _read(root / "proc/meminfo")
    groups = memory_groups(_read(root / "proc/self/cgroup") or "")
    found = [_group_memory(root / "sys/fs/cgroup", version, path) for version, path in groups]
    return tightest(_machine_memory(meminfo), [group for group in found if group is not None])


def tightest(available: int, groups: Iterable[GroupMemory]) -> MemoryBudget:
    """The budget under all of `groups`, on a machine with `available` bytes left."""
    group = min(groups, key=lambda group: group.limit - group.used, default=None)
    if group is None:
        return MemoryBudget(None, 0, available)
    return MemoryBudget(group.limit, group.used, max(0, min(available, group.limit - group.used)))


def memory_groups(text: str) -> list[tuple[int, str]]:
    """The control groups that may limit memory, as (cgroup version, path), from `/proc/self/cgroup`.

    Ancestors are named too: each of them limits what is below it. A path from outside a container
    need not be visible inside; the root, which then is the container's own group, always is.
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
    """The number behind `name` in `memory.stat` (`name 123`) or meminfo (`name: 123 kB`); else 0."""
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


# Slabs.


class Slab:
    """A run of page-aligned host memory, zero until written; pages are taken as they are touched.

    The memory lives as long as any view of it: `close` gives up the slab's own views and the
    pinning, so a view that someone still holds never points at memory that is gone.
    """

    def __init__(self, nbytes: int) -> None:
        """
        Raises:
            ConfigError: `nbytes` is not above 0.
            CapacityError: the system has no room for it.
        """
        if nbytes < 1:
            raise ConfigError(f"a slab of {nbytes} bytes; it must have 1 at least")
        try:
            mapping = mmap.mmap(-1, nbytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise CapacityError(f"no room for a slab of {nbytes} bytes: {error}") from error
        # Pages of 2 MiB: O_DIRECT pins them in half the time, and a checksum reads a third faster.
        with suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes = nbytes
        self._memory: memoryview | None = memoryview(mapping)
        # Torch holds the mapping itself, not a buffer export: closing the mapping by hand would
        # succeed and leave tensors dangling. It is left to its last reference.
        self._tensor: torch.Tensor | None = torch.frombuffer(mapping, dtype=torch.uint8)
        self._registration: HostRegistration | None = None

    @property
    def memory(self) -> memoryview:
        """The bytes, writable.

        Raises:
            ClosedError: the slab is closed.
        """
        if self._memory is None:
            raise ClosedError("the slab is closed")
        return self._memory

    @property
    def tensor(self) -> torch.Tensor:
        """The bytes as a uint8 tensor `[nbytes]`.

        Raises:
            ClosedError: the slab is closed.
        """
        if self._tensor is None:
            raise ClosedError("the slab is closed")
        return self._tensor

    @property
    def pinned(self) -> bool:
        return self._registration is not None

    def pin(self, runtime: CudaRuntime, unit: int) -> None:
        """Register the memory with CUDA; without it, and with a warning, if CUDA refuses.

        Args:
            runtime: `torch.cuda.cudart()`.
            unit: bytes that no boundary between two registrations may cut.
        """
        try:
            self._registration = HostRegistration(runtime, self.tensor.data_ptr(), self.nbytes, unit)
        except DeviceError as error:
            warnings.warn(f"host memory is not pinned: {error}", PinningWarning, stacklevel=2)

    def close(self) -> None:
        """Unpin and let go; twice is harmless. No copy may be in flight."""
        registration, self._registration = self._registration, None
        self._memory = self._tensor = None
        if registration is not None:
            registration.close()


def allocate_slab(nbytes: int, pin: bool, *, unit: int = ALIGNMENT) -> Slab:
    """A slab of `nbytes`, pinned if `pin` and this process can use CUDA.

    Args:
        nbytes: its size.
        pin: whether a GPU will copy from and to it. Without CUDA there is nothing to pin for.
        unit: bytes of what is copied as a whole; pinning does not cut through it.

    Raises:
        ConfigError: `nbytes` is not above 0.
        CapacityError: the system has no room for it.
    """
    slab = Slab(nbytes)
    if pin and torch.cuda.is_available():
        slab.pin(torch.cuda.cudart(), unit)  # type: ignore[no-untyped-call]
        if not slab.pinned:
            _forget_cuda_error()
    return slab


def _forget_cuda_error() -> None:
    """A refused registration is reported again by the next kernel launch; let it be this one."""
    with suppress(RuntimeError):
        torch.ones(1, device="cuda")


class CudaRuntime(Protocol):
    """What is used of `torch.cuda.cudart()`; its calls return the error code and never raise."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> SupportsInt: ...  # noqa: N802

    def cudaHostUnregister(self, pointer: int) -> SupportsInt: ...  # noqa: N802


class HostRegistration:
    """Host memory that is pinned, in chunks of at most `REGISTRATION_BYTES`, until `close`."""

    def __init__(self, runtime: CudaRuntime, address: int, nbytes: int, unit: int) -> None:
        """
        Raises:
            DeviceError: CUDA refused a chunk; those before it are unpinned again.
        """
        self._runtime = runtime
        self._addresses: list[int] = []
        for offset, size in registration_chunks(nbytes, unit):
            code = int(runtime.cudaHostRegister(address + offset, size, _PORTABLE))
            if code != 0:
                self.close()
                raise DeviceError(f"cudaHostRegister of {size} bytes at {offset} returned error {code}")
            self._addresses.append(address + offset)

    def close(self) -> None:
        """Unpin; twice is harmless."""
        while self._addresses:
            self._runtime.cudaHostUnregister(self._addresses.pop())


def registration_chunks(nbytes: int, unit: int, most: int = REGISTRATION_BYTES) -> Iterator[tuple[int, int]]:
    """(offset, size) of chunks that hold whole units, as many as fit into `most` bytes."""
    step = max(unit, most // unit * unit)
    for offset in range(0, nbytes, step):
        yield offset, min(step, nbytes - offset)
