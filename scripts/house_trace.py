"""What `house.py` runs in a process of its own: four pages go from a CPU device to a file and come back, and
every function of the package that is entered meanwhile, in any thread, is noted. Prints JSON.

- **functions, files**: distinct functions, and the files that define them. Bodies of modules and classes and
  comprehensions do not count.
- **frames of a storage call**: frames of the package on the stack when the storage engine's `put` is called,
  up to, and without, the function that the writing task runs. Where a frame runs in a task of its own, the
  stack goes on where that task was created.
- **types that a copy passes**: classes of the package of which an instance was made during the write, and
  passed to or returned by a function of `asynchicache.transfer`. What exists before, such as the engine,
  does not count; enums and exceptions neither.
"""
# ruff: noqa: T201, SLF001  # it prints for `house.py`, and looks inside

from __future__ import annotations

import argparse
import asyncio
import enum
import gc
import json
import os
import sys
import tempfile
import threading
from collections.abc import Coroutine, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import CodeType, FrameType
from typing import Any

import asynchicache
from asynchicache.cache import HybridCache
from asynchicache.config import CacheConfig
from asynchicache.specs import ModelSpec, PoolSpec, TensorSpec

PACKAGE = os.path.realpath(asynchicache.__path__[0])
PAGES, PAGE_SIZE = 4, 16

Origins = dict[asyncio.Task[Any] | None, tuple[asyncio.Task[Any] | None, list[CodeType]]]
"""By task: the task that created it, and the stack at that place, innermost first."""


class Recorder:
    """A profile function that notes what of the package is called while it is `on`."""

    def __init__(self) -> None:
        self.on = False
        self.functions: set[CodeType] = set()
        self.threads: set[int] = set()
        self.types: set[type] = set()
        self.before: dict[int, object] = {}
        self.places: dict[str, str | None] = {}

    def __call__(self, frame: FrameType, event: str, value: object) -> None:
        if not self.on or event not in ("call", "return"):
            return
        place = self.place(frame.f_code)
        if place is None:
            return
        if event == "call":
            self._called(frame.f_code)
        if place.startswith("transfer/"):
            self._passed(frame, event, value)

    def place(self, code: CodeType) -> str | None:
        """The file of a function inside the package; None for all other code."""
        name = code.co_filename
        if name not in self.places:
            path = os.path.realpath(name)
            folder = next((one for one in FOLDERS if path.startswith(one + os.sep)), None)
            self.places[name] = None if folder is None else FOLDERS[folder] + path[len(folder) + 1 :]
        return self.places[name]

    def _called(self, code: CodeType) -> None:
        self.threads.add(threading.get_ident())
        if not code.co_name.startswith("<") or code.co_name == "<lambda>":
            self.functions.add(code)

    def _passed(self, frame: FrameType, event: str, value: object) -> None:
        count = frame.f_code.co_argcount + frame.f_code.co_kwonlyargcount
        names = frame.f_code.co_varnames[:count]
        values = [value] if event == "return" else [frame.f_locals.get(name) for name in names]
        for one in values:
            for part in one if type(one) in (list, tuple) else [one]:
                kind = type(part)
                own = kind.__module__.startswith("asynchicache.")
                if own and id(part) not in self.before and not issubclass(kind, enum.Enum | BaseException):
                    self.types.add(kind)

    def figures(self, way: str) -> dict[str, object]:
        """What was entered since the beginning, under a name for that way."""
        files = {self.place(one) for one in self.functions}
        count = f"{len(self.functions)}, {len(files)}, {len(self.threads)}"
        return {f"four pages {way}: functions, files, threads": count}

    @contextmanager
    def recording(self) -> Iterator[None]:
        gc.collect()
        self.before = {id(one): one for one in gc.get_objects()}  # kept: an address is not given twice
        self.on = True
        try:
            yield
        finally:
            self.on = False
            self.before = {}


FOLDERS = {PACKAGE: ""} | {
    os.path.realpath(Path(PACKAGE, package)): f"{package}/" for package in ("kernels", "backends")
}
"""Where the package's files lie, behind links too, and what stands before their names."""

RECORDER = Recorder()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--details", action="store_true")
    details = parser.parse_args().details
    threading.setprofile(RECORDER)
    sys.setprofile(RECORDER)
    with tempfile.TemporaryDirectory() as folder:
        figures, frames = asyncio.run(walk(folder))
    sys.setprofile(None)
    figures |= {
        "frames of a storage call": len(frames),
        "types that a copy passes": len(RECORDER.types),
    }
    if details:
        figures["functions"] = sorted(map(_named, RECORDER.functions))
        figures["frames"] = list(map(_named, frames))
        figures["types"] = sorted(f"{kind.__module__}.{kind.__qualname__}" for kind in RECORDER.types)
    print(json.dumps(figures))


def _named(code: CodeType) -> str:
    return f"{RECORDER.place(code)}:{code.co_qualname}"


async def walk(folder: str) -> tuple[dict[str, object], list[CodeType]]:
    """Write four pages and read them back; what was entered, and the frames of the call that wrote them."""
    origins: Origins = {}
    asyncio.get_running_loop().set_task_factory(_remembering(origins))
    stacks: list[list[CodeType]] = []
    tensor = TensorSpec("keys", (0, 1), (2,), "float32")
    spec = ModelSpec("house", PAGE_SIZE, 2, (PoolSpec("kv", (tensor,)),))
    config = CacheConfig(
        device="cpu",
        device_slots={"kv": 16},
        host_slots={"kv": 16},
        storage="file",
        storage_options={"path": folder},
        weight_version="0",
    )
    async with HybridCache.open(spec, config) as cache:
        _watch_puts(cache, origins, stacks)
        await _serve(cache, first=1000)  # what is done once, at the first use, is no part of the way
        with RECORDER.recording():
            await _serve(cache, first=0)
        written = RECORDER.figures("to a file")
        types = set(RECORDER.types)
        with RECORDER.recording():
            await cache.flush()
            async with cache.request(range(PAGES * PAGE_SIZE + 1)) as request:
                await request.prefetch()
                await request.load()
                if request.hit.tokens != PAGES * PAGE_SIZE:
                    raise SystemExit(f"found {request.hit} again")
        RECORDER.types = types
    return written | RECORDER.figures("and back"), stacks[-1]


async def _serve(cache: HybridCache, first: int) -> None:
    async with cache.request(range(first, first + PAGES * PAGE_SIZE + 1)) as request:
        await request.load()
        request.extend(PAGES * PAGE_SIZE + 1)
        await request.checkpoint(PAGES * PAGE_SIZE)
    await cache.drain()


def _remembering(origins: Origins) -> Any:
    def create(
        loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, Any], **options: Any
    ) -> asyncio.Task[Any]:
        task = asyncio.Task(coroutine, loop=loop, **options)
        origins[task] = (asyncio.current_task(loop), _stack(sys._getframe(1)))
        return task

    return create


def _stack(frame: FrameType | None) -> list[CodeType]:
    found = []
    while frame is not None:
        if RECORDER.place(frame.f_code) is not None:
            found.append(frame.f_code)
        frame = frame.f_back
    return found


def _watch_puts(cache: HybridCache, origins: Origins, stacks: list[list[CodeType]]) -> None:
    """Note the frames of each call of the file engine's `put`."""
    from asynchicache.backends.file import engine

    kind = next(one for one in vars(engine).values() if isinstance(one, type) and hasattr(one, "put"))
    put = kind.put

    def watched(*arguments: Any, **options: Any) -> Any:
        stacks.append(_frames(sys._getframe(1), origins))
        return put(*arguments, **options)

    kind.put = watched


def _frames(frame: FrameType, origins: Origins) -> list[CodeType]:
    """Innermost first, without the function that the writing task runs itself."""
    found = _stack(frame)
    task = asyncio.current_task()
    while task in origins and not _spawning(origins[task][1][:1]):
        task, created = origins[task]
        found += created
    while _spawning(found[-1:]):
        found.pop()
    return found[:-1]


def _spawning(codes: list[CodeType]) -> bool:
    return any(RECORDER.place(one) == "controller/tasks.py" for one in codes)


if __name__ == "__main__":
    main()
