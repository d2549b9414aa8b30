"""A stand-in for `hf3fs_fuse.io` on a folder of any file system: the documented interface, at its worst.

Real bytes move, by `pread` and `pwrite`, between files and shared memory. What is allowed happens, by a
seed: results in any order, I/O before it is submitted, time-outs that return fewer results while the I/O
comes later, refusals. What is forbidden raises, or is written down in `faults`.
"""

from __future__ import annotations

import errno
import mmap
import os
import random
import stat
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import timedelta
from multiprocessing.shared_memory import SharedMemory
from pathlib import Path
from types import ModuleType
from typing import Any


class Slice:
    """What the binding calls an iovec: a range of registered memory, then a result."""

    def __init__(self, memory: memoryview, start: int, base: Slice | None) -> None:
        self.memory = memory
        self.base = base
        self.base_off = start
        self.result = 0
        self.userdata: object = None


class Iovec:
    """`hf3fs_fuse.io.iovec`."""

    def __init__(self, memory: memoryview) -> None:
        self.iov = Slice(memory, 0, None)

    def __getitem__(self, where: slice) -> Slice:
        start, stop, step = where.indices(len(self.iov.memory))
        if step != 1:
            raise ValueError("step not 1 when slicing iovec")
        return Slice(self.iov.memory[start:stop], start, self.iov)


@dataclass
class Io:
    """One prepared I/O."""

    view: Slice
    descriptor: int
    offset: int
    done: bool = False


@dataclass
class Behaviour:
    """What goes wrong, and how often: rates of 0 to 1.

    Attributes:
        early: an I/O runs when it is prepared.
        stalls: an I/O does not end until `Usrbio.finish_late`.
        fails: an I/O ends with -EIO and moves nothing.
        short: a read ends with half of its bytes.
        refuse: prepare raises, by errno, the next times.
    """

    early: float = 0.5
    stalls: float = 0.0
    fails: float = 0.0
    short: float = 0.0
    refuse: list[int] = field(default_factory=list)
    submit_fails: list[int] = field(default_factory=list)
    wait_fails: list[int] = field(default_factory=list)


class Ring:
    """`hf3fs_fuse.io.ioring`: one direction, used by one thread at a time."""

    def __init__(self, owner: Usrbio, entries: int, for_read: bool) -> None:
        self._owner = owner
        self._entries = entries
        self._for_read = for_read
        self._queue: list[Io] = []
        self._ended: list[Slice] = []
        self._stalled: list[Io] = []
        self._busy = threading.Lock()

    def prepare(self, iov: Slice | Iovec, read: bool, fd: int, off: int, userdata: object = None) -> Ring:
        with self._alone():
            view = iov.iov if isinstance(iov, Iovec) else iov
            self._check(view, read, fd)
            if userdata is not None:
                self._owner.faults.append("userdata is counted without the interpreter's lock")
            io = Io(view, fd, off)
            self._queue.append(io)
            if self._owner.strikes("early"):
                self._run(io)
        return self

    def submit(self) -> Ring:
        with self._alone():
            self._owner.raise_next(self._owner.behaviour.submit_fails)
        return self

    def wait(
        self, *, max_results: int = 0, min_results: int = 0, timeout: timedelta | None = None
    ) -> list[Slice]:
        with self._alone():
            self._owner.raise_next(self._owner.behaviour.wait_fails)
            for io in self._owner.shuffled(self._queue):
                self._run(io)
            self._queue.clear()
            if len(self._ended) < min_results and timeout is None:
                raise AssertionError("this waits for ever")
            most = max(max_results, min_results, 1)
            found, self._ended = self._ended[:most], self._ended[most:]
            return found

    def finish_late(self) -> None:
        """What stalled runs now, into whatever its memory has become."""
        stalled, self._stalled = self._stalled, []
        for io in stalled:
            self._end(io)

    @property
    def outstanding(self) -> int:
        return sum(not io.done for io in self._queue) + len(self._stalled) + len(self._ended)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        if not self._busy.acquire(blocking=False):
            self._owner.faults.append("one ring, two threads")
            raise OSError(errno.EBUSY, "one ring, two threads")
        try:
            yield
        finally:
            self._busy.release()

    def _check(self, view: Slice, read: bool, fd: int) -> None:
        self._owner.raise_next(self._owner.behaviour.refuse)
        if self.outstanding >= self._entries:
            raise OSError(errno.EAGAIN, os.strerror(errno.EAGAIN))
        if fd not in self._owner.registered:
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        if read != self._for_read or not len(view.memory) or view.base is None:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        if not read and not self._owner.registered[fd]:
            raise OSError(errno.EACCES, os.strerror(errno.EACCES))

    def _run(self, io: Io) -> None:
        if io.done:
            return
        io.done = True
        if self._owner.strikes("stalls"):
            self._stalled.append(io)
        else:
            self._end(io)

    def _end(self, io: Io) -> None:
        io.view.result = self._moved(io)
        self._ended.append(io.view)
        self._ended[:] = self._owner.shuffled(self._ended)

    def _moved(self, io: Io) -> int:
        if self._owner.strikes("fails"):
            return -errno.EIO
        try:
            if not self._for_read:
                return os.pwrite(io.descriptor, io.view.memory, io.offset)
            view = io.view.memory
            if self._owner.strikes("short"):
                view = view[: len(view) // 2]
            return os.preadv(io.descriptor, [view], io.offset)
        except OSError as error:
            return -(error.errno or errno.EIO)


class Usrbio:
    """The state behind the module: one mount, its registered files, its rings.

    Args:
        mount: a folder.
        seed: of everything that may go either way.
    """

    def __init__(self, mount: Path, seed: int = 0) -> None:
        self.mount = mount
        self.behaviour = Behaviour()
        self.faults: list[str] = []
        """Rules of the interface that were broken."""
        self.registered: dict[int, bool] = {}
        """Descriptors, and whether each may be written to."""
        self.rings: list[Ring] = []
        self._chance = random.Random(seed)
        self._lock = threading.Lock()

    def strikes(self, name: str) -> bool:
        with self._lock:
            return self._chance.random() < getattr(self.behaviour, name)

    def shuffled(self, items: Sequence[Any]) -> list[Any]:
        with self._lock:
            return self._chance.sample(items, len(items))

    def raise_next(self, errors: list[int]) -> None:
        with self._lock:
            number = errors.pop(0) if errors else 0
        if number:
            raise OSError(number, os.strerror(number))

    def finish_late(self) -> None:
        """Whatever stalled, on any ring, runs now."""
        for ring in list(self.rings):
            ring.finish_late()

    def extract_mount_point(self, path: str) -> str | None:
        return str(self.mount) if Path(path).is_relative_to(self.mount) else None

    def register_fd(self, fd: int, flags: int = 0) -> None:
        if fd in self.registered:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        path = Path(f"/proc/self/fd/{fd}").readlink()
        if not path.is_relative_to(self.mount.resolve()):
            raise OSError(errno.EBADF, os.strerror(errno.EBADF))
        self.registered[fd] = True

    def deregister_fd(self, fd: int) -> None:
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            self.faults.append(f"{fd} was closed before it was deregistered")
        self.registered.pop(fd)

    def make_iovec(
        self, shm: SharedMemory, hf3fs_mount_point: str, block_size: int = 0, numa: int = -1
    ) -> Iovec:
        self._check_mount(hf3fs_mount_point)
        with Path("/dev/shm", shm.name).open("r+b") as file:  # a mapping of its own, as 3FS's process has
            return Iovec(memoryview(mmap.mmap(file.fileno(), shm.size)))

    def make_ioring(
        self,
        hf3fs_mount_point: str,
        entries: int,
        for_read: bool = True,
        io_depth: int = 0,
        priority: int | None = None,
        timeout: int | None = None,
        numa: int = -1,
        flags: int = 0,
    ) -> Ring:
        self._check_mount(hf3fs_mount_point)
        assert io_depth <= 0, "with fewer I/Os than io_depth wait() hangs"
        ring = Ring(self, entries, for_read)
        self.rings.append(ring)
        return ring

    def module(self) -> ModuleType:
        """What `import hf3fs_fuse.io` gives."""
        found = ModuleType("hf3fs_fuse.io")
        for name in ("extract_mount_point", "register_fd", "deregister_fd", "make_iovec", "make_ioring"):
            setattr(found, name, getattr(self, name))
        return found

    def _check_mount(self, mount: str) -> None:
        if mount != str(self.mount):
            raise OSError(errno.ENODEV, f"{mount} is no mount of 3FS")
