"""A folder with one file of pages for each pool."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from asynchicache.backends.file.engine import FileEngine
from asynchicache.backends.file.folder import StoreFolder
from asynchicache.backends.file.index import PageIndex
from asynchicache.backends.file.pages import PageFile
from asynchicache.backends.options import Options
from asynchicache.errors import ClosedError, StorageError
from asynchicache.ports import Port
from asynchicache.storage.protocol import PoolBinding


@dataclass(frozen=True, slots=True)
class FileOptions:
    """What the user chooses.

    Attributes:
        path: the folder; made if it is missing.
        capacity_bytes: most bytes of one pool's file: one number for every pool, or one for each by
            name, where a pool that is not named has no limit. Default: as many as the disk has. A
            full file evicts what was not used for longest.
        read_only: serve what is there, write nothing; several readers may share a folder. Default: false.
        direct: go around the kernel's cache where the file system allows it. Default: true.
    """

    path: Path
    capacity_bytes: int | Mapping[str, int] | None = None
    read_only: bool = False
    direct: bool = True

    @classmethod
    def of(cls, options: Mapping[str, object]) -> FileOptions:
        """
        Raises:
            ConfigError: an option is missing, unknown, or breaks its rule.
        """
        taken = Options("file", options)
        path = taken.take("path", object, "")
        if not isinstance(path, str | os.PathLike) or not path:
            raise taken.refused("path", path, "must name a folder")
        capacity = options.get("capacity_bytes")
        if isinstance(capacity, Mapping):
            taken.take("capacity_bytes", Mapping, {})
            _check_capacities(taken, capacity)
        else:
            capacity = taken.positive("capacity_bytes")
        read_only = taken.take("read_only", bool, False)
        direct = taken.take("direct", bool, True)
        taken.finish()
        return cls(Path(path), capacity, read_only, direct)

    def capacity_of(self, pool: str) -> int | None:
        """Most bytes of a pool's file, None for no limit."""
        if isinstance(self.capacity_bytes, Mapping):
            return self.capacity_bytes.get(pool)
        return self.capacity_bytes


def _check_capacities(taken: Options, capacities: Mapping[object, object]) -> None:
    for pool, size in capacities.items():
        if not isinstance(pool, str) or not isinstance(size, int) or isinstance(size, bool) or size < 1:
            raise taken.refused("capacity_bytes", {pool: size}, "must map pool names to numbers above 0")


class FileBackend:
    """The pools of one folder, which is locked until `aclose`.

    Args:
        options: where, and how much.
        port: threads.

    Raises:
        StorageError: the folder cannot be used; says what to do.
    """

    name = "file"

    def __init__(self, options: FileOptions, port: Port) -> None:
        self._options = options
        self._port = port
        self._folder = StoreFolder(options.path, read_only=options.read_only)
        self._engines: dict[Path, asyncio.Task[FileEngine]] = {}
        self._closed = False

    async def open_pool(self, binding: PoolBinding) -> FileEngine:
        """Open the pool's file and find its pages.

        Raises:
            StorageError: the pool is open already, or its file cannot be used.
            ClosedError: the backend is closed.
        """
        if self._closed:
            raise ClosedError(f"file store {self._options.path} is closed")
        path = self._folder.pages_path(binding.pool, binding.shard, binding.fingerprint)
        self._check_free(path)
        # A task of our own: its file must not be lost if the caller is cancelled.
        opening = asyncio.create_task(self._port.run_blocking(partial(self._open, path, binding)))
        self._engines[path] = opening
        return await asyncio.shield(opening)

    async def aclose(self) -> None:
        self._closed = True
        if self._engines:
            await asyncio.wait(self._engines.values())
        for opened in self._engines.values():
            if opened.exception() is None:
                await opened.result().aclose()
        self._folder.close()

    def _check_free(self, path: Path) -> None:
        opened = self._engines.get(path)
        if opened is None or (opened.done() and (opened.exception() is not None or opened.result().closed)):
            return
        raise StorageError(f"{path} is open already; each pool is opened once")

    def _open(self, path: Path, binding: PoolBinding) -> FileEngine:
        options = self._options
        self._folder.make(path)
        file = PageFile(
            path,
            binding.header_bytes,
            binding.slot_bytes,
            read_only=options.read_only,
            direct=options.direct,
        )
        return FileEngine(
            binding,
            self._port,
            file,
            scan(file, binding),
            capacity_bytes=options.capacity_of(binding.pool),
            read_only=options.read_only,
        )

    def __repr__(self) -> str:
        return f"<FileBackend {self._options.path}: {len(self._engines)} pools>"


def scan(file: PageFile, binding: PoolBinding) -> PageIndex:
    """Find the pages of a file by their headers; a slot whose header is damaged is free."""
    found = ((binding.identify(header), slot) for slot, header in file.headers())
    index = PageIndex()
    index.load(((key.digest, slot) for key, slot in found if key is not None), file.slots)
    return index


def open_backend(options: Mapping[str, object], port: Port) -> FileBackend:
    """The file engine; see `FileOptions` for its options.

    Raises:
        ConfigError: an option is missing, unknown, or breaks its rule.
        StorageLockedError: the folder is open already.
        StorageFormatError: the folder holds something else, or a store of a newer version.
        StorageError: the folder cannot be read, or written.
    """
    return FileBackend(FileOptions.of(options), port)
