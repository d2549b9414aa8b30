"""Options of the 3FS backend."""

from __future__ import annotations

from collections.abc import Mapping
from enum import Enum
from pathlib import Path
from typing import Annotated, ClassVar, TypeAlias

from msgspec import Meta

from asynchicache.backends.options import BackendOptions
from asynchicache.options import Positive

_Deadline: TypeAlias = Annotated[float, Meta(gt=0, le=86_400)]


class Io(Enum):
    """The data path."""

    POSIX = "posix"  # pread and pwrite, through 3FS's FUSE mount or any other file system
    USRBIO = "usrbio"  # 3FS's rings in shared memory, bypassing FUSE


class Hf3fsOptions(BackendOptions, frozen=True):
    """Options of the 3FS backend.

    Attributes:
        path: a folder on the 3FS mount, used by this cache only; created if missing. A leading `~` is the
            user's home.
        metadata: where names and reservations are kept: the URL of a Redis or Valkey server, cluster or
            Sentinels, for many hosts; or a folder on a local disk, for the processes of one host.
        metadata_options: further options of the redis backend, for such a URL: `password`, `service`,
            `ca_file`, `namespace`, ... Default: none.
        capacity_bytes: bytes of a pool's file. Default: 1 GiB.
        fractions: by pool, its file's share of `capacity_bytes`, at least one page. Default: 1.0.
        io: `posix` or `usrbio`. Default: `posix`.
        replicated_writer: whether this rank writes the pages that all ranks share; true for exactly one
            rank of a group. Default: true.
        direct: for `posix`, bypass the kernel's cache if the file system allows it. Default: true.
        workers: concurrent batches of a pool; for `usrbio`, also rings in each direction. Default: 4.
        entries: for `usrbio`, I/Os that a ring holds. Default: 64.
        buffer_bytes: for `usrbio`, shared memory per ring, at least one page. Default: 32 MiB.
        io_seconds: for `usrbio`, deadline of the I/Os of one batch. Default: 5.
        zero_copy: for `usrbio`, host slots are shared memory that 3FS reads and writes. Default: false.
        metadata_seconds: deadline of one metadata call. Default: 5.
    """

    backend: ClassVar[str] = "hf3fs"

    path: Path
    metadata: str = ""
    metadata_options: Mapping[str, object] = {}
    capacity_bytes: Positive = 1 << 30
    fractions: Mapping[str, Annotated[float, Meta(gt=0, le=1)]] = {}
    io: Io = Io.POSIX
    replicated_writer: bool = True
    direct: bool = True
    workers: Positive = 4
    entries: Positive = 64
    buffer_bytes: Positive = 32 << 20
    io_seconds: _Deadline = 5.0
    zero_copy: bool = False
    metadata_seconds: _Deadline = 5.0

    def check(self) -> None:
        if self.zero_copy and self.io is not Io.USRBIO:
            raise self.refused("zero_copy", True, "needs io='usrbio'")

        if not self.metadata:
            raise self.missing("metadata", "names a folder on a local disk, or redis://host:port")
        if self.metadata_options and not self.remote:
            raise self.refused("metadata_options", dict(self.metadata_options), "needs the URL of a server")

    @property
    def remote(self) -> bool:
        """Whether `metadata` is a URL."""
        return "://" in self.metadata

    def slots_of(self, pool: str, frame_bytes: int) -> int:
        """Number of pages that fit into a pool's file."""
        return max(1, int(self.capacity_bytes * self.fractions.get(pool, 1.0)) // frame_bytes)
