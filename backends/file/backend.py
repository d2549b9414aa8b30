"""The file backend: options of a folder of pools, its lock and its engines."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import ClassVar

from asynchicache.backends.engine_registry import EngineRegistry
from asynchicache.backends.file.budget import FIXED_BYTES, Budget, Disk
from asynchicache.backends.file.dependencies import PoolDependencies
from asynchicache.backends.file.engine import FileEngine, WriteLimits
from asynchicache.backends.file.folder import Manifest, StoreFolder, settle
from asynchicache.backends.file.segments import SegmentShape
from asynchicache.backends.file.store import PoolStore
from asynchicache.backends.options import BackendOptions
from asynchicache.errors import StorageError
from asynchicache.options import Positive, Share
from asynchicache.ports import Port
from asynchicache.storage.protocol import PoolBinding


class FileOptions(BackendOptions, frozen=True):
    """Options of the file backend.

    Attributes:
        path: the folder; created if it is missing. A leading `~` is the user's home.
        capacity_bytes: most bytes of all files in the folder, or a table of limits by pool name; a pool
            that is not in the table has no limit. A full store evicts the least recently used pages.
            Default: no limit but the disk and `keep_free`.
        keep_free: the share of the disk that stays free, whoever fills it: files do not grow into it, and new
            pages take the place of old ones. Default: 0.1.
        read_only: serve existing pages and write nothing; several readers may share a folder. Default: false.
        direct: bypass the page cache (O_DIRECT) if the file system allows it. Default: true.
    """

    backend: ClassVar[str] = "file"

    path: Path
    capacity_bytes: Positive | dict[str, Positive] | None = None
    keep_free: Share = 0.1
    read_only: bool = False
    direct: bool = True

    @property
    def folder_limit(self) -> int | None:
        """Most bytes of all files, None for no limit."""
        return None if isinstance(self.capacity_bytes, dict) else self.capacity_bytes

    def limit_of(self, pool: str) -> int | None:
        """Most bytes of a pool's files, None for no limit of its own."""
        return self.capacity_bytes.get(pool) if isinstance(self.capacity_bytes, dict) else None


class FileBackend:
    """The pools of one folder, which stays locked until `aclose`.

    Raises:
        StorageError: the folder cannot be used; the message says what to do.
    """

    name = "file"

    def __init__(self, options: FileOptions, port: Port) -> None:
        self._options = options
        self._port = port
        self._folder = StoreFolder(options.path, read_only=options.read_only)
        self._budget = Budget(options.folder_limit, Disk(options.path, options.keep_free))
        for pool in self._folder.pools():
            self._budget.add_closed(pool)
        self._dependencies = PoolDependencies()
        self._write_limits = WriteLimits.of(os.cpu_count() or 1)
        self._engines: EngineRegistry[FileEngine] = EngineRegistry(f"file store {options.path}")
        self._closing: asyncio.Future[None] | None = None

    async def open_pool(self, binding: PoolBinding) -> FileEngine:
        """Open the pool's files and load the index of its pages.

        Raises:
            StorageFormatError: the files do not hold this pool.
            StorageError: the pool is open with another binding, its files cannot be used, or its limit has
                no room for a page.
            ClosedError: the backend is closed.
            UsageError: this process was forked from the one that opened the backend.
        """
        self._folder.check_process()
        path = self._folder.pool_path(binding.pool, binding.shard, binding.fingerprint)
        return await self._engines.open(binding, partial(self._open, path, binding))

    async def clear(self) -> int:
        """Delete every page of the pools that are open here; other pools of the folder keep theirs.

        Returns:
            The number of deleted pages.

        Raises:
            UsageError: the store is read-only, or was opened by the parent of this forked process.
            OSError: the disk reported an error.
        """
        self._folder.check_process()
        return sum([await engine.clear() for engine in self._engines.usable()])

    async def aclose(self) -> None:
        """Close all engines and unlock the folder; closing twice is harmless.

        The folder stays locked until the last write has ended, even if the caller is cancelled first.
        """
        if self._folder.forked:
            for engine in self._engines.usable():
                await engine.aclose()
            return
        self._closing = self._closing or asyncio.ensure_future(self._close())
        await asyncio.shield(self._closing)

    async def _close(self) -> None:
        await self._engines.aclose()
        self._folder.close()

    async def _open(self, path: Path, binding: PoolBinding) -> FileEngine:
        manifest = Manifest.of(binding)
        self._check_room(manifest)
        await self._port.run_blocking(partial(self._folder.make, path))
        await settle(path, manifest, read_only=self._options.read_only)
        store = await self._port.run_blocking(partial(self._store, path, manifest, binding.depends_on))
        return FileEngine(binding, self._port, self._folder, store, self._write_limits)

    def _check_room(self, manifest: Manifest) -> None:
        """Reject a limit too small for one page: that is a configuration error, not a full store."""
        options = self._options
        least = SegmentShape.of(manifest.slot_bytes).pool_bytes(1)
        limit = options.limit_of(manifest.pool)
        if options.folder_limit is not None:
            limit, least = options.folder_limit, FIXED_BYTES + least
        if limit is not None and limit < least and not options.read_only:
            raise StorageError(
                f"{options.path}: capacity_bytes {limit} has no room for a page of pool {manifest.pool!r}; "
                f"one needs {least}"
            )

    def _store(self, path: Path, manifest: Manifest, depends_on: str | None) -> PoolStore:
        options = self._options
        try:
            return PoolStore(
                path,
                manifest,
                self._budget,
                dependencies=self._dependencies,
                depends_on=depends_on,
                limit=options.limit_of(manifest.pool),
                read_only=options.read_only,
                direct=options.direct,
                now=self._port.now,
            )
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(f"{path} cannot be used: {error.strerror}") from error

    def __repr__(self) -> str:
        return f"<FileBackend {self._options.path}: {len(self._engines)} pools>"


def open_backend(options: Mapping[str, object], port: Port) -> FileBackend:
    """Open the file backend; see `FileOptions` for its options.

    Raises:
        ConfigError: an option is missing, unknown or invalid.
        StorageLockedError: the folder is already open.
        StorageFormatError: the folder holds other files, or a store of another format version.
        StorageError: the folder cannot be read or written.
    """
    return FileBackend(FileOptions.of(options), port)
