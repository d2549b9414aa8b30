"""What Mooncake's numbers mean to the core.

The numbers are those of `ErrorCode` in Mooncake's `mooncake-store/include/types.h`, as of 0.3.13.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import IntEnum

from asynchicache.types import Outcome


class MooncakeCode(IntEnum):
    """Return codes that a call for one key may end with, and that mean something of their own."""

    OK = 0
    NO_AVAILABLE_HANDLE = -200  # no node has room, or there is no node
    INVALID_PARAMS = -600
    REPLICA_IS_NOT_READY = -703  # somebody is writing it
    OBJECT_NOT_FOUND = -704
    OBJECT_ALREADY_EXISTS = -705
    OBJECT_HAS_LEASE = -706
    LEASE_EXPIRED = -707  # it may have been evicted, and its room used again, while it was read
    REPLICA_NOT_FOUND = -710
    REPLICA_IS_GONE = -712
    BUSY = -714
    TRANSFER_FAIL = -800
    CHECKSUM_MISMATCH = -801
    RPC_FAIL = -900
    RPC_TIMEOUT = -901
    QUOTA_EXCEEDED = -1700


_GET: dict[int, Outcome] = {
    # Keys, pointers and sizes are always valid here, so the object is of another size than a page.
    MooncakeCode.INVALID_PARAMS: Outcome.CORRUPT,
    MooncakeCode.REPLICA_IS_NOT_READY: Outcome.MISS,
    MooncakeCode.OBJECT_NOT_FOUND: Outcome.MISS,
    MooncakeCode.LEASE_EXPIRED: Outcome.MISS,
    MooncakeCode.REPLICA_NOT_FOUND: Outcome.MISS,
    MooncakeCode.REPLICA_IS_GONE: Outcome.MISS,
    MooncakeCode.CHECKSUM_MISMATCH: Outcome.CORRUPT,
}
_PUT: dict[int, Outcome] = {
    MooncakeCode.OK: Outcome.STORED,  # or it was there already: Mooncake does not tell, and keeps the first
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
    """What a read ended with; HIT if `nbytes` arrived, which are still to be checked.

    Args:
        code: the bytes that were read, or a negative code.
        nbytes: the bytes that a page has.
    """
    if code >= 0:
        return Outcome.HIT if code == nbytes else Outcome.CORRUPT
    return _GET.get(code, Outcome.FAILED)


def put_outcome(code: int) -> Outcome:
    """What a write ended with."""
    return _PUT.get(code, Outcome.FAILED)


def delete_outcome(code: int) -> Outcome:
    """What a removal, forced past leases, ended with."""
    return _DELETE.get(code, Outcome.FAILED)


def master_is_away(codes: Iterable[int]) -> bool:
    """Whether the master did not answer a call."""
    return not _AWAY.isdisjoint(codes)


def name_of(code: int) -> str:
    """The code's name, or the number of one that is not known here."""
    return MooncakeCode(code).name if code in MooncakeCode.__members__.values() else str(code)
