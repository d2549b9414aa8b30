"""A pool's host slots as an engine sees them, and the header stored with each page.

The header holds the page's key and a checksum of its bytes. If storage loses, tears, swaps or damages a
page, the check fails and the result is a miss, never wrong data.
"""

from __future__ import annotations

import logging
import re
from copy import copy
from struct import Struct
from typing import NamedTuple, Protocol, Self

from xxhash import xxh3_64, xxh3_64_digest

from asynchicache.errors import ConfigError, UsageError
from asynchicache.hashing import DIGEST_BYTES, HASH_BYTES, ObjectKey, PlacedKey, PlacedPage
from asynchicache.layouts import HEADER_BYTES, SlotLayout
from asynchicache.types import Outcome

logger = logging.getLogger(__name__)


_MAGIC = b"AHC-PAGE"
_VERSION = 2
_XXH3_64 = 1  # id of the checksum algorithm
_FIXED = Struct("<8sHH4xQ32s64s32s")  # magic, version, checksum, page bytes, fingerprint, pool, shard
_SEALED = Struct(f"<{_FIXED.size}s{DIGEST_BYTES}s8s")  # the fixed part, page digest, page checksum
_SUM_BYTES = 8
_USED_BYTES = _SEALED.size + _SUM_BYTES  # the header ends with a checksum of itself

_POOL = re.compile(r"[a-z0-9_]{1,64}")
_SHARD = re.compile(r"[0-9a-z/-]{0,32}")


class SlotViews(Protocol):
    """Slots in memory."""

    def page(self, slot: int) -> memoryview:
        """The slot's `layout.slot_bytes`, writable, on an `ALIGNMENT` boundary."""
        ...

    def header(self, slot: int) -> memoryview:
        """The slot's `HEADER_BYTES`, writable, on an `ALIGNMENT` boundary."""
        ...

    def regions(self) -> tuple[memoryview, memoryview]:
        """All headers and all pages, each as one contiguous view that starts at slot 0."""
        ...


class SlotMemory(SlotViews, Protocol):
    """The host memory of one pool; `pools.host.HostPool` is one."""

    @property
    def layout(self) -> SlotLayout: ...


class PageHeader(NamedTuple):
    """The fields of a valid header.

    Attributes:
        page_bytes: bytes that the checksum covers, without padding.
        checksum: xxh3-64 of those bytes, 8 bytes big-endian.
    """

    key: ObjectKey
    page_bytes: int
    checksum: bytes


def read_header(data: bytes | bytearray | memoryview) -> PageHeader | None:
    """Parse the header in `data`, of any pool; None if it is damaged or not a header."""
    if len(data) < _USED_BYTES:
        return None
    raw = bytes(data[:_USED_BYTES])
    if xxh3_64_digest(raw[: _SEALED.size]) != raw[_SEALED.size :]:
        return None
    fixed, digest, checksum = _SEALED.unpack_from(raw)
    magic, version, algorithm, page_bytes, fingerprint, pool, shard = _FIXED.unpack(fixed)
    if (magic, version, algorithm) != (_MAGIC, _VERSION, _XXH3_64):
        return None
    key = ObjectKey(fingerprint, digest, _text(pool), _text(shard))
    return PageHeader(key, page_bytes, checksum)


def read_frame(data: bytes | memoryview) -> PageHeader | None:
    """The header of a page that was stored as one piece with it; None if either is damaged."""
    header = read_header(data[:HEADER_BYTES])
    page = memoryview(data)[HEADER_BYTES:]
    if header is None or len(page) != header.page_bytes or page_checksum(page) != header.checksum:
        return None
    return header


def page_checksum(page: memoryview) -> bytes:
    """xxh3-64 of a page without padding, 8 bytes big-endian."""
    return xxh3_64(page).digest()  # faster here than `xxh3_64_digest`


def _text(field: bytes) -> str:
    return field.rstrip(b"\0").decode("ascii", "replace")


class SlotBinding:
    """`storage.protocol.PoolBinding` over a pool's host memory.

    Args:
        fingerprint: 32 bytes, `hashing.pool_fingerprint`.
        shard: the part of each page that this rank holds; empty if all ranks hold the same bytes.
        depends_on: the pool whose page of the same digest a page of this pool needs; None if it needs none.

    Raises:
        ConfigError: the fingerprint, pool name or shard is not valid in a key.
    """

    header_bytes = HEADER_BYTES

    def __init__(
        self, memory: SlotMemory, fingerprint: bytes, shard: str = "", *, depends_on: str | None = None
    ) -> None:
        layout = memory.layout
        _check_names(layout.pool.name, fingerprint, shard)
        self.pool = layout.pool.name
        self.fingerprint = fingerprint
        self.shard = shard
        self.depends_on = depends_on
        self.page_bytes = layout.page_bytes
        self.slot_bytes = layout.slot_bytes
        self.header = memory.header
        self.page = memory.page
        self.regions = memory.regions
        self._fixed = _FIXED.pack(
            _MAGIC, _VERSION, _XXH3_64, self.page_bytes, fingerprint, self.pool.encode(), shard.encode()
        )

    def key(self, digest: bytes) -> ObjectKey:
        """The key of this pool's page with that digest."""
        return ObjectKey(self.fingerprint, digest, self.pool, self.shard)

    def over(self, memory: SlotViews) -> Self:
        """The same pool in other memory."""
        other = copy(self)
        other.header, other.page, other.regions = memory.header, memory.page, memory.regions
        return other

    def placed_key(self, page: PlacedPage) -> PlacedKey:
        """The key of this pool's page, which says where the page lies on its path."""
        return PlacedKey.of(self.key(page.digest), page)

    def seal(self, slot: int, key: ObjectKey) -> bytes:
        """Write the header for the page now in `slot`.

        Returns:
            The page's checksum, for an engine that stores the checksum instead of the header.

        Raises:
            UsageError: `key` belongs to another pool, shard or fingerprint.
        """
        if not self._owns(key):
            raise UsageError(f"{key.text()} is no page of pool {self.pool!r}, shard {self.shard!r}")
        found = self._checksum_of(slot)
        self.header(slot)[:_USED_BYTES] = self._header_of(key, found)
        return found

    def check(self, slot: int, key: ObjectKey) -> Outcome:
        """HIT if the header and page in `slot` match what `seal` wrote for `key`, else CORRUPT."""
        if self._owns(key):
            wanted = self._header_of(key, self._checksum_of(slot))
            if bytes(self.header(slot)[:_USED_BYTES]) == wanted:
                return Outcome.HIT
        logger.debug("slot %d for %s: %s", slot, key.text(), self._problem(slot, key))
        return Outcome.CORRUPT

    def restore(self, slot: int, key: ObjectKey, checksum: bytes) -> Outcome:
        """HIT if the page in `slot` has the checksum that `seal` returned for `key`, else CORRUPT.

        A hit writes the header into the slot, because the engine did not store it.
        """
        if self._owns(key) and self._checksum_of(slot) == checksum:
            self.header(slot)[:_USED_BYTES] = self._header_of(key, checksum)
            return Outcome.HIT
        logger.debug("slot %d for %s: its bytes are not what was stored", slot, key.text())
        return Outcome.CORRUPT

    def identify(
        self, header: bytes | bytearray | memoryview, page: memoryview | None = None
    ) -> ObjectKey | None:
        """The key in `header`; None if the header is damaged or belongs to another pool, or if `page` is
        given and does not match it."""
        if header[: _FIXED.size] != self._fixed:  # usually a slot that was never written
            return None
        found = read_header(header)
        if found is None or (page is not None and page_checksum(page[: self.page_bytes]) != found.checksum):
            return None
        return self.key(found.key.digest)

    def _owns(self, key: ObjectKey) -> bool:
        return (
            key.fingerprint == self.fingerprint
            and key.pool == self.pool
            and key.shard == self.shard
            and len(key.digest) == DIGEST_BYTES
        )

    def _checksum_of(self, slot: int) -> bytes:
        """Checksum of the page now in `slot`, without padding."""
        return page_checksum(self.page(slot)[: self.page_bytes])

    def _header_of(self, key: ObjectKey, checksum: bytes) -> bytes:
        sealed = self._fixed + key.digest + checksum
        return sealed + xxh3_64_digest(sealed)

    def _problem(self, slot: int, key: ObjectKey) -> str:
        found = read_header(self.header(slot))
        if found is None:
            return "its header is damaged"
        if found.key != key:
            return f"it holds {found.key.text()}"
        if found.page_bytes != self.page_bytes:
            return f"it has {found.page_bytes} bytes, {self.page_bytes} are wanted"
        return "its bytes are damaged"


def _check_names(pool: str, fingerprint: bytes, shard: str) -> None:
    if len(fingerprint) != HASH_BYTES:
        raise ConfigError(f"fingerprint of pool {pool!r} has {len(fingerprint)} bytes; 32 are needed")
    if not _POOL.fullmatch(pool):
        raise ConfigError(f"pool name {pool!r} must be 1 to 64 of a-z, 0-9 and _")
    if not _SHARD.fullmatch(shard):
        raise ConfigError(f"shard {shard!r} of pool {pool!r} must be at most 32 of a-z, 0-9, / and -")
