"""What a device calls an address of host memory."""

from __future__ import annotations

from typing import Protocol


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
