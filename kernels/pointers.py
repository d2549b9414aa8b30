"""What a device calls an address of host memory."""

from __future__ import annotations

from typing import Protocol

from asynchicache.errors import DeviceError


class HostPointers(Protocol):
    """Translates addresses; `cuda_driver.CudaDriver` is one."""

    def device_address(self, address: int) -> int:
        """
        Raises:
            DeviceError: the device cannot reach this memory.
        """
        ...


class SamePointers:
    """The device is the host."""

    def device_address(self, address: int) -> int:
        return address


def shared_address(address: int, pointers: HostPointers) -> int:
    """`address` itself, which the device is to call by that name.

    Where the two differ, memory that was pinned in several steps need not be one run to the device. There
    batches of copies, which are given the host's addresses, end in an illegal access, after which nothing of
    the process can use the device (https://github.com/sgl-project/sglang/issues/40232).

    Raises:
        DeviceError: the device cannot reach it, or calls it otherwise.
    """
    if pointers.device_address(address) != address:
        raise DeviceError(f"the GPU calls host memory {address:#x} by another address")
    return address
