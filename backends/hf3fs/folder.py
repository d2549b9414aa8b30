"""Folder ownership: a marker file names the store of names that manages the files beside it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from asynchicache.errors import StorageError, StorageFormatError

PAGES, LABEL = ".pages", ".label"
"""What the names of a pool's files end with."""

_MARKER = "STORE"
_MAGIC = "asynchicache hf3fs store"
_FORMAT = 3
_MAX_DIGITS = 9  # of a version; Python refuses to parse integers of thousands of digits


def claim_folder(folder: Path, store: str) -> None:
    """Create the folder and mark it as the store's, or check that it already is.

    Args:
        folder: on the 3FS mount.

    Raises:
        StorageFormatError: the folder holds another store's files, or foreign files.
        StorageError: the folder cannot be created or written.
    """
    marker = folder / _MARKER
    with _folder_errors(folder):
        folder.mkdir(parents=True, exist_ok=True)
        if not marker.exists():
            _check_empty(folder)
            # If two stores race, the later one wins; the check detects this.
            replace_file(marker, f"{_MAGIC} {_FORMAT} {store}\n".encode())
        owner = _owner(marker)
    if owner != store:
        raise StorageFormatError(
            f"{folder} belongs to the names of state {owner}, and option metadata leads to {store}: "
            "give the metadata that it was used with, or another folder"
        )


def check_folder(folder: Path) -> None:
    """Check that a folder is some store's.

    Raises:
        StorageFormatError: its files are of another version, or foreign.
        StorageError: there is no store, or it cannot be read.
    """
    with _folder_errors(folder):
        if not (folder / _MARKER).exists():
            raise StorageError(f"{folder} holds no store of hf3fs: it has no file {_MARKER}")
        _owner(folder / _MARKER)


@contextmanager
def _folder_errors(folder: Path) -> Iterator[None]:
    try:
        yield
    except UnicodeDecodeError:
        raise StorageFormatError(
            f"{folder / _MARKER} is no marker of hf3fs; give an empty or new folder"
        ) from None
    except StorageError:
        raise
    except OSError as error:
        raise StorageError(f"{folder} cannot be used: {error.strerror}") from error


def _check_empty(folder: Path) -> None:
    others = [path.name for path in folder.iterdir() if not path.name.startswith(_MARKER)]
    if others:
        raise StorageFormatError(
            f"{folder} holds {sorted(others)[0]!r} and no store: give an empty or new folder"
        )


def replace_file(path: Path, data: bytes) -> None:
    """Write a small file at once, in place of the one before."""
    draft = path.with_name(f"{_MARKER}.{uuid4().hex}")
    draft.write_bytes(data)
    draft.replace(path)


def _owner(marker: Path) -> str:
    """The state whose names manage the folder."""
    magic, found, owner = _parse(marker.read_text("utf-8"))
    if magic != _MAGIC or not found.isdecimal() or len(found) > _MAX_DIGITS:
        raise StorageFormatError(f"{marker} is no marker of hf3fs; give an empty or new folder")
    if int(found) != _FORMAT:
        raise StorageFormatError.of_version(marker, int(found), _FORMAT, "folder")
    return owner


def _parse(text: str) -> tuple[str, str, str]:
    head, _, owner = text.strip().rpartition(" ")
    magic, _, version = head.rpartition(" ")
    return magic, version, owner
