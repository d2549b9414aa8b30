"""Whose folder it is: a marker names the metadata service that knows what lies in the files beside it."""

from __future__ import annotations

from pathlib import Path
from uuid import uuid4

from asynchicache.errors import StorageError, StorageFormatError

_MARKER = "STORE"
_MAGIC = "asynchicache hf3fs store"
_FORMAT = 1
_MOST_DIGITS = 9  # of a version; Python refuses to read numbers of thousands


def claim_folder(folder: Path, store: str) -> None:
    """Make the folder, and mark it as that service's, or see that it is.

    Args:
        folder: on the mount of 3FS.
        store: the service's id.

    Raises:
        StorageFormatError: another service's files, or anything else, lie there.
        StorageError: it cannot be made or written.
    """
    marker = folder / _MARKER
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if not marker.exists():
            _check_empty(folder)
            _write_marker(marker, store)
        _check_marker(marker, store)
    except UnicodeDecodeError:
        raise StorageFormatError(f"{marker} is no marker of hf3fs; give an empty or new folder") from None
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


def _write_marker(marker: Path, store: str) -> None:
    """Whole or not at all. Of two services that race, the later wins, and the check finds it out."""
    draft = marker.with_name(f"{_MARKER}.{uuid4().hex}")
    draft.write_text(f"{_MAGIC} {_FORMAT} {store}\n", "utf-8")
    draft.replace(marker)


def _check_marker(marker: Path, store: str) -> None:
    magic, found, owner = _parse(marker.read_text("utf-8"))
    if magic != _MAGIC or not found.isdecimal() or len(found) > _MOST_DIGITS:
        raise StorageFormatError(f"{marker} is no marker of hf3fs; give an empty or new folder")
    if int(found) != _FORMAT:
        raise StorageFormatError(
            f"{marker} has format {found}; this version knows {_FORMAT}: update asynchicache"
        )
    if owner != store:
        raise StorageFormatError(
            f"{marker.parent} belongs to the metadata service of state {owner}, and this one's is {store}: "
            "start the service with its own --dir, or give another folder"
        )


def _parse(text: str) -> tuple[str, str, str]:
    head, _, owner = text.strip().rpartition(" ")
    magic, _, version = head.rpartition(" ")
    return magic, version, owner
