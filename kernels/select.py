"""Which page kernels a device has."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, TypeAlias

import torch

PageCopy: TypeAlias = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class PageKernels(NamedTuple):
    """A `gather` and a `scatter` as in `asynchicache.kernels.reference`."""

    gather: PageCopy
    scatter: PageCopy


def page_kernels(device: torch.device, *, pinned: bool) -> PageKernels | None:
    """Kernels that copy between `device` and host memory, or None: then only runs can be copied.

    Args:
        device: where the device pages are.
        pinned: whether the host pages are; a kernel cannot reach others.
    """
    if device.type != "cuda" or not pinned:
        return None
    try:
        from asynchicache.kernels import triton_copy
    except ImportError:  # Triton is optional
        return None
    return PageKernels(triton_copy.gather, triton_copy.scatter)
