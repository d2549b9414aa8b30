"""`pool.json`: the manifest of one pool's files, for users, for `verify`, and to reject a wrong pool."""

from __future__ import annotations

import os
from pathlib import Path

import aiofiles
import msgspec
from aiofiles.os import replace, wrap
from xxhash import xxh3_64_hexdigest

from asynchicache.backends.file.folder import (
    MANIFEST,
    MANIFEST_DRAFT,
    check_file,
    read_small,
    sync_folder,
)
from asynchicache.errors import StorageError, StorageFormatError
from asynchicache.layouts import ALIGNMENT, round_up
from asynchicache.storage.protocol import PoolBinding

_FINGERPRINT_BYTES = 32
_MAX_BYTES = 1 << 16


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The identity and sizes of one pool.

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
