"""A process that was forked from one that has a store open: it has none, and keeps nobody out of it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from asynchicache.types import Outcome
from storage.file_stores import bench_at, fill, other_process, there

QUIET = """
import warnings
warnings.simplefilter("ignore", DeprecationWarning)  # of a fork beside threads, since Python 3.12
"""

FORK = f"""{QUIET}
import asyncio, os, sys
from storage.file_stores import backend_at, bench_at, fill, open_bench

async def main():
    async with backend_at(sys.argv[1], read_only=sys.argv[2] == "True") as backend:
        bench = await open_bench(backend)
        if not sys.argv[2] == "True":
            await fill(bench, range(4))
        child = os.fork()
        if not child:
            print(os.getpid(), flush=True)  # it has let go of the lock by now
            sys.stdin.readline()
            os._exit(0)
        await asyncio.Event().wait()

asyncio.run(main())
"""

KEEP = f"""{QUIET}
import asyncio, os, sys
from asynchicache.errors import StorageLockedError
from storage.file_stores import backend_at

async def main():
    async with backend_at(sys.argv[1]):
        child = os.fork()
        if not child:
            os._exit(0)
        os.waitpid(child, 0)
        try:
            async with backend_at(sys.argv[1]):
                print("open")
        except StorageLockedError:
            print("locked")

asyncio.run(main())
"""

USE = (
    QUIET
    + """
import asyncio, os, sys
from asynchicache.errors import UsageError
from storage.file_stores import backend_at, fill, open_bench, there

async def use(backend, bench):
    keys = bench.keys(1)
    calls = {
        "exists": lambda: bench.engine.exists(keys),
        "get": lambda: bench.engine.get(keys, [0]),
        "put": lambda: bench.engine.put(keys, [0]),
        "delete": lambda: bench.engine.delete(keys),
        "touch": lambda: bench.engine.touch(keys),
        "clear": lambda: bench.engine.clear(),
        "clear all": lambda: backend.clear(),
        "open": lambda: open_bench(backend, "swa"),
    }
    for name, call in calls.items():
        try:
            await call()
        except UsageError as error:
            print(name, error)
    await bench.engine.aclose()
    await backend.aclose()
    print("closed")

def child(backend, bench):
    try:
        asyncio.run(use(backend, bench))
    finally:
        sys.stdout.flush()
        os._exit(0)

async def main():
    async with backend_at(sys.argv[1]) as backend:
        bench = await open_bench(backend)
        await fill(bench, range(4))
        pid = os.fork()
        if not pid:
            asyncio.events._set_running_loop(None)
            child(backend, bench)
        os.waitpid(pid, 0)
        print(await there(bench, range(4)))
        await fill(bench, range(4, 8))

asyncio.run(main())
"""
)


@contextmanager
def orphan(folder: Path, *, read_only: bool = False) -> Iterator[int]:
    """A process that was forked from one that had the store open, and was killed."""
    with other_process(FORK, folder, read_only) as parent:
        assert parent.stdout is not None
        line = parent.stdout.readline()
        assert line, parent.stderr.read() if parent.stderr else ""
        child = int(line)
        parent.kill()
        parent.wait()
        try:
            yield child
        finally:
            os.kill(child, signal.SIGKILL)


@pytest.mark.asyncio
async def test_a_forked_worker_does_not_keep_the_folder_of_a_writer_that_was_killed(tmp_path: Path) -> None:
    with orphan(tmp_path) as child:
        async with bench_at(tmp_path) as bench:
            assert await there(bench, range(4)) == [0, 1, 2, 3]
            assert await bench.put(bench.keys(9), [0]) == [Outcome.STORED]
        os.kill(child, 0)  # it lived all the time


@pytest.mark.asyncio
async def test_nor_that_of_a_reader(tmp_path: Path) -> None:
    async with bench_at(tmp_path) as bench:
        await fill(bench, range(4))
    with orphan(tmp_path, read_only=True):
        async with bench_at(tmp_path) as bench:
            assert await bench.put(bench.keys(9), [0]) == [Outcome.STORED]


def test_the_parent_keeps_its_lock_when_a_child_ends(tmp_path: Path) -> None:
    with other_process(KEEP, tmp_path) as parent:
        assert parent.communicate() == ("locked\n", "")


def test_the_store_in_a_child_says_whose_it_is_and_changes_nothing(tmp_path: Path) -> None:
    with other_process(USE, tmp_path) as parent:
        output, errors = parent.communicate()
        assert errors == ""
    *refusals, closed, there = output.splitlines()
    names = ["exists", "get", "put", "delete", "touch", "clear", "clear all", "open"]
    for name, line in zip(names, refusals, strict=True):
        assert line.startswith(f"{name} {tmp_path}"), line
        assert f"was opened by process {parent.pid}, and this one was forked from it" in line
    assert (closed, there) == ("closed", "[0, 1, 2, 3]")
