"""What the user chooses, checked."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path

from asynchicache.backends.options import Options

DEFAULT_METADATA = "http://127.0.0.1:18000"
_GIB = 1 << 30
_LONGEST = 86_400


class Io(Enum):
    """How bytes move."""

    POSIX = "posix"  # pread and pwrite, through 3FS's FUSE mount or any other file system
    USRBIO = "usrbio"  # 3FS's rings in shared memory, past FUSE


@dataclass(frozen=True, slots=True)
class Hf3fsOptions:
    """
    Attributes:
        path: a folder on the mount of 3FS, for this cache alone; made if it is missing. `~` at its beginning
            is the user's home.
        metadata: URL of the metadata service. Default: `http://127.0.0.1:18000`.
        capacity_bytes: bytes of a pool's file. Default: 1 GiB.
        fractions: by pool, the share of `capacity_bytes` that its file has, one page at least. Default: 1.0.
        io: `posix` or `usrbio`. Default: `posix`.
        replicated_writer: whether this rank writes the pages that every rank shares; true for one rank of
            a group. Default: true.
        direct: of `posix`, go around the kernel's cache where the file system allows it. Default: true.
        workers: batches of a pool that move at once; of `usrbio`, rings in each direction. Default: 4.
        entries: of `usrbio`, I/Os that a ring holds. Default: 64.
        buffer_bytes: of `usrbio`, shared memory of a ring. Default: 32 MiB; one page at least.
        io_seconds: of `usrbio`, how long the I/Os of one batch may take. Default: 5.
        zero_copy: of `usrbio`, host slots are shared memory that 3FS reads and writes. Default: false.
        metadata_seconds: deadline of one call of the metadata service. Default: 5.
    """

    path: Path
    metadata: str = DEFAULT_METADATA
    capacity_bytes: int = _GIB
    fractions: Mapping[str, float] = field(default_factory=dict)
    io: Io = Io.POSIX
    replicated_writer: bool = True
    direct: bool = True
    workers: int = 4
    entries: int = 64
    buffer_bytes: int = 32 << 20
    io_seconds: float = 5.0
    zero_copy: bool = False
    metadata_seconds: float = 5.0

    @classmethod
    def of(cls, options: Mapping[str, object]) -> Hf3fsOptions:
        """
        Raises:
            ConfigError: an option is missing, unknown, or breaks its rule.
        """
        taken = Options("hf3fs", options)
        found = cls(
            path=taken.folder(),
            metadata=taken.take("metadata", str, DEFAULT_METADATA),
            capacity_bytes=taken.positive("capacity_bytes") or _GIB,
            fractions=_fractions(taken),
            io=_io(taken),
            replicated_writer=taken.take("replicated_writer", bool, True),
            direct=taken.take("direct", bool, True),
            workers=taken.positive("workers") or 4,
            entries=taken.positive("entries") or 64,
            buffer_bytes=taken.positive("buffer_bytes") or 32 << 20,
            io_seconds=_seconds(taken, "io_seconds"),
            zero_copy=taken.take("zero_copy", bool, False),
            metadata_seconds=_seconds(taken, "metadata_seconds"),
        )
        taken.finish()
        if found.zero_copy and found.io is not Io.USRBIO:
            raise taken.refused("zero_copy", True, "needs io='usrbio'")
        return found

    def slots_of(self, pool: str, frame_bytes: int) -> int:
        """Pages that a pool's file has room for."""
        return max(1, int(self.capacity_bytes * self.fractions.get(pool, 1.0)) // frame_bytes)


def _io(taken: Options) -> Io:
    name = taken.take("io", str, Io.POSIX.value)
    try:
        return Io(name)
    except ValueError:
        raise taken.refused("io", name, f"must be one of {[io.value for io in Io]}") from None


def _seconds(taken: Options, name: str) -> float:
    seconds = taken.take(name, (int, float), 5.0)
    if not 0 < seconds <= _LONGEST:
        raise taken.refused(name, seconds, f"must be above 0, and {_LONGEST} at most")
    return float(seconds)


def _fractions(taken: Options) -> Mapping[str, float]:
    fractions: Mapping[object, object] = taken.take("fractions", Mapping, {})
    checked: dict[str, float] = {}
    for pool, share in fractions.items():
        number = share if isinstance(share, int | float) and not isinstance(share, bool) else 0
        if not isinstance(pool, str) or not 0 < number <= 1:
            raise taken.refused(
                "fractions", {pool: share}, "must map pool names to shares above 0 and up to 1"
            )
        checked[pool] = number
    return checked
