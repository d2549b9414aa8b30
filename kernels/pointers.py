"""Addresses of host memory as a device sees them."""

from __future__ import annotations

from typing import Protocol

from asynchicache.errors import DeviceError


class HostPointers(Protocol):
    """Translates addresses; `asynchicache.cuda_driver.CudaDriver` is one."""

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
    """Check that the device uses the same address as the host, and return it.

    If the two differ, memory that was pinned in several steps need not be contiguous on the device. Batches
    of copies, which take the host's addresses, then end in an illegal access, after which the process cannot
    use the device any more (https://github.com/sgl-project/sglang/issues/40232).

    Raises:
        DeviceError: the device cannot reach it, or uses another address.
    """
    if pointers.device_address(address) != address:
        raise DeviceError(f"the GPU calls host memory {address:#x} by another address")
    return address
