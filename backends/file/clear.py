"""Remove pools from a store that is not open: their files, and no other file."""

from __future__ import annotations

from contextlib import closing
from pathlib import Path
from typing import NamedTuple

from asynchicache.backends.file.folder import (
    LABEL,
    LABEL_DRAFT,
    MANIFEST,
    StoreFolder,
    disk_errors,
    pages_files,
    read,
    sync_folder,
)
from asynchicache.errors import StorageError


class Cleared(NamedTuple):
    """The result of `clear_store`.

    Attributes:
        pools: folder names of the removed pools.
        bytes: total size of the removed files.
        kept: folder names of the pools that did not match.
    """

    pools: list[str]
    bytes: int
    kept: list[str]


def clear_store(path: Path, pool: str = "", fingerprint: str = "") -> Cleared:
    """Remove all pools that match.

    Args:
        pool: name of the pools; empty for any.
        fingerprint: prefix of the pools' fingerprint, in hex; empty for any.

    Raises:
        StorageLockedError: the store is open.
        StorageFormatError: the folder is not a store, or a manifest is damaged.
        StorageError: a file cannot be removed.
    """
    if not path.exists():
        raise StorageError(f"{path} does not exist")
    with (
        closing(StoreFolder(path, read_only=False, new=False)) as folder,
        disk_errors(f"{path} cannot be cleared"),
    ):
        there = folder.pools()
        going = [found for found in there if _fits(found, pool, fingerprint.lower())]
        size = sum(map(remove_pool, going))
        sync_folder(path)
    return Cleared([found.name for found in going], size, [one.name for one in there if one not in going])


def _fits(folder: Path, pool: str, fingerprint: str) -> bool:
    if not (pool or fingerprint):
        return True
    if not (folder / MANIFEST).exists():  # without a manifest the pool's fingerprint is unknown
        return False
    manifest = read(folder / MANIFEST)
    return pool in ("", manifest.pool) and manifest.fingerprint.startswith(fingerprint)


def remove_pool(folder: Path) -> int:
    """Remove a pool's files; returns their bytes. The manifest goes last, so a crash leaves a valid pool."""
    small = (folder / name for name in (LABEL_DRAFT, LABEL, MANIFEST))
    there = [file for file in (*pages_files(folder), *small) if file.is_file()]
    size = sum(file.stat().st_size for file in there)
    for file in there:
        file.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
    return size
