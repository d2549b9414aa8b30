"""All pools of a file store: what they are, and removing those that nobody needs.

To remove something, no other process may have the store open.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping
from contextlib import closing
from functools import partial
from pathlib import Path

from asynchicache.backends.file.backend import FileOptions
from asynchicache.backends.file.budget import Budget
from asynchicache.backends.file.clear import remove_pool
from asynchicache.backends.file.entries import load_entries
from asynchicache.backends.file.folder import (
    MANIFEST,
    StoreFolder,
    disk_errors,
    read,
    read_label_file,
    sync_folder,
)
from asynchicache.backends.file.segments import Segments
from asynchicache.backends.file.store import PoolStore
from asynchicache.errors import StorageError, StorageFormatError
from asynchicache.hashing import NAMESPACE_BYTES
from asynchicache.ports import Port
from asynchicache.storage.labels import GoOn, PoolLabel, PoolListing, read_label


class FileInventory:
    """The pools of one folder.

    Args:
        writes: whether something may be removed; then the folder is locked.

    Raises:
        StorageLockedError: another process has the store open.
        StorageError: the folder cannot be used, or holds no store.
    """

    def __init__(self, options: FileOptions, port: Port, *, writes: bool) -> None:
        self._port = port
        if not options.path.exists():
            raise StorageError(f"{options.path} does not exist")
        self._folder = StoreFolder(options.path, read_only=not writes, new=False)

    async def pools(self) -> list[PoolListing]:
        return await self._port.run_blocking(self._pools)

    def _pools(self) -> list[PoolListing]:
        with disk_errors(f"{self._folder.path} cannot be listed"):
            return [_listing(folder) for folder in self._folder.pools()]

    async def label(self, pool: PoolListing) -> PoolLabel | None:
        return read_label(read_label_file(self._folder.path / pool.name))

    async def remove(self, pool: PoolListing, namespace: bytes | None, go_on: GoOn) -> int:
        """Files are removed, and not pages one by one, so `go_on` is asked once."""
        if not await go_on(0):
            return 0
        return await self._port.run_blocking(partial(self._remove, pool, namespace))

    def _remove(self, pool: PoolListing, namespace: bytes | None) -> int:
        folder = self._folder.path / pool.name
        with disk_errors(f"{folder} cannot be removed"):
            if namespace is not None and set(pool.pages) != {namespace}:
                return _remove_namespace(folder, namespace)
            remove_pool(folder)
            sync_folder(self._folder.path)
        return sum(pool.pages.values())

    async def aclose(self) -> None:
        self._folder.close()


def _listing(folder: Path) -> PoolListing:
    nbytes = sum(file.stat().st_size for file in folder.glob("*") if file.is_file())
    if not (folder / MANIFEST).exists():
        return PoolListing(folder.name, "", "", "", {}, nbytes)
    try:
        manifest = read(folder / MANIFEST)
    except StorageFormatError as error:  # the other pools are no worse for it
        return PoolListing(folder.name, "", "", "", {}, nbytes, problem=str(error))
    segments = Segments(folder, manifest.slot_bytes, manifest.identity, read_only=True, direct=False)
    with closing(segments):
        pages = Counter(entry.digest[:NAMESPACE_BYTES] for entry in load_entries(segments).pages)
    label = read_label(read_label_file(folder))
    return PoolListing(
        folder.name, manifest.pool, manifest.shard, manifest.fingerprint, dict(pages), nbytes, label
    )


def _remove_namespace(folder: Path, namespace: bytes) -> int:
    with closing(PoolStore(folder, read(folder / MANIFEST), Budget(None))) as store:
        return sum(store.remove([digest for digest in store.digests() if digest.startswith(namespace)]))


def open_inventory(options: Mapping[str, object], port: Port, *, writes: bool) -> FileInventory:
    """
    Raises:
        ConfigError: an option does not fit.
        StorageError: as `FileInventory`.
    """
    return FileInventory(FileOptions.of(options), port, writes=writes)
