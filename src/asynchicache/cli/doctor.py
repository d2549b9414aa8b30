"""What this machine has for the cache to use: one check per thing, none of which changes anything.

A check is not ok if the cache would fail, or run slowly, for want of that thing on this machine. No GPU
is no fault: copies are then emulated on the CPU.
"""

from __future__ import annotations

import asyncio
import os
import platform
import shutil
import socket
import tempfile
import warnings
from collections.abc import Iterable
from importlib import import_module
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, version
from pathlib import Path
from typing import NamedTuple

import torch
from rich.console import RenderableType
from rich.table import Table
from rich.text import Text

from asynchicache.cli.options import DoctorOptions, StoreOptions
from asynchicache.cli.output import CommandResult, Output
from asynchicache.cli.stores import opened
from asynchicache.config import BACKEND_GROUP, load_factory
from asynchicache.errors import CacheError, StorageError
from asynchicache.layouts import ALIGNMENT
from asynchicache.pools.memory import process_memory
from asynchicache.pools.slabs import Slab, allocate_slab
from asynchicache.storage.labels import StoreFaults
from asynchicache.transfer.calibration import measured_paths
from asynchicache.transfer.plan import Direction

OLDEST_TORCH = (2, 5)
LEAST_MEMORY = 1 << 30
"""Bytes below which a model beside its host pools has no room worth speaking of."""
LEAST_DISK = 1 << 30
"""Free bytes below which a file store does little but evict."""
OWN_ENGINES = {"memory", "file"}
"""Engines that need nothing but this package, so that they must always work."""
_GROWTH_BYTES = 1 << 20  # what a store's first pages take
CLIENTS = {"mooncake": "mooncake.store", "object": "obstore", "redis": "redis"}
"""What our engines import only when they are opened."""


PACKAGES = (
    "asynchicache",
    "torch",
    "triton",
    "transformers",
    "vllm",
    "sglang",
    "numpy",
    "msgspec",
    "uvloop",
    "starlette",
    "uvicorn",
    "obstore",
    "mooncake-transfer-engine",
    "mooncake-transfer-engine-non-cuda",
)
"""Whose versions a report names."""


class Check(NamedTuple):
    """One thing looked at.

    Attributes:
        name: what it is; stable, for programs.
        ok: whether the cache can use it, or does not miss it here.
        detail: what was found, in words.
    """

    name: str
    ok: bool
    detail: str


def run(options: DoctorOptions, output: Output) -> CommandResult:
    """Look at everything."""
    found = checks()
    if options.store:
        found.append(check_store(options))
    result: dict[str, object] = {"checks": [check._asdict() for check in found]}
    if not options.report:
        return CommandResult(result, present(found))
    # A table of Markdown that is wrapped is none.
    output.console.print(report(found), soft_wrap=True, markup=False, highlight=False)
    return CommandResult(result, Text(end=""))


def report(found: Iterable[Check]) -> str:
    """Markdown for a bug tracker: versions of packages, the machine, and all checks."""
    system = f"{platform.system()} {platform.release()}, {platform.machine()}, {os.cpu_count()} CPUs"
    lines = ["### asynchicache doctor", "", f"- Python {platform.python_version()}, {system}"]
    lines += [f"- {name} {known}" for name in PACKAGES if (known := _version(name))]
    lines += ["", "| check | ok | detail |", "|---|---|---|"]
    cells = ((one.name, "yes" if one.ok else "**no**", one.detail.replace("|", "\\|")) for one in found)
    return "\n".join([*lines, *(f"| {' | '.join(row)} |" for row in cells)])


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def checks(folder: Path = Path()) -> list[Check]:
    """Everything there is to look at.

    Args:
        folder: where storage would lie; tried for O_DIRECT and for room. By default the current one.
    """
    return [
        check_torch(),
        check_triton(),
        check_device(),
        check_pinning(),
        check_copy_paths(),
        check_o_direct(folder),
        check_disk_space(folder),
        check_memory_limits(),
        check_engines(entry_points(group=BACKEND_GROUP)),
        check_ranks(),
    ]


def present(checks: Iterable[Check]) -> RenderableType:
    """Checks as a table for people."""
    table = Table("check", "ok", title="doctor")
    table.add_column("detail", overflow="fold")
    for check in checks:
        answer = Text("yes", "green") if check.ok else Text("no", "red")
        table.add_row(check.name, answer, Text(check.detail))  # as it is: brackets are no markup
    return table


def check_torch() -> Check:
    release = tuple(int(part) for part in torch.__version__.split(".")[:2])
    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "no CUDA in this build"
    return Check("torch", release >= OLDEST_TORCH, f"{torch.__version__}, {build}")


def check_triton() -> Check:
    """Triton is missed on a GPU only: elsewhere pages are moved by torch."""
    try:
        import triton
    except ImportError as error:
        needed = torch.cuda.is_available()
        why = "needed for copy kernels on this GPU" if needed else "not needed without a GPU"
        return Check("triton", not needed, f"{why}; cannot be imported: {error}")
    return Check("triton", True, triton.__version__)


def check_device() -> Check:
    """Whether the GPU, if torch sees one, does what it is told."""
    if not torch.cuda.is_available():
        return Check("device", True, f"cpu, {os.cpu_count()} cores; torch sees no CUDA device")
    try:
        torch.ones(1, device="cuda").item()
    except RuntimeError as error:
        return Check("device", False, f"cuda:0 fails: {error}")
    names = [torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())]
    return Check("device", True, ", ".join(f"cuda:{index} {name}" for index, name in enumerate(names)))


def check_pinning() -> Check:
    """Whether host memory can be pinned, the way the pools do it."""
    if not torch.cuda.is_available():
        return Check("pinning", True, "not needed without a CUDA device")
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        slab = allocate_slab(ALIGNMENT, pin=True)
    pinned = slab.pinned
    slab.close()
    words = "; ".join(str(warning.message) for warning in caught)
    return Check("pinning", pinned, words or "host memory can be pinned")


def check_copy_paths() -> Check:
    """How pages would be copied: by which path up to which length of runs, as measured now."""
    device = "cuda:0" if torch.cuda.is_available() else "cpu"
    table = measured_paths(device)
    words = [f"{way.value}: {table.summary(way)}" for way in (Direction.LOAD, Direction.BACKUP)]
    return Check("copy paths", bool(table.rates), f"{device}, {'; '.join(words)}")


def check_o_direct(folder: Path) -> Check:
    """Whether a page can be written past the system's cache and read back, in a file of `folder`."""
    try:
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".asynchicache-doctor-") as file:
            same = _direct_round_trip(file.name)
    except OSError as error:
        return Check("O_DIRECT", False, f"{folder.absolute()}: {error.strerror or error}")
    words = "direct writes and reads work" if same else "direct reads differ from what was written"
    return Check("O_DIRECT", same, f"{folder.absolute()}: {words}")


def _direct_round_trip(name: str) -> bool:
    """
    Raises:
        OSError: the file system, or the platform, has no O_DIRECT.
    """
    if not hasattr(os, "O_DIRECT"):
        raise OSError("this platform has no O_DIRECT")
    written, read = Slab(ALIGNMENT), Slab(ALIGNMENT)  # direct I/O wants aligned memory
    written.memory[:] = os.urandom(ALIGNMENT)
    descriptor = os.open(name, os.O_RDWR | os.O_DIRECT)
    try:
        os.pwritev(descriptor, [written.memory], 0)
        os.preadv(descriptor, [read.memory], 0)
    finally:
        os.close(descriptor)
    return written.memory == read.memory


def check_disk_space(folder: Path) -> Check:
    """Whether a file store could grow in `folder`: what is free there, and whether this user is given some of
    it. A store that was refused rejects writes, or evicts, until it is given more."""
    try:
        free = shutil.disk_usage(folder).free
        with tempfile.NamedTemporaryFile(dir=folder, prefix=".asynchicache-doctor-") as file:
            os.posix_fallocate(file.fileno(), 0, _GROWTH_BYTES)
    except OSError as error:
        return Check("disk space", False, f"{folder.absolute()}: {error.strerror or error}")
    return Check("disk space", free >= LEAST_DISK, f"{folder.absolute()}: {_gib(free)} free")


def check_memory_limits(root: Path = Path("/")) -> Check:
    """What this process may still take, by the machine and its control groups.

    Args:
        root: where `proc` and `sys` are mounted.
    """
    budget = process_memory(root)
    limit = "no control group limits it" if budget.limit is None else f"limit {_gib(budget.limit)}"
    words = f"{_gib(budget.available)} available, {limit}"
    return Check("memory limits", budget.available >= LEAST_MEMORY, words)


def check_engines(entries: Iterable[EntryPoint]) -> Check:
    """Which storage engines can be imported. Others' may lack their client; ours must be there."""
    faults = {entry.name: _fault(entry) for entry in entries}
    usable = sorted(name for name, fault in faults.items() if fault is None)
    missing = sorted(OWN_ENGINES - set(faults))
    words = [
        *usable,
        *(f"{name} (unusable: {fault})" for name, fault in sorted(faults.items()) if fault is not None),
        *(f"{name} (not registered; is the package installed?)" for name in missing),
    ]
    return Check("engines", set(usable) >= OWN_ENGINES, ", ".join(words))


def check_ranks(folder: Path | None = None) -> Check:
    """Whether ranks of a model can form a group here: over a Unix socket, or over TCP.

    Args:
        folder: where the socket would lie. Default: the folder of temporary files.
    """
    try:
        with tempfile.TemporaryDirectory(dir=folder, prefix="asynchicache-doctor-") as name:
            for family, address in ((socket.AF_UNIX, f"{name}/group"), (socket.AF_INET, ("127.0.0.1", 0))):
                with socket.socket(family) as listening:
                    listening.bind(address)
                    listening.listen()
    except OSError as error:
        return Check("ranks", False, f"no socket to listen on: {error.strerror or error}")
    needs = f"every rank needs asynchicache {_version('asynchicache')} and the group's token"
    return Check("ranks", True, f"Unix sockets and TCP work; {needs}")


def check_store(options: DoctorOptions) -> Check:
    """Whether a store is ours or empty, and keeps what it is given."""
    store = StoreOptions(path=options.store, option=options.option)
    try:
        faults = asyncio.run(_store_faults(store))
    except StorageError as error:
        faults = [str(error)]
    return Check("store", not faults, f"{store.place}: {'; '.join(faults) or 'nothing is wrong'}")


async def _store_faults(options: StoreOptions) -> list[str]:
    """
    Raises:
        ConfigError, StorageError: as `open_inventory`.
    """
    async with opened(options) as inventory:
        if isinstance(inventory, StoreFaults):
            return await inventory.faults()
        return [pool.problem for pool in await inventory.pools() if pool.problem]


def _fault(entry: EntryPoint) -> str | None:
    """Why the entry point's object, or the client that it will need, cannot be had; None if both can."""
    try:
        load_factory(entry.name, entry.value)
        if entry.name in CLIENTS:
            import_module(CLIENTS[entry.name])
    except CacheError as error:
        return str(error.__cause__ or error)
    except (ImportError, OSError, RuntimeError) as error:
        return str(error)
    return None


def _gib(count: int) -> str:
    return f"{count / (1 << 30):.1f} GiB"
