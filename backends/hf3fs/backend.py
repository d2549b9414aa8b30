"""The 3FS backend: a folder with one preallocated file per pool, and a store of names that assigns slots.

The metadata protocol follows SGLang's hf3fs engine (https://github.com/sgl-project/sglang/pull/23241) and
adds leases and generations.
"""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping
from functools import partial
from pathlib import Path

from asynchicache.backends.engine_registry import EngineRegistry
from asynchicache.backends.hf3fs.datafile import DataFile, DataPath
from asynchicache.backends.hf3fs.engine import Hf3fsEngine
from asynchicache.backends.hf3fs.folder import LABEL, PAGES, claim_folder
from asynchicache.backends.hf3fs.metadata.local import LocalNames
from asynchicache.backends.hf3fs.metadata.namespace import MetadataNamespace
from asynchicache.backends.hf3fs.metadata.words import NameStore
from asynchicache.backends.hf3fs.options import Hf3fsOptions, Io
from asynchicache.backends.hf3fs.posix import PosixPath
from asynchicache.backends.hf3fs.usrbio import UsrbioPath, load_usrbio
from asynchicache.errors import StorageError
from asynchicache.hashing import ObjectKey
from asynchicache.ports import Port
from asynchicache.storage.protocol import PoolBinding

logger = logging.getLogger(__name__)

_POOL = re.compile(r"[a-z0-9_]{1,64}")
_SHARD = re.compile(r"[0-9a-z/-]{0,32}")


class Hf3fsBackend:
    """The pools of one rank.

    Args:
        options: location, capacity and I/O settings.

    Raises:
        ConfigError: option `metadata` is no URL of a server, or breaks a rule of the redis backend.
        StorageError: a required library is not installed.
    """

    name = "hf3fs"

    def __init__(self, options: Hf3fsOptions, port: Port) -> None:
        self._options = options
        self._port = port
        self._usrbio = load_usrbio() if options.io is Io.USRBIO else None
        self._names = names_of(options, port)
        self._engines: EngineRegistry[Hf3fsEngine] = EngineRegistry(f"hf3fs backend over {options.path}")

    async def open_pool(self, binding: PoolBinding) -> Hf3fsEngine:
        """Register the pool with the store of names, and open its file.

        Raises:
            StorageError: the store does not answer, the folder or file cannot be used, or the pool is
                open with another binding.
            StorageFormatError: the folder or the store holds incompatible data.
            ClosedError: the backend is closed.
        """
        name = namespace_name(binding)
        return await self._engines.open(binding, partial(self._open, name, binding))

    async def aclose(self) -> None:
        await self._engines.aclose()
        await self._names.aclose()

    async def _open(self, name: str, binding: PoolBinding) -> Hf3fsEngine:
        options = self._options
        frame_bytes = binding.header_bytes + binding.slot_bytes
        wanted = options.slots_of(binding.pool, frame_bytes)
        known = await self._names.open(name, 1, frame_bytes)
        data = await self._port.run_blocking(partial(self._open_data, name, known.store, wanted, binding))
        try:
            # Register only after the file is allocated: a namespace never shrinks again.
            opened = await self._names.open(name, wanted, frame_bytes)
        except BaseException:
            await self._port.run_blocking(data.close)
            raise
        if opened.slots > wanted:
            logger.info("%s has %d slots already; %d were asked for", name, opened.slots, wanted)
        return Hf3fsEngine(
            binding,
            self._port,
            MetadataNamespace(self._names, opened, name, frame_bytes),
            data,
            label=options.path / f"{name}{LABEL}",
            writes=options.replicated_writer or bool(binding.shard),
            concurrency=options.workers,
        )

    def _open_data(self, name: str, store: str, slots: int, binding: PoolBinding) -> DataPath:
        options = self._options
        claim_folder(options.path, store)
        file = DataFile(
            options.path / f"{name}{PAGES}",
            binding.header_bytes + binding.slot_bytes,
            slots,
            direct=options.direct and options.io is Io.POSIX,
            # 3FS has no fallocate, and the C library's fallback writes to every block of the file.
            reserve=options.io is Io.POSIX,
        )
        if self._usrbio is None:
            return PosixPath(file, binding)
        try:
            return UsrbioPath(self._usrbio, file, binding, options, self._port.now)
        except BaseException:
            file.close()
            raise

    def __repr__(self) -> str:
        return f"<Hf3fsBackend {self._options.path}, {self._names.where}: {len(self._engines)} pools>"


def names_of(options: Hf3fsOptions, port: Port) -> NameStore:
    """Where names and reservations are kept.

    Raises:
        ConfigError: option `metadata` is no URL of a server, or breaks a rule of the redis backend.
        StorageError: a required library is not installed.
    """
    if not options.remote:
        return LocalNames(Path(options.metadata).expanduser(), port, options.metadata_seconds)
    try:
        from asynchicache.backends.hf3fs.metadata.shared import open_names
    except ImportError as error:
        raise StorageError("names in Redis need redis-py: pip install 'asynchicache[redis]'") from error
    words = {**options.metadata_options, "url": options.metadata, "timeout_seconds": options.metadata_seconds}
    return open_names(words, port)


def namespace_name(binding: PoolBinding | ObjectKey) -> str:
    """A name unique to the pool, shard and fingerprint, for the file and for its namespace.

    Raises:
        StorageError: a part of the name is not allowed in a path.
    """
    if not _POOL.fullmatch(binding.pool) or not _SHARD.fullmatch(binding.shard):
        raise StorageError(f"pool {binding.pool!r}, shard {binding.shard!r}: these are no names of a file")
    # Shards contain `/` and `-` but never `_`, so the replacement keeps names distinct.
    shard = f".{binding.shard.replace('/', '_')}" if binding.shard else ""
    return f"{binding.fingerprint.hex()[:32]}.{binding.pool}{shard}"


def open_backend(options: Mapping[str, object], port: Port) -> Hf3fsBackend:
    """Create the hf3fs backend; see `Hf3fsOptions` for its options.

    Raises:
        ConfigError: an option is missing, unknown, or breaks its rule.
        StorageError: a required library is not installed.
    """
    return Hf3fsBackend(Hf3fsOptions.of(options), port)
