"""What is said of names and places: of pages, of slots of a file, and of who may write or read them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Protocol

LEASE_SECONDS = 60.0
"""How long a reservation or a read lease lasts unless its client ends it."""


class SlotVersion(NamedTuple):
    """A page's location: `slot` of the file, valid while the slot has this `generation`."""

    slot: int
    generation: int


class Claim(NamedTuple):
    """A page and its location, valid only while the slot has this generation."""

    key: str
    slot: int
    generation: int


class OpenedNamespace(NamedTuple):
    """
    Attributes:
        handle: identifies the namespace in all other calls.
        store: id of the state, 32 hexadecimal digits.
        slots: number of slots; larger than requested if another client requested more.
    """

    handle: str
    store: str
    slots: int


class Located(NamedTuple):
    """
    Attributes:
        lease: read lease that protects these slots from reuse until it ends or expires; 0 for none.
        places: one per key; None if the page does not exist.
    """

    lease: int
    places: Sequence[SlotVersion | None]


class Reserved(NamedTuple):
    """
    Attributes:
        existed: for each key, whether its page already exists.
        places: one per key; None if the page exists or there is no room.
    """

    existed: Sequence[bool]
    places: Sequence[SlotVersion | None]


Verdict = Literal["stored", "existed", "lost"]
"""Of a claim: the page is visible now; another client's copy is, and the slot was freed; or the reservation
had expired."""


class NameStore(Protocol):
    """Where names and reservations are kept."""

    @property
    def where(self) -> str:
        """For messages."""
        ...

    async def open(self, name: str, slots: int, frame_bytes: int) -> OpenedNamespace:
        """Create a namespace, or return the existing one. It grows if it has fewer slots, but never shrinks,
        because its other users would lose their pages.

        Raises:
            StorageFormatError: the namespace exists with frames of another size.
            StorageError: the store does not answer, or refuses.
        """
        ...

    async def call(self, handle: str, verb: str, finished: Sequence[int], *given: Any) -> Any:
        """Do a verb of `MetadataNamespace` to a namespace. `finished` are reads that have ended since the
        last call.

        Raises:
            StorageError: the store does not answer, refuses, or does not know the namespace.
        """
        ...

    async def time(self) -> float:
        """The Unix time of the store, in seconds; ours if it may not be asked.

        Raises:
            StorageError: the store does not answer.
        """
        ...

    async def aclose(self) -> None: ...
