"""Credentials that rotate: a file, or what a command prints, in JSON, read again before they expire."""

from __future__ import annotations

import shlex
import subprocess
from collections.abc import Callable, Mapping
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import msgspec

from asynchicache.backends.object.options import ObjectOptions
from asynchicache.errors import StorageError

_LONGEST = timedelta(minutes=5)
"""After this time credentials are read again that do not say when they expire, and so long before they do."""
_COMMAND_SECONDS = 30.0

_NAMES = {
    "AccessKeyId": "access_key_id",
    "SecretAccessKey": "secret_access_key",
    "SessionToken": "token",
    "Expiration": "expires_at",
}
"""Names of AWS's `credential_process`, by which tools print credentials; others are obstore's own."""


def provider_of(options: ObjectOptions) -> Callable[[], dict[str, Any]] | None:
    """What obstore asks for credentials, in a thread of its own; None if they do not rotate."""
    if options.credentials_file is not None:
        path = Path(options.credentials_file)
        return lambda: _parsed(path.read_bytes(), str(path))
    if options.credentials_command is not None:
        words = shlex.split(options.credentials_command)
        return lambda: _parsed(_printed_by(words), words[0])
    return None


def _printed_by(words: list[str]) -> bytes:
    done = subprocess.run(  # noqa: S603 - the words are the operator's own
        words, capture_output=True, timeout=_COMMAND_SECONDS, check=False
    )
    if done.returncode:
        why = done.stderr.decode("utf-8", "replace").strip()
        raise StorageError(f"credentials_command {words[0]} ended with {done.returncode}: {why[-200:]}")
    return done.stdout


def _parsed(text: bytes, source: str) -> dict[str, Any]:
    """Credentials by obstore's names. Messages show names only."""
    try:
        given = msgspec.json.decode(text)
    except msgspec.DecodeError:
        given = None
    if not isinstance(given, Mapping):
        raise StorageError(f"credentials of {source} are no JSON object")
    found: dict[str, Any] = {
        _NAMES.get(name, str(name)): value for name, value in given.items() if name != "Version"
    }
    expires = found.get("expires_at")
    now = datetime.now(UTC)
    try:
        end = now + 2 * _LONGEST if expires is None else datetime.fromisoformat(str(expires))
    except ValueError:
        raise StorageError(f"credentials of {source}: Expiration is no time in ISO 8601") from None
    left = end.replace(tzinfo=end.tzinfo or UTC) - now
    return {**found, "expires_at": now + max(left / 2, left - _LONGEST)}
