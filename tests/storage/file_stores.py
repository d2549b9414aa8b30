"""A file store with one pool, as tests and the processes that they kill open it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path

from asynchicache.backends.file import FileBackend, open_backend
from asynchicache.backends.file.budget import FIXED_BYTES
from asynchicache.backends.file.segments import SegmentShape
from asynchicache.ports import AsyncioPort
from asynchicache.storage.binding import SlotBinding
from asynchicache.testing.backends import PoolUnderTest, fingerprint_of, slab_of

PAGE_BYTES = 5000
SLOT_BYTES = 8192
SLOTS_AT = SegmentShape.of(SLOT_BYTES).entries_bytes
"""Where the first slot lies in a file of pages."""


@asynccontextmanager
async def backend_at(path: Path | str, **options: object) -> AsyncIterator[FileBackend]:
    """The file backend over a folder; closed in the end."""
    async with AsyncExitStack() as stack:
        port = AsyncioPort(threads=4, seed=0)
        stack.push_async_callback(port.aclose)
        backend = open_backend({"path": path, **options}, port)
        stack.push_async_callback(backend.aclose)
        yield backend


async def open_bench(
    backend: FileBackend, pool: str = "kv", *, weights: str = "w1", slots: int = 64
) -> PoolUnderTest:
    """One pool of the backend, and slots."""
    binding = SlotBinding(slab_of(pool, PAGE_BYTES, slots), fingerprint_of(weights))
    return PoolUnderTest(await backend.open_pool(binding), binding)


@asynccontextmanager
async def bench_at(path: Path | str, *, slots: int = 64, **options: object) -> AsyncIterator[PoolUnderTest]:
    """One pool of the file backend over a folder; closed in the end."""
    async with backend_at(path, **options) as backend:
        yield await open_bench(backend, slots=slots)


async def fill(bench: PoolUnderTest, numbers: Sequence[int]) -> None:
    """Put the pages of these numbers."""
    for start in range(0, len(numbers), 32):
        some = numbers[start : start + 32]
        await bench.put(bench.keys(*some), range(len(some)))


async def there(bench: PoolUnderTest, numbers: Sequence[int]) -> list[int]:
    """Those of the numbers whose pages are there."""
    found = await bench.engine.exists(bench.keys(*numbers))
    return [number for number, bit in zip(numbers, found, strict=True) if bit]


def pages_file(path: Path) -> Path:
    """The one file of pages below a folder."""
    (found,) = path.glob("*/*.pages")
    return found


def pool_bytes(slots: int) -> int:
    """Bytes of the files of a pool with so many slots."""
    return SegmentShape.of(SLOT_BYTES).pool_bytes(slots)


def capacity_for(slots: int) -> int:
    """Bytes of a folder that holds so many slots of one pool, and not one more."""
    return FIXED_BYTES + pool_bytes(slots)


def size_of(path: Path) -> int:
    """Bytes of all files below a folder."""
    return sum(file.stat().st_size for file in path.rglob("*") if file.is_file())


def other_process(script: str, *arguments: object) -> subprocess.Popen[str]:
    """Python code that imports this module, in a process of its own."""
    path = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, [os.environ.get("PYTHONPATH")])])
    return subprocess.Popen(
        [sys.executable, "-c", f"import forking; forking.forget_full_disk()\n{script}", *map(str, arguments)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": path},
    )
