"""What the bus and the driver can do by themselves, so that a missed goal says where its time goes.

    python -m asynchicache_lab.gpu.probe --seconds 170

Sections come in the order of what they tell, and each stops when its share of the time is up. `--dry` runs
all of it on a CPU, with a driver that does nothing.
"""

from __future__ import annotations

import argparse
import ctypes
import mmap
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, closing, contextmanager, nullcontext
from ctypes import byref, c_int, c_size_t, c_ubyte, c_uint, c_uint64, c_void_p
from dataclasses import dataclass, field
from functools import partial
from statistics import median
from typing import Any, ClassVar, TypeAlias

import numpy as np
import torch

from asynchicache.errors import CacheError
from asynchicache.kernels.items import PoolItems
from asynchicache.kernels.select import copy_methods
from asynchicache.pools.slabs import Pinner, Slab
from asynchicache_lab.gpu.rows import Deadline, tell

CHUNK_BYTES, MAX_RUNS = 32 << 20, 1024  # of one call, as transfers make them
CALLS = 400
RUNS = (2 << 10, 64 << 10, 16 << 10, 256 << 10, 128, 512, 4 << 10, 8 << 10, 32 << 10, 1 << 20)
"""Bytes of a run, the most telling first."""

KINDS = ("pools'", "driver's", "small pages", "mapped")
"""Of host memory. The pools': registered, in huge pages where the system has some. The driver's: what torch
pins. Mapped: `cuMemCreate` on a NUMA node, which a GPU may reach by larger pages."""

Work: TypeAlias = Callable[[], object]


class _Location(ctypes.Structure):
    _fields_ = (("type", c_int), ("id", c_int))


class _Attributes(ctypes.Structure):
    _fields_ = (("order", c_int), ("source", _Location), ("destination", _Location), ("flags", c_uint))


class _Allocation(ctypes.Structure):
    _fields_ = (
        ("type", c_int),
        ("handles", c_int),
        ("location", _Location),
        ("windows", c_void_p),
        ("flags", c_ubyte * 8),
    )


class _Access(ctypes.Structure):
    _fields_ = (("location", _Location), ("flags", c_int))


class _Copy2D(ctypes.Structure):
    _side: ClassVar = (
        ("X", c_size_t),
        ("Y", c_size_t),
        ("Type", c_int),
        ("Host", c_void_p),
        ("Device", c_uint64),
    )
    _fields_ = (
        *((f"src{name}", kind) for name, kind in _side),
        ("srcArray", c_void_p),
        ("srcPitch", c_size_t),
        *((f"dst{name}", kind) for name, kind in _side),
        ("dstArray", c_void_p),
        ("dstPitch", c_size_t),
        ("width", c_size_t),
        ("height", c_size_t),
    )


class _Nothing:
    """A driver whose every function succeeds at nothing."""

    def __getattr__(self, name: str) -> Callable[..., int]:
        return lambda *given: 0


_DEVICE, _HOST_NODE, _HOST = 1, 3, 2  # CUmemLocationType
_STREAM, _ANY = 1, 3  # CUmemcpySrcAccessOrder


@dataclass(slots=True, eq=False)
class Machine:
    """A GPU with its driver, or a CPU with none.

    Attributes:
        dry: whether it is a CPU.
        released, kept: the driver, whose calls release the interpreter's lock, or keep it.
        nbytes: of each side of a copy.
        rounds: of each measurement, after one that warms up.
    """

    dry: bool
    device: torch.device = field(init=False)
    released: Any = field(init=False)
    kept: Any = field(init=False)
    nbytes: int = field(init=False)
    rounds: int = field(init=False)
    streams: list[Any] = field(init=False)

    def __post_init__(self) -> None:
        self.device = torch.device("cpu" if self.dry else "cuda:0")
        self.released = _Nothing() if self.dry else ctypes.CDLL("libcuda.so.1")
        self.kept = _Nothing() if self.dry else ctypes.PyDLL("libcuda.so.1")
        self.nbytes, self.rounds = (1 << 20, 1) if self.dry else (256 << 20, 4)
        torch.zeros(1, device=self.device)  # makes the context
        self.streams = [None] * 2 if self.dry else [_stream(self.device) for _ in range(2)]

    def handle(self, which: int = 0) -> c_void_p:
        return c_void_p(0 if self.dry else self.streams[which].cuda_stream)

    def on(self, which: int = 0) -> Any:
        return nullcontext() if self.dry else torch.cuda.stream(self.streams[which])

    def settle(self) -> None:
        if not self.dry:
            torch.cuda.synchronize()

    def call(self, name: str, *arguments: object) -> None:
        """
        Raises:
            RuntimeError: the driver refused it.
        """
        if code := getattr(self.released, name)(*arguments):
            raise RuntimeError(f"{name} returned error {code}")

    def measured(self, work: Work, which: int = 0) -> tuple[float, float]:
        """Milliseconds of the device, the best of some rounds, and microseconds of the host, their median."""
        device, host = [], []
        for _ in range(self.rounds + 1):
            self.settle()
            marks = [] if self.dry else [_mark() for _ in "12"]
            with self.on(which):
                if marks:
                    marks[0].record()
                started = time.perf_counter()
                work()
                host.append(1e6 * (time.perf_counter() - started))
                if marks:
                    marks[1].record()
            self.settle()
            device.append(marks[0].elapsed_time(marks[1]) if marks else 1.0)
        return min(device[1:]), median(host[1:])

    def there(self) -> torch.Tensor:
        """Memory of the device."""
        return torch.zeros(self.nbytes, dtype=torch.uint8, device=self.device)


def _stream(device: torch.device) -> Any:
    return torch.cuda.Stream(device)  # type: ignore[no-untyped-call]


def _mark() -> Any:
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@contextmanager
def host_memory(machine: Machine, kind: str) -> Iterator[torch.Tensor]:
    """Bytes of a kind of host memory, all ones."""
    nbytes = machine.nbytes
    with ExitStack() as stack:
        if kind == "driver's":
            memory = torch.empty(nbytes, dtype=torch.uint8, pin_memory=not machine.dry)
        elif kind == "mapped":
            memory = _mapped(machine)
        else:
            slab = stack.enter_context(closing(Slab(nbytes)))
            memory = slab.tensor
            if kind == "small pages":
                mapping = (ctypes.c_char * nbytes).from_address(memory.data_ptr())
                ctypes.CDLL(None).madvise(byref(mapping), c_size_t(nbytes), mmap.MADV_NOHUGEPAGE)
            memory.fill_(1)
            if pinner := Pinner.of(str(machine.device)):
                slab.pin(pinner, 0, nbytes)
        yield memory.fill_(1)
        machine.settle()
        del memory  # before the slab goes


def _mapped(machine: Machine) -> torch.Tensor:
    if machine.dry:
        return torch.empty(machine.nbytes, dtype=torch.uint8)
    made = _Allocation(type=1, location=_Location(_HOST_NODE, 0))
    step, address, handle = c_size_t(), c_uint64(), c_uint64()
    machine.call("cuMemGetAllocationGranularity", byref(step), byref(made), 1)
    size = c_size_t(-(-machine.nbytes // step.value) * step.value)
    machine.call("cuMemAddressReserve", byref(address), size, c_size_t(0), c_uint64(0), c_uint64(0))
    machine.call("cuMemCreate", byref(handle), size, byref(made), c_uint64(0))
    machine.call("cuMemMap", address, size, c_size_t(0), handle, c_uint64(0))
    access = (_Access * 2)(_Access(_Location(_DEVICE, 0), 3), _Access(_Location(_HOST_NODE, 0), 3))
    machine.call("cuMemSetAccess", address, size, access, c_size_t(2))
    found = (ctypes.c_char * machine.nbytes).from_address(address.value)
    return torch.frombuffer(found, dtype=torch.uint8)


@dataclass(slots=True, eq=False)
class Runs:
    """Runs of one length between host and device, in random order: addresses, int64 `[runs]`."""

    machine: Machine
    host: torch.Tensor
    there: torch.Tensor
    nbytes: int
    load: bool = True
    sorted: bool = False
    columns: tuple[Any, Any, Any] = field(init=False)

    def __post_init__(self) -> None:
        count = len(self.host) // self.nbytes
        draw = np.random.default_rng(0)
        order = [np.arange(count) if self.sorted else draw.permutation(count) for _ in "12"]
        host, there = (
            numbers * self.nbytes + memory.data_ptr()
            for numbers, memory in zip(order, (self.host, self.there), strict=True)
        )
        to, of = (there, host) if self.load else (host, there)
        self.columns = to, of, np.full(count, self.nbytes, np.int64)

    @property
    def total(self) -> int:
        return len(self.columns[0]) * self.nbytes

    def batch(
        self,
        *,
        order: int = _STREAM,
        hints: bool = False,
        flags: int = 0,
        chunk: int = CHUNK_BYTES,
        most: int | None = None,
        which: int = 0,
    ) -> Work:
        """What enqueues them in calls of at most `chunk` bytes; `most` runs in all."""
        machine, (to, of, sizes) = self.machine, self.columns
        attributes, first, failed = _Attributes(order, flags=flags), c_size_t(0), c_size_t(0)
        if hints:
            ends = _Location(_HOST, 0), _Location(_DEVICE, 0)
            attributes.source, attributes.destination = ends if self.load else ends[::-1]
        count = len(to) if most is None else most
        step = max(1, min(MAX_RUNS, chunk // self.nbytes))

        def enqueue() -> None:
            for start in range(0, count, step):
                columns = (c_void_p(column.ctypes.data + 8 * start) for column in (to, of, sizes))
                number = c_size_t(min(step, count - start))
                rest = byref(attributes), byref(first), c_size_t(1), byref(failed), machine.handle(which)
                machine.call("cuMemcpyBatchAsync", *columns, number, *rest)

        return enqueue

    def kernel(self, which: int = 0) -> Work | None:
        """What copies them by the library's kernel, where there is one."""
        shape = 1, len(self.columns[0]), 1, self.nbytes
        items = PoolItems.of([self.host[: self.total].view(shape)], [self.there[: self.total].view(shape)])
        kernels = copy_methods(items, pinned=True).kernels
        if kernels is None:
            return None
        slots = [torch.randperm(shape[1]).to(self.there.device) for _ in "12"]
        self.machine.settle()

        def enqueue() -> None:
            ours, theirs = (side.data_ptr() for side in slots)
            stream = self.machine.handle(which).value or 0
            kernels.copy(range(1), ours, theirs, shape[1], to_device=self.load, stream=stream)

        return enqueue


def calls(machine: Machine, end: Deadline) -> None:
    """Microseconds of the host for one call, and for batches by their number of runs and kind of memory."""
    event = c_void_p()
    machine.call("cuEventCreate", byref(event), 3)  # blocking, without time
    stream = machine.handle()
    asked: Mapping[str, tuple[object, ...]] = {
        "cuEventRecord": (event, stream),
        "cuStreamWaitEvent": (stream, event, 0),
        "cuEventQuery": (event,),
        "cuCtxGetCurrent": (byref(c_void_p()),),
    }
    for name, arguments in asked.items():
        for lock, library in (("released", machine.released), ("kept", machine.kept)):
            times = []
            for turn in range(CALLS):
                started = time.perf_counter()
                getattr(library, name)(*arguments)
                times.append(1e6 * (time.perf_counter() - started))
                if turn % 64 == 63:
                    machine.settle()
            tell(section="calls", call=name, lock=lock, us=round(median(times), 2))
    there = machine.there()
    for kind in KINDS[:2]:
        with host_memory(machine, kind) as host:
            for nbytes in (64 << 10, 2 << 10, 2 << 20):
                runs = Runs(machine, host, there, nbytes)
                for count in (1, 16, 128, 1024, 4096):
                    if count > len(runs.columns[0]) or end.passed:
                        break
                    ms, us = machine.measured(runs.batch(chunk=1 << 40, most=count))
                    each = {
                        "host_us": round(us, 1),
                        "us_a_run": round(us / count, 3),
                        "device_ms": round(ms, 3),
                    }
                    tell(
                        section="calls",
                        call="cuMemcpyBatchAsync",
                        memory=kind,
                        run=nbytes,
                        runs=count,
                        **each,
                    )


def plain(machine: Machine, end: Deadline) -> None:
    """One copy of everything, by kind of host memory: what is held against it must be of the same kind."""
    there = machine.there()
    for kind in KINDS:
        if end.passed:
            return
        try:
            with host_memory(machine, kind) as host:
                load, _ = machine.measured(partial(there.copy_, host, non_blocking=True))
                backup, _ = machine.measured(partial(host.copy_, there, non_blocking=True))
        except (RuntimeError, CacheError) as error:  # a kind that this machine does not have
            tell(section="plain", memory=kind, refused=str(error))
            continue
        tell(
            section="plain",
            memory=kind,
            load_gb_s=_rate(machine.nbytes, load),
            backup_gb_s=_rate(machine.nbytes, backup),
        )


def lengths(machine: Machine, end: Deadline) -> None:
    """GB/s by length of runs, path, kind of memory and direction; and whether the bytes are right."""
    there = machine.there()
    for kind in KINDS:
        with host_memory(machine, kind) as host:
            for nbytes in RUNS:
                for load in (True, False):
                    runs = Runs(machine, host, there, nbytes, load)
                    ways = {"batch": runs.batch() if nbytes > 1024 else None, "kernel": runs.kernel()}
                    for path, work in ways.items():
                        if end.passed:
                            return
                        if work is not None:
                            _tell_rate(machine, runs, kind, path, work)


def _tell_rate(machine: Machine, runs: Runs, kind: str, path: str, work: Work) -> None:
    to, value, way = (runs.there, 1, "load") if runs.load else (runs.host, 2, "backup")
    runs.there.fill_(0 if runs.load else value)
    ms, us = machine.measured(work)
    wrong = None if machine.dry else int((to[: runs.total] != value).sum())
    runs.host.fill_(1)
    found = {"gb_s": _rate(runs.total, ms), "host_us": round(us), "wrong_bytes": wrong}
    tell(section="lengths", memory=kind, run=runs.nbytes, direction=way, path=path, **found)


def options(machine: Machine, end: Deadline) -> None:
    """What a batch may be told, and in what order its runs come."""
    there = machine.there()
    told: Mapping[str, dict[str, Any]] = {
        "as it is": {},
        "hints": {"hints": True},
        "any order of sources": {"order": _ANY},
        "overlap flag": {"flags": 1},
        "4 MiB a call": {"chunk": 4 << 20},
        "all in one call": {"chunk": 1 << 40},
    }
    with host_memory(machine, KINDS[0]) as host:
        for nbytes in (64 << 10, 16 << 10, 256 << 10):
            runs = Runs(machine, host, there, nbytes)
            works = {name: runs.batch(**given) for name, given in told.items()}
            works["neighbours in order"] = Runs(machine, host, there, nbytes, sorted=True).batch()
            for name, work in works.items():
                if end.passed:
                    return
                ms, us = machine.measured(work)
                tell(
                    section="options", run=nbytes, option=name, gb_s=_rate(runs.total, ms), host_us=round(us)
                )


def strided(machine: Machine, end: Deadline) -> None:
    """Tokens 16 KiB apart on the host (layout page_first): a 2-D copy of many, against a run for each."""
    width, parts, tokens = 2048, 8, 16 if machine.dry else 256
    there = machine.there()
    with host_memory(machine, KINDS[0]) as host:
        slots = machine.nbytes // (width * parts * tokens)
        copies = [
            _Copy2D(
                srcType=1,
                srcHost=host.data_ptr() + (slot * tokens * parts + part) * width,
                srcPitch=width * parts,
                dstType=2,
                dstDevice=there.data_ptr() + (part * slots + slot) * width * tokens,
                dstPitch=width,
                width=width,
                height=tokens,
            )
            for slot in range(slots)
            for part in range(parts)
        ]

        def enqueue() -> None:
            for one in copies:
                machine.call("cuMemcpy2DAsync_v2", byref(one), machine.handle())

        for name, work in (("2-D", enqueue), ("batch", Runs(machine, host, there, width).batch())):
            if not end.passed:
                ms, us = machine.measured(work)
                rate = _rate(machine.nbytes, ms)
                tell(section="strided", path=name, copies=len(copies), gb_s=rate, host_us=round(us))


def busy(machine: Machine, end: Deadline) -> None:
    """What copies and matrix products take from each other, and how long an engine's own small copy waits
    behind a load."""
    size, products = (256, 2) if machine.dry else (4096, 60)
    kind = torch.float32 if machine.dry else torch.bfloat16
    left, right = (torch.ones(size, size, device=machine.device, dtype=kind) for _ in "12")
    out, there = torch.empty_like(left), machine.there()

    def compute() -> None:
        for _ in range(products):
            torch.mm(left, right, out=out)

    with host_memory(machine, KINDS[0]) as host:
        alone, _ = machine.measured(compute)
        for nbytes in (16 << 10, 256 << 10):
            runs = Runs(machine, host, there, nbytes)
            for path, work in {"batch": runs.batch(which=1), "kernel": runs.kernel(which=1)}.items():
                if work is None or end.passed:
                    continue

                def beside(copy: Work = work) -> None:
                    with machine.on(1):
                        copy()
                    compute()

                lonely, _ = machine.measured(work, which=1)
                together, _ = machine.measured(beside)
                times = {"copy_ms": lonely, "compute_ms": alone, "compute_beside_ms": together}
                tell(
                    section="busy",
                    run=nbytes,
                    path=path,
                    **{name: round(ms, 2) for name, ms in times.items()},
                )
        _tell_waits(machine, host, there, end)


def _tell_waits(machine: Machine, host: torch.Tensor, there: torch.Tensor, end: Deadline) -> None:
    small = torch.zeros(4096, dtype=torch.uint8, pin_memory=not machine.dry)
    to = torch.zeros(4096, dtype=torch.uint8, device=machine.device)
    runs = Runs(machine, host, there, 64 << 10)
    for chunk in (None, 4 << 20, CHUNK_BYTES, 1 << 40):
        if end.passed:
            return
        load, waits = runs.batch(chunk=chunk, which=1) if chunk else None, []
        for _ in range(machine.rounds):
            machine.settle()
            if load is not None:
                load()
            started = time.perf_counter()
            with machine.on():
                to.copy_(small, non_blocking=True)
            if not machine.dry:
                machine.streams[0].synchronize()
            waits.append(1e6 * (time.perf_counter() - started))
        tell(
            section="busy",
            behind_calls_of=chunk,
            small_copy_us=round(median(waits), 1),
            worst_us=round(max(waits), 1),
        )


def _rate(nbytes: int, ms: float) -> float:
    return round(nbytes / ms / 1e6, 2)


SECTIONS: Mapping[str, tuple[Callable[[Machine, Deadline], None], float]] = {
    "calls": (calls, 0.2),
    "plain": (plain, 0.1),
    "busy": (busy, 0.15),
    "options": (options, 0.15),
    "strided": (strided, 0.05),
    "lengths": (lengths, 0.35),
}
"""By name, and its share of the time; what one leaves goes to the next."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seconds", type=float, default=170)
    parser.add_argument("--dry", action="store_true")
    given = parser.parse_args()
    machine, whole, share, failed = Machine(given.dry), Deadline(given.seconds), 0.0, 0
    for name, (section, part) in SECTIONS.items():
        share += part
        end = Deadline(whole.left - (1 - share) * given.seconds)
        try:
            section(machine, end)
            machine.settle()
        except (
            RuntimeError,
            CacheError,
        ) as error:  # the next one may do; a lost device ends them all at once
            failed += 1
            tell(section=name, failed=f"{type(error).__name__}: {error}")
    return failed


if __name__ == "__main__":
    sys.exit(main())
