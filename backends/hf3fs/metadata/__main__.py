"""`python -m asynchicache.backends.hf3fs.metadata --dir DIR`: the metadata service, until SIGTERM."""

from __future__ import annotations

import argparse
import logging
import socket
import sys
from collections.abc import Sequence
from pathlib import Path

from asynchicache.backends.hf3fs.metadata.store import LEASE_SECONDS, MetadataStore
from asynchicache.errors import CacheError, ConfigError

DEFAULT_PORT = 18_000


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser("python -m asynchicache.backends.hf3fs.metadata", description=__doc__)
    found.add_argument("--dir", type=Path, required=True, help="folder of the state, on a local disk")
    found.add_argument(
        "--host", default="127.0.0.1", help="address; anything but a loopback trusts its network"
    )
    found.add_argument("--port", type=int, default=DEFAULT_PORT, help="0 for any that is free")
    found.add_argument(
        "--lease-seconds",
        type=float,
        default=LEASE_SECONDS,
        help="how long a slot stays reserved for a client that is not heard of",
    )
    return found


def main(arguments: Sequence[str] | None = None) -> int:
    """Serve until stopped; return 1 if the service cannot start."""
    given = parser().parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s: %(message)s")
    try:
        serve(given.dir, given.host, given.port, given.lease_seconds)
    except (CacheError, OSError) as error:
        sys.stderr.write(f"{error}\n")
        return 1
    return 0


def serve(folder: Path, host: str, port: int, lease_seconds: float) -> None:
    """
    Raises:
        ConfigError, StorageError: the state cannot be used.
        OSError: the address is not available.
    """
    try:
        import uvicorn

        from asynchicache.backends.hf3fs.metadata.service import MetadataService
    except ImportError as error:
        raise OSError(f"{error}; install asynchicache[hf3fs]") from error
    if not 0 <= port < 1 << 16:
        raise ConfigError(f"port={port} must be 0 to 65535")
    with socket.create_server((host, port), family=_family(host)) as listener:
        store = MetadataStore(folder, lease_seconds=lease_seconds)
        # One line, also for programs that requested port 0 and parse the actual port.
        sys.stdout.write(f"listening on http://{_shown(host)}:{listener.getsockname()[1]}\n")
        sys.stdout.flush()
        config = uvicorn.Config(MetadataService(store).app(), access_log=False, log_config=None)
        uvicorn.Server(config).run(sockets=[listener])


def _family(host: str) -> socket.AddressFamily:
    return socket.AF_INET6 if ":" in host else socket.AF_INET


def _shown(host: str) -> str:
    return f"[{host}]" if ":" in host else host


if __name__ == "__main__":
    sys.exit(main())
