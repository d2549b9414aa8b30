"""What the leader and its followers say to each other: tagged structs, encoded as msgpack.

The leader's log is a sequence of entries. A follower answers each entry that has an operation number exactly
once, and once more if an engine was late. Slots are sent as runs, pages as one string of 81 bytes each.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import chain
from struct import Struct
from typing import TypeAlias

import msgspec

from asynchicache.errors import RankProtocolError
from asynchicache.hashing import DIGEST_BYTES, PlacedPage
from asynchicache.pools.shared import HostHandle
from asynchicache.ranks.host_sizes import HostNeed
from asynchicache.types import Direction, MissReason, Outcome, Tier

PROTOCOL = 9
"""Version of these messages. Both sides of a connection must have the same one."""

_PAGE = Struct(f"{DIGEST_BYTES}s{DIGEST_BYTES}sB")

OUTCOMES = tuple(Outcome)
REASONS = tuple(MissReason)
"""Outcomes and reasons travel as their index here."""


def pack_slots(slots: Iterable[int]) -> list[int]:
    """Slots as runs: first slot and length, alternating."""
    runs: list[int] = []
    for slot in slots:
        if runs and slot == runs[-2] + runs[-1]:
            runs[-1] += 1
        else:
            runs += (int(slot), 1)
    return runs


def unpack_slots(runs: Sequence[int]) -> list[int]:
    """
    Raises:
        RankProtocolError: the runs are not pairs of a slot and a positive length.
    """
    starts, lengths = runs[::2], runs[1::2]
    if len(starts) != len(lengths) or any(start < 0 for start in starts) or any(n < 1 for n in lengths):
        raise RankProtocolError(f"runs {list(runs)!r:.80} are not pairs of a slot and a positive length")
    return list(
        chain.from_iterable(range(start, start + n) for start, n in zip(starts, lengths, strict=True))
    )


def pack_pages(pages: Iterable[PlacedPage]) -> bytes:
    """Pages as one string: digest, group and place of each."""
    return b"".join(_PAGE.pack(*page) for page in pages)


def unpack_pages(joined: bytes) -> list[PlacedPage]:
    """
    Raises:
        RankProtocolError: the length is not a multiple of a page's.
    """
    if len(joined) % _PAGE.size:
        raise RankProtocolError(f"{len(joined)} bytes are not pages of {_PAGE.size} bytes each")
    return [PlacedPage(*fields) for fields in _PAGE.iter_unpack(joined)]


def pack_outcomes(outcomes: Iterable[Outcome]) -> bytes:
    return bytes(map(OUTCOMES.index, outcomes))


def unpack_outcomes(packed: bytes) -> list[Outcome]:
    """
    Raises:
        RankProtocolError: a byte stands for no outcome.
    """
    if packed and max(packed) >= len(OUTCOMES):
        raise RankProtocolError(f"byte {max(packed)} stands for no outcome")
    return [OUTCOMES[code] for code in packed]


class TransferRuns(msgspec.Struct, frozen=True, array_like=True):
    """A `PoolTransfer`; slots as runs."""

    pool: str
    sources: list[int]
    destinations: list[int]


class PoolPages(msgspec.Struct, frozen=True, array_like=True):
    """Pages of one pool: `pack_pages` of them and, for reads and writes, the host slots as runs."""

    pool: str
    pages: bytes
    slots: list[int] = []


class FreeSlots(msgspec.Struct, frozen=True, array_like=True):
    """The free slots of one pool in one tier, as runs."""

    pool: str
    tier: Tier
    slots: list[int]


# The log: from the leader to every follower, in one order.


class CopyEntry(msgspec.Struct, frozen=True, tag="copy", array_like=True):
    """Copy between slots. It runs at its place in the log, in the order of the follower's compute stream."""

    operation: int
    direction: Direction
    transfers: list[TransferRuns]


class MarkEntry(msgspec.Struct, frozen=True, tag="mark", array_like=True):
    """All copies that forward `step` depends on come before this entry.

    Attributes:
        step: the number of the forward.
        message: what the leader's engine says to those of the followers; None if it does so itself.
    """

    step: int
    message: bytes | None = None


class ReadEntry(msgspec.Struct, frozen=True, tag="read", array_like=True):
    """Read pages from storage into host slots, on arrival."""

    operation: int
    pages: list[PoolPages]


class WriteEntry(msgspec.Struct, frozen=True, tag="write", array_like=True):
    """Write pages from host slots to storage, on arrival."""

    operation: int
    pages: list[PoolPages]


class ExistsEntry(msgspec.Struct, frozen=True, tag="exists", array_like=True):
    """Ask storage which pages every one of `pools` has. `fresh`, `everywhere`: see `StoragePools.exists`."""

    operation: int
    pools: list[str]
    pages: bytes
    fresh: bool = False
    everywhere: bool = False


class TouchEntry(msgspec.Struct, frozen=True, tag="touch", array_like=True):
    """Report pages used in memory to the storage engines. Not answered."""

    pages: list[PoolPages]


class ClearEntry(msgspec.Struct, frozen=True, tag="clear", array_like=True):
    """Remove every page of the model from storage."""

    operation: int


class EpochEntry(msgspec.Struct, frozen=True, tag="epoch", array_like=True):
    """The weights have changed: storage is used under `weight_version` from here on."""

    operation: int
    weight_version: str


class VerifyEntry(msgspec.Struct, frozen=True, tag="verify", array_like=True):
    """Compare what runs with the leader's view, as of this place in the log.

    Attributes:
        open_operations: what some rank has not ended, as far as the leader knows.
        free: the slots that the leader takes for free.
        idle: the cache is not in use, so nothing runs.
    """

    operation: int
    open_operations: list[int]
    free: list[FreeSlots]
    idle: bool = False


class CloseEntry(msgspec.Struct, frozen=True, tag="close", array_like=True):
    """The leader closes; nothing follows."""


class HeartbeatEntry(msgspec.Struct, frozen=True, tag="alive", array_like=True):
    """The leader is alive. Sent when there is nothing else to send."""


LogEntry: TypeAlias = (
    CopyEntry
    | MarkEntry
    | ReadEntry
    | WriteEntry
    | ExistsEntry
    | TouchEntry
    | ClearEntry
    | EpochEntry
    | VerifyEntry
    | CloseEntry
    | HeartbeatEntry
)


# Answers: from a follower to the leader.


class EndAnswer(msgspec.Struct, frozen=True, tag="ended", array_like=True):
    """An operation without outcomes has ended.

    Attributes:
        error: why it failed; empty if it succeeded.
        count: the number of pages that a clear removed.
    """

    operation: int
    error: str = ""
    count: int = 0


class OutcomesAnswer(msgspec.Struct, frozen=True, tag="answered", array_like=True):
    """Outcomes of a read or write.

    Attributes:
        outcomes: of each pool of the entry, a byte per page.
        late: whether an engine may still use the slots; `LateAnswer` follows then.
    """

    operation: int
    outcomes: list[bytes]
    late: bool = False


class LateAnswer(msgspec.Struct, frozen=True, tag="late", array_like=True):
    """No engine uses the slots of a late operation any more; not `safe`: that will never be known."""

    operation: int
    safe: bool


class PresenceAnswer(msgspec.Struct, frozen=True, tag="present", array_like=True):
    """Which pages storage has: a byte per page, and the index of the reason for an incomplete answer."""

    operation: int
    flags: bytes
    reason: int


class ProblemsAnswer(msgspec.Struct, frozen=True, tag="problems", array_like=True):
    """What contradicts the leader's view; empty if nothing does."""

    operation: int
    problems: list[str]


class FailureAnswer(msgspec.Struct, frozen=True, tag="failed", array_like=True):
    """The follower cannot go on, for example because its device has failed."""

    error: str


class HeartbeatAnswer(msgspec.Struct, frozen=True, tag="alive", array_like=True):
    """The follower is alive. Sent when there is nothing else to send."""


FollowerAnswer: TypeAlias = (
    EndAnswer
    | OutcomesAnswer
    | LateAnswer
    | PresenceAnswer
    | ProblemsAnswer
    | FailureAnswer
    | HeartbeatAnswer
)


# The handshake, once, before both.


class Hello(msgspec.Struct, frozen=True, tag="hello"):
    """What a follower is.

    Attributes:
        token: the group's secret.
        rank: its number, from 1; the leader is rank 0.
        build: what every rank must agree on, by name: versions, page size, layouts, pools.
        slots: by pool that owns slots, the (device, host) slots that this rank has memory for.
        shares: equal for ranks that can share the host memory of replicated pools; empty: with none.
        need: what the slots cost of the memory of its host.
        parts: `parts.rank_parts` of this rank.
    """

    protocol: int
    token: str
    rank: int
    build: dict[str, str]
    slots: dict[str, tuple[int, int]]
    shares: str = ""
    need: HostNeed = HostNeed()
    parts: dict[str, tuple[str, bool]] = {}


class Welcome(msgspec.Struct, frozen=True, tag="welcome"):
    """The group is complete.

    Attributes:
        incarnation: the group's number, drawn when it forms. Frames of another group are refused.
        slots: the agreed slots, by pool: the least that any rank has.
        heartbeat: seconds between two signs of life.
        sharing: the ranks that share the host memory of replicated pools with this one, itself included; the
            first has it, and sends `MemoryHandles`. None if it has its own.
    """

    incarnation: int
    slots: dict[str, tuple[int, int]]
    heartbeat: float
    sharing: list[int] = []


class MemoryHandles(msgspec.Struct, frozen=True, tag="memory"):
    """Host memory of replicated pools, which other ranks of the host map; the leader passes it on."""

    pools: HostHandle


class Refused(msgspec.Struct, frozen=True, tag="refused"):
    """The group does not form, or does not take this rank."""

    error: str


class Ready(msgspec.Struct, frozen=True, tag="ready"):
    """The follower has allocated its memory and opened its storage, or failed to."""

    error: str = ""


Handshake: TypeAlias = Hello | Welcome | MemoryHandles | Refused | Ready
