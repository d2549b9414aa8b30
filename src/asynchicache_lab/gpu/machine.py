"""What a machine is: versions, its GPU, and what `doctor` and the measured copy paths say of it.

python -m asynchicache_lab.gpu.machine          looks; imports no more than torch
python -m asynchicache_lab.gpu.machine doctor   measures, too
"""

from __future__ import annotations

import logging
import os
import platform
import sys
from importlib.metadata import distributions

import torch

from asynchicache_lab.gpu.rows import tell

CHECKS = ("torch", "triton", "device", "pinning", "copy_paths", "memory_limits")


def look() -> None:
    found: dict[str, object] = {
        "cuda": torch.cuda.is_available(),
        "device": None,
        "torch": torch.__version__,
        "cuda_runtime": torch.version.cuda,
        "python": platform.python_version(),
        "kernel": platform.release(),
        "cores": len(os.sched_getaffinity(0)),
        "packages": dict(sorted((str(one.metadata["Name"]), one.version) for one in distributions())),
    }
    if found["cuda"]:
        made = torch.cuda.get_device_properties(0)
        found |= {"device": made.name, "properties": str(made), "memory": torch.cuda.mem_get_info(0)}
        found["devices"] = torch.cuda.device_count()
    tell(**found)


def examine() -> int:
    """Whether all is well, a row for each check; then the rates of the copy paths."""
    logging.basicConfig(level=logging.INFO)  # which path is left out, and why
    from asynchicache.cli import doctor
    from asynchicache.transfer.calibration import measured_paths

    checks = [getattr(doctor, f"check_{name}")() for name in CHECKS]
    for check in checks:
        tell(**check._asdict())
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    for shape, rates in measured_paths(device).rates.items():
        gb_s = {path.value: round(rate, 2) for path, rate in rates.items()}
        tell(direction=shape.direction.value, tokens=shape.tokens, run_bytes=shape.nbytes, gb_s=gb_s)
    return not all(check.ok for check in checks)


if __name__ == "__main__":
    if sys.argv[1:] == ["doctor"]:
        sys.exit(examine())
    look()
