"""Place host memory on the NUMA node that a GPU is attached to."""

from __future__ import annotations

import ctypes
import errno
import logging
import platform
from pathlib import Path

logger = logging.getLogger(__name__)

_MBIND = {"x86_64": 237, "aarch64": 235}  # the number of the system call; libc has no wrapper
_PREFERRED = 1  # MPOL_PREFERRED: use this node while it has room
_MASK_BITS = 1024

_libc = ctypes.CDLL(None, use_errno=True)


def device_node(pci_address: str, root: Path = Path("/")) -> int | None:
    """The node of a PCI device; None if there is only one node, or it is unknown.

    Args:
        pci_address: such as `0000:3b:00.0`.
        root: where `sys` is mounted.
    """
    online = _read(root / "sys/devices/system/node/online")
    node = _read(root / "sys/bus/pci/devices" / pci_address.lower() / "numa_node")
    if online is None or node is None or online.isdigit():  # one number is one node; several are a range
        return None
    return int(node) if int(node) >= 0 else None


def prefer_node(address: int, nbytes: int, node: int) -> bool:
    """Place the untouched pages of a range on `node`; returns whether the system agreed.

    A refusal costs only speed, so it is only logged.
    """
    call = _MBIND.get(platform.machine())
    if call is None:
        return False
    mask = (ctypes.c_ulong * (_MASK_BITS // 64))()
    mask[node // 64] = 1 << node % 64
    arguments = (ctypes.c_void_p(address), ctypes.c_size_t(nbytes), ctypes.c_long(_PREFERRED), mask)
    if _libc.syscall(ctypes.c_long(call), *arguments, ctypes.c_ulong(_MASK_BITS), ctypes.c_uint(0)) == 0:
        return True
    code = ctypes.get_errno()
    logger.warning("host memory is not bound to NUMA node %d: %s", node, errno.errorcode.get(code, code))
    return False


def _read(path: Path) -> str | None:
    try:
        return path.read_text().strip()
    except OSError:
        return None
