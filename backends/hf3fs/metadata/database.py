"""Names and reservations on disk: one SQLite database in a known format, open in any number of processes of a
host."""

from __future__ import annotations

import sqlite3
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from uuid import uuid4

from asynchicache.errors import StorageError, StorageFormatError

FILE = "metadata.sqlite3"
FORMAT = 3
_APPLICATION = 0x48334653  # "H3FS"

_SCHEMA = (
    "CREATE TABLE store (id TEXT, generation INTEGER, clock INTEGER, boot TEXT)",
    """CREATE TABLE namespaces (
        number INTEGER PRIMARY KEY AUTOINCREMENT,
        name TEXT NOT NULL UNIQUE,
        frame_bytes INTEGER NOT NULL,
        slots INTEGER NOT NULL,
        evicted INTEGER NOT NULL DEFAULT 0
    )""",
    """CREATE TABLE slots (
        namespace INTEGER NOT NULL,
        slot INTEGER NOT NULL,
        state INTEGER NOT NULL,
        used INTEGER NOT NULL DEFAULT 0,
        generation INTEGER NOT NULL,
        key TEXT,
        token TEXT,
        ends REAL,
        PRIMARY KEY (namespace, slot)
    ) WITHOUT ROWID""",
    "CREATE INDEX by_age ON slots (namespace, state, used, slot)",
    "CREATE UNIQUE INDEX by_key ON slots (namespace, key) WHERE state = 2",
    "CREATE INDEX by_token ON slots (namespace, token) WHERE state = 1",
    "CREATE TABLE reads (namespace INTEGER, slot INTEGER, lease INTEGER, ends REAL)",
    "CREATE INDEX by_lease ON reads (lease)",
    "CREATE INDEX by_slot ON reads (namespace, ends, slot)",
    f"PRAGMA application_id = {_APPLICATION}",
    f"PRAGMA user_version = {FORMAT}",
)
"""A slot is free (0), reserved (1), or held by a page (2); it has a row once it was reserved.
`ends` is when a lease does, on the clock that the processes of a host share until it starts anew."""


def open_database(folder: Path, seconds: float) -> sqlite3.Connection:
    """Open the database below `folder`, created if missing. Threads may pass the connection on to each other.

    Args:
        seconds: how long a call waits for those of other processes.

    Raises:
        StorageFormatError: the file is not such a database, has another format, or is damaged.
        StorageError: the folder cannot be written.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        database = sqlite3.connect(
            folder / FILE, timeout=seconds, isolation_level=None, check_same_thread=False
        )
    except (OSError, sqlite3.Error) as error:
        raise StorageError(f"{folder} cannot hold the metadata: {error}") from error
    try:
        with undamaged(folder / FILE):
            _prepare(database, folder / FILE)
            _check_whole(database)
    except BaseException:
        database.close()
        raise
    return database


@contextmanager
def undamaged(path: Path) -> Iterator[None]:
    """Turn SQLite's errors about a damaged file into one that says what to do.

    Raises:
        StorageFormatError: the file is damaged.
    """
    try:
        yield
    except (sqlite3.DatabaseError, UnicodeDecodeError) as error:  # the latter in words of its own, of junk
        raise StorageFormatError(
            f"{path} is damaged: {error}; the places of pages are lost: remove its folder and "
            "the files of the pages, and start anew"
        ) from error


@contextmanager
def transaction(database: sqlite3.Connection, *, durable: bool = True) -> Iterator[None]:
    """Commit the block's changes, or roll them back if it raises.

    Args:
        durable: they are on disk afterwards. Leases and uses need not be: a host that starts anew has no
            readers.
    """
    database.execute(f"PRAGMA synchronous = {'FULL' if durable else 'NORMAL'}")
    database.execute("BEGIN IMMEDIATE")
    try:
        yield
        database.execute("COMMIT")
    except BaseException:
        if database.in_transaction:
            database.execute("ROLLBACK")
        raise


def _prepare(database: sqlite3.Connection, path: Path) -> None:
    try:
        _check_format(database, path)
        database.execute("PRAGMA journal_mode = WAL")
        with transaction(database):
            if _number(database, "user_version") == 0:
                _create(database)
    except sqlite3.OperationalError as error:
        raise StorageError(f"{path} cannot be used: {error}") from error
    except sqlite3.DatabaseError as error:
        raise StorageFormatError(f"{path} is no metadata of hf3fs: {error}; give another folder") from error


def _create(database: sqlite3.Connection) -> None:
    for statement in _SCHEMA:
        database.execute(statement)
    database.execute("INSERT INTO store VALUES (?, 0, 0, '')", (uuid4().hex,))


def _check_format(database: sqlite3.Connection, path: Path) -> None:
    application, version = _number(database, "application_id"), _number(database, "user_version")
    tables = database.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if application != _APPLICATION and (application or version or tables):
        raise StorageFormatError(f"{path} is a database of something else; give another folder")
    if application == _APPLICATION and version != FORMAT:
        raise StorageFormatError.of_version(path, version, FORMAT, "folder")


def _check_whole(database: sqlite3.Connection) -> None:
    """Check integrity at start, so that damage does not show up in a later call."""
    words = str(database.execute("PRAGMA quick_check(1)").fetchone()[0])
    if words != "ok":
        raise sqlite3.DatabaseError(" ".join(words.split()))  # the report has several lines


def _number(database: sqlite3.Connection, pragma: str) -> int:
    number: int = database.execute(f"PRAGMA {pragma}").fetchone()[0]
    return number
