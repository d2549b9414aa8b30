"""Join a cluster: import Mooncake's client, try to join in a child process, then set it up here."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Protocol, cast

from asynchicache.backends.mooncake.options import MooncakeOptions
from asynchicache.backends.mooncake.store import MooncakeStore, reach
from asynchicache.errors import StorageError

_MAX_ERRORS = 3
_SCRIPT = Path(__file__).with_name("trial_join.py")


class UnjoinedStore(MooncakeStore, Protocol):
    """A store that is not set up yet."""

    def setup(self, config: dict[str, str]) -> int: ...


def join(options: MooncakeOptions) -> MooncakeStore:
    """Return a store that has joined the cluster. Blocks.

    Setup holds the GIL: 20 to 140 ms on success, minutes on failure. So a child process tries it first.

    Raises:
        StorageError: Mooncake is not installed, its master does not answer, or it refuses the options.
    """
    store = new_store()
    if options.master_address is not None:
        check_port(options.master_address)
    try_to_join(options)
    code = store.setup(options.setup())
    if code != 0:
        raise StorageError(
            f"Mooncake refuses {options.setup()} with code {code}; it logs the reason to stderr"
        )
    return store


def new_store() -> UnjoinedStore:
    """
    Raises:
        StorageError: Mooncake or a library that it needs is not installed.
    """
    try:
        from mooncake.store import MooncakeDistributedStore
    except ImportError as error:
        raise StorageError(
            "storage 'mooncake' needs one of two wheels, asynchicache[mooncake-non-cuda] or, with CUDA's "
            "libraries, asynchicache[mooncake-cuda], and the system's libibverbs1, libnuma1 and libcurl4: "
            f"{error}"
        ) from error
    return cast("UnjoinedStore", MooncakeDistributedStore())


def check_port(address: tuple[str, int]) -> None:
    """
    Raises:
        StorageError: connecting fails or takes longer than a second.
    """
    try:
        reach(address)
    except OSError as error:
        host, port = address
        raise StorageError(
            f"no Mooncake master answers at {host}:{port} ({error}); start mooncake_master there"
        ) from error


def try_to_join(options: MooncakeOptions) -> None:
    """In a child process, join as a client that lends no memory, and leave.

    Raises:
        StorageError: joining failed or took longer than `open_seconds`. The message quotes Mooncake's log.
    """
    setup = options.setup() | {"global_segment_size": "0"}
    command = [sys.executable, "-P", str(_SCRIPT), json.dumps({"path": sys.path, "setup": setup})]
    try:
        done = subprocess.run(  # noqa: S603 - runs this Python with our own script
            command, stderr=subprocess.PIPE, timeout=options.open_seconds, check=False
        )
    except subprocess.TimeoutExpired as error:
        reason = f"not within {options.open_seconds:g} s; is that a Mooncake master?"
        raise StorageError(_cannot_join(options, reason, error.stderr)) from None
    if done.returncode != 0:
        raise StorageError(_cannot_join(options, "Mooncake refuses", done.stderr))


def _cannot_join(options: MooncakeOptions, reason: str, log: bytes | None) -> str:
    lines = (log or b"").decode(errors="replace").splitlines()
    errors = [line for line in lines if line.startswith("E")][:_MAX_ERRORS] or lines[-_MAX_ERRORS:]
    return f"cannot join the cluster of {options.master} with {options.setup()}: {reason} {errors}"
