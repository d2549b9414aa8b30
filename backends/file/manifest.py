"""`pool.json`: what the files of one pool hold, for people, for `verify`, and to refuse what does not fit."""

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
_MOST_BYTES = 1 << 16


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pool.

    Attributes:
        pool, shard, fingerprint: whose pages these are; the fingerprint in hex.
        page_bytes, slot_bytes: of a page, and of its slot, padding included.
        checksum: of all of these (xxh3-64), in hex: on what is said here hangs every page of the pool.
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
        """The same with its checksum."""
        content = msgspec.json.encode(msgspec.structs.replace(self, checksum=""))
        return msgspec.structs.replace(self, checksum=xxh3_64_hexdigest(content))

    @property
    def identity(self) -> bytes:
        """What entries are sealed with, so that none holds in a file of another pool."""
        return f"{self.fingerprint} {self.pool} {self.shard}".encode()


def parse(text: bytes, path: Path) -> Manifest:
    """
    Raises:
        StorageFormatError: this is no manifest.
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
    """
    Raises:
        StorageFormatError: this is no manifest.
        StorageError: this is no file.
        OSError: it cannot be read.
    """
    check_file(path)
    try:
        return parse(read_small(path, _MOST_BYTES), path)
    except OverflowError as error:
        raise _damaged(path, str(error)) from error


async def settle(folder: Path, wanted: Manifest, *, read_only: bool) -> None:
    """Compare a pool's manifest with what is wanted; write it where there is none.

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
