"""Messages between the metadata service and its clients: JSON, checked by both sides."""

from __future__ import annotations

from typing import Annotated, Literal

from msgspec import Meta, Struct

MAX_KEYS = 16_384
"""Keys of one call; more are refused."""

_MOST = 1 << 40

Name = Annotated[str, Meta(pattern=r"\A[0-9a-z][0-9a-z._-]{0,199}\Z")]
"""A namespace: what one file of pages belongs to; also the file's name."""
Key = Annotated[str, Meta(pattern=r"\A[0-9a-f]{80}\Z")]
"""A page digest, 40 bytes in hexadecimal digits."""
Token = Annotated[str, Meta(pattern=r"\A[0-9a-f]{32}\Z")]
"""Names one put, so that asking again gets the same slots."""
Keys = Annotated[list[Key], Meta(max_length=MAX_KEYS)]
Whole = Annotated[int, Meta(ge=0, lt=_MOST)]
Count = Annotated[int, Meta(ge=1, lt=_MOST)]
SlotGeneration = Annotated[int, Meta(ge=1, lt=1 << 62)]
Leases = Annotated[list[int], Meta(max_length=MAX_KEYS)]


class MetadataMessage(Struct, frozen=True, forbid_unknown_fields=True):
    """The root of every message."""


class SlotVersion(Struct, frozen=True, array_like=True):
    """A page's location: `slot` of the file, valid while the slot has this `generation`."""

    slot: Whole
    generation: SlotGeneration


class Claim(Struct, frozen=True, array_like=True):
    """A page and its location, valid only while the slot has this generation."""

    key: Key
    slot: Whole
    generation: SlotGeneration


Claims = Annotated[list[Claim], Meta(max_length=MAX_KEYS)]


class Open(MetadataMessage, frozen=True):
    """Register a namespace with at least this many slots."""

    name: Name
    slots: Count
    frame_bytes: Count


class Opened(MetadataMessage, frozen=True):
    """
    Attributes:
        handle: identifies the namespace in all other calls; unknown to other services.
        store: id of the service's state, 32 hexadecimal digits.
        slots: number of slots; larger than requested if another client requested more.
        lease_seconds: duration of a reservation.
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
        lease: read lease that protects these slots from reuse until it ends or expires; 0 for none.
        places: one per key; None if the page does not exist.
    """

    lease: int
    places: list[SlotVersion | None]


class Reserve(MetadataMessage, frozen=True):
    """Reserve slots for pages that do not exist. Keys must be distinct."""

    token: Token
    keys: Keys
    finished: Leases = []


class Reserved(MetadataMessage, frozen=True):
    """
    Attributes:
        existed: for each key, whether its page already exists.
        places: one per key; None if the page exists or there is no room.
    """

    existed: list[bool]
    places: list[SlotVersion | None]


class Confirm(MetadataMessage, frozen=True):
    """Make written pages visible."""

    claims: Claims


Verdict = Literal["stored", "existed", "lost"]


class Confirmed(MetadataMessage, frozen=True):
    """
    Attributes:
        verdicts: one per claim: the page is visible now; another client's copy is, and the slot was freed; or
            the reservation had expired.
    """

    verdicts: list[Verdict]


class Release(MetadataMessage, frozen=True):
    """Release reserved slots that were not written."""

    places: Annotated[list[SlotVersion], Meta(max_length=MAX_KEYS)]


class Forget(MetadataMessage, frozen=True):
    """Drop damaged pages, unless their slots have other generations."""

    claims: Claims


class Dropped(MetadataMessage, frozen=True):
    """For each key or claim, whether a page was dropped."""

    dropped: list[bool]


class Clear(MetadataMessage, frozen=True):
    """Drop every page of the namespace."""


class Counted(MetadataMessage, frozen=True):
    """Number of released slots or dropped pages."""

    count: int


class NamespaceStatus(MetadataMessage, frozen=True):
    """Contents of one namespace."""

    name: str
    slots: int
    held: int
    reserved: int
    evicted: int


class Status(MetadataMessage, frozen=True):
    """Contents of the service."""

    store: str
    namespaces: list[NamespaceStatus]


class Refusal(MetadataMessage, frozen=True):
    """The body of every answer that is not 200."""

    error: str
