"""Host memory that several processes map: one decides what lies in it, others copy to and from their devices.

The memory is a `memfd`: it has no name in /dev/shm, so that a killed process leaves nothing behind. It does
not count against the size of /dev/shm, and is freed when the last process that maps it has ended. Another
process of the same user opens it as a file of its owner, `/proc/PID/fd/N`, for as long as the owner lives.
"""

from __future__ import annotations

import fcntl
import os
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack

import msgspec

from asynchicache.errors import CapacityError, ConfigError
from asynchicache.layouts import HostLayout, SlotLayout
from asynchicache.pools.host import HostPool, SteppedMemory
from asynchicache.pools.slabs import Pinner, Slab
from asynchicache.specs import ModelSpec


class SlabHandle(msgspec.Struct, frozen=True):
    """Where another process finds a shared slab.

    Attributes:
        pid, fd: the owner, and the number of its file.
        device, inode: identify the file, should both numbers be in use for another one by now.
    """

    pid: int
    fd: int
    device: int
    inode: int
    nbytes: int


class SharedSlab(Slab):
    """A slab that other processes can map, see `handle`."""

    def __init__(self, nbytes: int) -> None:
        """
        Raises:
            ConfigError: `nbytes` is not above 0.
            CapacityError: the system has no room, or no more files.
        """
        if nbytes < 1:
            raise ConfigError(f"a slab of {nbytes} bytes; it must have 1 at least")
        try:
            fd = os.memfd_create("asynchicache-host", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
        except OSError as error:
            raise CapacityError(f"no shared memory: {error}") from error
        self._fd = fd
        try:
            os.ftruncate(fd, nbytes)
            # Nobody can cut it off under a process that maps it, whose next access would kill it (SIGBUS).
            fcntl.fcntl(fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
            super().__init__(nbytes, fd=fd)
        except (OSError, OverflowError) as error:
            os.close(fd)
            raise CapacityError(f"no room for {nbytes} bytes of shared memory: {error}") from error

    @property
    def handle(self) -> SlabHandle:
        """For `attach` in another process."""
        found = os.fstat(self._fd)
        return SlabHandle(os.getpid(), self._fd, found.st_dev, found.st_ino, self.nbytes)

    def close(self) -> None:
        """As `Slab.close`; processes that map it keep it."""
        super().close()
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


def attach(handle: SlabHandle) -> Slab:
    """Map a shared slab of another process, or of this one.

    Raises:
        ConfigError: the owner has ended, belongs to another user or another pid namespace, or has something
            else by now.
        CapacityError: there is no room in this process's address space.
    """
    path = f"/proc/{handle.pid}/fd/{handle.fd}"
    try:
        fd = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise ConfigError(
            f"host memory of process {handle.pid} cannot be opened at {path}: {error.strerror}. Its owner "
            "must run, as the same user and in the same pid namespace (container)"
        ) from error
    try:
        found = os.fstat(fd)
        if (found.st_dev, found.st_ino, found.st_size) != (handle.device, handle.inode, handle.nbytes):
            raise ConfigError(
                f"{path} is not the host memory that the handle names ({found.st_size} bytes for "
                f"{handle.nbytes}): its owner has ended, and another process has its number; send a new one"
            )
        return Slab(handle.nbytes, fd=fd)
    finally:
        os.close(fd)  # the mapping has a duplicate


class PoolHandle(msgspec.Struct, frozen=True):
    """The shared host memory of one pool.

    Attributes:
        signature: the layout of a slot, which both sides must agree on.
        slab: where it is.
    """

    slots: int
    signature: str
    slab: SlabHandle


class HostHandle(msgspec.Struct, frozen=True):
    """The shared host memory of all pools; made of plain values, so that any encoding carries it.

    Attributes:
        layout: the `HostLayout`, by its value.
        pools: by name. Pools that share a memory name the same slab.
        extent_bytes: of that memory; 0 if each pool has its own.
    """

    layout: str
    pools: dict[str, PoolHandle]
    extent_bytes: int = 0


def share(hosts: Mapping[str, HostPool], extent_bytes: int = 0) -> HostHandle:
    """The handle of pools that lie in shared slabs.

    Args:
        hosts: by pool.
        extent_bytes: see `HostHandle`.

    Raises:
        ConfigError: one lies in memory of its own.
    """
    pools = {}
    for name, host in hosts.items():
        slab = host.memory
        if not isinstance(slab, SharedSlab):
            raise ConfigError(f"host memory of pool {name!r} is not shared")
        pools[name] = PoolHandle(host.slots, host.layout.signature(), slab.handle)
    return HostHandle(next(iter(hosts.values())).layout.kind.value, pools, extent_bytes)


def attach_pools(
    spec: ModelSpec, handle: HostHandle, pinner: Pinner | None, kept: ExitStack
) -> tuple[dict[str, HostPool], SteppedMemory | None]:
    """Map the host memory of all pools, and pin a first step of each for a GPU.

    Args:
        handle: of the owner.
        pinner: pins it. Default: it is not pinned.
        kept: closes the memory, including what was mapped before an error.

    Returns:
        The pools by name, and the memory that some of them share, if any do.

    Raises:
        ConfigError: the owner's model is another one; or as `attach`.
        CapacityError: no room.
    """
    for pool in spec.pools:
        _check_pool(spec, pool.name, handle)
    users = Counter(handle.pools[pool.name].slab for pool in spec.pools)
    shared = None
    hosts = {}
    for pool in spec.pools:
        theirs = handle.pools[pool.name]
        memory: Slab | SteppedMemory
        if users[theirs.slab] == 1:
            memory = attach(theirs.slab)
        else:
            if shared is None:
                shared = SteppedMemory(attach(theirs.slab), handle.extent_bytes, pinner=pinner)
                kept.callback(shared.close)
            memory = shared
        layout = HostLayout(handle.layout)
        host = HostPool(pool, spec.page_size, theirs.slots, pin=pinner or False, layout=layout, memory=memory)
        kept.callback(host.close)
        hosts[pool.name] = host
    return hosts, shared


def attach_pool(spec: ModelSpec, name: str, handle: HostHandle, pinner: Pinner | None) -> HostPool:
    """Map the host memory of one pool that has a slab of its own, and pin a first step of it for a GPU.

    Raises:
        ConfigError: the owner's model is another one; or as `attach`.
        CapacityError: no room.
    """
    _check_pool(spec, name, handle)
    theirs, layout = handle.pools[name], HostLayout(handle.layout)
    memory = attach(theirs.slab)
    return HostPool(
        spec.pool(name), spec.page_size, theirs.slots, pin=pinner or False, layout=layout, memory=memory
    )


def _check_pool(spec: ModelSpec, name: str, handle: HostHandle) -> None:
    ours, theirs = spec.pool(name), handle.pools.get(name)
    if theirs is None:
        raise ConfigError(f"the owner of the host memory has pools {sorted(handle.pools)}, not {name!r}")
    signature = SlotLayout.of(ours, spec.page_size, HostLayout(handle.layout)).signature()
    if signature != theirs.signature:
        raise ConfigError(
            f"pool {name!r} is {signature} here, and {theirs.signature} for the owner of the host memory: "
            "both must have the same model and page size"
        )
