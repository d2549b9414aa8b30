"""Removes pools from a store that nobody has open: their files, and no other file."""

from __future__ import annotations

from pathlib import Path
from typing import NamedTuple

from asynchicache.backends.file.folder import MANIFEST, StoreFolder, pages_files, sync_folder
from asynchicache.backends.file.manifest import read
from asynchicache.errors import StorageError


class Cleared(NamedTuple):
    """What was removed.

    Attributes:
        pools: names of their folders.
        bytes: of their files.
        kept: names of the folders of pools that did not fit.
    """

    pools: list[str]
    bytes: int
    kept: list[str]


def clear_store(path: Path, pool: str = "", fingerprint: str = "") -> Cleared:
    """Remove the pools that fit, whole.

    Args:
        path: folder of the store.
        pool: their name; empty for any.
        fingerprint: what theirs begins with, in hex; empty for any.

    Raises:
        StorageLockedError: the store is open.
        StorageFormatError: the folder holds no store, or a manifest is damaged.
        StorageError: a file cannot be removed.
    """
    if not path.exists():
        raise StorageError(f"{path} does not exist")
    folder = StoreFolder(path, read_only=False, new=False)
    try:
        there = folder.pools()
        going = [found for found in there if _fits(found, pool, fingerprint.lower())]
        size = sum(map(_remove, going))
        sync_folder(path)
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{path} cannot be cleared: {error}") from error
    finally:
        folder.close()
    return Cleared([found.name for found in going], size, [one.name for one in there if one not in going])


def _fits(folder: Path, pool: str, fingerprint: str) -> bool:
    if not (pool or fingerprint):
        return True
    if not (folder / MANIFEST).exists():  # nobody knows whose pages these are
        return False
    manifest = read(folder / MANIFEST)
    return pool in ("", manifest.pool) and manifest.fingerprint.startswith(fingerprint)


def _remove(folder: Path) -> int:
    """Remove a pool's files; how many bytes they had. The manifest goes last: a crash leaves a pool."""
    there = [file for file in (*pages_files(folder), folder / MANIFEST) if file.is_file()]
    size = sum(file.stat().st_size for file in there)
    for file in there:
        file.unlink()
    if not any(folder.iterdir()):
        folder.rmdir()
    return size
