"""One request as the planner sees it: which slots are its own, which it borrows from the tree."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from asynchicache.tree.tree import PathLease
from asynchicache.types import MissReason, Tier


@dataclass(slots=True, eq=False)
class Sequence:
    """The tokens of a request and the device slots that hold what was computed for them.

    Attributes:
        tokens: prompt and generated ids so far.
        seed: digest of the request's namespace.
        prompt: how many of the tokens are the prompt.
        lease: keeps the prefix that the request borrows; moves on as its pages are published.
        pages: device slots of the full component, page by page; the first `borrowed` are the tree's.
        borrowed: pages of the restored prefix and of what was published since.
        duplicates: own slots of published pages that the tree had already; kept until the request
            closes, because kernels that read them may be under way.
        states: by component number, the slot of the request's own working state.
        snapshots: by component number, a slot with the state at `snapshot_tokens`.
        reserved: tokens that the pages have room for.
        hit_pages, tier, reason: what was restored, from how far away, and why it was not more.
        poisoned: a copy for it failed, so its own slots must not be handed out again.
        closed: the request is over; its slots may still be kept for copies.
        finished: its working states are the tree's; it computes nothing more.
        users: the request itself and every copy in flight for it; own slots are freed at zero.
    """

    tokens: array[int]
    seed: bytes
    lease: PathLease
    prompt: int = 0
    pages: list[int] = field(default_factory=list)
    borrowed: int = 0
    duplicates: list[int] = field(default_factory=list)
    states: dict[int, int] = field(default_factory=dict)
    snapshots: dict[int, int] = field(default_factory=dict)
    snapshot_tokens: int = 0
    reserved: int = 0
    hit_pages: int = 0
    matched_pages: int = 0
    branching_pages: int | None = None
    tier: Tier = Tier.DEVICE
    reason: MissReason = MissReason.NONE
    prefetched: bool = False
    loaded: bool = False
    poisoned: bool = False
    finished: bool = False
    closed: bool = False
    users: int = 1

    def own_pages(self) -> list[int]:
        """Page slots that are neither borrowed nor the tree's by now."""
        return self.pages[self.borrowed :] + self.duplicates
