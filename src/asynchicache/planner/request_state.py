"""One request as the planner sees it: which slots are its own, which it borrows from the tree."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field

from asynchicache.streams.base import Stream
from asynchicache.tree.node import Pins, SlotPlace
from asynchicache.tree.radix_tree import HeldBack, Match, PathLease
from asynchicache.types import MissReason, Tier


@dataclass(slots=True, eq=False)
class Window:
    """Device slots of a request's last pages of a pool that needs no others.

    Attributes:
        first: page number of the first slot.
        slots: page by page, up to the last page that the request has room for.
        own: those that are the request's; the others are the tree's, kept by the lease.
    """

    first: int = 0
    slots: list[int] = field(default_factory=list)
    own: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class RetiredPages:
    """Pages of windows that a request has moved past, until no forward reads them any more.

    Attributes:
        pins: the tree's pages; slots: by `place`, the request's own.
    """

    pins: Pins = field(default_factory=list)
    slots: dict[SlotPlace, list[int]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class RequestState:
    """The tokens of a request and the device slots that hold what was computed for them.

    Attributes:
        tokens: prompt and generated ids so far.
        seed: digest of the request's namespace.
        prompt: how many of the tokens are the prompt.
        lease: keeps the prefix that the request borrows; moves on as its pages are published.
        match: what was in the tree when it was asked last.
        held_back: the pool that keeps the match below the full pages in memory.
        pages: device slots of the full component, page by page; the first `borrowed` are the tree's.
        borrowed: pages of the restored prefix and of what was published since.
        duplicates: own slots of published pages that the tree had already; kept until the request
            closes, because kernels that read them may be under way.
        windows: by component id, the pages of a sliding window.
        states: by component id, the slot of the request's own working state.
        snapshots: by component id, a slot with the state at `snapshot_tokens`.
        reserved: tokens that the pages have room for.
        hit_pages, tier, reason: what was restored, from how far away, and why it was not more.
        stored_full_pages, stored_limit: how far full pages reach in memory and storage together, as its
            prefetch found, and the component that keeps a prefix from reaching as far.
        fetched_pages: by how many pages its prefetch made the match longer.
        sources: by pool and tier, the pages and states of what was restored, where they lay before;
            `STORAGE` is what its prefetch brought.
        resting: it keeps nothing for now, so nobody need wait for it.
        poisoned: a copy for it failed, so its own slots must not be handed out again.
        closed: the request is over; its slots may still be kept for copies.
        published: of models with windows, the page counts of its checkpoints.
        unpublished: a checkpoint of it was not published, because the device or its load had failed.
        finished: its working states are the tree's; it computes nothing more.
        streams: where its forwards run, as far as it was told; a dictionary, for its order.
        users: the request itself and every copy in flight for it; own slots are freed at zero.
    """

    tokens: array[int]
    seed: bytes
    lease: PathLease
    match: Match
    held_back: HeldBack | None
    prompt: int = 0
    pages: list[int] = field(default_factory=list)
    borrowed: int = 0
    duplicates: list[int] = field(default_factory=list)
    windows: dict[int, Window] = field(default_factory=dict)
    states: dict[int, int] = field(default_factory=dict)
    snapshots: dict[int, int] = field(default_factory=dict)
    snapshot_tokens: int = 0
    reserved: int = 0
    hit_pages: int = 0
    tier: Tier = Tier.DEVICE
    reason: MissReason = MissReason.NONE
    stored_full_pages: int = 0
    stored_limit: int | None = None
    fetched_pages: int = 0
    sources: Counter[tuple[str, Tier]] = field(default_factory=Counter)
    loaded: bool = False
    resting: bool = False
    poisoned: bool = False
    published: set[int] = field(default_factory=set)
    unpublished: bool = False
    finished: bool = False
    closed: bool = False
    streams: dict[Stream, None] = field(default_factory=dict)
    users: int = 1

    @property
    def prefetched(self) -> bool:
        """Whether storage brought what the hit ends with."""
        return self.fetched_pages > 0

    @property
    def matched_pages(self) -> int:
        """Pages that were restorable when the tree was asked last."""
        return self.match.pages

    @property
    def branching_pages(self) -> int | None:
        """How far full pages alone reach, in memory or in storage, if that is further than the match."""
        full = max(self.match.branching_pages or 0, self.stored_full_pages)
        return full if full > self.match.pages else None

    @property
    def limited_by(self) -> HeldBack | None:
        """What keeps the match from reaching as far as full pages do; None if nothing does."""
        memory = self.match.branching_pages or 0
        if self.stored_limit is None or self.stored_full_pages <= max(memory, self.match.pages):
            return self.held_back
        return HeldBack(self.stored_limit, dropped=False)

    def runs_on(self, stream: Stream) -> None:
        """Forwards of the request run on a stream: its slots are not given back before they have ended."""
        self.streams[stream] = None

    def own_pages(self) -> list[int]:
        """Page slots that are neither borrowed nor the tree's by now."""
        return self.pages[self.borrowed :] + self.duplicates
