"""Translate Mooncake's return codes to outcomes.

The codes are those of `ErrorCode` in Mooncake 0.3.13, `mooncake-store/include/types.h`.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from asynchicache.types import Outcome


class MooncakeCode(IntEnum):
    """Per-key return codes that this backend distinguishes."""

    OK = 0
    NO_AVAILABLE_HANDLE = -200  # no node has room, or there is no node
    INVALID_PARAMS = -600
    REPLICA_IS_NOT_READY = -703  # a write is in flight
    OBJECT_NOT_FOUND = -704
    OBJECT_ALREADY_EXISTS = -705
    OBJECT_HAS_LEASE = -706
    LEASE_EXPIRED = -707  # the object may have been evicted and overwritten during the read
    REPLICA_NOT_FOUND = -710
    REPLICA_IS_GONE = -712
    BUSY = -714
    TRANSFER_FAIL = -800
    CHECKSUM_MISMATCH = -801
    RPC_FAIL = -900
    RPC_TIMEOUT = -901
    QUOTA_EXCEEDED = -1700
    TENANT_NOT_REGISTERED = -1701


_GET: dict[int, Outcome] = {
    # Keys, pointers and sizes are always valid here, so the object's size differs from a page's.
    MooncakeCode.INVALID_PARAMS: Outcome.CORRUPT,
    MooncakeCode.REPLICA_IS_NOT_READY: Outcome.MISS,
    MooncakeCode.OBJECT_NOT_FOUND: Outcome.MISS,
    MooncakeCode.LEASE_EXPIRED: Outcome.MISS,
    MooncakeCode.REPLICA_NOT_FOUND: Outcome.MISS,
    MooncakeCode.REPLICA_IS_GONE: Outcome.MISS,
    MooncakeCode.CHECKSUM_MISMATCH: Outcome.CORRUPT,
}
_PUT: dict[int, Outcome] = {
    MooncakeCode.OK: Outcome.STORED,  # or it existed: Mooncake keeps the first and returns OK as well
    MooncakeCode.OBJECT_ALREADY_EXISTS: Outcome.EXISTS,
    MooncakeCode.NO_AVAILABLE_HANDLE: Outcome.REJECTED,
    MooncakeCode.QUOTA_EXCEEDED: Outcome.REJECTED,
}
_DELETE: dict[int, Outcome] = {
    MooncakeCode.OK: Outcome.HIT,
    MooncakeCode.OBJECT_NOT_FOUND: Outcome.MISS,
}
_AWAY = frozenset({MooncakeCode.RPC_FAIL, MooncakeCode.RPC_TIMEOUT})


def get_outcome(code: int, nbytes: int) -> Outcome:
    """Outcome of a read: HIT if `nbytes` arrived. The caller must still verify the checksum.

    Args:
        code: the number of bytes read, or a negative code.
        nbytes: size of a stored page.
    """
    if code >= 0:
        return Outcome.HIT if code == nbytes else Outcome.CORRUPT
    return _GET.get(code, Outcome.FAILED)


def put_outcome(code: int) -> Outcome:
    """Outcome of a write."""
    return _PUT.get(code, Outcome.FAILED)


def delete_outcome(code: int) -> Outcome:
    """Outcome of a forced removal, which ignores leases."""
    return _DELETE.get(code, Outcome.FAILED)


def master_is_away(codes: Iterable[int]) -> bool:
    """Whether a call's codes say that the master did not answer."""
    return not _AWAY.isdisjoint(codes)


def name_of(code: int) -> str:
    """The code's name, or its number if it is not a `MooncakeCode`."""
    return MooncakeCode(code).name if code in MooncakeCode.__members__.values() else str(code)
