"""What the metadata service and its clients say to each other: JSON, checked by both sides."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

MOST_KEYS = 16_384
"""Keys of one call; more are refused."""

_MOST = 1 << 40

Name = Annotated[str, Meta(pattern=r"\A[0-9a-z][0-9a-z._-]{0,199}\Z")]
"""A namespace: what one file of pages belongs to; also the file's name."""
Key = Annotated[str, Meta(pattern=r"\A[0-9a-f]{64}\Z")]
"""A page digest, 32 bytes in hexadecimal digits."""
Token = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
"""Names one put, so that asking again gets the same slots."""
Keys = Annotated[list[Key], Meta(max_length=MOST_KEYS)]
Whole = Annotated[int, Meta(ge=0, lt=_MOST)]
Count = Annotated[int, Meta(ge=1, lt=_MOST)]
Generation = Annotated[int, Meta(ge=1, lt=1 << 62)]
Leases = Annotated[list[int], Meta(max_length=MOST_KEYS)]


class MetadataMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """The root of every message."""


class SlotVersion(Struct, frozen=True, array_like=True):
    """Where a page lies: `slot` of the file, as long as the slot has this `generation`."""

    slot: Whole
    generation: Generation


class Claim(Struct, frozen=True, array_like=True):
    """A page at a place: true only while the slot has this generation."""

    key: Key
    slot: Whole
    generation: Generation


Claims = Annotated[list[Claim], Meta(max_length=MOST_KEYS)]


class Open(MetadataMessage, frozen=True):
    """Make a namespace known, and at least this large."""

    name: Name
    slots: Count
    frame_bytes: Count


class Opened(MetadataMessage, frozen=True):
    """
    Attributes:
        handle: names the namespace in every other call; another service knows no such handle.
        store: the service's state, 32 hexadecimal digits.
        slots: how many there are; more than was asked for if somebody asked for more.
        lease_seconds: how long a reservation holds.
    """

    handle: str
    store: str
    slots: Count
    lease_seconds: float


class Ask(MetadataMessage, frozen=True):
    """`exists`, `locate`, `delete` and `touch` of keys. `finished` are reads that have ended since the last
    call."""

    keys: Keys
    finished: Leases = []


class Present(MetadataMessage, frozen=True):
    present: list[bool]


class Located(MetadataMessage, frozen=True):
    """
    Attributes:
        lease: until it is finished, or too old, no slot below gets another page; 0 if there is none.
        places: one a key, None where it is not there.
    """

    lease: int
    places: list[SlotVersion | None]


class Reserve(MetadataMessage, frozen=True):
    """Slots for pages that are not there; every key once."""

    token: Token
    keys: Keys
    finished: Leases = []


class Reserved(MetadataMessage, frozen=True):
    """
    Attributes:
        existed: one a key, whether its page is there already.
        places: one a key, None where it existed, or where there is no room.
    """

    existed: list[bool]
    places: list[SlotVersion | None]


class Confirm(MetadataMessage, frozen=True):
    """These pages are written: show them."""

    claims: Claims


Verdict = Literal["stored", "existed", "lost"]


class Confirmed(MetadataMessage, frozen=True):
    """
    Attributes:
        verdicts: one a claim: visible now; somebody else's copy is, and the slot is free again; or the
            reservation had ended.
    """

    verdicts: list[Verdict]


class Release(MetadataMessage, frozen=True):
    """These reserved slots were not written: take them back."""

    places: Annotated[list[SlotVersion], Meta(max_length=MOST_KEYS)]


class Forget(MetadataMessage, frozen=True):
    """These pages are not what they should be: drop them, unless their slots have other generations."""

    claims: Claims


class Dropped(MetadataMessage, frozen=True):
    """One answer a key or claim: whether a page was dropped."""

    dropped: list[bool]


class Clear(MetadataMessage, frozen=True):
    """Drop every page of the namespace."""


class Counted(MetadataMessage, frozen=True):
    """How many slots were given back, or pages dropped."""

    count: int


class NamespaceStatus(MetadataMessage, frozen=True):
    """What one namespace holds."""

    name: str
    slots: int
    held: int
    reserved: int
    evicted: int


class Status(MetadataMessage, frozen=True):
    """What the service holds."""

    store: str
    namespaces: list[NamespaceStatus]


class Refusal(MetadataMessage, frozen=True):
    """The body of every answer that is not 200."""

    error: str
