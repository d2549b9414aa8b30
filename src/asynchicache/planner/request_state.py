"""State of one request: the slots that it owns, and those that it borrows from the tree."""

from __future__ import annotations

from array import array
from collections import Counter
from dataclasses import dataclass, field
from sys import maxsize

from asynchicache.planner.hints import NO_HINT, CacheHint
from asynchicache.streams.base import Stream
from asynchicache.tree.node import Keep, Locks, Node, SlotPlace
from asynchicache.tree.radix_tree import HeldBack, Match, PathLease
from asynchicache.tree.tails import Tail
from asynchicache.types import MissReason, Tier


@dataclass(slots=True, eq=False)
class Window:
    """Device slots of a request's last pages in a sliding-window pool.

    Attributes:
        first: page number of the first slot.
        slots: one per page, up to the last page that the request has room for.
        own: slots that the request owns. The lease keeps the others, which the tree owns.
    """

    first: int = 0
    slots: list[int] = field(default_factory=list)
    own: set[int] = field(default_factory=set)


@dataclass(slots=True, eq=False)
class RetiredPages:
    """Window pages that a request has moved past, kept until no forward reads them.

    Attributes:
        locks: locks of pages that the tree owns.
        slots: by place, slots that the request owns.
    """

    locks: Locks = field(default_factory=list)
    slots: dict[SlotPlace, list[int]] = field(default_factory=dict)


@dataclass(slots=True, eq=False)
class Published:
    """What the checkpoints of a request published; it stays the same when the request is suspended.

    Attributes:
        pages: the page counts of its checkpoints.
        resumable: the page count of the longest one that had states to keep, whether there was room or not.
        tail: tokens behind the whole pages of the last one, if the tree took them as the end of an answer.
        lost: a checkpoint was not published, because the device or the load had failed, the weights had
            changed, or the client asked for it.
    """

    pages: set[int] = field(default_factory=set)
    resumable: int = 0
    tail: int = 0
    lost: bool = False


@dataclass(slots=True, eq=False)
class RequestState:
    """The tokens of a request and the device slots that hold their pages and states.

    Attributes:
        tokens: prompt and generated ids so far.
        seed: digest of the request's namespace.
        prompt: the number of prompt tokens.
        known_pages: pages of it that the tree had when the request came, in whatever tier or only lately.
        lease: locks the borrowed prefix; extended as pages are published.
        held_back: the pool that keeps the match below the full pages in memory.
        tail: the end of the match inside a page, kept by the lease; None if it ends with a page.
        tail_tokens: tokens of it: those that are restored, once the request is loaded.
        last_tail: the tail of the tree at which the sequence was last known to end.
        superseded_tails: earlier ones that were in use when it went on, to be dropped when the request ends.
        pages: device slots of the full component, one per page; the tree owns the first `borrowed`.
        borrowed: pages of the restored prefix and those published since.
        duplicates: own slots of published pages that the tree already had. They are kept until the request
            closes, because running kernels may read them.
        windows: by component id, the pages of a sliding window.
        states: by component id, the slot of the request's working state.
        snapshots: by component id, a slot with the state at `snapshot_tokens`.
        reserved: tokens that the pages have room for.
        hit_pages, tier, reason: the restored pages, the farthest tier they came from, and what cut them
            short; NONE: nothing did.
        cut_below: the cut is why there are fewer pages than these.
        stored_full_pages, stored_held_back: how far full pages reach in memory and storage together, as the
            request's prefetch found, and the component that keeps a prefix shorter than that.
        stored_behind: of these, the pages that memory had or was about to get: storage adds to them only.
        prefetched_pages: pages that the request's prefetch added to the match, and a tail.
        stage: the farthest stage of a chain of stores that a page of it was read from.
        sources: by pool and the tier they came from, the restored pages and states. `STORAGE` counts those
            that the request's prefetch brought.
        hint: what its client knows.
        keep: until when the hint keeps its pages.
        favoured: how many of its pages the hint favours by their order.
        turn: its place among those that read from storage; 0: it did not.
        kept: while it rests, locks of what was read for it.
        made_at: where the request was made, for reports.
        loaded: whether `load` was called.
        resumed: the request was suspended, so its hit has been counted already.
        resting: it holds nothing for now, so no other request waits for it.
        poisoned: a copy for it failed, and may still write to its own slots: they must not be reused.
        void: a copy into its own slots failed: what it computes stands on bytes that never came.
        closed: the request is over; copies may still keep its slots.
        published: what its checkpoints published.
        epoch: of the tree, when its prefix was matched last.
        written: by who says so, up to which token pages were written, and of which length its working states
            are, if it has any. Empty for an engine that does not say.
        finished: the tree took its working states; it computes nothing more.
        streams: the known streams of its forwards, as a dictionary to keep their order.
        references: the request, its copies in flight, and streams waited for; own slots are freed at zero.
    """

    tokens: array[int]
    seed: bytes
    lease: PathLease
    match: Match
    held_back: HeldBack | None
    prompt: int = 0
    known_pages: int = 0
    tail: Tail | None = None
    tail_tokens: int = 0
    last_tail: Node | None = None
    superseded_tails: list[Node] = field(default_factory=list)
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
    cut_below: int = maxsize
    stored_full_pages: int = 0
    stored_held_back: int | None = None
    stored_behind: int = 0
    prefetched_pages: int = 0
    stage: int = 0
    sources: Counter[tuple[str, Tier]] = field(default_factory=Counter)
    turn: int = 0
    kept: Locks = field(default_factory=list)
    hint: CacheHint = NO_HINT
    keep: Keep | None = None
    favoured: int = 0
    made_at: str = ""
    loaded: bool = False
    resumed: bool = False
    resting: bool = False
    poisoned: bool = False
    void: bool = False
    published: Published = field(default_factory=Published)
    epoch: int = 0
    written: dict[object, tuple[int, int | None]] = field(default_factory=dict)
    finished: bool = False
    closed: bool = False
    streams: dict[Stream, None] = field(default_factory=dict)
    references: int = 1

    @property
    def prefetched(self) -> bool:
        """Whether the end of the hit came from storage."""
        return self.prefetched_pages > 0

    @property
    def matched_pages(self) -> int:
        """Pages that were restorable at the latest match."""
        return self.match.pages

    @property
    def whole_tail(self) -> Node | None:
        """The tail that the match ends with all of; None if it ends with a page, or inside a longer one."""
        tail = self.tail
        return tail.node if tail is not None and tail.node.tail == tail.tokens else None

    def cut(self, reason: MissReason, below: int = maxsize) -> None:
        """Record what keeps the hit shorter than `below` pages."""
        self.reason, self.cut_below = reason, below

    def hit_tokens(self, page_size: int) -> int:
        """Tokens of the prefix: matched, or restored once it is loaded."""
        return (self.hit_pages if self.loaded else self.matched_pages) * page_size + self.tail_tokens

    @property
    def branching_pages(self) -> int | None:
        """How far full pages alone reach, in memory or storage; None if not further than the match."""
        full = max(self.match.branching_pages or 0, self._stored_reach)
        return full if full > self.match.pages else None

    @property
    def held_back_by(self) -> HeldBack | None:
        """The component that keeps the match shorter than the full pages; None if none does."""
        memory = self.match.branching_pages or 0
        if self.stored_held_back is None or self._stored_reach <= max(memory, self.match.pages):
            return self.held_back
        return HeldBack(self.stored_held_back, dropped=False)

    @property
    def _stored_reach(self) -> int:
        """How far full pages reach with those in storage; 0 if memory lacks those before."""
        return self.stored_full_pages if self.match.full_pages >= self.stored_behind else 0

    def runs_on(self, stream: Stream) -> None:
        """Record a stream that runs forwards of the request: its slots are freed only after their end."""
        self.streams[stream] = None

    def own_pages(self) -> list[int]:
        """Page slots that the request owns: those not borrowed or published, and duplicates."""
        return self.pages[self.borrowed :] + self.duplicates
