"""Page-aligned slabs of host memory, and pinning them in steps, so that a GPU can copy from and to them."""

from __future__ import annotations

import ctypes
import errno
import logging
import mmap
import warnings
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Protocol, SupportsInt

import torch

from asynchicache.captures import relaxed_capture_mode
from asynchicache.errors import CapacityError, ClosedError, ConfigError, DeviceError
from asynchicache.layouts import ALIGNMENT
from asynchicache.pools.numa import device_node, prefer_node

STEP_BYTES = 1 << 30
"""Bytes pinned by one call. One call for hundreds of GiB holds the driver's lock for minutes, and fails
outright above 512 GiB (https://github.com/vllm-project/vllm/pull/51080)."""

TOUCH_THREADS = 4
"""Threads that have the system find pages: 16 GB take one thread 8 s and four 1.6 s
(https://github.com/rapidsai/cudf/pull/23457)."""

_REGISTER_FLAGS = 1 | 2  # cudaHostRegisterPortable, for every context; cudaHostRegisterMapped, for kernels
_POPULATE_WRITE = 23  # MADV_POPULATE_WRITE, from Linux 5.14 on
_UNKNOWN_ADVICE = {errno.EINVAL, errno.ENOSYS}

logger = logging.getLogger(__name__)

_libc = ctypes.CDLL(None, use_errno=True)
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]


class PinningWarning(RuntimeWarning):
    """Warned when host memory could not be pinned; names the slower path that copies take then."""


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
        except (OSError, OverflowError) as error:
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
        """Whether some of it is pinned."""
        return self._registration is not None

    def pin(self, pinner: Pinner, offset: int, nbytes: int) -> None:
        """Have the system find pages for a part of the slab, and pin it.

        Raises:
            DeviceError: CUDA refused; what was pinned before stays so.
            CapacityError: the system has no pages left.
            ClosedError: the slab is closed.
        """
        memory = self.tensor[offset : offset + nbytes]
        pinner.touch(memory)
        registration = self._registration or HostRegistration(pinner.runtime, pinner.index)
        registration.add(self.tensor.data_ptr() + offset, nbytes)
        self._registration = registration

    def close(self) -> None:
        """Unpin and let go; twice is harmless. No copy may be in flight."""
        self.unpin()
        self._memory = self._tensor = None

    def unpin(self) -> None:
        """Unpin what is pinned; twice is harmless. No copy may be in flight."""
        registration, self._registration = self._registration, None
        if registration is not None:
            registration.close()


class CudaRuntime(Protocol):
    """What is used of `torch.cuda.cudart()`; its calls return the error code and never raise."""

    def cudaHostRegister(self, pointer: int, size: int, flags: int) -> SupportsInt: ...  # noqa: N802

    def cudaHostUnregister(self, pointer: int) -> SupportsInt: ...  # noqa: N802


class HostRegistration:
    """Runs of host memory that are pinned until `close`."""

    def __init__(self, runtime: CudaRuntime, index: int = -1) -> None:
        """
        Args:
            runtime: `torch.cuda.cudart()`.
            index: of the GPU whose context the calls are made in; -1 is the thread's current one.
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
                raise DeviceError(f"cudaHostRegister of {nbytes} bytes returned error {code}")
        self._runs.append((address, nbytes))

    def close(self) -> None:
        """Unpin; twice is harmless. What the system refuses to unpin is logged, and stays pinned."""
        with torch.cuda.device(self._index), relaxed_capture_mode():
            while self._runs:
                address, nbytes = self._runs.pop()
                code = int(self._runtime.cudaHostUnregister(address))
                if code == 0:
                    _advise_forks(address, nbytes, mmap.MADV_DOFORK)
                    continue
                _forget_cuda_error()
                logger.warning("cudaHostUnregister of %#x returned error %d", address, code)


def _forget_cuda_error() -> None:
    """A call that was refused is reported again by the next kernel launch; let it be this one."""
    if torch.cuda.is_available():
        with suppress(RuntimeError):
            torch.ones(1, device="cuda")


class Pinner:
    """Pins host memory for one GPU.

    Attributes:
        runtime: `torch.cuda.cudart()`.
        index: of the GPU; -1 is the thread's current one.
        step_bytes: most bytes of one call, as far as what is copied as a whole allows.
    """

    def __init__(
        self,
        runtime: CudaRuntime,
        *,
        index: int = -1,
        node: int | None = None,
        step_bytes: int = STEP_BYTES,
        threads: int = TOUCH_THREADS,
    ) -> None:
        """
        Args:
            runtime: `torch.cuda.cudart()`.
            index: see above.
            node: the NUMA node that memory shall lie on; None lets the system decide.
            step_bytes: see above.
            threads: how many have the system find pages at once.
        """
        self.runtime = runtime
        self.index = index
        self.step_bytes = step_bytes
        self._node = node
        self._threads = threads

    @classmethod
    def of(cls, device: str = "cuda:0") -> Pinner | None:
        """For a GPU, on the node that it hangs on; None if this process can use no CUDA.

        Args:
            device: as torch names it; a CPU needs nothing pinned, so it has None too.
        """
        index = torch.device(device).index or 0
        if not device.startswith("cuda") or not torch.cuda.is_available():
            return None
        runtime = torch.cuda.cudart()  # type: ignore[no-untyped-call]
        return cls(runtime, index=index, node=device_node(pci_address(index)))

    def touch(self, memory: torch.Tensor) -> None:
        """Have the system find pages for fresh memory, on the node, in several threads.

        Raises:
            CapacityError: it has none left.
        """
        start, nbytes = memory.data_ptr(), memory.numel()
        if self._node is not None:
            prefer_node(start, nbytes, self._node)
        step = max(ALIGNMENT, -(-nbytes // self._threads // ALIGNMENT) * ALIGNMENT)
        parts = [memory[offset : offset + step] for offset in range(0, nbytes, step)]
        with ThreadPoolExecutor(self._threads, "asynchicache-touch") as threads:
            list(threads.map(_populate, parts))

    def steps(self, nbytes: int, unit: int) -> Iterator[tuple[int, int]]:
        """(offset, size) of steps that hold whole units, as many as fit into `step_bytes`."""
        step = max(unit, self.step_bytes // unit * unit)
        for offset in range(0, nbytes, step):
            yield offset, min(step, nbytes - offset)


def _populate(memory: torch.Tensor) -> None:
    """Without the GIL, as touching is what takes long."""
    if _libc.madvise(memory.data_ptr(), memory.numel(), _POPULATE_WRITE) == 0:
        return
    code = ctypes.get_errno()
    if code not in _UNKNOWN_ADVICE:
        name = errno.errorcode.get(code, str(code))
        raise CapacityError(f"no pages for {memory.numel()} bytes of host memory: {name}")
    memory[::ALIGNMENT].zero_()  # it is fresh, so nothing is lost


def _advise_forks(address: int, nbytes: int, advice: int) -> None:
    """A fork would copy pinned pages at once, all of them, and a child can use neither them nor CUDA; what
    is not pinned a child may read."""
    _libc.madvise(address, nbytes, advice)  # a refusal costs speed only


def pci_address(index: int) -> str:
    """Of GPU `index`, as `/sys/bus/pci/devices` names it; empty if torch does not tell."""
    properties = torch.cuda.get_device_properties(index)
    numbers = [getattr(properties, f"pci_{part}_id", -1) for part in ("domain", "bus", "device")]
    return "" if min(numbers) < 0 else "{:04x}:{:02x}:{:02x}.0".format(*numbers)


def warn_unpinned(what: str, error: Exception) -> None:
    """Name the slower path."""
    text = f"{what} is not pinned ({error}): copies take path 'plain', through the driver's own buffers"
    warnings.warn(text, PinningWarning, stacklevel=3)


def allocate_slab(nbytes: int, pin: bool) -> Slab:
    """A slab of `nbytes`, pinned if `pin` and this process can use CUDA; else with a warning.

    Raises:
        ConfigError: `nbytes` is not above 0.
        CapacityError: the system has no room for it.
    """
    slab = Slab(nbytes)
    pinner = Pinner.of() if pin else None
    if pinner is not None:
        try:
            slab.pin(pinner, 0, nbytes)
        except RuntimeError as error:
            warn_unpinned(f"a slab of {nbytes} bytes", error)
    return slab
