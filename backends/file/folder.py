"""The folder of a file store: its layout, format version and lock.

    FORMAT                                 magic and version
    LOCK                                   flock: one writer, or any number of readers
    <pool>[-<shard>]-<fingerprint>/        one pool: pool.json, 00000.pages, ...

Other files and folders are left alone. A folder without FORMAT becomes a new store if it holds nothing but
empty pool folders, which remain when a user deletes only the files.
"""

from __future__ import annotations

import os
import re
from pathlib import Path

from asynchicache.backends.file.lock import FolderLock
from asynchicache.errors import StorageError, StorageFormatError
from asynchicache.hashing import shard_text

_MAGIC = "asynchicache file store"
_VERSION = 5
_MAX_FORMAT_BYTES = 4096
_MAX_DIGITS = 9  # of a version; Python's `int` rejects strings of thousands of digits
_FORMAT = "FORMAT"
_FORMAT_DRAFT = "FORMAT.new"
_LOCK = "LOCK"
MANIFEST = "pool.json"
"""Name of the manifest in a pool's folder; it is written before any other file there."""
MANIFEST_DRAFT = f"{MANIFEST}.new"
_OURS = frozenset({_FORMAT, _FORMAT_DRAFT, _LOCK})

_POOL = re.compile(r"[a-z0-9_]+")
_SHARD = re.compile(r"[0-9a-z/-]*")
_POOL_FOLDER = re.compile(r"[a-z0-9_]+(-[0-9a-z_-]+)?-[0-9a-f]{32}")
_PAGES = re.compile(r"\d{5}\.pages", re.ASCII)


class StoreFolder:
    """An opened and locked folder; `close` unlocks it.

    Args:
        path: the folder; created if it is missing, unless `read_only`.
        read_only: share the folder with other readers and write nothing, not even the lock file.
        new: create a store if there is none; a reader never does.

    Raises:
        StorageLockedError: another writer has the folder open (or, for a writer, a reader has).
        StorageFormatError: the folder holds other files, or a store of another format version.
        StorageError: the folder cannot be read or written.
    """

    def __init__(self, path: Path, *, read_only: bool, new: bool = True) -> None:
        self.path = path
        self.read_only = read_only
        self._new = new
        self._lock = FolderLock(path)
        try:
            self._open()
        except StorageError:
            self.close()
            raise
        except OSError as error:
            self.close()
            raise StorageError(self._advice(error)) from error

    def pool_path(self, pool: str, shard: str, fingerprint: bytes) -> Path:
        """The folder of a pool, unique to its pool, shard and fingerprint.

        Raises:
            StorageError: a name is not allowed in a path.
        """
        if not _POOL.fullmatch(pool) or not _SHARD.fullmatch(shard):
            raise StorageError(f"pool {pool!r}, shard {shard!r}: a-z, 0-9, _ (and /, - in the shard) only")
        parts = [pool, shard_text(shard), fingerprint.hex()[:32]]
        return self.path / "-".join(part for part in parts if part)

    def make(self, pool: Path) -> None:
        """Create a pool's folder durably if it is missing; a reader only checks it.

        Raises:
            StorageError: the folder cannot be created, or its manifest is not a regular file.
        """
        try:
            for name in (MANIFEST, MANIFEST_DRAFT):
                check_file(pool / name)
            if not self.read_only:
                pool.mkdir(exist_ok=True)
                sync_folder(self.path)
        except StorageError:
            raise
        except OSError as error:
            raise StorageError(self._advice(error)) from error

    def pools(self) -> list[Path]:
        """All pool folders, including those whose damaged manifest a repair has removed."""
        return sorted(filter(_is_pool, self.path.iterdir()))

    def in_place(self) -> bool:
        """Whether a restart would find a store here."""
        return (self.path / _FORMAT).exists()

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that opened the folder."""
        return self._lock.forked

    def check_process(self) -> None:
        """Check that this process opened the folder.

        Raises:
            UsageError: this process is a child of the one that opened the folder.
        """
        self._lock.check()

    def close(self) -> None:
        """Unlock the folder; closing twice is harmless."""
        self._lock.close()

    def _open(self) -> None:
        if not self.read_only:
            self.path.mkdir(parents=True, exist_ok=True)
        self._check_content()  # before creating a lock file in a folder that may not be a store
        self._lock.take(self.path / _LOCK, shared=self.read_only)
        self._check_content()  # another writer may have created a store meanwhile
        if not self.read_only and not (self.path / _FORMAT).exists():
            self._write_format()

    def _check_content(self) -> None:
        for name in sorted(_OURS):
            check_file(self.path / name)
        try:
            text = read_small(self.path / _FORMAT, _MAX_FORMAT_BYTES).decode()
        except FileNotFoundError:
            self._check_empty()
        except (UnicodeDecodeError, OverflowError):
            raise StorageFormatError(self._foreign()) from None
        else:
            self._check_version(text)

    def _check_empty(self) -> None:
        entries = [entry for entry in self.path.iterdir() if entry.name not in _OURS]
        others = sorted(entry.name for entry in entries if not _is_empty_pool(entry))
        if others:
            raise StorageFormatError(f"{self._foreign()}; it holds {others[0]!r}{self._cure(others)}")
        if self.read_only:
            raise StorageFormatError(f"{self.path} holds no file store yet; a writer makes one")
        if not self._new:
            raise StorageFormatError(f"{self.path} is empty and holds no file store")

    def _check_version(self, text: str) -> None:
        magic, _, version = text.strip().rpartition(" ")
        if magic != _MAGIC or not version.isdecimal() or len(version) > _MAX_DIGITS:
            raise StorageFormatError(self._foreign())
        if int(version) != _VERSION:
            raise StorageFormatError.of_version(self.path, int(version), _VERSION, "folder")

    def _foreign(self) -> str:
        return f"{self.path} is not empty and holds no file store: give an empty or new folder"

    def _cure(self, others: list[str]) -> str:
        """Say what to remove if all that is left are pool folders of a store whose FORMAT file is gone."""
        left = [self.path / name for name in others]
        if not all(map(_may_be_pool, left)):
            return ""
        folders = ", ".join(map(str, left))
        return f", left by a store whose {_FORMAT} file was removed: remove {folders} to start afresh"

    def _write_format(self) -> None:
        draft = self.path / _FORMAT_DRAFT
        with draft.open("w", encoding="utf-8") as file:
            file.write(f"{_MAGIC} {_VERSION}\n")
            file.flush()
            os.fsync(file.fileno())
        draft.replace(self.path / _FORMAT)
        sync_folder(self.path)

    def _advice(self, error: OSError) -> str:
        if isinstance(error, FileExistsError | NotADirectoryError):
            return f"{self.path} is no folder, or lies in none"
        if self.read_only:
            return f"{self.path} cannot be read: {error.strerror}"
        advice = "make it writable, or open it with read_only=true"
        return f"{self.path} cannot be written: {error.strerror}; {advice}"


def check_file(path: Path) -> None:
    """Check that `path`, if it exists, is a regular file: opening a pipe could block forever.

    Raises:
        StorageError: it is a folder, a pipe or a device.
    """
    if path.exists() and not path.is_file():
        raise StorageError(f"{path} cannot be opened: it is no file")


def read_small(path: Path, most: int) -> bytes:
    """Read a small file of the store.

    Raises:
        OverflowError: the file has more than `most` bytes, so the store did not write it.
        OSError: the file cannot be read.
    """
    with path.open("rb") as file:
        content = file.read(most + 1)
    if len(content) > most:
        raise OverflowError(f"it has more than {most} bytes")
    return content


def pages_files(folder: Path) -> list[Path]:
    """The page files in a pool's folder, in order; other files there do not belong to the store."""
    named = (path for path in folder.iterdir() if _PAGES.fullmatch(path.name))
    return sorted(path for path in named if path.is_file() and not path.is_symlink())


def _is_pool(folder: Path) -> bool:
    """Whether this is a pool's folder by name and content, and not a link: its files may be deleted."""
    return _may_be_pool(folder) and ((folder / MANIFEST).is_file() or bool(pages_files(folder)))


def _is_empty_pool(folder: Path) -> bool:
    """Whether this is a pool's folder without files."""
    return _may_be_pool(folder) and not any(folder.iterdir())


def _may_be_pool(folder: Path) -> bool:
    return bool(_POOL_FOLDER.fullmatch(folder.name)) and not folder.is_symlink() and folder.is_dir()


def sync_folder(path: Path) -> None:
    """Make the directory entries of a folder durable."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
