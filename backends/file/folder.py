"""The folder of a file store: its layout, format version, lock, and pools.

    FORMAT                                 magic and version
    LOCK                                   flock: one writer, or any number of readers
    <pool>[-<shard>]-<fingerprint>/        one pool: pool.json, 00000.pages, ...

Other files and folders are left alone. A folder without FORMAT becomes a new store if it holds nothing but
empty pool folders, which remain when a user deletes only the files.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from weakref import WeakSet

import aiofiles
import msgspec
from aiofiles.os import replace, wrap
from xxhash import xxh3_64_hexdigest

from asynchicache.errors import StorageError, StorageFormatError, StorageLockedError, UsageError
from asynchicache.hashing import shard_text
from asynchicache.layouts import ALIGNMENT, round_up
from asynchicache.storage.protocol import PoolBinding

_BLOCKED = frozenset({errno.EWOULDBLOCK, errno.EAGAIN, errno.EACCES})


class FolderLock:
    """The lock of one folder, not taken until `take`. It belongs to the process that took it, not to forked
    children.

    A `flock` belongs to an open file description, which a forked child shares: a worker could keep the lock
    of a killed parent. So each child closes its descriptor right after the fork; it must not unlock, because
    that would unlock the parent. The alternatives are worse: `fcntl` locks are not inherited, but they end
    when the process closes any descriptor of the file, and a process can take one twice; OFD locks are shared
    as well.

    Args:
        folder: the folder, for messages.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process = os.getpid()
        self._descriptor: int | None = None

    @property
    def forked(self) -> bool:
        """Whether this process is a child of the one that opened the folder."""
        return os.getpid() != self._process

    def check(self) -> None:
        """Check that this process opened the folder.

        Raises:
            UsageError: this process is a child of the one that opened the folder.
        """
        if self.forked:
            raise UsageError(
                f"{self._folder} was opened by process {self._process}, and this one was forked from it: "
                "let each process open a store of its own, after the fork"
            )

    def take(self, file: Path, *, shared: bool) -> None:
        """Lock `file`.

        Args:
            file: the lock file. A writer creates it if it is missing; a reader then goes without a lock.
            shared: share the lock with other readers.

        Raises:
            StorageLockedError: the file is already locked, in this or another process.
            OSError: the file cannot be opened or locked.
        """
        flags = os.O_RDONLY if shared else os.O_RDWR | os.O_CREAT
        with _forking:  # a fork between `open` and `_taken.add` would leak the descriptor into the child
            try:
                self._descriptor = os.open(file, flags | os.O_CLOEXEC, 0o666)
            except FileNotFoundError:
                if shared:  # no writer has opened this folder, or it is a copy on read-only media
                    return
                raise
            _taken.add(self)
        try:
            fcntl.flock(self._descriptor, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
        except OSError as error:
            if error.errno not in _BLOCKED:
                raise
            raise StorageLockedError(
                f"{self._folder} is open already, here or in another process: close that one, "
                "or give each its own folder"
            ) from None

    def close(self) -> None:
        """Unlock; closing twice is harmless."""
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if not self.forked:  # children forked outside Python share the lock: closing is not enough
            fcntl.flock(descriptor, fcntl.LOCK_UN)
        os.close(descriptor)


_taken: WeakSet[FolderLock] = WeakSet()
_forking = threading.Lock()


def _let_go() -> None:
    """In a forked child: close the descriptors of the parent's locks."""
    for lock in list(_taken):
        with suppress(OSError):
            lock.close()
    _taken.clear()
    _forking.release()


os.register_at_fork(before=_forking.acquire, after_in_parent=_forking.release, after_in_child=_let_go)


_FINGERPRINT_BYTES = 32
_MAX_BYTES = 1 << 16


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """`pool.json`: the identity and sizes of one pool, for users, for `verify`, and to reject a wrong pool.

    Attributes:
        pool, shard, fingerprint: identity of the pages; the fingerprint in hex.
        page_bytes, slot_bytes: bytes of a page, and of its slot including padding.
        checksum: xxh3-64 of the other fields, in hex: an error here would make every page unreadable.
    """

    pool: str
    shard: str
    fingerprint: str
    page_bytes: int
    slot_bytes: int
    checksum: str = ""

    @classmethod
    def of(cls, binding: PoolBinding) -> Manifest:
        sizes = binding.page_bytes, binding.slot_bytes
        return cls(binding.pool, binding.shard, binding.fingerprint.hex(), *sizes).sealed()

    def sealed(self) -> Manifest:
        """A copy with its checksum set."""
        content = msgspec.json.encode(msgspec.structs.replace(self, checksum=""))
        return msgspec.structs.replace(self, checksum=xxh3_64_hexdigest(content))

    @property
    def identity(self) -> bytes:
        """Bytes included in the checksum of every entry, so that no entry is valid in another pool."""
        return f"{self.fingerprint} {self.pool} {self.shard}".encode()


def parse(text: bytes, path: Path) -> Manifest:
    """Parse and check a manifest.

    Raises:
        StorageFormatError: `text` is not a valid manifest.
    """
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
        fingerprint = bytes.fromhex(manifest.fingerprint)
    except (msgspec.MsgspecError, ValueError) as error:
        raise _damaged(path, str(error)) from error
    whole = manifest == manifest.sealed()
    named = len(fingerprint) == _FINGERPRINT_BYTES and manifest.fingerprint == fingerprint.hex()
    sized = manifest.page_bytes > 0 and manifest.slot_bytes == round_up(manifest.page_bytes, ALIGNMENT)
    if not (whole and named and sized):
        raise _damaged(path, "it does not fit together")
    return manifest


def _damaged(path: Path, why: str) -> StorageFormatError:
    return StorageFormatError(f"{path} is damaged: {why}; `asynchicache verify --repair` removes it")


def read(path: Path) -> Manifest:
    """Read a manifest from a file.

    Raises:
        StorageFormatError: the file is not a valid manifest.
        StorageError: the path is not a regular file.
        OSError: the file cannot be read.
    """
    check_file(path)
    try:
        return parse(read_small(path, _MAX_BYTES), path)
    except OverflowError as error:
        raise _damaged(path, str(error)) from error


async def settle(folder: Path, wanted: Manifest, *, read_only: bool) -> None:
    """Compare a pool's manifest with `wanted`; write it if it is missing, unless `read_only`.

    Raises:
        StorageFormatError: the files hold pages of another pool, or of other sizes.
        StorageError: the manifest cannot be read or written.
    """
    path = folder / MANIFEST
    try:
        found = await wrap(read)(path)
    except FileNotFoundError:
        if not read_only:
            await _write(folder, wanted)
        return
    except OSError as error:
        if isinstance(error, StorageError):
            raise
        raise StorageError(f"{path} cannot be read: {error.strerror}") from error
    if found != wanted:
        raise StorageFormatError(f"{folder} holds {found}, not {wanted}: remove it, or give another folder")


async def _write(folder: Path, manifest: Manifest) -> None:
    draft = folder / MANIFEST_DRAFT
    try:
        async with aiofiles.open(draft, "wb") as file:
            await file.write(msgspec.json.format(msgspec.json.encode(manifest), indent=2) + b"\n")
            await file.flush()
            await wrap(os.fsync)(file.fileno())
        await replace(draft, folder / MANIFEST)
        await wrap(sync_folder)(folder)
    except OSError as error:
        raise StorageError(f"{draft} cannot be written: {error.strerror}") from error


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
LABEL = "label.json"
"""Name of a pool's label, see `storage.labels`; the store works without it."""
LABEL_DRAFT = f"{LABEL}.new"
_OURS = frozenset({_FORMAT, _FORMAT_DRAFT, _LOCK})

_POOL = re.compile(r"[a-z0-9_]+")
_SHARD = re.compile(r"[0-9a-z/-]*")
_POOL_FOLDER = re.compile(r"[a-z0-9_]+(-[0-9a-z_-]+)?-[0-9a-f]{32}")
_PAGES = re.compile(r"\d{5}\.pages", re.ASCII)


@contextmanager
def disk_errors(failed: str) -> Iterator[None]:
    """An `OSError` of the body is a `StorageError` that says what failed, and why."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{failed}: {error}") from error


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


def read_label_file(folder: Path) -> bytes | None:
    """A pool's label; None if there is none that can be read."""
    try:
        check_file(folder / LABEL)
        return read_small(folder / LABEL, _MAX_BYTES)
    except (OSError, OverflowError, StorageError):
        return None


def write_label_file(folder: Path, label: bytes) -> None:
    """Keep a pool's label. Not durably: after a power cut the next one comes.

    Raises:
        OSError: it cannot be written.
    """
    (folder / LABEL_DRAFT).write_bytes(label)
    (folder / LABEL_DRAFT).replace(folder / LABEL)


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
