"""Page-aligned slabs of host memory, pinned in steps for copies from and to a GPU."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import resource
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import partial
from typing import ClassVar, Protocol, SupportsInt

import torch

from asynchicache.cuda_driver import relaxed_capture_mode
from asynchicache.errors import CapacityError, ClosedError, ConfigError, DeviceError
from asynchicache.layouts import ALIGNMENT
from asynchicache.pools.memory import process_memory
from asynchicache.pools.numa import device_node, prefer_node

STEP_BYTES = 128 << 20
"""Bytes pinned per call. The driver launches nothing meanwhile, whoever asks it to: while a model runs, calls
are to be short (https://github.com/vllm-project/vllm/issues/42632)."""

FIRST_BYTES = 1 << 30
"""Bytes pinned before a pool is opened; the rest follows while it serves."""

TOUCH_THREADS = 4
"""Threads that touch fresh memory: 16 GB take 8 s with one thread, 1.6 s with four
(https://github.com/rapidsai/cudf/pull/23457)."""

_REGISTER_FLAGS = 1 | 2  # cudaHostRegisterPortable, for every context; cudaHostRegisterMapped, for kernels
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, from Linux 5.14 on
_OUT_OF_MEMORY = 2  # cudaErrorMemoryAllocation
_UNKNOWN_ADVICE = {errno.EINVAL, errno.ENOSYS}

logger = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PinningWarning(RuntimeWarning):
    """Warned when host memory could not be pinned; names the slower copy path that is used instead."""


class Slab:
    """A run of page-aligned host memory, zero until written; the system allocates pages on first touch.

    The memory lives as long as any view of it. `close` drops only the slab's own views and the pinning, so
    a remaining view never points at freed memory.

    Attributes:
        on_allocate: called with the size of each slab before it is mapped; tests of scarce memory raise here.
    """

    on_allocate: ClassVar[Callable[[int], object] | None] = None

    def __init__(self, nbytes: int, *, fd: int = -1) -> None:
        """
        Args:
            fd: a file of that size to map, which may have content; the slab keeps a duplicate. Default: fresh
                memory of this process.

        Raises:
            ConfigError: `nbytes` is not above 0.
            CapacityError: the system has no room.
        """
        if nbytes < 1:
            raise ConfigError(f"a slab of {nbytes} bytes; it must have 1 at least")
        if Slab.on_allocate is not None:
            Slab.on_allocate(nbytes)
        self._fresh = fd < 0
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS if self._fresh else mmap.MAP_SHARED
        try:
            mapping = mmap.mmap(fd, nbytes, flags=flags)
        except (OSError, OverflowError) as error:
            raise CapacityError(f"no room for a slab of {nbytes} bytes: {error}") from error
        # Huge pages (2 MiB): O_DIRECT pins them in half the time, and a checksum reads a third faster.
        with suppress(OSError):  # a kernel without them
            mapping.madvise(mmap.MADV_HUGEPAGE)
        self.nbytes = nbytes
        self._memory: memoryview | None = memoryview(mapping)
        # Torch holds the mapping without a buffer export, so closing it explicitly would succeed and leave
        # tensors dangling. The last reference closes it.
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
        """Whether any part is pinned."""
        return self._registration is not None

    def pin(self, pinner: Pinner, offset: int, nbytes: int) -> None:
        """Touch and pin a part of the slab.

        Raises:
            DeviceError: CUDA refused; parts pinned before stay pinned.
            CapacityError: the system has no pages left.
            ClosedError: the slab is closed.
        """
        memory = self.tensor[offset : offset + nbytes]
        pinner.touch(memory, fresh=self._fresh)
        registration = self._registration or HostRegistration(pinner.runtime, pinner.index)
        registration.add(self.tensor.data_ptr() + offset, nbytes)
        self._registration = registration

    def close(self) -> None:
        """Unpin and drop the memory; idempotent. No copy may be in flight."""
        self.unpin()
        self._memory = self._tensor = None

    def unpin(self) -> None:
        """Unpin all parts; idempotent. No copy may be in flight."""
        registration, self._registration = self._registration, None
        if registration is not None:
            registration.close()


class CudaRuntime(Protocol):
    """The used part of `torch.cuda.cudart()`; calls return the error code and never raise."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> SupportsInt: ...  # noqa: N802

    def cudaHostUnregister(self, pointer: int) -> SupportsInt: ...  # noqa: N802


class HostRegistration:
    """Runs of host memory, pinned until `close`."""

    def __init__(self, runtime: CudaRuntime, index: int = -1) -> None:
        """
        Args:
            runtime: `torch.cuda.cudart()`.
            index: the GPU whose context the calls use; -1 is the thread's current one.
        """
        self._runtime = runtime
        self._index = index
        self._runs: list[tuple[int, int]] = []

    def add(self, address: int, nbytes: int) -> None:
        """
        Raises:
            DeviceError: CUDA refused.
        """
        with torch.cuda.device(self._index), relaxed_capture_mode():
            _advise_forks(address, nbytes, mmap.MADV_DONTFORK)
            code = int(self._runtime.cudaHostRegister(address, nbytes, _REGISTER_FLAGS))
            if code != 0:
                _advise_forks(address, nbytes, mmap.MADV_DOFORK)
                _forget_cuda_error()
                why = f": {_limits()}" if code == _OUT_OF_MEMORY else ""
                raise DeviceError(f"cudaHostRegister of {nbytes} bytes returned error {code}{why}")
        self._runs.append((address, nbytes))

    def close(self) -> None:
        """Unpin; idempotent. A run that CUDA refuses to unpin is logged and stays pinned."""
        with torch.cuda.device(self._index), relaxed_capture_mode():
            while self._runs:
                address, nbytes = self._runs.pop()
                code = int(self._runtime.cudaHostUnregister(address))
                if code == 0:
                    _advise_forks(address, nbytes, mmap.MADV_DOFORK)
                    continue
                _forget_cuda_error()
                logger.warning("cudaHostUnregister of %#x returned error %d", address, code)


def _limits() -> str:
    """What may keep this process from pinning, in words."""
    locked, budget = resource.getrlimit(resource.RLIMIT_MEMLOCK)[0], process_memory()
    may_lock = "unlimited" if locked == resource.RLIM_INFINITY else f"{locked} bytes"
    group = "" if budget.limit is None else f" (its control group's limit is {budget.limit})"
    return (
        f"{budget.available} bytes are available{group}, and ulimit -l is {may_lock}; raise what is too "
        "small, or lower host_bytes"
    )


def _forget_cuda_error() -> None:
    """Clear the error of a refused call: CUDA reports it again at the next kernel launch, made here."""
    if torch.cuda.is_available():
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")


class Pinner:
    """Pins host memory for one GPU.

    Attributes:
        runtime: `torch.cuda.cudart()`.
        index: the GPU; -1 is the thread's current one.
        step_bytes: the most bytes per call, unless one unit of copying is larger.
        first_bytes: pinned at once, where memory grows.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        *,
        index: int = -1,
        node: int | None = None,
        step_bytes: int = STEP_BYTES,
        first_bytes: int = 0,
        threads: int = TOUCH_THREADS,
    ) -> None:
        """
        Args:
            runtime: `torch.cuda.cudart()`.
            index: as the attribute.
            node: the NUMA node for the memory; None lets the system decide.
            step_bytes: as the attribute.
            first_bytes: as the attribute. Default: one step.
            threads: the number of threads that touch memory.
        """
        self.runtime = runtime
        self.index = index
        self.step_bytes = step_bytes
        self.first_bytes = first_bytes
        self._node = node
        self._threads = threads

    @classmethod
    def of(cls, device: str = "cuda:0") -> Pinner | None:
        """Make a pinner for a GPU and its NUMA node; None if this process cannot use CUDA.

        Args:
            device: a torch device name. Also None for a CPU, which needs no pinning.
        """
        index = torch.device(device).index or 0
        if not device.startswith("cuda") or not torch.cuda.is_available():
            return None
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        node = device_node(pci_address(index))
        return cls(runtime, index=index, node=node, first_bytes=FIRST_BYTES)

    def touch(self, memory: torch.Tensor, *, fresh: bool = True) -> None:
        """Make the system allocate pages for memory, on the node, in several threads.

        Args:
            memory: the bytes.
            fresh: they have no content, so that they may be written.

        Raises:
            CapacityError: the system has no pages left.
        """
        start, nbytes = memory.data_ptr(), memory.numel()
        if self._node is not None:
            prefer_node(start, nbytes, self._node)
        step = max(ALIGNMENT, -(-nbytes // self._threads // ALIGNMENT) * ALIGNMENT)
        parts = [memory[offset : offset + step] for offset in range(0, nbytes, step)]
        with ThreadPoolExecutor(self._threads, "asynchicache-touch") as threads:
            list(threads.map(partial(_populate, fresh=fresh), parts))

    def steps(self, nbytes: int, unit: int) -> Iterator[tuple[int, int]]:
        """(offset, size) of steps, each with as many whole units as fit into `step_bytes`, at least one."""
        step = max(unit, self.step_bytes // unit * unit)
        for offset in range(0, nbytes, step):
            yield offset, min(step, nbytes - offset)


def _populate(memory: torch.Tensor, *, fresh: bool) -> None:
    """Touch memory without holding the GIL, because it takes long."""
    if _libc.madvise(memory.data_ptr(), memory.numel(), _POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code not in _UNKNOWN_ADVICE:
        name = errno.errorcode.get(code, str(code))
        raise CapacityError(f"no pages for {memory.numel()} bytes of host memory: {name}")
    if fresh:
        memory[::ALIGNMENT].zero_()
    else:
        memory[::ALIGNMENT].clone()  # reading allocates pages of a file


def _advise_forks(address: int, nbytes: int, advice: int) -> None:
    """Exclude pinned pages from forks, or include unpinned ones again. A fork would copy all pinned pages at
    once, and the child can use neither them nor CUDA."""
    _libc.madvise(address, nbytes, advice)  # a refusal costs only speed


def pci_address(index: int) -> str:
    """The PCI address of GPU `index` as in `/sys/bus/pci/devices`; empty if torch does not report it."""
    properties = torch.cuda.get_device_properties(index)
    numbers = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    return "" if min(numbers) < 0 else "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def warn_unpinned(what: str, error: Exception) -> None:
    """Warn that memory is not pinned; names the slower copy path."""
    text = f"{what} is not pinned ({error}): copies take path 'plain', through the driver's own buffers"
    warnings.warn(text, PinningWarning, stacklevel=3)


def allocate_slab(nbytes: int, pin: bool) -> Slab:
    """Allocate a slab, pinned if `pin` and CUDA is usable; warns if pinning fails.

    Raises:
        ConfigError: `nbytes` is not above 0.
        CapacityError: the system has no room.
    """
    slab = Slab(nbytes)
    pinner = Pinner.of() if pin else None
    if pinner is not None:
        try:
            slab.pin(pinner, 0, nbytes)
        except RuntimeError as error:
            warn_unpinned(f"a slab of {nbytes} bytes", error)
    return slab
