"""`pool.json`: what the files of one pool hold, for people, for `verify`, and to refuse what does not fit."""

from __future__ import annotations

import os
from pathlib import Path

import aiofiles
import msgspec
from aiofiles.os import replace, wrap

from asynchicache.backends.file.folder import MANIFEST, MANIFEST_DRAFT, check_file, sync_folder
from asynchicache.errors import StorageError, StorageFormatError
from asynchicache.hashing import ObjectKey
from asynchicache.layouts import ALIGNMENT, round_up
from asynchicache.storage.protocol import PoolBinding


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One pool.

    Attributes:
        pool, shard, fingerprint: whose pages these are; the fingerprint in hex.
        page_bytes: of a page.
        header_bytes, slot_bytes: of a slot's two parts, padding included.
    """

    pool: str
    shard: str
    fingerprint: str
    page_bytes: int
    header_bytes: int
    slot_bytes: int

    @classmethod
    def of(cls, binding: PoolBinding) -> Manifest:
        return cls(
            binding.pool,
            binding.shard,
            binding.fingerprint.hex(),
            binding.page_bytes,
            binding.header_bytes,
            binding.slot_bytes,
        )

    @property
    def frame_bytes(self) -> int:
        return self.header_bytes + self.slot_bytes

    def key(self, digest: bytes) -> ObjectKey:
        """The name of a page of this pool."""
        return ObjectKey(bytes.fromhex(self.fingerprint), digest, self.pool, self.shard)


def parse(text: bytes, path: Path) -> Manifest:
    """
    Raises:
        StorageFormatError: this is no manifest.
    """
    try:
        manifest = msgspec.json.decode(text, type=Manifest)
        bytes.fromhex(manifest.fingerprint)
    except (msgspec.MsgspecError, ValueError) as error:
        raise StorageFormatError(f"{path} is damaged: {error}; remove its folder to start anew") from error
    header, page, slot = manifest.header_bytes, manifest.page_bytes, manifest.slot_bytes
    if min(header, page) < 1 or header % ALIGNMENT or slot != round_up(page, ALIGNMENT):
        raise StorageFormatError(
            f"{path} is damaged: a page of {page} bytes cannot have {header} and {slot}; "
            "remove its folder to start anew"
        )
    return manifest


def read(path: Path) -> Manifest:
    """
    Raises:
        StorageFormatError: this is no manifest.
        StorageError: this is no file.
        OSError: it cannot be read.
    """
    check_file(path)
    return parse(path.read_bytes(), path)


async def settle(folder: Path, wanted: Manifest, *, read_only: bool) -> None:
    """Compare a pool's manifest with what is wanted; write it where there is none.

    Raises:
        StorageFormatError: the files hold pages of another pool, or of other sizes.
        StorageError: the manifest cannot be read or written.
    """
    path = folder / MANIFEST
    try:
        async with aiofiles.open(path, "rb") as file:
            found = parse(await file.read(), path)
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
